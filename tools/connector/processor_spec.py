"""vLLM's offloading to tiers in its build for processors, which refuses it: only copies to and from a GPU are there.

All but the copies is vLLM's own: scheduler, keys, primary tier, jobs. Here pages are in main memory, so a copy is done
when it is submitted. Runs in vLLM's environment: `"spec_name": "ProcessorTieringSpec", "spec_module_path": ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class ProcessorTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`TieringOffloadingSpec` with a worker for main memory."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copies(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between vLLM's cache and the chunks of the primary tier. The thread that runs the model does it."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._per_chunk, self._region = blocks_per_chunk, region
        self._groups = caches.group_data_refs
        self._pages = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self._chunks = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk).unflatten(1, (blocks_per_chunk, -1))
            for one in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for pages, chunk, size in self._places(src_spec, dst_spec):
            chunk[:size] = pages[:size]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        del expedited
        for pages, chunk, size in self._places(dst_spec, src_spec):
            pages[:size] = chunk[:size]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: what was submitted is done."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _places(self, pages: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yields each page, its place in a chunk, and the bytes of it that a layer uses. The first page of a group may
        be one in the middle of a chunk."""
        blocks, slots = (
            iter(pages.block_ids.tolist()),
            chunks.chunk_ids if hasattr(chunks, "chunk_ids") else chunks.block_ids,
        )
        first_slot = 0
        for refs, number, start in zip(self._groups, pages.group_sizes, pages.block_indices, strict=True):
            skipped = start % self._per_chunk
            for index in range(skipped, skipped + number):
                block, slot = next(blocks), int(slots[first_slot + index // self._per_chunk])
                for ref in refs:
                    chunk = self._chunks[ref.tensor_idx][slot, index % self._per_chunk]
                    yield self._pages[ref.tensor_idx][block], chunk, ref.page_size_bytes
            first_slot += -(-(skipped + number) // self._per_chunk) if number else 0
