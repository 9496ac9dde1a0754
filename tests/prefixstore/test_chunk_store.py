"""Chunks of an engine's offloading in a store: they come back bit for bit, or are missing. And the store that
the parts of an engine share."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.identity import identity_fields
from diskprefix.prefixstore.chunk_store import GROUP, ChunkGroup, ChunkKey, ChunkStore, chunk_identity
from diskprefix.prefixstore.shared_store import SharedStore, open_shared
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.processors import unbind
from diskprefix.staging import Staging

CHUNK_BYTES = 160 * 4096
"""More than a piece."""
BUDGET = 16 * 2**20
ODD, ODD_BYTES = 7, 5000
"""Groups from this index on have chunks of so many bytes, which are not whole pages."""


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32), group)


def chunk(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, np.uint8)


@contextmanager
def opened(folder: Path, weights: str = "some", **settings: Any) -> Iterator[tuple[ChunkStore, SharedStore]]:
    shared = open_shared(options(folder, **settings))
    chunks = ChunkStore(shared, partial(group_of, weights=weights))
    try:
        yield chunks, shared
    finally:
        chunks.close()
        assert shared.release()


def group_of(index: int, weights: str = "some") -> ChunkGroup:
    num_bytes = CHUNK_BYTES if index < ODD else ODD_BYTES
    numbers = {"engine": "test", "weights_digest": weights, GROUP: str(index)}
    return ChunkGroup(chunk_identity("model", numbers, num_bytes, "bfloat16"), num_bytes)


def odd(identity: str) -> int | None:
    """Returns the group of a root with chunks of another size, None for the others."""
    return ODD if identity_fields(identity)[GROUP] == str(ODD) else None


def options(folder: Path, **settings: Any) -> StoreOptions:
    return StoreOptions(kv_cache_dir=folder, **{"kv_cache_budget": BUDGET, "kv_cache_write_buffer": 2**28} | settings)


def saved(folder: Path, keys: Sequence[ChunkKey]) -> None:
    with opened(folder) as (chunks, _):
        assert chunks.save(keys, [chunk(number) for number in range(len(keys))])


def test_chunks_come_back_bit_for_bit_and_only_under_their_own_key(tmp_path: Path) -> None:
    keys = [key(number, group=number % 2) for number in range(5)]
    saved(tmp_path / "kv", keys)
    with opened(tmp_path / "kv") as (chunks, _):
        assert [chunks.has(one) for one in keys] == [True] * 5
        assert not chunks.has(key(0, group=1))
        assert not chunks.has(key(5))
        places = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(6)]
        assert chunks.load([*keys, key(5)], places) == [True] * 5 + [False]
        for number in range(5):
            assert np.array_equal(places[number], chunk(number))
    with opened(tmp_path / "kv", weights="others") as (chunks, _):
        assert not any(map(chunks.has, keys))


def test_a_chunk_can_be_loaded_before_it_is_on_the_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as (chunks, shared):
        shared.writer.pause_writing()
        assert chunks.save([key(1)], [chunk(1)])
        place = np.zeros(CHUNK_BYTES, np.uint8)
        assert chunks.load([key(1)], [place]) == [True]
        assert np.array_equal(place, chunk(1))


def test_a_step_sees_one_moment_of_the_store(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as (chunks, _):
        assert not chunks.has(key(1))
        assert chunks.save([key(1)], [chunk(1)])
        assert not chunks.has(key(1))
        chunks.end_step()
        assert chunks.has(key(1))


def test_a_damaged_chunk_is_missing_and_the_others_are_loaded(tmp_path: Path) -> None:
    keys = [key(number) for number in range(3)]
    saved(tmp_path / "kv", keys)
    file = tmp_path / "kv" / "data.mdb"
    content = bytearray(file.read_bytes())
    content[content.index(chunk(1).tobytes()[70_000:70_100])] ^= 1
    file.write_bytes(content)
    with opened(tmp_path / "kv") as (chunks, shared):
        places = [np.zeros(CHUNK_BYTES, np.uint8) for _ in keys]
        assert chunks.load(keys, places) == [True, False, True]
        assert np.array_equal(places[2], chunk(2))
        assert [chunks.has(one) for one in keys] == [True, False, True]
        assert chunks.save(keys, [chunk(number) for number in range(3)])
        assert shared.writer.flush(30)
        assert shared.writer.housekeeping.quarantined == 1
        chunks.end_step()
        assert all(map(chunks.has, keys))
        assert chunks.load(keys, places) == [True] * 3
    with closing(Store(tmp_path / "kv", read_only=True)) as store:
        assert not verify_index(store).problems


def test_the_file_keeps_its_budget_and_the_ends_of_prompts_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kv") as (chunks, shared):
        now = time.time()
        monkeypatch.setattr(shared.store, "clock", lambda: now)
        first = [key(number) for number in range(4)]
        assert chunks.save(first, [chunk(number) for number in range(4)])
        for number in range(100, 200, 5):
            prompt = [key(one) for one in range(number, number + 5)]
            # As the steps of its computation complete them. It begins as the first one did.
            for part in (prompt[:2], prompt[2:]):
                assert chunks.save(part, [chunk(one) for one in range(len(part))])
            chunks.use([*first, *prompt])
            assert shared.writer.flush(60)
            now += 60
            assert (tmp_path / "kv" / "data.mdb").stat().st_size <= BUDGET
        assert shared.writer.evicted > 50
        assert all(map(chunks.has, first))
        kept = [chunks.has(key(one)) for one in range(100, 200)]
        assert 5 < sum(kept) < 30
        # Of each prompt a beginning is left.
        for start in range(0, 100, 5):
            assert kept[start : start + 5] == sorted(kept[start : start + 5], reverse=True)


def test_chunks_for_which_the_buffer_has_no_room_are_dropped(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", kv_cache_write_buffer=2**20) as (chunks, shared):
        shared.writer.pause_writing()
        assert not chunks.save([key(1), key(2)], [chunk(1), chunk(2)])
        assert not chunks.has(key(2))


def test_each_group_has_its_size_and_a_chunk_need_not_be_whole_pages(tmp_path: Path) -> None:
    keys = [key(1), key(2, group=ODD), key(3, group=ODD)]
    contents = [chunk(1), chunk(2)[:ODD_BYTES], chunk(3)[:ODD_BYTES]]
    with opened(tmp_path / "kv") as (chunks, _):
        assert chunks.write(keys, contents) == dict.fromkeys(keys, True)
    with opened(tmp_path / "kv") as (chunks, _):
        assert chunks.are_stored(keys) == [True] * 3
        places = [np.zeros(len(content), np.uint8) for content in contents]
        assert chunks.load(keys, places) == [True] * 3
        assert all(map(np.array_equal, places, contents))
        in_order = sorted(keys[1:])
        assert chunks.listed(odd) == in_order
        # One by one, over the end of the first group.
        places_of = {index: group_of(index).identity.root("").hex() for index in (0, ODD)}
        every = sorted(keys, key=lambda each: (places_of[int(str(each.group))], each.digest))
        after: tuple[str, bytes] | None = None
        for each in every:
            [listed] = chunks.listed(lambda identity: int(identity_fields(identity)[GROUP]), after, limit=1)
            assert listed == each
            after = places_of[int(str(each.group))], each.digest
        assert chunks.listed(lambda _: 0, after) == []
        assert chunks.clear(lambda _, identity: odd(identity) is not None)
        assert chunks.are_stored(keys) == [True, False, False]
    with closing(Store(tmp_path / "kv", read_only=True)) as store:
        assert not verify_index(store).problems


def test_what_is_written_is_in_the_file_and_more_than_the_buffer_holds_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._PUBLICATION_BYTES", CHUNK_BYTES)
    keys = [key(number) for number in range(8)]
    with opened(tmp_path / "kv", kv_cache_write_buffer=2**20) as (chunks, shared):
        assert chunks.write(keys, [chunk(number) for number in range(8)]) == dict.fromkeys(keys, True)
        assert shared.writer.num_pending == 0
        assert chunks.listed(lambda _: 0) == sorted(keys)
        assert chunks.write(keys, [chunk(number) for number in range(8)]) == {}, "they are stored"


def test_a_write_ends_while_another_process_holds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._WRITE_S", 0.2)
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._LOOK_S", 0.05)
    with opened(tmp_path / "kv") as (chunks, shared):
        with shared.store.changes():
            assert chunks.write([key(1)], [chunk(1)]) == {key(1): False}
            assert chunks.are_stored([key(1)]) == [True], "it is in the buffer"
        assert shared.writer.flush(30)
        assert chunks.are_stored([key(1)]) == [True]


def test_a_deleted_chunk_is_missing_and_a_pinned_one_is_not_evicted(tmp_path: Path) -> None:
    keys = [key(number) for number in range(3)]
    with opened(tmp_path / "kv") as (chunks, shared):
        chunks.write(keys, [chunk(number) for number in range(3)])
        assert chunks.delete([keys[0], key(9)]) == [True, False]
        assert chunks.are_stored(keys) == [False, True, True]
        chunks.pin(keys[1])
        for start in range(100, 200, 10):
            other = [key(number) for number in range(start, start + 10)]
            assert all(chunks.write(other, [chunk(number) for number in range(start, start + 10)]).values())
        assert shared.writer.evicted > 50
        assert chunks.are_stored(keys) == [False, True, False]
        chunks.unpin(keys[1])
        assert shared.store.evictor.pinned() == frozenset()


def test_a_path_is_opened_once_and_closed_by_its_last_user(tmp_path: Path) -> None:
    settings = options(tmp_path / "kv", kv_cache_budget=64 * 2**20)
    scheduler, worker = open_shared(settings), open_shared(settings)
    assert scheduler is worker
    assert scheduler.release()
    assert worker.store.counts()["blocks"] == 0
    assert worker.release()
    again = open_shared(settings)
    assert again is not worker
    assert again.release()


def test_a_path_that_is_opened_while_it_is_closed_is_opened_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(tmp_path / "kv", kv_cache_budget=64 * 2**20)
    first, close = open_shared(settings), SharedStore.close
    with ThreadPoolExecutor(1) as other:
        opened: list[Future[SharedStore]] = []

        def open_first(self: SharedStore, timeout_s: float) -> bool:
            opened.append(other.submit(open_shared, settings))
            # Time for a thread that does not wait; one that waits is not done.
            wait(opened, 0.3)
            return close(self, timeout_s)

        monkeypatch.setattr(SharedStore, "close", open_first)
        assert first.release()
        monkeypatch.undo()
        (second,) = (future.result() for future in opened)
        assert second is not first
        assert second.store.counts()["blocks"] == 0
        assert second.release()


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
    settings = options(tmp_path / "kv", kv_cache_budget=64 * 2**20)
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
