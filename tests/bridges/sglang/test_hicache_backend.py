"""The store as a backend of SGLang's HiCache, driven as its controller drives it; with the real SGLang where there is
one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bridges.sglang.standin import IS_REAL, Config, Pool, storage

# The stand-in comes first.
from diskprefix.errors import SettingsError  # isort: skip
from diskprefix.bridges.sglang import _sglang_compat as compat  # isort: skip
from diskprefix.bridges.sglang.hicache_backend import DiskPrefixHiCache  # isort: skip
from diskprefix.prefixstore.store.store import Store  # isort: skip
from diskprefix.prefixstore.store.verify import verify_index  # isort: skip
from tests.prefixstore.packs.exported import entry_of  # isort: skip
from tests.bridges.suspended import suspended_writer  # isort: skip
from tests.prefixstore.store.building import BLOCK, is_whole, prompt  # isort: skip

FACTORY = {"backend_name": "diskprefix", "module_path": "x", "class_name": "y", "interface_v1": 1}
SWA, MAMBA, INDEXER = storage.PoolName.SWA, storage.PoolName.MAMBA, storage.PoolName.INDEXER


def key(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def fill(pool: Pool, number: int) -> None:
    """Fills the pages of a pool with values that depend on a number."""
    values = torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(number))
    pool.kv_buffer.copy_(values)


def places(pool: Pool, pages: Sequence[int]) -> torch.Tensor:
    """The places of all tokens of some pages."""
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


@contextmanager
def opened(folder: Path, pools: dict[Any, Pool], **other: Any) -> Iterator[DiskPrefixHiCache]:
    config = {"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"} | other.pop("config", {})
    backend = DiskPrefixHiCache(Config(FACTORY | config, **other), {})
    try:
        for name, pool in pools.items():
            if name == "kv":
                backend.register_mem_pool_host(pool)
            else:
                backend.register_mem_host_pool_v2(pool, name)
        yield backend
    finally:
        backend.close()
        backend.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_bit_for_bit_after_a_restart(folder: Path, layout: str) -> None:
    keys, pool = [key(number) for number in range(5)], Pool(layout=layout)
    fill(pool, 1)
    with opened(folder, {"kv": pool}) as first:
        assert first.batch_exists(keys) == 0
        assert first.batch_set_v1(keys, places(pool, range(5))) == [True] * 5
        assert first.batch_set_v1(keys, places(pool, range(5))) == [True] * 5, "they are stored"
    again = Pool(layout=layout)
    with opened(folder, {"kv": again}) as second:
        assert second.batch_exists([*keys, key(9)]) == 5
        assert second.batch_exists([key(9), *keys]) == 0
        assert second.exists(keys[0])
        assert not second.exists(key(9))
        # A page goes to another place.
        assert second.batch_get_v1([*keys, key(9)], places(again, [7, 3, 5, 1, 0, 2])) == [True] * 5 + [False]
        for number, page in enumerate([7, 3, 5, 1, 0]):
            at, was = again.page_size * page, pool.page_size * number
            assert torch.equal(again.get_data_page(at), pool.get_data_page(was))


def test_flat_pages_of_the_generic_way_are_the_same_pages(folder: Path) -> None:
    pool = Pool()
    fill(pool, 1)
    flat = [pool.get_data_page(page * pool.page_size) for page in range(3)]
    with opened(folder, {"kv": pool}) as backend:
        assert backend.batch_set([key(number) for number in range(2)], flat[:2])
        assert backend.set(key(2), flat[2])
        assert backend.batch_exists([key(number) for number in range(4)]) == 3
        targets = [pool.get_dummy_flat_data_page() for _ in range(4)]
        found = backend.batch_get([key(number) for number in range(4)], targets)
        assert found[3] is None
        assert all(map(torch.equal, found[:3], flat))
        assert backend.get(key(9), pool.get_dummy_flat_data_page()) is None
        other = Pool()
        assert backend.batch_get_v1([key(0)], places(other, [0])) == [True]


def test_each_pool_has_its_own_pages_and_policies(folder: Path) -> None:
    pools = {"kv": Pool(), SWA: Pool(page_size=8), MAMBA: Pool(page_size=1), INDEXER: Pool(dtype=torch.float16)}
    for number, pool in enumerate(pools.values()):
        fill(pool, number)
    keys = [key(number) for number in range(6)]

    def transfer(name: Any, pages: Sequence[int], policy: str = "ALL_PAGES") -> Any:
        some = [keys[page] for page in pages]
        policy = getattr(storage.PoolHitPolicy, policy)
        return storage.PoolTransfer(name=name, host_indices=places(pools[name], pages), keys=some, hit_policy=policy)

    with opened(folder, pools) as first:
        first.batch_set_v1(keys, places(pools["kv"], range(6)))
        done = first.batch_set_v2([transfer(SWA, [1, 2, 4, 5]), transfer(MAMBA, [2, 5]), transfer(INDEXER, range(4))])
        assert done == {SWA: [True] * 4, MAMBA: [True] * 2, INDEXER: [True] * 4}
    again = {name: Pool(pool.page_size, dtype=pool.dtype) for name, pool in pools.items()}
    with opened(folder, again) as second:
        windows, state = transfer(SWA, [4, 5], "TRAILING_PAGES"), transfer(MAMBA, [5], "TRAILING_PAGES")
        found = second.batch_exists_v2(keys, [windows])
        # A window of two pages ends at the second page only if the first is stored too.
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
        found = second.batch_exists_v2(keys, [windows, state, transfer(INDEXER, range(6))])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        assert found.extra_pool_hit_pages == {storage.PoolName.KV: 6, SWA: 6, MAMBA: 6, INDEXER: 4}
        assert second.batch_exists_v2([*keys, key(9)], []).kv_hit_pages == 6
        assert second.batch_exists_v2([key(9), *keys], [state]).kv_hit_pages == 0
        groups = transfer(MAMBA, [0], "BLOCK_GROUPS")
        assert second.batch_exists_v2(keys, [groups]).kv_hit_pages == 6
        loaded = second.batch_get_v2([transfer(SWA, [1, 2, 3]), transfer(MAMBA, [5])])
        assert loaded == {SWA: [True, True, False], MAMBA: [True]}
        size = pools[SWA].page_size
        assert torch.equal(again[SWA].get_data_page(size), pools[SWA].get_data_page(size))
        assert torch.equal(again[MAMBA].get_data_page(5), pools[MAMBA].get_data_page(5))


@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        ({}, True),
        ({"tp_rank": 1}, False),
        ({"model_name": "org/other-model"}, False),
        ({"tp_size": 2}, False),
        ({"tp_rank": 1, "is_mla_model": True}, True),
    ],
)
def test_pages_are_found_by_ranks_that_hold_the_same(folder: Path, other: dict[str, Any], is_found: bool) -> None:
    pool, is_mla = Pool(), bool(other.get("is_mla_model"))
    fill(pool, 1)
    pools = {"kv": pool, MAMBA: pool}
    state = storage.PoolTransfer(name=MAMBA, host_indices=places(pool, [0]), keys=[key(0)])
    with opened(folder, pools, is_mla_model=is_mla) as first:
        first.batch_set_v1([key(0)], places(pool, [0]))
        first.batch_set_v2([state])
    with opened(folder, pools, **other) as second:
        assert second.batch_exists([key(0)]) == is_found
        assert second.batch_get_v2([state])[MAMBA] == [is_found and not is_mla], "each rank has its own states"


def test_pages_of_another_form_are_misses_and_the_log_names_the_difference(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, {"kv": Pool()}) as first:
        first.batch_set_v1([key(0)], places(Pool(), [0]))
    with caplog.at_level(logging.WARNING), opened(folder, {"kv": Pool(layout="page_first")}) as second:
        assert second.batch_exists([key(0)]) == 0
    assert "stored pages of some-model are not used: they differ in pages (" in caplog.text


def test_a_pool_without_flat_pages_is_served_without_the_store_and_told_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Cut(Pool):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise NotImplementedError("no flat pages")

    pool = Cut()
    with caplog.at_level(logging.WARNING), opened(folder, {"kv": pool}) as backend:
        for _ in range(2):
            assert backend.batch_set_v1([key(0)], places(pool, [0])) == [False]
            assert backend.batch_get_v1([key(0)], places(pool, [0])) == [False]
            assert backend.batch_exists([key(0)]) == 0
    assert [record.message for record in caplog.records] == [
        "[disk-cache] pages of the pool kv are not stored: it has no flat pages (no flat pages)"
    ]


def test_wrong_places_move_nothing(folder: Path) -> None:
    pool = Pool()
    with opened(folder, {"kv": pool}) as backend:
        assert backend.batch_set_v1([key(0), key(1)], places(pool, [0])) == [False, False]
        unknown = storage.PoolTransfer(name=SWA, host_indices=places(pool, [0]), keys=[key(0)])
        assert backend.batch_set_v2([unknown]) == {SWA: [False]}
        assert backend.batch_exists_v2([key(0)], [unknown]).kv_hit_pages == 0


def test_a_damaged_page_is_a_miss_and_a_suspended_process_makes_failed_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.chunk_store._WRITE_S", 0.5)
    pool, keys = Pool(), [key(number) for number in range(3)]
    fill(pool, 1)
    with opened(folder, {"kv": pool}) as first:
        first.batch_set_v1(keys, places(pool, range(3)))
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        records = ((name, snapshot.node(name)) for name in snapshot.keys("nodes"))
        [name] = [name for name, node in records if node and node.token_ids.tobytes().hex() == keys[1]]
        piece = bytes(snapshot.piece(name, 0) or b"")
    file = folder / "data.mdb"
    content = bytearray(file.read_bytes())
    content[content.index(piece[100:200])] ^= 1
    file.write_bytes(content)
    with opened(folder, {"kv": pool}) as second:
        assert second.batch_get_v1(keys, places(pool, range(3))) == [True, False, True]
        assert second.batch_exists(keys) == 1
        assert second.batch_set_v1(keys, places(pool, range(3))) == [True] * 3
        with suspended_writer(folder):
            assert second.batch_set_v1([key(7)], places(pool, [7])) == [False]
            assert second.batch_get_v1(keys, places(pool, range(3))) == [True] * 3


def test_a_backend_whose_store_does_not_open_in_time_stores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = Pool(), [key(number) for number in range(3)]
    with opened(folder, {"kv": pool}) as first:
        first.batch_set_v1(keys, places(pool, range(3)))
    monkeypatch.setattr("diskprefix.bridges.shared.timed_opening._OPEN_S", 0.5)
    with suspended_writer(folder), opened(folder, {"kv": pool}) as second:
        assert second.batch_set_v1([key(7)], places(pool, [7])) == [False]
        assert second.batch_get_v1(keys, places(pool, range(3))) == [False] * 3
        assert second.batch_exists(keys) == 0
        assert not second.clear()


def test_clear_removes_the_pages_of_this_model_alone(folder: Path) -> None:
    pool = Pool()
    with opened(folder, {"kv": pool}, model_name="org/other") as other:
        other.batch_set_v1([key(0)], places(pool, [0]))
    with opened(folder, {"kv": pool}) as backend:
        backend.batch_set_v1([key(0)], places(pool, [0]))
        assert backend.clear()
        assert backend.batch_exists([key(0)]) == 0
        assert backend.batch_set_v1([key(1)], places(pool, [1])) == [True]
    with opened(folder, {"kv": pool}, model_name="org/other") as other:
        assert other.batch_exists([key(0)]) == 1
    with closing(Store(folder, read_only=True)) as store:
        assert verify_index(store).problems == ()


def test_clear_leaves_what_another_engine_has_of_the_same_model(folder: Path) -> None:
    pool = Pool()
    with opened(folder, {"kv": pool}) as backend:
        backend.batch_set_v1([key(0)], places(pool, [0]))
        assert backend._shared is not None
        store = backend._shared.store
        theirs = entry_of(store, prompt(1, 2 * BLOCK), model=backend._model)
        store.publish(theirs)
        assert backend.clear()
        assert backend.batch_exists([key(0)]) == 0
        assert is_whole(store, theirs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_cache_dir": ""}, "kv_cache_dir: must name the folder"),
        ({"budget": 1}, "budget: unknown key; there are: kv_cache_dir, kv_cache_budget"),
        ({"kv_cache_budget": "much"}, "kv_cache_budget: "),
    ],
)
def test_wrong_settings_are_refused_by_name(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused, opened(folder, {}, config=config):
        pass
    assert "\n" not in str(refused.value)


def test_another_version_is_told_of_and_another_interface_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "VERSION", "0.9.1")
    with caplog.at_level(logging.WARNING), opened(folder, {"kv": Pool()}):
        pass
    assert "SGLang 0.9.1 was not tried with this diskprefix; 0.5.23 was" in caplog.text
    monkeypatch.setattr(DiskPrefixHiCache, "__abstractmethods__", frozenset({"teleport"}))
    with pytest.raises(ImportError, match=r"cannot serve SGLang 0\.9\.1, whose backends need teleport; it was tried"):
        compat.check_version(DiskPrefixHiCache)


@pytest.mark.skipif(not IS_REAL, reason="SGLang is not installed")
def test_sglang_creates_the_backend_by_its_name_dynamic(folder: Path) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    given = FACTORY | {"module_path": "diskprefix.bridges.sglang.hicache_backend", "class_name": "DiskPrefixHiCache"}
    config = storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config=given | {"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"},
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, Pool())
    assert isinstance(backend, DiskPrefixHiCache)
    backend.close()
