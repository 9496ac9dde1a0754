"""The tier under vLLM's own manager of tiers. Needs vLLM from 0.28 on: `tests/bridges/real-engines theirs` runs these
in its environment."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest

vllm: Any = pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.kv_offload.tiering.factory")

compat: Any = pytest.importorskip("diskprefix.bridges.vllm._vllm_tiering")
base: Any = pytest.importorskip("vllm.v1.kv_offload.base")
manager: Any = pytest.importorskip("vllm.v1.kv_offload.tiering.manager")
factory: Any = pytest.importorskip("vllm.v1.kv_offload.tiering.factory")

CHUNK_BYTES, SLOTS, DEADLINE_S = 3 * 4096, 8, 30.0


def key(number: int, group: int = 0) -> Any:
    return base.make_offload_key(hashlib.sha256(b"%d" % number).digest(), group)


def content(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, np.uint8)


@contextmanager
def tiers(folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Iterator[Manager]:
    """vLLM's primary tier of `SLOTS` chunks, and ours made by vLLM's factory from a configuration."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(compat, "engine_config", lambda: Fake(**ENGINE))
    monkeypatch.setattr(compat, "tier_numbers", lambda *_: {"engine": "vllm", "weights_digest": "some"})
    opened = Manager(folder, config)
    try:
        yield opened
    finally:
        opened.close()


ENGINE: dict[str, Any] = {
    "cache_config": Fake(prefix_caching_hash_algo="sha256"),
    "lora_config": None,
    "model_config": Fake(model="/models/some"),
}


