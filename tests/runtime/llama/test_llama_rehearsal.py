"""The rehearsal finds a library whose restored runs have other bits, and what ends its process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diskprefix.errors import ModelError
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.runtime.llama import llama_rehearsal
from diskprefix.runtime.llama.llama_context import LlamaOptions
from diskprefix.runtime.llama.llama_layout import LlamaLayout
from diskprefix.runtime.llama.llama_library import Library
from diskprefix.runtime.llama.llama_rehearsal import Rehearsed, rehearse, rehearsed
from diskprefix.runtime.llama.state_form import StateForm
from tests.runtime.llama.scripted_library import KINDS, ScriptedLlama, model_of

FILE = Path("made-up.gguf")
ON_CPU = LlamaOptions(step=32)
ON_GPU = LlamaOptions(step=32, device="CUDA0", num_layers=3)


def found(api: ScriptedLlama, options: LlamaOptions = ON_CPU) -> Rehearsed:
    result = rehearse(Library(api), FILE, options)
    assert api.contexts == []
    assert api.num_open_models == 0
    assert bool(result.reason) is (result.form is None)
    return result


def with_gpu(**changes: Any) -> ScriptedLlama:
    api = ScriptedLlama(**changes)
    api.gpus = {"CUDA0": (1, 1 << 30)}
    return api


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_passes_and_has_a_layout(name: str) -> None:
    api = ScriptedLlama(name)
    result = found(api)
    assert result.form is not None
    assert isinstance(result.placed(model_of(api)), LlamaLayout)
    assert found(ScriptedLlama(name)) == result
    # As the child hands it over.
    assert msgspec.json.decode(msgspec.json.encode(result), type=Rehearsed | str) == result


def test_the_golden_digest_follows_the_numbers() -> None:
    digests = [found(ScriptedLlama(seed=seed)).golden for seed in (1, 2)]
    digests += [found(ScriptedLlama(name)).golden for name in ("short window", "hybrid", "recurrent")]
    digests.append(found(with_gpu(), ON_GPU).golden)
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}


@pytest.mark.parametrize("name", ["dense", "short window", "hybrid"])
def test_a_restore_to_other_cells_is_found(name: str) -> None:
    api = ScriptedLlama(name)
    api.skips_cell = True
    result = found(api)
    assert result.reason == "a restored run has other bits than one that is not interrupted"
    # It is served without the cache.
    assert isinstance(layout := result.placed(model_of(api)), Layout)
    assert layout.unsupported == (result.reason,)


def test_states_of_another_form_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedLlama(further=bytes(12))
    # Memories that cannot be cut end the process when a range is asked for.
    monkeypatch.setattr(api, "llama_memory_seq_cp", lambda *_: pytest.fail("a range was asked for"))
    result = found(api)
    assert result.reason.startswith("its state in llama.cpp is not known: ")
    assert result.golden != found(ScriptedLlama(seed=1, further=bytes(12))).golden


def test_a_library_that_gives_other_bytes_than_it_took_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedLlama()
    taken = api.llama_state_seq_set_data_ext

    def changing(context: Any, *rest: Any) -> int:
        size = taken(context, *rest)
        context.attention[0].rows[0, 0, 0] ^= 1
        return size

    monkeypatch.setattr(api, "llama_state_seq_set_data_ext", changing)
    assert found(api).reason == "its state in llama.cpp is not known: put together again, it has other bytes"


@pytest.mark.parametrize("is_noisy", [False, True])
def test_a_device_whose_bits_do_not_repeat_is_found(is_noisy: bool) -> None:
    """Only behind thousands of tokens, so the first comparisons pass."""
    quiet = found(with_gpu(), ON_GPU)
    api = with_gpu()
    api.noise = (1 if is_noisy and number == 600 else 0 for number, _ in enumerate(repeat(0)))
    result = found(api, ON_GPU)
    assert result.reason == ("CUDA0 gives the same rows other bits from run to run" if is_noisy else "")
    assert is_noisy or result == quiet


@pytest.mark.parametrize("status", [1, -3])
def test_a_model_that_cannot_be_computed_is_no_model(status: int) -> None:
    api = ScriptedLlama()
    api.statuses.append(status)
    with pytest.raises(ModelError, match=rf"cannot compute made-up.gguf: .*\(status {status}\): failed to compute"):
        found(api)
    api.most_contexts = 0
    with pytest.raises(
        ModelError, match=r"cannot compute made-up.gguf: llama.cpp makes no context of .* out of memory"
    ):
        found(api)
    assert (api.contexts, api.num_open_models) == ([], 0)


Ended = Callable[..., None]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ended:
    """Sets how the child process ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_ended(code: int = 0, stdout: bytes = b"", stderr: bytes = b"") -> None:
        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
            assert command[1:4] == ["-P", "-m", "diskprefix.runtime.llama.llama_rehearsal"]
            return subprocess.CompletedProcess(command, code, stdout, stderr)

        monkeypatch.setattr(subprocess, "run", run)

    return set_ended


