"""Stands for the parts of LMCache that the adapter needs, where LMCache is not installed. `IS_REAL` says which it is.

The real package runs the same tests in the environment of `tests/bridges/real-engines lmcache`.
"""

from __future__ import annotations

import importlib
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from tests.bridges.made_up_modules import install_modules

IS_REAL = find_spec("lmcache") is not None


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> Any:
        return SimpleNamespace(to_object_key=lambda: self)


@dataclass(frozen=True)
class KeyEntry:
    key: Any
    size_bytes: int


@dataclass(frozen=True)
class KeyListPage:
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return self >= 0


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: dict[str, int] = field(default_factory=dict)


class L2AdapterInterface(ABC):
    """The counts and listeners of LMCache's base class, under its names."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._max_capacity_bytes, self._listeners = max_capacity_bytes, list[Any]()
        self._backend_name, self._shared, self._event_bus = "", False, None
        self._total_bytes_used, self._bytes_by_cache_salt = 0, dict[str, int]()
        self._usage_lock = threading.Lock()

    @abstractmethod
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int: ...

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def _count(self, keys: list[Any], sizes: list[int], sign: int) -> None:
        with self._usage_lock:
            for key, size in zip(keys, sizes, strict=True):
                used = self._bytes_by_cache_salt
                used[key.cache_salt] = used.get(key.cache_salt, 0) + sign * size
                self._total_bytes_used += sign * size

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self._count(keys, sizes, 1)
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self._count(keys, sizes, -1)
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)

    def get_usage(self) -> AdapterUsage:
        used = {salt: size for salt, size in self._bytes_by_cache_salt.items() if size}
        return AdapterUsage(self._total_bytes_used, self._max_capacity_bytes, used)


class Notifier:
    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def notify(self) -> None:
        os.write(self._write, b"1")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class MemoryObj:
    """A memory object in main memory, as LMCache's `TensorMemoryObj`."""

    def __init__(self, shapes: list[torch.Size], dtypes: list[torch.dtype], data: bytearray) -> None:
        self.metadata = SimpleNamespace(shape=shapes[0], dtype=dtypes[0], shapes=shapes, dtypes=dtypes)
        self.data = data

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)


def _install() -> None:
    """Puts stand-ins into the places of LMCache's modules."""
    modules: dict[str, dict[str, Any]] = {
        "lmcache": {"__version__": "0.5.6"},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.api": {
            "KeyEntry": KeyEntry,
            "KeyListPage": KeyListPage,
            "ObjectKey": ObjectKey,
            "MemoryLayoutDesc": MemoryLayoutDesc,
        },
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {
            "AdapterUsage": AdapterUsage,
            "L2AdapterInterface": L2AdapterInterface,
        },
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
    }
    install_modules(modules)


if not IS_REAL:
    _install()

api: Any = importlib.import_module("lmcache.v1.distributed.api")
