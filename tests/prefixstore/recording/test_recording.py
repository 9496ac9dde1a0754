"""A recording of requests, which never stands in a request's way."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.recording import recording
from diskprefix.prefixstore.recording.recorded_request import RecordedRequest, joined
from diskprefix.prefixstore.recording.recording import RequestRecorder
from diskprefix.tokens import as_token_ids
from diskprefix.values import SHARED, CacheOptions, CacheReport, Mark, Prompt, Scope, Selection
from tests.runner import BLOCK, random_prompt
from tests.waiting import wait_for

ROOT, OTHER_ROOT, GROUP = b"r" * 16, b"o" * 16, b"\1" * 8
FULL = CacheOptions(scope=Scope("full"))
CHOSEN = Selection(scope=Scope("full"), prompt_tokens=50, reason="full")
REPORT = CacheReport(selection=CHOSEN)
SHORT = Prompt(random_prompt(1, 20))
Record = Callable[..., list[RecordedRequest]]


def open_recorder(path: Path, *, secret: int = 7, default_scope: Scope = FULL.scope) -> RequestRecorder:
    settings = Settings(block_size=BLOCK, kv_cache_min_tokens=BLOCK, disk_prefix_cache=str(default_scope))
    return RequestRecorder(path, settings, lambda: secret)


def note(
    recorder: RequestRecorder,
    prompt: Prompt = SHORT,
    options: CacheOptions = FULL,
    report: CacheReport = REPORT,
    *,
    root: bytes = ROOT,
    when: float = 1.0,
) -> None:
    recorder.record_request(
        prompt,
        options,
        report,
        root=root,
        when=when,
        reply=as_token_ids([]),
        prefill_ms=4.5,
        remembered=True,
    )


def parsed(line: bytes) -> RecordedRequest:
    record = msgspec.json.decode(line, type=RecordedRequest)
    record.check()
    return record


def read(path: Path) -> list[RecordedRequest]:
    return [parsed(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def record(path: Path) -> Record:
    """Returns all lines of the recording after some more prompts; a list is a prompt's token ids."""

    def run(*prompts: Prompt | Sequence[int]) -> list[RecordedRequest]:
        recorder = open_recorder(path)
        for prompt in prompts:
            note(recorder, prompt if isinstance(prompt, Prompt) else Prompt(as_token_ids(prompt)))
        recorder.close()
        return read(path)

    return run


def test_a_line_says_what_was_asked_for_and_what_the_cache_did(path: Path) -> None:
    recorder = open_recorder(path, default_scope=Scope("auto", 30))
    prompt = Prompt(random_prompt(1, 40), (5, 20), 5, 18, "secret words", marks=(Mark(20, 300.0), Mark(33)))
    options = CacheOptions(scope=Scope("auto", 8), tenant=SHARED.with_salt("me"), group=GROUP, save=False, ttl_s=60.0)
    report = CacheReport(selection=replace(CHOSEN, selected=20, aligned=16), restored=16)
    recorder.describe(bytes_per_token=640, state_bytes=1024, logits_bytes=800, exact_at="token")
    note(recorder, prompt, options, report, when=1234.5678)
    recorder.close()
    (line,) = read(path)
    assert (line.when, line.question_end, line.cuts) == (1234.568, 18, [5, 16, 18, 20, 32, 33, 40])
    assert (line.own_scope, line.is_trusted, line.restored, line.prefill_ms) == (True, False, 16, 4.5)
    assert len({*line.hashes, line.root, line.group}) == 9
    for secret in (b"secret words", ROOT.hex()[:8].encode(), GROUP.hex()[:8].encode()):
        assert secret not in path.read_bytes()


def test_what_stands_for_roots_groups_and_prompts_is_keyed(tmp_path: Path) -> None:
    """Else whoever has the file could try names of models, salts and keys, and prompts. Without a store, 0 is the
    secret, and nothing can be joined to another recording."""
    files = []
    for number, secret in enumerate((7, 7, 8, 0, 0)):
        recorder = open_recorder(tmp_path / str(number), secret=secret)
        for root, group in ((ROOT, GROUP), (OTHER_ROOT, GROUP), (ROOT, b""), (ROOT, ROOT)):
            note(recorder, options=replace(FULL, group=group), root=root)
        recorder.close()
        files.append(read(tmp_path / str(number)))
    assert files[0] == files[1]
    one, other_root, no_group, group_like_a_root = files[0]
    assert one.root == no_group.root != other_root.root
    assert one.group == other_root.group != no_group.group == ""
    assert group_like_a_root.root != group_like_a_root.group
    assert one.hashes == no_group.hashes
    assert not set(one.hashes) & set(other_root.hashes)
    texts = [{text for line in file for text in (line.root, line.group, *line.hashes)} for file in files[1:]]
    assert all(a & b == {""} for a, b in combinations(texts, 2))


