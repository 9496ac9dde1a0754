"""A plugin for LMCache's own tests of adapters: it replaces LMCache's adapters by ours. Runs in LMCache's environment.

The tests make a `MockL2Adapter` or an `FSL2Adapter` from its configuration. Here both names stand for our adapter, with
a store of its own for each, and with what the tests ask of the mock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmcache
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, mock_l2_adapter
from lmcache.v1.distributed.l2_adapters.factory import _L2_ADAPTER_FACTORY_REGISTRY

from diskprefix.bridges.lmcache.l2_adapter import DiskPrefixL2Adapter

BUDGET = "64MiB"


class Ours(DiskPrefixL2Adapter):
    """Our adapter with a store of its own, whatever settings a test has for theirs. As slow as a test wants it."""

    def __init__(self, config: Any = None, **_: Any) -> None:
        folder = getattr(config, "base_path", None) or tempfile.mkdtemp(prefix="kv-")
        super().__init__({"kv_cache_dir": str(Path(folder) / "kv"), "kv_cache_budget": BUDGET})
        self._bytes_per_s = getattr(config, "mock_bandwidth_gb", 1024.0) * 2**30

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        time.sleep(sum(len(obj.byte_array) for obj in objects) / self._bytes_per_s)
        return super()._store(keys, objects)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        time.sleep(sum(len(obj.byte_array) for obj in objects) / self._bytes_per_s)
        return super()._load(keys, objects)

    def debug_get_stored_object_count(self) -> int:
        return int(self.report_status()["stored_object_count"])

    def debug_get_locked_key_count(self) -> int:
        return int(self.report_status()["locked_key_count"])

    def debug_has_key(self, key: Any) -> bool:
        return any(self._chunks.are_stored(list(self._chunks_of(key))))


def pytest_configure() -> None:
    """Prepares the plugin before their modules are imported. Those of the controllers ask for a GPU, and need none."""
    lmcache.torch_dev.is_available = lambda: True
    mock_l2_adapter.MockL2Adapter = Ours
    fs_l2_adapter.FSL2Adapter = Ours
    for name in ("mock", "fs"):
        _L2_ADAPTER_FACTORY_REGISTRY[name] = lambda config, *_: Ours(config)
