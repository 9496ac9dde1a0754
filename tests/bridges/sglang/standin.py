"""Stands for the parts of SGLang that the backend needs, where SGLang is not installed, and for a pool in host memory.

The real package runs the same tests in the environment of `tests/bridges/real-engines sglang`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from tests.bridges.made_up_modules import install_modules

IS_REAL = find_spec("sglang") is not None


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    """SGLang's base class, under its names."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools = dict[Any, Any]()
        self.registered_pools[host_pool_name] = host_pool

    @abstractmethod
    def get(self, key: str) -> Any: ...


def _install() -> None:
    """Puts stand-ins into the places of SGLang's modules."""

    def get_server_args() -> Any:
        raise ValueError("not published")

    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolName": PoolName,
            "PoolTransfer": PoolTransfer,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.srt.runtime_context": {"get_server_args": get_server_args},
        "sglang.version": {"__version__": "0.5.23"},
    }
    install_modules(modules)


if not IS_REAL:
    _install()

storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")


@dataclass
class Config:
    """SGLang's `HiCacheStorageConfig`."""

    extra_config: dict[str, Any]
    model_name: str = "org/some-model"
    is_mla_model: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    others: Any = field(default_factory=SimpleNamespace)


class Pool:
    """A pool of pages in host memory, in one of the orders of SGLang's `MHATokenToKVPoolHost`."""

    layer_num, head_num, head_dim, num_pages = 4, 2, 64, 64

    def __init__(self, page_size: int = 16, layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> None:
        self.page_size, self.layout, self.dtype = page_size, layout, dtype
        tokens = self.num_pages * page_size
        shape = (self.layer_num, tokens) if layout == "layer_first" else (tokens, self.layer_num)
        self.kv_buffer = torch.zeros((2, *shape, self.head_num, self.head_dim), dtype=dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.reshape(page.shape))

    def _page(self, index: int) -> torch.Tensor:
        tokens = slice(index, index + self.page_size)
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]