def test_where_an_earlier_prompt_ends_or_is_left_is_a_cut(record: Record) -> None:
    tokens = random_prompt(3, 100).tolist()
    first, branch, other, longest = record(tokens[:41], [*tokens[:39], 1, 2, 3], [9, *tokens], tokens)
    assert (first.cuts, first.parted_at) == ([16, 32, 41], 0)
    assert (branch.cuts, branch.parted_at, branch.parted_from) == ([16, 32, 39, 42], 39, first.hashes[-1])
    assert (other.cuts, other.parted_at) == ([16, 32, 48, 64, 80, 96, 101], 0)
    assert (longest.cuts, longest.parted_at) == ([16, 32, 39, 41, 48, 64, 80, 96, 100], 0)


def test_a_prompt_whose_line_is_missing_parts_from_nothing(record: Record) -> None:
    lost, line = record(range(40), [*range(21), 7])
    assert line.parted_from == lost.hashes[-1]
    assert joined([line])[line.hashes[-1]] == line.hashes[-2]


def test_half_a_line_that_a_crash_left_is_a_line_of_its_own(record: Record, path: Path) -> None:
    (first,) = record(range(20))
    whole = path.read_bytes()
    for half in (whole[: len(whole) // 2], whole[:5]):
        path.write_bytes(whole + half)
        assert record(range(20)) == [first, first]
        path.write_bytes(half)
        assert record(range(20)) == [first]


def test_a_file_that_cannot_be_recorded_to_is_refused_at_once_and_left_alone(tmp_path: Path) -> None:
    pipe, notes = tmp_path / "pipe", tmp_path / "notes.txt"
    os.mkfifo(pipe)
    notes.write_text("buy milk\n")
    for path in (tmp_path / "no" / "folder.jsonl", tmp_path, pipe, notes):
        with pytest.raises(SettingsError, match=r"^--record: ") as refusal:
            open_recorder(path)
        assert "\n" not in refusal.value.message
    assert "is not a recording" in refusal.value.message
    assert notes.read_text() == "buy milk\n"


def test_two_processes_append_whole_lines_to_one_recording(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, flock = list[Any](), fcntl.flock

    def noted(fd: Any, how: int) -> None:
        if how == fcntl.LOCK_EX:
            waiting.append(fd)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", noted)
    recorders = open_recorder(path), open_recorder(path)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for recorder in recorders:
            note(recorder)
        wait_for(lambda: len(waiting) == 5)
        assert path.stat().st_size == 0, "each waits for its turn"
    for recorder in recorders:
        recorder.close()
    assert len(read(path)) == 2


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_file_that_was_rotated_is_begun_anew(path: Path, how: str) -> None:
    old = path.with_suffix(".1")
    recorder = open_recorder(path)
    note(recorder)
    wait_for(lambda: path.stat().st_size > 0)
    if how == "deleted":
        path.unlink()
    else:
        path.rename(old)
    if how == "replaced":
        path.touch(0o600)
    for _ in range(2):
        note(recorder)
    recorder.close()
    assert len(read(path)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert how == "deleted" or len(read(old)) == 1
    open_recorder(old if how == "moved" else path).close()


@contextmanager
def one_warning(caplog: pytest.LogCaptureFixture, path: Path, reason: str) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "diskprefix"):
        yield
    (line,) = caplog.records
    assert line.getMessage() == f"[record] {path}: a request was not recorded: {reason} (said once)"


def test_an_unwritable_recording_is_logged_once_until_it_recovers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = open_recorder(path)
    path.rename(path.with_suffix(".1"))
    path.write_text("buy milk\n")
    with one_warning(caplog, path, f"--record: {path} is not a recording; give another name"):
        for _ in range(3):
            note(recorder)
        wait_for(lambda: bool(caplog.records))
        path.unlink()
        note(recorder)
        recorder.close()
    assert 1 <= len(read(path)) <= 3


def test_a_full_disk_is_said_once_and_recording_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write

    def failing(fd: int, data: Any) -> int:
        """Half of what was to be written is, then nothing."""
        if data.lstrip().startswith(b"{"):
            return write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = open_recorder(path)
    with monkeypatch.context() as patch, one_warning(caplog, path, "No space left on device"):
        patch.setattr(os, "write", failing)
        for _ in range(3):
            note(recorder)
        recorder.close()
    assert read(path) == []
    recorder = open_recorder(path)
    note(recorder)
    recorder.close()
    assert len(read(path)) == 1


def test_a_disk_that_hangs_stops_recording_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "_MOST_WAITING", 2)
    released, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data) if released.wait() else 0)
    recorder = open_recorder(path)
    with one_warning(caplog, path, "requests come faster than they are written"):
        for _ in range(10):
            note(recorder)
    released.set()
    recorder.close()
    assert 2 <= len(read(path)) <= 4