class Manager:
    """A manager of tiers, driven as vLLM's scheduler drives it."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.slots = np.zeros((SLOTS, CHUNK_BYTES), np.int8)
        given = {"type": "DiskPrefixTier", "module_path": "diskprefix.bridges.vllm.offload_tier"}
        given |= {"kv_cache_dir": str(folder), "kv_cache_budget": "64MiB"}
        spec = Fake(config=Fake(model=Fake(dtype="bfloat16")), kv_events_config=Fake(enable_kv_cache_events=False))
        self.tier = factory.SecondaryTierFactory.create_secondary_tier(given | config, self.slots.data, spec)
        region = Fake(create_kv_memoryview=lambda: self.slots.data, cleanup=lambda: None)
        primary = manager.CPUPrimaryTierOffloadingManager(SLOTS, mmap_region=region)
        self.all = manager.TieringOffloadingManager(primary, [self.tier])
        self._number = 0

    def request(self) -> Any:
        self._number += 1
        request = base.ReqContext(f"request {self._number}")
        self.all.on_new_request(request)
        return request

    def store(self, keys: list[Any], *, first: int = 0) -> None:
        """Stores chunks with the contents `first`, `first + 1` … A GPU copies them between the two calls."""
        request = self.request()
        prepared = self.all.prepare_store(keys, request)
        for one, slot in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.slots[slot] = content(first + keys.index(one)).view(np.int8)
        self.all.complete_store(keys, request)
        self.all.on_request_finished(request)
        self.run()

    def find(self, keys: list[Any]) -> list[bool]:
        """Asks in each step until no chunk is on its way. Returns which are in the primary tier then."""
        request, found, deadline = self.request(), [base.LookupResult.RETRY], time.monotonic() + DEADLINE_S
        unsettled = (base.LookupResult.RETRY, base.LookupResult.HIT_PENDING)
        while any(one in unsettled for one in found) and time.monotonic() < deadline:
            found = [self.all.lookup(one, request) for one in keys]
            self.step()
        self.all.on_request_finished(request)
        return [one is base.LookupResult.HIT for one in found]

    def read(self, keys: list[Any]) -> list[Any]:
        request = self.request()
        spec = self.all.prepare_load(keys, request)
        read = [self.slots[slot].view(np.uint8).copy() for slot in spec.block_ids]
        self.all.complete_load(keys, request)
        self.all.on_request_finished(request)
        return read

    def step(self) -> None:
        self.all.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def run(self) -> None:
        self.tier.drain_jobs()
        self.step()

    def close(self) -> None:
        with suppress(AttributeError):
            self.all.shutdown()


def test_chunks_are_restored_by_the_next_process_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(number, number % 2) for number in range(4)]
    with tiers(tmp_path / "kv", monkeypatch) as first:
        assert first.find(keys) == [False] * 4
        first.store(keys)
        assert first.find(keys) == [True] * 4
    with tiers(tmp_path / "kv", monkeypatch) as second:
        assert second.find([*keys, key(9)]) == [True] * 4 + [False]
        for number, read in enumerate(second.read(keys)):
            assert np.array_equal(read, content(number))


def test_a_damaged_chunk_is_computed_again_and_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(number) for number in range(3)]
    with tiers(tmp_path / "kv", monkeypatch) as first:
        first.store(keys)
    file = tmp_path / "kv" / "data.mdb"
    data = bytearray(file.read_bytes())
    data[data.index(content(1).tobytes()[100:200])] ^= 1
    file.write_bytes(data)
    with tiers(tmp_path / "kv", monkeypatch) as second:
        assert second.find(keys) == [True, False, True]
        assert second.find(keys) == [True, False, True]
        second.store(keys)
        assert second.find(keys) == [True] * 3
    with tiers(tmp_path / "kv", monkeypatch) as third:
        assert third.find(keys) == [True] * 3
        assert np.array_equal(third.read(keys)[1], content(1))


def test_more_than_the_primary_tier_holds_is_stored_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiers(tmp_path / "kv", monkeypatch) as tier:
        for start in range(0, 5 * SLOTS, 4):
            tier.store([key(start + number) for number in range(4)], first=start)
        for start in range(0, 5 * SLOTS, 4):
            keys = [key(start + number) for number in range(4)]
            assert tier.find(keys) == [True] * 4
            assert np.array_equal(tier.read(keys)[3], content(start + 3))


def test_a_store_that_is_deleted_under_it_makes_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiers(tmp_path / "kv", monkeypatch) as tier:
        tier.store([key(1)])
        (tmp_path / "kv" / "data.mdb").unlink()
        (tmp_path / "kv").rename(tmp_path / "gone")
        for number in range(2, 2 + SLOTS):
            tier.store([key(number)])
        assert tier.find([key(number) for number in range(10, 12)]) == [False, False]


def test_this_version_has_all_that_is_used_and_one_that_lacks_something_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compat.check_version() is None
    monkeypatch.setitem(compat.USED, "vllm.v1.kv_offload.tiering.base:TransferJob", ("job_id", "nothing_of_the_kind"))
    with pytest.raises(ImportError, match=r"cannot be a tier of vLLM .*: it has no TransferJob\.nothing_of_the_kind$"):
        compat.check_version()


def test_a_store_that_does_not_open_in_time_makes_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.bridges.vllm.offload_tier.open_in_time", lambda _: None)
    with tiers(tmp_path / "kv", monkeypatch) as tier:
        tier.store([key(1)])
        assert tier.find([key(1), key(2)]) == [True, False], "vLLM's own tier has it"
        for number in range(2, 2 + SLOTS):
            tier.store([key(number)])
        assert tier.find([key(1)]) == [False]
    assert not (tmp_path / "kv").exists()


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**engine: Any) -> None:
        compat.check_keys(Fake(**ENGINE | engine))

    with pytest.raises(Exception, match="bugdet: unknown key; there are: kv_cache_dir, kv_cache_budget, "):  # noqa: SIM117
        with tiers(tmp_path / "kv", monkeypatch, bugdet=1):
            pass
    monkeypatch.setattr(vllm, "__version__", "0.28.0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check()
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(ValueError, match="set PYTHONHASHSEED to a number that stays the same"):
        check()
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    check()
    with pytest.raises(ValueError, match=r"prefix_caching_hash_algo xxhash; choose sha256 or sha256_cbor"):
        check(cache_config=Fake(prefix_caching_hash_algo="xxhash"))
    with pytest.raises(ValueError, match="cannot serve LoRA adapters"):
        check(lora_config="some")


def test_the_engines_configuration_is_found_up_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        """In the place of vLLM's, which needs a model."""

    monkeypatch.setattr(compat, "VllmConfig", Config)

    def connector(vllm_config: Any) -> Any:
        return [compat.engine_config()][0], vllm_config

    found, given = connector(Config())
    assert found is given
    with pytest.raises(ImportError, match="cannot find the configuration of vLLM"):
        compat.engine_config()


def test_engines_share_chunks_unless_their_numbers_or_chunks_differ() -> None:
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "data_parallel_index": 0}
    assert json.loads(_chunk(**parallel)) == json.loads(_chunk(**parallel | {"data_parallel_index": 3}))
    assert _chunk(**parallel) != _chunk(**parallel | {"tp_size": 2})


def _chunk(**parallel: int) -> str:
    cache = Fake(blocks_per_chunk=1, tokens_per_hash=16)
    group = Fake(tokens_per_block=16, layer_names=("layer.0",))
    chunk: str = compat.chunk_form(Fake(groups=(group,), cache=cache), parallel)
    return chunk
