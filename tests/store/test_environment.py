"""The transactions of a process, and what waits until none is open: fitting the map, and closing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from tests.store.building import BLOCK, is_whole, open_store, prompt, publication
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
