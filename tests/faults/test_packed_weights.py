"""A daemon that is killed maps the packed weights that it has kept, and answers with the same bits. What is wrong with
the file or its disk costs one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.native.library import operators
from diskprefix.runtime.fetch.embedded import EMBEDDED
from tests.cache_folder import USERS
from tests.daemon.server.daemon_process import DaemonProcess, clean_environment, reply_to, serve_flags
from tests.daemon.server.other_user import OTHER_USER
from tests.runtime.plan import tiny
from tests.runtimes import RUNTIME
from tests.small_disk import remount, small_disk

pytestmark = pytest.mark.skipif(
    operators() is None or RUNTIME == "llama", reason="weights are packed for the compiled operators"
)
ROOT = Path(__file__).parents[2]
KEPT = r"\[model\] kept for a faster start: .+ in (\S+)$"
EMBEDDED_FILES = [*(USERS / "diskprefix/models" / EMBEDDED.requirement).glob("*.gguf")]
QUESTION = {"prompt": "Rivers of the south and north. " * 3, "temperature": 0, "max_tokens": 12, "logprobs": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose digest is remembered, as its file is not new."""
    file = tiny.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quantised="Q4_1")
    os.utime(file, (1e9, 1e9))
    return file


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "24m") as place:
        yield place


@contextmanager
def daemon_of(model: Path, folder: Path, weights: Path) -> Iterator[DaemonProcess]:
    """A daemon with its store and its packed weights in two folders. Without requests it writes what it keeps."""
    flags = serve_flags(model, folder / "kv", packed_weights=weights)
    with DaemonProcess(*flags, module="tests.faults.small_packed") as daemon:
        yield daemon.wait_ready()


def is_mapped(daemon: DaemonProcess, file: str | Path) -> bool:
    return str(file) in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def answer(daemon: DaemonProcess, scope: str = "full") -> tuple[Any, int]:
    """The reply to one question with its probabilities, and how many tokens of it were restored."""
    with daemon.client() as client:
        reply = reply_to(client, QUESTION, "/v1/completions", scope=scope)
    return reply["choices"], reply["prefix_cache"]["restored"]


def kept_by(daemon: DaemonProcess) -> Path:
    return Path(daemon.wait_for_line(KEPT)[1])


def said(daemon: DaemonProcess) -> list[str]:
    """The daemon's lines about packed weights."""
    found = (re.search(r"\[model\] (.*packed.*|kept for a faster start.*)$", line) for line in daemon.lines)
    return [line[1] for line in found if line]


def first_answer(model: Path, folder: Path, weights: Path) -> tuple[Any, Path]:
    """The reply of a first daemon, which is killed once it has kept its weights, and the file with them."""
    with daemon_of(model, folder, weights) as daemon:
        choices, restored = answer(daemon)
        assert restored == 0
        file = kept_by(daemon)
        daemon.wait_saved()
        daemon.stop(signal.SIGKILL)
    return choices, file


_HAS_MODEL = pytest.mark.skipif(not EMBEDDED_FILES, reason="the embedded model is not on this machine")


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=_HAS_MODEL)],
    ids=["tiny", "embedded"],
)
def test_after_a_kill_the_weights_are_mapped_and_the_reply_has_the_same_bits(
    model: Path, tmp_path: Path, *, real: bool
) -> None:
    of = EMBEDDED_FILES[0] if real else model
    choices, file = first_answer(of, tmp_path, tmp_path / "weights")
    for _ in range(2):
        with daemon_of(of, tmp_path, tmp_path / "weights") as daemon:
            assert is_mapped(daemon, file)
            cold, restored = answer(daemon, "off")
            assert (cold, restored) == (choices, 0), "computed with the weights of the file"
            warm, restored = answer(daemon)
            assert warm == choices
            assert restored > 0
            assert said(daemon) == []
            daemon.stop(signal.SIGKILL)


