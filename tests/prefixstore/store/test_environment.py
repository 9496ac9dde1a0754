"""The transactions of a process, and what waits until none is open: fitting the map, and closing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from tests.prefixstore.store.building import BLOCK, is_whole, open_store, prompt, publication
from tests.waiting import wait_for

SMALL, LARGE = 16 << 20, 64 << 20


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_later_transactions_wait_while_the_map_is_fitted(tmp_path: Path) -> None:
    """Restores may overlap all the time, so there may be no moment without a transaction."""
    map_bytes: list[int] = []
    with closing(open_store(tmp_path, budget_bytes=SMALL)) as store:
        env = store.environment

        def read() -> None:
            with env.transaction():
                map_bytes.append(env._env.info()["map_size"])

        with env.transaction():
            threads = [in_a_thread(lambda: env.resize(LARGE, 60))]
            wait_for(lambda: env._is_resizing)
            threads.append(in_a_thread(read))
            read()
        for thread in threads:
            thread.join()
        assert map_bytes == [SMALL, LARGE], "that of the transaction within one, and that of the later one"


def test_what_outlives_a_read_keeps_no_place_among_the_readers(tmp_path: Path) -> None:
    """LMDB has 126 places for all processes of a folder."""
    outlives: list[object] = []
    with closing(open_store(tmp_path)) as store:
        for _ in range(150):
            with store.snapshot() as snapshot:
                outlives.append(snapshot)
            with pytest.raises(ValueError, match="damaged") as failure, store.snapshot() as snapshot:
                raise ValueError("damaged")
            outlives.append(failure.value)
            with pytest.raises(ValueError, match="damaged") as failure, store.environment.transaction():
                raise ValueError("damaged")
            outlives.append(failure.value)
        places = store.environment._env.readers().splitlines()[1:]
    assert len(outlives) == 450
    assert len(places) <= 2, places


def test_later_transactions_are_refused_while_the_store_is_closed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    env = store.environment
    with env.transaction():
        closing_thread = in_a_thread(store.close)
        wait_for(lambda: env._is_closing)
        with env.transaction():
            pass

        def begin() -> None:
            with pytest.raises(StoreUnavailable, match="closed meanwhile"), env.transaction():
                raise AssertionError

        in_a_thread(begin).join()
    closing_thread.join()
    assert env._closed


def test_a_store_that_is_not_closed_in_time_can_be_used_again(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        with store.snapshot():
            in_a_thread(lambda: store.environment.close(0.01)).join()
        pub = publication(store, prompt(1, 2 * BLOCK))
        store.publish(pub)
        assert is_whole(store, pub)


HOLD = (
    "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX, 1, int(sys.argv[2]))"
)
"""Locks a byte of a file, says so, and waits for its standard input to end. LMDB locks the byte with the number of its
pid, so this stands for a process of another pid namespace with the pid of the test."""


def test_a_process_of_another_container_with_the_same_pid_is_named_as_the_cause(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    script = f"{HOLD}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path / "lock.mdb"), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StoreUnavailable) as refused, closing(open_store(tmp_path)) as store, store.snapshot():
            pass
        other.communicate()
    message = str(refused.value)
    assert f"--kv-cache-dir {tmp_path}: a process of another container" in message
    assert f"the same pid ({os.getpid()})" in message
    assert "let the containers share a pid namespace, or use two folders" in message
    assert "Resource temporarily unavailable" not in message


@pytest.mark.parametrize("is_new", [True, False])
def test_a_map_without_room_in_the_address_space_names_the_limit_and_the_budget(tmp_path: Path, is_new: bool) -> None:
    if not is_new:
        # The budget that the folder has is larger than the limit.
        open_store(tmp_path, budget_bytes=SMALL).close()
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom diskprefix.errors import StoreUnavailable\n"
        "from diskprefix.prefixstore.store.store import Store\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try:\n    Store(Path(sys.argv[1]), budget_bytes=16 << 30)\n"
        "except StoreUnavailable as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    limit = "this process may have 8.0 GiB of address space (`ulimit -v`), which is not enough"
    problem = f"{limit} for the store's map of 16.0 GiB; raise that limit, or lower --kv-cache-budget"
    assert done.stdout == f"--kv-cache-dir {tmp_path}: {problem}\n"
