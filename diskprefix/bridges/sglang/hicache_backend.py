"""The storage backend that SGLang's HiCache loads by its `module_path`. See README.md."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.bridges.sglang import _sglang_compat as compat
from diskprefix.bridges.shared.connector_settings import tier_settings
from diskprefix.bridges.shared.timed_opening import open_in_time
from diskprefix.errors import CacheError
from diskprefix.identity import identity_fields
from diskprefix.prefixstore.chunk_store import DIGEST_BYTES, ChunkGroup, ChunkKey, chunk_identity, chunks_in

log = logging.getLogger("diskprefix")

_KV = "kv"
"""The pool of keys and values. The others hold the states of recurrent layers, layers with windows, and indexes."""
_COPIES_BYTES = 64 * 2**20
"""The most bytes of pages that are copied at a time, which has at least one page."""


class PoolPages(NamedTuple):
    """The pages of one pool: chunks under one root."""

    pool: str
    num_bytes: int
    dtype: str


class DiskPrefixHiCache(compat.HiCacheStorage):  # type: ignore[misc]
    """Keeps the pages of HiCache's pools in host memory in a store on disk. SGLang names a page by a digest of all
    tokens up to its end. A page that was set is in the file. For any thread."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """The extra config has the keys of `connector_settings.TIER_NAMES`. Raises `ImportError` or `DiskPrefixError`,
        each with one line, for wrong settings and for another interface of SGLang."""
        del kwargs
        compat.check_version(type(self))
        settings = tier_settings(compat.settings_of(storage_config))
        self._config, self._numbers = storage_config, compat.numbers_of(storage_config)
        self._shared = open_in_time(settings)
        self._chunks = chunks_in(self._shared, self._chunk_group)
        self._pools: dict[str, Any] = {}
        self._groups: dict[str, PoolPages | None] = {}
        """By pool; None for one whose pages cannot be cut."""
        self._lock = threading.Lock()
        self._closed = False

    # The pools, which SGLang registers before anything else.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)
        if (group := self._groups[_KV]) is not None and self._shared is not None:
            identity = self._chunk_group(group).identity
            try:
                differs = identity.differences(self._shared.store)
            except CacheError:
                return
            if differs is not None:
                log.warning("[disk-cache] stored pages of %s are not used: they differ in %s", identity.model, differs)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_text(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        self._pools[name] = pool
        try:
            page = pool.get_dummy_flat_data_page()
            self._groups[name] = PoolPages(name, page.numel() * page.element_size(), _dtype(page))
        except Exception as error:  # noqa: BLE001 (each kind of pool refuses in its own way)
            self._groups[name] = None
            log.warning("[disk-cache] pages of the pool %s are not stored: it has no flat pages (%s)", name, error)

    # The first version of the interface: keys and values.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Reads pages into flat tensors in main memory. Returns these, None for each page that is not stored."""
        del target_sizes
        wanted = list(zip(keys, target_locations or [], strict=False))
        places = [_bytes(target) for _, target in wanted]
        loaded = self._chunks.load([self._key(key, _group(target)) for key, target in wanted], places)
        pages = [target if is_loaded else None for (_, target), is_loaded in zip(wanted, loaded, strict=True)]
        return pages + [None] * (len(keys) - len(pages))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value], [target_location], target_sizes)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Writes flat tensors as pages. Returns False if some could not be written."""
        del target_locations, target_sizes
        pages = [value.contiguous() for value in values]
        return all(self._write([self._key(key, _group(page)) for key, page in zip(keys, pages, strict=True)], pages))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many of the first pages are stored without a gap."""
        del extra_info
        return _leading(self._found(_KV, keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        del extra_info
        return self._read_pages(_KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        del extra_info
        return self._write_pages(_KV, keys, host_indices)

    # The second version: any pool.

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        del extra_info
        return {
            transfer.name: self._read_pages(_text(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        del extra_info
        return {
            transfer.name: self._write_pages(_text(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_exists_v2(self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None) -> Any:
        """Returns the longest prefix of `keys` that can be restored in all pools, the pages that each pool has by its
        own policy, and every prefix that can be restored."""
        del extra_info
        kv_pages = _leading(self._found(_KV, keys))
        of_pools: dict[Any, int] = {compat.PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == compat.PoolHitPolicy.BLOCK_GROUPS:
                # It never limits the others, and a pool without pages is computed.
                continue
            stored = self._found(_text(transfer.name), keys[:kv_pages])
            if transfer.hit_policy == compat.PoolHitPolicy.TRAILING_PAGES:
                own = _ends_of_windows(stored, max(1, len(transfer.keys or ())))
            else:
                own = list(range(1, _leading(stored) + 1))
            if own:
                of_pools[transfer.name] = own[-1]
            restorable = [end for end in restorable if end in set(own)]
        return compat.PoolTransferResult(restorable[-1] if restorable else 0, of_pools, restorable)

    def clear(self) -> bool:
        """Removes all pages of this model, those of other ranks and versions too, and nothing of other engines. Returns
        False if the store cannot be written."""
        return self._chunks.clear(self._is_own)

    def _is_own(self, model: str, identity: str) -> bool:
        with suppress(ValueError):
            return model == self._model and identity_fields(identity).get("engine") == compat.ENGINE
        return False

    def close(self) -> None:
        """Closes the store. What was set is written."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._chunks.close()
        if self._shared is not None:
            self._shared.release()

    @property
    def _model(self) -> str:
        return str(self._config.model_name or "sglang").rstrip("/").rpartition("/")[2]

    def _chunk_group(self, group: PoolPages) -> ChunkGroup:
        fingerprint = (
            self._numbers
            | {"rank": compat.rank_of(self._config, group.pool), "pages": self._pages_of(group.pool)}
            | {name: str(value) for name, value in group._asdict().items()}
        )
        identity = chunk_identity(self._model, fingerprint, group.num_bytes, group.dtype)
        return ChunkGroup(identity, group.num_bytes)

    def _pages_of(self, pool: str) -> str:
        """Returns the form of a pool's pages, as far as their size does not tell it."""
        host = self._pools.get(pool)
        fields = ("page_size", "layout", "layer_num", "head_num", "head_dim", "start_layer", "end_layer")
        return ",".join(f"{name}={getattr(host, name, None)}" for name in fields)

    def _key(self, key: str, group: PoolPages) -> ChunkKey:
        digest = bytes.fromhex(key) if _is_digest(key) else hashlib.sha256(key.encode()).digest()
        return ChunkKey(digest, group)

    def _found(self, pool: str, keys: Sequence[str]) -> list[bool]:
        group = self._groups.get(pool)
        return (
            [False] * len(keys) if group is None else self._chunks.are_stored([self._key(key, group) for key in keys])
        )

    def _read_pages(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        """Reads pages into a pool. `indices` has the places of all tokens of the pages."""

        def read(group: PoolPages, some: Sequence[tuple[str, int]]) -> list[bool]:
            host = self._pools[pool]
            pages = [host.get_dummy_flat_data_page() for _ in some]
            loaded = self._chunks.load([self._key(key, group) for key, _ in some], [_bytes(page) for page in pages])
            for (_, place), page, is_loaded in zip(some, pages, loaded, strict=True):
                if is_loaded:
                    host.set_from_flat_data_page(place, page)
            return loaded

        return self._for_pages(pool, keys, indices, read)

    def _write_pages(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        def write(group: PoolPages, some: Sequence[tuple[str, int]]) -> list[bool]:
            host = self._pools[pool]
            pages = [host.get_data_page(place, flat=True).contiguous() for _, place in some]
            return self._write([self._key(key, group) for key, _ in some], pages)

        return self._for_pages(pool, keys, indices, write)

    def _for_pages(
        self,
        pool: str,
        keys: Sequence[str],
        indices: Any,
        copy: Callable[[PoolPages, Sequence[tuple[str, int]]], list[bool]],
    ) -> list[bool]:
        """Calls `copy` with some pages at a time: keys and the places of their first tokens."""
        group = self._groups.get(pool)
        size = getattr(self._pools.get(pool), "page_size", 1) or 1
        if group is None or indices is None or indices.numel() != len(keys) * size:
            return [False] * len(keys)
        chosen = list(zip(keys, indices[::size].tolist(), strict=True))
        done = list[bool]()
        num_copied = max(1, _COPIES_BYTES // group.num_bytes)
        for start in range(0, len(chosen), num_copied):
            done += copy(group, chosen[start : start + num_copied])
        return done

    def _write(self, keys: Sequence[ChunkKey], pages: Sequence[Any]) -> list[bool]:
        written = self._chunks.write(keys, [_bytes(page) for page in pages])
        self._chunks.use(keys)
        return [written.get(key, True) for key in keys]


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))


def _is_digest(key: str) -> bool:
    return len(key) == 2 * DIGEST_BYTES and all(char in "0123456789abcdef" for char in key)


def _dtype(page: Any) -> str:
    return str(page.dtype).removeprefix("torch.")


def _group(page: Any) -> PoolPages:
    return PoolPages(_KV, page.numel() * page.element_size(), _dtype(page))


def _bytes(page: Any) -> npt.NDArray[np.uint8]:
    """Returns the memory of a contiguous tensor, uint8 of shape [bytes]."""
    memory: npt.NDArray[np.uint8] = page.view(torch.uint8).numpy().reshape(-1)
    return memory


def _leading(stored: Iterable[bool]) -> int:
    """Returns how many of the first values are True."""
    number = 0
    for is_stored in stored:
        if not is_stored:
            break
        number += 1
    return number


def _ends_of_windows(stored: Sequence[bool], num_pages: int) -> list[int]:
    """Returns the lengths of the prefixes whose last `num_pages` pages are stored, or all of a shorter prefix."""
    missing = np.concatenate([[0], np.cumsum(np.logical_not(stored))])
    ends = np.arange(1, len(stored) + 1)
    whole: list[int] = ends[missing[ends] == missing[np.maximum(0, ends - num_pages)]].tolist()
    return whole
