"""Our store and an engine's own backend of files, side by side in one process, with the same real KV.

Runs in the engine's environment, as `python side_by_side.py ENGINE CHUNKS FOLDER`; prints one line of JSON. `store` and
`load` do the two in turn, each batch by both, so that other work on the machine meets both.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from diskprefix.prefixstore.store.codec.planes import Bytes

STORED_AT_ONCE, LOADED_AT_ONCE = 8, 40
BUDGET = "24GiB"
LAYERS, TOKENS, WIDTH = 30, 256, 192
"""The form of a chunk of SmolLM2-135M: keys and values of so many layers, tokens, and heads times their size."""
CHUNK_BYTES = 2 * LAYERS * TOKENS * WIDTH * 2


class Side(Protocol):
    """A backend. Chunks are numbered."""

    def store(self, numbers: Sequence[int], chunks: Bytes) -> bool: ...

    def load(self, numbers: Sequence[int]) -> list[bool]:
        """Loads chunks into `places`, the first ones in their order."""
        ...

    places: Bytes

    def close(self) -> None: ...


class LMCacheSide:
    """An adapter, driven over its tasks and file descriptors."""

    def __init__(self, adapter: Any) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.platform import consume_fd

        self._adapter, self._key, self._consume = adapter, ObjectKey, consume_fd
        shape = torch.Size((2, LAYERS, TOKENS, WIDTH))
        self._layouts = {0: MemoryLayoutDesc([shape], [torch.bfloat16])}

        def object_of(content: Bytes) -> Any:
            metadata = MemoryObjMetadata(
                shape,
                torch.bfloat16,
                0,
                CHUNK_BYTES,
                1,
                fmt=MemoryFormat.KV_2LTD,
                shapes=[shape],
                dtypes=[torch.bfloat16],
            )
            return TensorMemoryObj(torch.from_numpy(content), metadata, None)

        self._object_of = object_of
        self.places = np.zeros((LOADED_AT_ONCE, CHUNK_BYTES), np.uint8)

    def store(self, numbers: Sequence[int], chunks: Bytes) -> bool:
        task = self._adapter.submit_store_task(self._keys(numbers), [self._object_of(chunk) for chunk in chunks])
        self._wait(self._adapter.get_store_event_fd())
        return bool(self._adapter.pop_completed_store_tasks()[task].is_successful())

    def load(self, numbers: Sequence[int]) -> list[bool]:
        keys = self._keys(numbers)
        task = self._adapter.submit_lookup_and_lock_task(keys, self._layouts)
        self._wait(self._adapter.get_lookup_and_lock_event_fd())
        locked = self._adapter.query_lookup_and_lock_result(task)
        task = self._adapter.submit_load_task(keys, [self._object_of(place) for place in self.places[: len(keys)]])
        self._wait(self._adapter.get_load_event_fd())
        loaded = self._adapter.query_load_result(task)
        self._adapter.submit_unlock([key for number, key in enumerate(keys) if locked.test(number)])
        return [loaded.test(number) for number in range(len(keys))]

    def close(self) -> None:
        self._adapter.close()

    def _keys(self, numbers: Sequence[int]) -> list[Any]:
        return [self._key(random.Random(number).randbytes(32), "SmolLM2", 0x01000100) for number in numbers]

    def _wait(self, descriptor: int) -> None:
        assert select.select([descriptor], [], [], 300)[0], "a task did not end"
        self._consume(descriptor)


class SGLangSide:
    """A storage backend, called as SGLang's controller calls it: a page is a chunk. Ours copies from and to the pool
    (`interface_v1`). For the files, the controller does that, as here, in SGLang 0.5.23."""

    def __init__(self, backend: Any, *, is_generic: bool) -> None:
        self._backend, self._is_generic = backend, is_generic
        self._pool = _Pool()
        self.places = self._pool.memory[:LOADED_AT_ONCE]
        backend.register_mem_pool_host(self._pool)

    def store(self, numbers: Sequence[int], chunks: Bytes) -> bool:
        self._pool.memory[: len(chunks)] = chunks
        keys, indices = self._keys(numbers), self._pool.indices(len(numbers))
        if not self._is_generic:
            return all(self._backend.batch_set_v1(keys, indices))
        pages = [self._pool.get_data_page(indices[n * TOKENS]) for n in range(len(keys))]
        return bool(self._backend.batch_set(keys, pages))

    def load(self, numbers: Sequence[int]) -> list[bool]:
        keys, indices = self._keys(numbers), self._pool.indices(len(numbers))
        num_stored = self._backend.batch_exists(keys)
        if not self._is_generic:
            return list(self._backend.batch_get_v1(keys[:num_stored], indices[: num_stored * TOKENS])) + [False] * (
                len(keys) - num_stored
            )
        targets = [self._pool.get_dummy_flat_data_page() for _ in keys[:num_stored]]
        pages = self._backend.batch_get(keys[:num_stored], targets)
        for number, page in enumerate(pages):
            if page is not None:
                self._pool.set_from_flat_data_page(indices[number * TOKENS], page)
        return [page is not None for page in pages] + [False] * (len(keys) - num_stored)

    def close(self) -> None:
        getattr(self._backend, "close", lambda: None)()

    def _keys(self, numbers: Sequence[int]) -> list[str]:
        return [random.Random(number).randbytes(32).hex() for number in numbers]


class _Pool:
    """Pages in host memory, each contiguous."""

    page_size, layout, dtype, layer_num = TOKENS, "page_first_direct", torch.bfloat16, LAYERS

    def __init__(self) -> None:
        self.memory = np.zeros((LOADED_AT_ONCE, CHUNK_BYTES), np.uint8)
        self._pages = torch.from_numpy(self.memory).view(torch.bfloat16)

    def indices(self, num_pages: int) -> Any:
        return torch.arange(num_pages * TOKENS)

    def get_data_page(self, index: Any, flat: bool = True) -> Any:
        del flat
        return self._pages[int(index) // TOKENS]

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(self._pages.shape[1], dtype=self.dtype)

    def set_from_flat_data_page(self, index: Any, page: Any) -> None:
        self._pages[int(index) // TOKENS] = page


def sides_of(engine: str, folder: Path) -> dict[str, Callable[[], Side]]:
    """Returns what opens our store and the engine's own files in `folder`."""
    ours, files = folder / "ours", folder / "files"
    settings = {"kv_cache_dir": str(ours), "kv_cache_budget": BUDGET}

    def lmcache() -> Side:
        from diskprefix.bridges.lmcache.l2_adapter import DiskPrefixL2Adapter

        return LMCacheSide(DiskPrefixL2Adapter(settings))

    def lmcache_files() -> Side:
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

        return LMCacheSide(FSL2Adapter(FSL2AdapterConfig(base_path=str(files))))

    def config_of(extra: dict[str, str]) -> Any:
        return SimpleNamespace(
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size", "dcp_size"), 1),
            model_name="SmolLM2",
            is_mla_model=False,
            extra_config=extra,
            is_storage_writer=True,
        )

    def sglang() -> Side:
        from diskprefix.bridges.sglang.hicache_backend import DiskPrefixHiCache

        return SGLangSide(DiskPrefixHiCache(config_of(settings)), is_generic=False)

    def sglang_files() -> Side:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        files.mkdir(exist_ok=True)
        return SGLangSide(HiCacheFile(config_of({"file_storage_path": str(files)})), is_generic=True)

    return {"ours": lmcache, "files": lmcache_files} if engine == "lmcache" else {"ours": sglang, "files": sglang_files}


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def measure(engine: str, chunks: Bytes, folder: Path) -> dict[str, Any]:
    """Stores and loads all chunks by both sides. Returns bytes, how many chunks came back wrong, and the seconds until
    all are stored (`store`), also on the disk (`synced`), loaded without the page cache (`load`), and with it (`warm`).
    """
    sides = {name: opened() for name, opened in sides_of(engine, folder).items()}
    seconds: dict[str, dict[str, float]] = {
        name: dict.fromkeys(("store", "synced", "load", "warm"), 0.0) for name in sides
    }
    wrong = dict.fromkeys(sides, 0)
    for start in range(0, len(chunks), STORED_AT_ONCE):
        part = np.array(chunks[start : start + STORED_AT_ONCE])
        for name in in_turn(sides, start // STORED_AT_ONCE):
            began = time.perf_counter()
            assert sides[name].store(range(start, start + len(part)), part), f"{name}: not stored"
            seconds[name]["store"] += time.perf_counter() - began
            # Otherwise the one that waits for the disk would wait for the other's bytes too.
            os.sync()
            seconds[name]["synced"] += time.perf_counter() - began
    for way in ("load", "warm"):
        for start in range(0, len(chunks), LOADED_AT_ONCE):
            part = np.array(chunks[start : start + LOADED_AT_ONCE])
            for name in in_turn(sides, start // LOADED_AT_ONCE):
                sides[name].places[:] = 0
                if way == "load":
                    drop_page_cache()
                else:
                    sides[name].load(range(start, start + len(part)))
                began = time.perf_counter()
                loaded = sides[name].load(range(start, start + len(part)))
                seconds[name][way] += time.perf_counter() - began
                same = (sides[name].places[: len(part)] == part).all(axis=1)
                wrong[name] += len(part) - int((np.array(loaded) & same).sum())
    for side in sides.values():
        side.close()
    return {"seconds": seconds, "wrong": wrong, "disk_bytes": {name: disk_bytes(folder / name) for name in sides}}


def in_turn(sides: dict[str, Side], number: int) -> list[str]:
    return list(sides) if number % 2 else list(reversed(sides))


def store_until_killed(engine: str, chunks: Bytes, folder: Path, first: int) -> None:
    """Stores chunks from `first` on by our side, and prints how many are stored."""
    side = sides_of(engine, folder)["ours"]()
    for start in range(first, len(chunks), 2):
        part = np.array(chunks[start : start + 2])
        if side.store(range(start, start + len(part)), part):
            print(start + len(part), flush=True)


def kill_and_look(command: Sequence[str], engine: str, chunks: Bytes, folder: Path) -> dict[str, int]:
    """Has processes store all chunks, each of which is killed somewhere. Looks at the chunks that each said to have
    stored, and in the end at all. Returns the numbers of kills, and of lost or wrong chunks."""
    stored = kills = bad = 0
    chance = random.Random(1)
    # Bound: each process stores some.
    while (before := stored) < len(chunks):
        with subprocess.Popen([*command, "--from", str(stored)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in islice(process.stdout, chance.randint(40, 90)):
                stored = int(line)
            # In the middle of the next ones.
            time.sleep(chance.random() * 0.05)
            process.send_signal(signal.SIGKILL)
            # What it said before it was killed counts.
            stored = max([stored, *map(int, process.stdout)])
        kills += 1
        bad += look(engine, chunks, folder, range(before, stored))
    bad += look(engine, chunks, folder, range(len(chunks)))
    return {"kills": kills, "lost_or_wrong": bad}


def look(engine: str, chunks: Bytes, folder: Path, which: range) -> int:
    """Returns how many of some chunks are lost or wrong."""
    side, bad = sides_of(engine, folder)["ours"](), 0
    for start in range(which.start, which.stop, LOADED_AT_ONCE):
        part = np.array(chunks[start : min(start + LOADED_AT_ONCE, which.stop)])
        side.places[:] = 0
        loaded = np.array(side.load(range(start, start + len(part))))
        bad += len(part) - int((loaded & (side.places[: len(part)] == part).all(axis=1)).sum())
    side.close()
    return bad


def main() -> None:
    engine, file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    chunks = np.memmap(file, np.uint8, mode="r").reshape(-1, CHUNK_BYTES)
    if "--from" in sys.argv:
        store_until_killed(engine, chunks, folder, int(sys.argv[-1]))
        return
    result: dict[str, Any] = {"chunks": len(chunks)} | measure(engine, chunks, folder)
    (folder / "kills").mkdir()
    command = [sys.executable, "-P", __file__, engine, str(file), str(folder / "kills")]
    print(json.dumps(result | kill_and_look(command, engine, chunks, folder / "kills")))


if __name__ == "__main__":
    main()