def asked(key: str = "key") -> Rehearsed:
    return rehearsed(FILE, ON_CPU, key, lambda _line: None)


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_library_that_ends_the_process_gives_one_line_with_what_to_do(
    child: Ended, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "flags: fpu amx_tile amx_int8" if has_amx else "flags: fpu avx2"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: flags if str(path) == "/proc/cpuinfo" else "")
    child(-signal.SIGSEGV)
    with pytest.raises(ModelError, match=r"ended with SIGSEGV while it computed a prompt of made-up.gguf") as raised:
        asked()
    assert "\n" not in raised.value.message
    assert ("-mno-amx-tile" in raised.value.message) is has_amx
    assert ("--runtime plan" in raised.value.message) is not has_amx


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "reason"),
    [
        (1, b"", b"Traceback:\nValueError: no\n", "ValueError: no"),
        (0, b"ggml_vulkan: found 1 device\n", b"", "made-up.gguf: 0"),
        (0, b'{"golden": 3}\n', b"", "made-up.gguf: 0"),
        (7, b"", b"", "made-up.gguf: 7"),
    ],
)
def test_a_child_without_a_result_is_an_error_of_one_line(
    child: Ended, code: int, stdout: bytes, stderr: bytes, reason: str
) -> None:
    child(code, stdout, stderr)
    with pytest.raises(ModelError, match=rf"^llama.cpp failed with made-up.gguf: .*{reason}$|{reason}$") as raised:
        asked()
    assert "\n" not in raised.value.message


def test_what_the_child_says_of_the_model_is_the_message(child: Ended) -> None:
    child(0, b'said before\n"llama.cpp cannot load it"\n')
    with pytest.raises(ModelError, match=r"^llama.cpp cannot load it$"):
        asked()


def test_a_child_that_does_not_end_is_an_error(child: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    child()

    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"computed no first prompt of made-up.gguf within 1800 s"):
        asked()


def test_a_result_is_remembered_for_its_key_alone_and_an_error_is_not(child: Ended) -> None:
    result = found(ScriptedLlama("hybrid"))
    assert isinstance(result.form, StateForm)
    child(-signal.SIGABRT)
    with pytest.raises(ModelError, match="SIGABRT"):
        asked()
    child(0, msgspec.json.encode(result))
    assert asked() == result
    child(-signal.SIGABRT)
    assert asked() == result
    with pytest.raises(ModelError, match="SIGABRT"):
        asked("another key")


def test_the_child_prints_what_it_finds_or_the_message_of_an_error(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    api = ScriptedLlama()
    monkeypatch.setattr(llama_rehearsal, "open_library", lambda: Library(api))
    task = msgspec.json.encode({"path": str(FILE), "options": ON_CPU}).decode()
    llama_rehearsal.main(task)
    api.load_error = "it is cut"
    llama_rehearsal.main(task)
    lines = capfdbinary.readouterr().out.splitlines()
    assert msgspec.json.decode(lines[0], type=Rehearsed) == found(ScriptedLlama())
    assert msgspec.json.decode(lines[1], type=str) == "llama.cpp cannot load made-up.gguf: it is cut"