def flip(file: Path) -> None:
    """Flips a bit of the first matrix. The daemon that has mapped the file has ended."""
    content = bytearray(file.read_bytes())
    content[100] ^= 4
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip, r"a packed matrix in \S+ is damaged: it is packed anew"),
    "a cut": (lambda file: os.truncate(file, 5000), r"the packed weights in \S+ are made anew: it is cut short.*"),
    "shown to others": (lambda file: file.chmod(0o644), r"the packed weights in \S+ are made anew: other users may.*"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_costs_one_line_and_is_made_anew_once(kind: str, model: Path, tmp_path: Path) -> None:
    damage, line = DAMAGE[kind]
    choices, file = first_answer(model, tmp_path, tmp_path / "weights")
    damage(file)
    with daemon_of(model, tmp_path, tmp_path / "weights") as daemon:
        assert answer(daemon, "off") == (choices, 0)
        assert answer(daemon)[1] > 0
        assert kept_by(daemon) == file
        first, second = said(daemon)
        assert re.fullmatch(line, first)
        assert second.startswith("kept for a faster start")
        daemon.stop(signal.SIGKILL)
    with daemon_of(model, tmp_path, tmp_path / "weights") as daemon:
        assert is_mapped(daemon, file)
        assert answer(daemon, "off") == (choices, 0)
        assert said(daemon) == []


def test_what_a_kill_or_a_flipped_bit_leaves_is_never_computed_with(model: Path) -> None:
    """A little of `tools/bench packed`, which tries this with a real model."""
    command = [sys.executable, "-P", "-m", "tools", "packed", "--kills", "5", "--model", str(model), "--json"]
    environment = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout)
    assert (len(samples["kills"]), len(samples["flips"])) == (5, 14)
    assert all(case["is_right"] for cases in samples.values() for case in cases)
    assert all(flip["found_s"] < flip["start_s"] for flip in samples["flips"])


def _fill(folder: Path) -> None:
    left = shutil.disk_usage(folder.parent).free - (64 << 10)
    (folder.parent / "of another program").write_bytes(bytes(left))


def _of_another(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a full disk": (_fill, "the packed weights are not kept: "),
    "a read-only disk": (lambda folder: remount(folder.parent, "ro"), "are not kept in .+: Read-only file system"),
    "a folder of another user": (_of_another, "are not kept in .+: .+ belongs to another user"),
    "a file in its place": (Path.touch, "are not kept in .+: (Not a directory|File exists)"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_where_nothing_can_be_kept_requests_are_served_and_one_line_says_why(
    kind: str, model: Path, tmp_path: Path, disk: Path
) -> None:
    refuse, line = REFUSALS[kind]
    folder = disk / "weights"
    refuse(folder)
    answers = []
    for _ in range(2):
        with daemon_of(model, tmp_path, folder) as daemon:
            answers.append(answer(daemon, "off"))
            daemon.wait_for_line(line)
            assert len(said(daemon)) == 1
            assert "Traceback" not in daemon.log
            daemon.stop(signal.SIGKILL)
    assert answers[0] == answers[1]
    assert not [*disk.rglob("*.packed"), *disk.rglob(".partial-*")]


def test_who_cuts_the_file_ends_the_daemon_and_the_next_start_makes_it_anew(model: Path, tmp_path: Path) -> None:
    choices, file = first_answer(model, tmp_path, tmp_path / "weights")
    whole = file.read_bytes()
    with daemon_of(model, tmp_path, tmp_path / "weights") as daemon:
        assert is_mapped(daemon, file)
        # Once it was compared: before that, it is packed anew.
        assert answer(daemon, "off") == (choices, 0)
        os.truncate(file, 0)
        with pytest.raises(httpx.TransportError):
            answer(daemon, "off")
        assert daemon.process.wait(60) == -signal.SIGBUS
    with daemon_of(model, tmp_path, tmp_path / "weights") as daemon:
        assert answer(daemon, "off") == (choices, 0)
        assert kept_by(daemon) == file
        assert said(daemon)[0] == f"the packed weights in {file} are made anew: it is cut short"
    assert file.read_bytes() == whole
