"""The store as LMCache's second level, driven as its controllers drive it; with the real LMCache where there is one."""

from __future__ import annotations

import logging
import os
import random
import select
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bridges.lmcache.standin import IS_REAL, MemoryObj, api

# The stand-in comes first.
from diskprefix.errors import SettingsError  # isort: skip
from diskprefix.bridges.lmcache import _lmcache_compat as compat, l2_adapter  # isort: skip
from diskprefix.bridges.lmcache.l2_adapter import DiskPrefixL2Adapter  # isort: skip
from diskprefix.prefixstore.shared_store import SharedStore  # isort: skip
from diskprefix.prefixstore.store.store import Store  # isort: skip
from diskprefix.prefixstore.store.verify import verify_index  # isort: skip
from tests.bridges.suspended import suspended_writer  # isort: skip

SHAPES = {0: (2, 24, 16, 128), 1: (3, 1000)}
"""The shape of an object by group: keys and values of 16 tokens, and a state, which is not whole pages."""
DEADLINE_S = 60.0
MODEL = "org/some-model"


def key(number: int, group: int = 0, **other: Any) -> Any:
    return api.ObjectKey(random.Random(number).randbytes(32), MODEL, 0x01000100, group, **other)


def layout(group: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return api.MemoryLayoutDesc([torch.Size(SHAPES[group])], [dtype])


LAYOUTS = {group: layout(group) for group in SHAPES}


def memory(group: int = 0, number: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """An object with the content of a number, or zeros."""
    shape = torch.Size(SHAPES[group])
    size = shape.numel() * dtype.itemsize
    content = bytes(size) if number is None else np.random.default_rng(number).bytes(size)
    return MemoryObj([shape], [dtype], bytearray(content))


class Listener:
    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


class Driver:
    """Waits for tasks on their file descriptors, as LMCache's controllers do."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.adapter = DiskPrefixL2Adapter({"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"} | config)
        self.listener = Listener()
        self.adapter.register_listener(self.listener)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task([*keys], [*objects])
        wait_on(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def look_up(self, keys: Sequence[Any], layouts: Any = LAYOUTS) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task([*keys], layouts)
        wait_on(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [found.test(number) for number in range(len(keys))]

    def has(self, keys: Sequence[Any]) -> list[bool]:
        found = self.look_up(keys)
        self.adapter.submit_unlock([one for one, is_found in zip(keys, found, strict=True) if is_found])
        return found

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task([*keys], [*objects])
        wait_on(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        return [loaded.test(number) for number in range(len(keys))]

    @property
    def shared(self) -> SharedStore:
        assert self.adapter._opened is not None
        return self.adapter._opened

    def pinned(self) -> frozenset[bytes]:
        return frozenset() if self.adapter._opened is None else self.shared.store.evictor.pinned()


def wait_on(descriptor: int) -> None:
    assert select.select([descriptor], [], [], DEADLINE_S)[0]
    os.read(descriptor, 8)


@contextmanager
def opened(folder: Path, **config: Any) -> Iterator[Driver]:
    driver = Driver(folder, **config)
    try:
        yield driver
    finally:
        driver.adapter.close()
        driver.adapter.close()
        assert driver.pinned() == frozenset(), "a lock is left"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_objects_come_back_bit_for_bit_after_a_restart_and_only_under_their_own_key(folder: Path) -> None:
    keys = [key(number, number % 2) for number in range(6)]
    objects = [memory(number % 2, number) for number in range(6)]
    with opened(folder) as first:
        assert first.look_up(keys) == [False] * 6
        result = first.store(keys, objects)
        assert result.is_successful()
        assert int(result) == sum(len(one.data) for one in objects)
        assert first.store(keys, objects) == 0, "they are stored"
    others = [
        key(0, 1),
        key(9),
        key(0, cache_salt="another tenant"),
        api.ObjectKey(keys[0].chunk_hash, MODEL, 0x02000200),
        api.ObjectKey(keys[0].chunk_hash, "org/other-model", keys[0].kv_rank),
        api.ObjectKey(keys[0].chunk_hash[:31], MODEL, keys[0].kv_rank),
    ]
    with opened(folder) as second:
        assert second.has([*keys, *others]) == [True] * 6 + [False] * len(others)
        assert second.look_up(keys[:2], {}) == [True, True], "without layouts, those of the start are known"
        second.adapter.submit_unlock(keys[:2])
        places = [memory(number % 2) for number in range(6)] + [memory(1)]
        assert second.load([*keys, others[0]], places) == [True] * 6 + [False]
        assert [place.data for place in places[:6]] == [one.data for one in objects]
        assert second.listener.accessed == keys


def test_objects_of_one_size_and_another_dtype_are_not_confused(folder: Path) -> None:
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
        assert one.look_up([key(1)], {0: layout(0, torch.float16)}) == [False]
        assert one.load([key(1)], [memory(0, dtype=torch.float16)]) == [False]
        assert one.has([key(1)]) == [True]


def test_each_kind_of_task_has_its_own_descriptor_and_no_task_is_lost(folder: Path) -> None:
    with opened(folder) as one:
        adapter = one.adapter
        descriptors = [
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        ]
        assert len(set(descriptors)) == 3
        tasks = [adapter.submit_store_task([key(number)], [memory(0, number)]) for number in range(4)]
        done: dict[int, Any] = {}
        while len(done) < 4:
            wait_on(descriptors[0])
            done |= adapter.pop_completed_store_tasks()
        assert sorted(done) == tasks
        assert adapter.query_lookup_and_lock_result(99) is None
        assert adapter.query_load_result(99) is None


def test_what_is_locked_is_neither_evicted_nor_deleted_until_it_is_unlocked(folder: Path) -> None:
    locked, fill = [key(number) for number in range(3)], range(100, 700)
    with opened(folder, kv_cache_budget="32MiB") as one:
        one.store(locked, [memory(0, number) for number in range(3)])
        assert one.look_up([*locked, key(50)]) == [True] * 3 + [False]
        assert len(one.pinned()) == 3, "what is not found is not locked"
        assert one.look_up([locked[0]]) == [True]
        for start in range(0, len(fill), 50):
            some = fill[start : start + 50]
            assert one.store([key(number) for number in some], [memory(0, number) for number in some]).is_successful()
        assert one.shared.writer.evicted > 100
        one.adapter.delete(locked)
        places = [memory() for _ in locked]
        assert one.load(locked, places) == [True] * 3
        assert [place.data for place in places] == [memory(0, number).data for number in range(3)]
        one.adapter.submit_unlock([*locked, key(50)])
        one.adapter.delete(locked)
        assert one.has(locked) == [True, False, False], "the first is locked twice"
        assert one.listener.deleted[-2:] == locked[1:]
        one.adapter.submit_unlock([locked[0], locked[0]])
        assert one.pinned() == frozenset()
        one.adapter.delete(locked)
        assert one.has(locked) == [False] * 3


def test_a_lock_that_nobody_ends_ends_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
        assert one.look_up([key(1)]) == [True]
        assert one.adapter.report_status()["locked_key_count"] == 1
        now = time.monotonic() + l2_adapter._LOCK_S + 1
        monkeypatch.setattr("diskprefix.bridges.lmcache.l2_adapter.time.monotonic", lambda: now)
        assert one.adapter.report_status()["locked_key_count"] == 0
        assert one.pinned() == frozenset()


def test_listeners_and_usage_follow_what_is_stored_deleted_and_evicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salted = key(7, cache_salt="alice")
    size = len(memory().data)
    with opened(folder) as one:
        one.store([key(1), salted], [memory(0, 1), memory(0, 7)])
        assert one.listener.stored == {key(1): size, salted: size}
        assert dict(one.adapter.get_usage().bytes_by_cache_salt) == {"": size, "alice": size}
        one.adapter.delete([key(1), key(2)])
        assert one.listener.deleted == [key(1)]
    with opened(folder, kv_cache_budget="32MiB") as again:
        usage = again.adapter.get_usage()
        assert (usage.total_bytes_used, usage.total_capacity_bytes) == (size, 32 * 2**20)
        assert dict(usage.bytes_by_cache_salt) == {"alice": size}
        later = time.time() + 60
        monkeypatch.setattr(again.shared.store, "clock", lambda: later)
        for start in range(0, 600, 50):
            some = range(start, start + 50)
            again.store([key(number) for number in some], [memory(0, number) for number in some])
        assert again.shared.writer.evicted == len(again.listener.deleted) > 100
        assert salted in again.listener.deleted
        left = {salted, *again.listener.stored} - {*again.listener.deleted}
        assert again.adapter.get_usage().total_bytes_used == len(left) * size
        assert again.adapter.report_status()["stored_object_count"] == len(left)


def test_all_objects_are_listed_in_pages(folder: Path) -> None:
    keys = {key(number, number % 2) for number in range(9)} | {
        api.ObjectKey(b"\0\1\2\3", "other", 7, cache_salt="alice")
    }
    with opened(folder) as one:
        for some in keys:
            one.store([some], [memory(some.object_group_id, 1)])
        listed, cursor = list[Any](), None
        for _ in range(5):
            page = one.adapter.list_l2_keys(page_size=2, cursor=cursor)
            assert len(page.entries) == 2
            listed += page.entries
            cursor = page.next_page_token
        assert cursor is None
        assert {entry.key.to_object_key() for entry in listed} == keys
        assert {entry.size_bytes for entry in listed} == {len(memory(group).data) for group in SHAPES}
        assert len(one.adapter.list_l2_keys(model_name=MODEL).entries) == 9
        assert one.adapter.list_l2_keys(model_name="none").entries == ()
        for wrong in ({"page_size": 0}, {"cursor": "zz"}, {"cursor": "00-00"}):
            with pytest.raises(ValueError, match=r"page_size|cursor|hex"):
                one.adapter.list_l2_keys(**wrong)


def test_objects_that_cannot_be_stored_are_told_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OnTheGpu:
        @property
        def byte_array(self) -> memoryview:
            raise NotImplementedError

    long = api.ObjectKey(bytes(64), MODEL, 0)
    with opened(folder) as one, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not one.store([key(1), key(2)], [OnTheGpu(), memory(0, 2)]).is_successful()
            assert not one.store([long], [memory(0, 1)]).is_successful()
        assert one.has([key(1), key(2), long]) == [False, True, False]
        assert one.load([key(1), long], [OnTheGpu(), memory()]) == [False, False]
    assert [record.message for record in caplog.records] == [
        "[disk-cache] objects of LMCache are not stored: they are not in main memory",
        "[disk-cache] objects of LMCache are not stored: their hashes have 64 bytes, or they are empty",
    ]


def test_more_forms_than_a_model_has_are_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_adapter, "_MAX_FORMS", 1)
    with opened(folder) as one:
        assert one.store([key(1)], [memory(0, 1)]).is_successful()
        assert not one.store([key(2)], [memory(0, 2, torch.float16)]).is_successful()
        assert one.store([key(3)], [memory(0, 3)]).is_successful()


def test_a_damaged_object_is_a_miss_and_is_stored_again(folder: Path) -> None:
    keys = [key(number) for number in range(3)]
    with opened(folder) as first:
        first.store(keys, [memory(0, number) for number in range(3)])
    file = folder / "data.mdb"
    content = bytearray(file.read_bytes())
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        records = ((name, snapshot.node(name)) for name in snapshot.keys("nodes"))
        [name] = [name for name, node in records if node and node.token_ids.tobytes() == keys[1].chunk_hash]
        piece = snapshot.piece(name, 0)
        assert piece is not None
        content[content.index(bytes(piece)[100:200])] ^= 1
    file.write_bytes(content)
    with opened(folder) as second:
        assert second.load(keys, [memory() for _ in keys]) == [True, False, True]
        assert second.has(keys) == [True, False, True]
        assert second.store(keys, [memory(0, number) for number in range(3)]).is_successful()
        assert second.listener.deleted == []
        place = memory()
        assert second.load([keys[1]], [place]) == [True]
        assert place.data == memory(0, 1).data


@pytest.mark.slow
def test_a_store_that_is_deleted_makes_misses(folder: Path) -> None:
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
        shutil.rmtree(folder)
        # The writer waits for the folder.
        one.store([key(2)], [memory(0, 2)])
        one.shared.store.maintain()
        assert one.has([key(1)]) == [False]
        assert one.load([key(1)], [memory()]) == [False]
        one.adapter.delete([key(1)])
        assert one.store([key(3)], [memory(0, 3)]).is_successful()
        assert one.has([key(1), key(3)]) == [False, True]


def test_a_suspended_process_that_writes_makes_failed_stores_and_no_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._WRITE_S", 0.5)
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._DELETE_S", 0.5)
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
        with suspended_writer(folder):
            began = time.monotonic()
            assert not one.store([key(2)], [memory(0, 2)]).is_successful()
            one.adapter.delete([key(1)])
            assert one.has([key(1)]) == [True]
            assert one.load([key(1)], [memory()]) == [True]
            assert time.monotonic() - began < DEADLINE_S
        assert one.shared.writer.flush(30)
        assert one.store([key(3)], [memory(0, 3)]).is_successful()


def test_an_adapter_whose_store_does_not_open_in_time_stores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
    monkeypatch.setattr("diskprefix.bridges.shared.timed_opening._OPEN_S", 0.5)
    with suspended_writer(folder), opened(folder) as one:
        assert not one.store([key(2)], [memory(0, 2)]).is_successful()
        assert one.has([key(1), key(2)]) == [False, False]
        assert one.load([key(1)], [memory()]) == [False]
        one.adapter.delete([key(1)])
        assert one.adapter.list_l2_keys().entries == ()
        status = one.adapter.report_status()
        assert (status["is_healthy"], status["problem"]) == (False, "the store could not be opened in time")


def test_objects_that_a_full_buffer_or_a_small_budget_cannot_hold_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.bridges.shared.connector_settings._WRITE_BUFFER", 2**16)
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._WRITE_S", 0.2)
    with opened(folder) as one:
        assert not one.store([key(1)], [memory(0, 1)]).is_successful()
        assert one.store([key(2, 1)], [memory(1, 2)]).is_successful()
        assert one.has([key(1), key(2, 1)]) == [False, True]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "kv_cache_dir: must name the folder"),
        ({"kv_cache_dir": "{}", "budget": 1}, "budget: unknown key; there are: kv_cache_dir, kv_cache_budget"),
        ({"kv_cache_dir": "{}", "kv_cache_budget": "much"}, "kv_cache_budget: "),
        ({"kv_cache_dir": "{}", "kv_cache_ttl": "soon"}, "kv_cache_ttl: "),
    ],
)
def test_wrong_settings_are_refused_by_name(folder: Path, config: dict[str, Any], message: str) -> None:
    given = {name: str(folder) if value == "{}" else value for name, value in config.items()}
    with pytest.raises(SettingsError, match=message) as refused:
        DiskPrefixL2Adapter(given)
    assert "\n" not in str(refused.value)


def test_another_version_is_told_of_and_another_interface_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "VERSION", "0.9.1")
    with opened(folder) as one, caplog.at_level(logging.WARNING):
        one.store([key(1)], [memory(0, 1)])
    assert "LMCache 0.9.1 was not tried with this diskprefix; 0.5.6 was" in caplog.text
    monkeypatch.setattr(DiskPrefixL2Adapter, "__abstractmethods__", frozenset({"submit_teleport"}))
    with pytest.raises(ImportError, match=r"cannot serve LMCache 0\.9\.1, whose adapters need submit_teleport; it was"):
        compat.check_version(DiskPrefixL2Adapter)


def test_after_it_is_closed_an_adapter_deletes_nothing_and_the_store_is_whole(folder: Path) -> None:
    with opened(folder) as one:
        one.store([key(1)], [memory(0, 1)])
        one.look_up([key(1)])
        one.adapter.close()
        one.adapter.delete([key(1)])
    store = Store(folder, read_only=True)
    assert store.counts()["blocks"] == 1
    assert verify_index(store).problems == ()
    store.close()


@pytest.mark.skipif(not IS_REAL, reason="LMCache is not installed")
def test_lmcache_loads_the_adapter_by_its_plugin(folder: Path) -> None:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    given = {"module_path": "diskprefix.bridges.lmcache.l2_adapter", "class_name": "DiskPrefixL2Adapter"}
    params = {"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"}
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(given | {"adapter_params": params}))
    assert isinstance(adapter, DiskPrefixL2Adapter)
    adapter.close()
    with pytest.raises(SettingsError, match="budget: unknown key"):
        create_l2_adapter(PluginL2AdapterConfig.from_dict(given | {"adapter_params": params | {"budget": 1}}))
