"""One open store for each process and path, and buffers that come back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.extras.vllm.connector_settings import connector_settings
from diskprefix.extras.vllm.processors import unbind
from diskprefix.extras.vllm.shared_store import open_shared
from diskprefix.extras.vllm.staging import Staging


def test_a_path_is_opened_once_and_closed_by_its_last_user(tmp_path: Path) -> None:
    settings = connector_settings({"path": str(tmp_path / "kv"), "budget": "64MiB"}, 16)
    scheduler, worker = open_shared(settings), open_shared(settings)
    assert scheduler is worker
    assert scheduler.release()
    assert worker.store.counts()["blocks"] == 0
    assert worker.release()
    again = open_shared(settings)
    assert again is not worker
    assert again.release()


def test_a_buffer_is_used_again_once_its_last_view_is_gone() -> None:
    staging = Staging(64)
    first, second = staging.take(), staging.take()
    place = first.ctypes.data
    assert second.ctypes.data != place
    part = first.data[8:]
    del first
    third = staging.take()
    assert third.ctypes.data != place
    del part
    assert staging.take().ctypes.data == place


def test_a_buffer_that_comes_back_while_another_is_made_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(64)
    held = [staging.take()]

    def empty(*shape: Any) -> Any:
        # The collector of garbage may run at any allocation.
        held.clear()
        return np.ndarray(*shape)

    monkeypatch.setattr(np, "empty", empty)
    taking = threading.Thread(target=staging.take, daemon=True)
    taking.start()
    taking.join(2)
    assert not taking.is_alive()


@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(os.getppid())) < 2, reason="needs two processors"
)
def test_threads_of_the_store_run_where_the_process_may_and_not_where_vllm_binds_its_own(tmp_path: Path) -> None:
    settings = connector_settings({"path": str(tmp_path / "kv"), "budget": "64MiB"}, 16)
    allowed = os.sched_getaffinity(os.getppid())
    one = {min(allowed)}

    def in_bound_thread() -> tuple[Any, ...]:
        os.sched_setaffinity(0, one)
        shared = open_shared(settings)
        writer = next(thread for thread in threading.enumerate() if thread.name == "kv-writer")
        assert writer.native_id is not None
        with ThreadPoolExecutor(1, initializer=unbind) as pool:
            found = pool.submit(os.sched_getaffinity, 0).result()
        places = os.sched_getaffinity(writer.native_id), found, os.sched_getaffinity(0)
        shared.release()
        return places

    with ThreadPoolExecutor(1) as bound:
        assert bound.submit(in_bound_thread).result() == (allowed, allowed, one)
