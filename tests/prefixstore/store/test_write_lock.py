"""A process that is suspended inside a write transaction: who waits for it is told so, by every way to wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from diskprefix.prefixstore.cache import cache as cache_module
from diskprefix.prefixstore.store import processes, store_file, write_lock
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Writer, WriterLimits
from tests.prefixstore.store.building import BLOCK, is_clean, is_whole, open_store, prompt, publication
from tests.prefixstore.store.other_process import beside
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
BUDGET = 32 << 20


def write_until_told(ready: Path, folder: Path) -> None:
    """Begins a write transaction, and ends it when the file `end` is there."""
    store = open_store(folder)
    with store.changes() as changes:
        changes.put_meta("written by the other process", b"1")
        ready.touch()
        while not (folder.parent / "end").exists():
            time.sleep(0.01)
    time.sleep(3600)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "kv")
    store.publish(publication(store, prompt(0, 3 * BLOCK)))
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def suspended(folder: Path) -> Iterator[int]:
    """A process that was suspended in a write transaction."""
    with beside(write_until_told, folder) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: processes.is_suspended(process.pid or 0))
        yield process.pid


def resume(folder: Path, process: int) -> None:
    (folder.parent / "end").touch()
    os.kill(process, signal.SIGCONT)


def waits_for(process: int, folder: Path) -> str:
    """What is said of a write that waits for a process."""
    named = rf"process {process} \([^()]+, suspended\) writes to it and does not end"
    return (
        rf"--kv-cache-dir {re.escape(str(folder))}: nothing can be saved, because {named}; "
        rf"end that process, or resume it \(kill -CONT {process}\)"
    )


def test_a_daemon_is_degraded_and_names_the_suspended_process_and_saves_all_when_it_goes_on(
    folder: Path, suspended: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_file, "_WRITE_PATIENCE_S", 0.3)
    told: list[str] = []
    # The start waits, because LMDB opens databases in a write transaction.
    opened: list[Store] = []
    monkeypatch.setattr(write_lock, "_COMMAND_PATIENCE_S", 0.1)
    opening = threading.Thread(
        target=lambda: opened.append(Store(folder, budget_bytes=BUDGET, serving=True, on_wait=told.append))
    )
    opening.start()
    wait_for(lambda: told)
    assert re.fullmatch(waits_for(suspended, folder), told[0])
    resume(folder, suspended)
    opening.join()
    (store,) = opened
    writer = Writer(store, buffer_bytes=BUDGET)
    assert writer.flush(30)
    (folder.parent / "end").unlink()
    with beside(write_until_told, folder) as process:
        pid = process.pid or 0
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: processes.is_suspended(pid))
        caplog.clear()
        pub = publication(store, prompt(1, 3 * BLOCK))
        assert store.write_stall is None
        writer.queue_publication(Save(pub.epoch), pub, is_last=True)
        wait_for(lambda: store.write_stall is not None)
        assert re.fullmatch(waits_for(pid, folder), store.write_stall or "")
        wait_for(lambda: caplog.records)
        assert [re.sub(r"waited \d+ s", "waited", record.message) for record in caplog.records] == [
            f"[disk-cache] a write has waited: {store.write_stall}"
        ]
        resume(folder, pid)
        assert writer.flush(30)
        assert store.write_stall is None
    assert is_whole(store, pub)
    assert writer.close(30)
    assert is_clean(store)
    store.close()


def test_the_health_of_a_cache_shows_a_write_that_waits() -> None:
    class Part:
        problem = error = unsupported = None
        reads = SimpleNamespace(stalled=None)
        write_stall = "process 7 writes to it and does not end"

    cache = cache_module.PrefixCache.__new__(cache_module.PrefixCache)
    vars(cache).update(store=Part, writer=Part, layout=Part)
    assert cache.health == ("degraded", Part.write_stall)


def test_a_write_that_the_disk_does_not_finish_is_a_stall(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder, budget_bytes=BUDGET)
    with store.changes():
        assert store.write_stall is None
        monkeypatch.setattr(write_lock, "_WRITE_S", 0.0)
        assert "the disk has not finished a write for" in str(store.write_stall)
    assert store.write_stall is None


def test_a_stop_does_not_wait_for_a_process_that_is_suspended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_file, "_WRITE_PATIENCE_S", 0.1)
    store = Store(folder, budget_bytes=BUDGET, serving=True)
    writer = Writer(store, buffer_bytes=BUDGET, limits=WriterLimits(foreign_write_s=0.2))
    with beside(write_until_told, folder) as process:
        os.kill(process.pid or 0, signal.SIGSTOP)
        pub = publication(store, prompt(1, 3 * BLOCK))
        writer.queue_publication(Save(pub.epoch), pub, is_last=True)
        wait_for(lambda: store.write_stall is not None)
        # Would wait for minutes otherwise.
        ended: list[bool] = []
        closing = threading.Thread(target=lambda: ended.append(writer.close(600)))
        closing.start()
        wait_for(lambda: ended)
        assert ended == [False]
        assert re.search(rf"1 prompts were not saved: .*process {process.pid} ", caplog.text)
        resume(folder, process.pid or 0)
        writer._thread.join(30)
    store.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("purge", "--all", "--yes"),
        ("verify", "--fix"),
        pytest.param(("purge", "--all", "--yes", "--erase"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_command_says_what_it_waits_for_and_goes_on(folder: Path, suspended: int, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "diskprefix", *arguments, "--kv-cache-dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.fullmatch(rf"\[disk-cache\] a write has waited 2 s: {waits_for(suspended, folder)}\n", line)
        resume(folder, suspended)
        process.stderr.read()
    assert process.returncode == 0


def test_ctrl_c_ends_a_command_that_waits(folder: Path, suspended: int) -> None:
    command = [sys.executable, "-m", "diskprefix", "purge", "--all", "--yes", "--kv-cache-dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert f"process {suspended} " in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.usefixtures("suspended")
def test_commands_that_only_read_do_not_wait(folder: Path) -> None:
    for arguments in (("inspect",), ("verify",), ("backup", str(folder.parent / "copy"))):
        command = [sys.executable, "-m", "diskprefix", *arguments, "--kv-cache-dir", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
        assert (result.returncode, "waited" in result.stderr) == (0, False), result


def test_a_process_that_died_in_a_transaction_is_named_by_nobody(folder: Path) -> None:
    store = open_store(folder)
    with beside(write_until_told, folder):
        assert store.environment.write_lock._holder() is not None
    assert store.environment.write_lock._holder() is None
    store.publish(publication(store, prompt(5, 3 * BLOCK)))
    store.close()


def test_an_argument_of_another_process_is_not_named() -> None:
    code = "import time; print(1, flush=True); time.sleep(3600)"
    with subprocess.Popen(
        [sys.executable, "-c", code, "diskprefix", "import", "--secret"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes.described(process.pid) == f"process {process.pid} (diskprefix import)"
        process.kill()
    assert processes.described(0) == "another process"
