"""A store that a suspended process keeps: the engine starts without it, or goes on without saving."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.bridges.shared import timed_opening
from diskprefix.bridges.shared.connector_settings import connector_settings
from diskprefix.bridges.shared.timed_opening import open_in_time
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store import processes
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store_options import StoreOptions
from tests.bridges.vllm.engine import BLOCK, Engine, Request, prompt
from tests.waiting import wait_for

other_process = pytest.importorskip("tests.prefixstore.store.other_process")

PROMPT = prompt(1, 3 * BLOCK + 5)


def hold_writes(ready: Path, folder: Path) -> None:
    """Begins to write to a store, and does not end."""
    with Store(folder).changes() as changes:
        changes.put_meta("written by the other process", b"1")
        ready.touch()
        time.sleep(3600)


@pytest.fixture
def suspended(tmp_path: Path) -> Iterator[int]:
    """A process that was suspended while it wrote to the store, which has a prompt."""
    engine = Engine(tmp_path / "kv")
    engine.run(Request("a", PROMPT))
    engine.close()
    with other_process.beside(hold_writes, tmp_path / "kv") as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: processes.is_suspended(process.pid))
        yield process.pid


def settings_of(folder: Path) -> StoreOptions:
    return connector_settings({"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"}, 16)


def test_a_store_that_does_not_open_in_time_is_done_without(
    tmp_path: Path, suspended: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timed_opening, "_OPEN_S", 0.3)
    settings = settings_of(tmp_path / "kv")
    assert open_in_time(settings) is None
    assert caplog.text.count("could not be opened within 0 s: requests are served without the cache") == 1
    os.kill(suspended, signal.SIGKILL)
    # The thread that waited gives back what it gets, so the next user opens the store anew.
    wait_for(lambda: not any(thread.name == "kv-open" for thread in threading.enumerate()))
    monkeypatch.setattr(timed_opening, "_OPEN_S", 30.0)
    shared = open_in_time(settings)
    assert shared is not None
    assert shared.num_users == 1
    assert shared.store.counts()["blocks"] == 3
    assert shared.release()


def test_an_engine_goes_on_while_a_suspended_process_holds_its_store(tmp_path: Path) -> None:
    one = Engine(tmp_path / "kv")
    one.run(Request("a", PROMPT))
    with other_process.beside(hold_writes, tmp_path / "kv") as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: processes.is_suspended(process.pid))
        restored = Request("b", PROMPT)
        assert one.begin(restored) == 3 * BLOCK
        assert one.results(restored) == [(True, False, set())]
        assert one.is_right(restored, 3 * BLOCK)
        new = Request("c", prompt(2, 2 * BLOCK + 1))
        assert one.begin(new) == 0
        one.step(new, 2 * BLOCK + 1)
        assert one.scheduler.finish("c") is None
        assert one.begin(Request("d", new.prompt_token_ids)) == 2 * BLOCK, "from the write buffer"
    one.close()


def test_wrong_settings_are_an_error_and_no_wait(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    key.chmod(0o600)
    settings = connector_settings({"kv_cache_dir": str(tmp_path / "kv"), "namespace_key_file": str(key)}, 16)
    with pytest.raises(SettingsError, match="must hold 16 to 4096 bytes"):
        open_in_time(settings)
