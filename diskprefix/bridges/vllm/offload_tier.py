"""The tier that vLLM's offloading loads by its `module_path`. See README.md."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from diskprefix.bridges.shared.connector_settings import tier_settings
from diskprefix.bridges.shared.timed_opening import open_in_time
from diskprefix.bridges.vllm import _vllm_tiering as compat
from diskprefix.prefixstore.chunk_store import GROUP, ChunkGroup, ChunkKey, chunk_identity, chunks_in
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.processors import unbind

log = logging.getLogger("diskprefix")


class DiskPrefixTier(compat.SecondaryTierManager):  # type: ignore[misc]
    """Keeps the chunks of vLLM's primary tier in a store on disk. vLLM calls it in the scheduler's process; one thread
    loads chunks, and one copies them for the writer."""

    medium: ClassVar[Any] = compat.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """`primary_kv_view` has shape [chunks, chunk_bytes]; `config` has the keys of `connector_settings.TIER_NAMES`.
        Raises `ValueError`, `ImportError` or `DiskPrefixError`, each with one line, for wrong settings and for an
        engine whose chunks cannot be told apart. If the store cannot be opened in time, the tier stays empty."""
        given = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **given)
        if (untried := compat.check_version()) is not None:
            log.warning("[disk-cache] %s", untried)
        vllm_config = compat.engine_config()
        compat.check_keys(vllm_config)
        self._slots: npt.NDArray[np.uint8] = np.asarray(primary_kv_view).view(np.uint8)
        identity = _identity_of(vllm_config, offloading_spec.config, self._slots.shape[1])
        groups = partial(_group_of, identity, self._slots.shape[1])
        self._shared = open_in_time(tier_settings(config))
        self._chunks = chunks_in(self._shared, groups)
        if self._shared is not None and (differs := identity.differences(self._shared.store)) is not None:
            log.warning("[disk-cache] stored prefixes of %s are not used: they differ in %s", identity.model, differs)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kv-loader", initializer=unbind)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kv-saver", initializer=unbind)
        self._running: set[Future[None]] = set()
        self._finished: SimpleQueue[Any] = SimpleQueue()
        self._keys: dict[str, dict[ChunkKey, None]] = {}
        """The chunks of each request, in the order of its tokens."""

    def on_new_request(self, req_context: Any) -> Any:
        """Has vLLM submit all chunks of a request, even if its own cache has them: a chunk that was evicted here is
        stored again, any other counts as used."""
        del req_context
        return compat.RequestOffloadingContext(policy=compat.OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: Any, req_context: Any) -> Any:
        del req_context
        is_stored = self._chunks.has(compat.chunk_key(key))
        return compat.LookupResult.HIT if is_stored else compat.LookupResult.MISS

    def on_request_finished(self, req_context: Any) -> None:
        if keys := self._keys.pop(req_context.req_id, None):
            self._saver.submit(self._chunks.use, list(keys))

    def on_schedule_end(self, context: Any) -> None:
        del context
        self._chunks.end_step()

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._loader, self._load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        keys = self._keys.setdefault(job_metadata.req_context.req_id, {})
        keys.update(dict.fromkeys(map(compat.chunk_key, job_metadata.keys)))
        self._submit(self._saver, self._save, job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Yields the results of the jobs that have ended since the last call."""
        with suppress(Empty):
            while True:
                yield self._finished.get_nowait()

    def drain_jobs(self) -> None:
        wait(set(self._running))

    def shutdown(self) -> None:
        """Waits for the jobs, writes the saved chunks, and releases the primary tier's memory."""
        self._loader.shutdown()
        self._saver.shutdown()
        self._chunks.close()
        if self._shared is not None:
            self._shared.release()
        del self._slots

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[Any], Any], job: Any) -> None:
        def run() -> None:
            try:
                result = work(job)
            except Exception:
                log.exception("[disk-cache] %d chunks were not copied", len(job.keys))
                result = compat.JobResult(job_id=job.job_id, success=False)
            self._finished.put(result)

        running = thread.submit(run)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def _load(self, job: Any) -> Any:
        keys = list(job.keys)
        loaded = self._chunks.load(list(map(compat.chunk_key, keys)), self._places(job))
        good = tuple(key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded)
        return compat.JobResult(job_id=job.job_id, success=all(loaded), successful_keys=good)

    def _save(self, job: Any) -> Any:
        is_whole = self._chunks.save(list(map(compat.chunk_key, job.keys)), self._places(job))
        return compat.JobResult(job_id=job.job_id, success=is_whole)

    def _places(self, job: Any) -> Sequence[npt.NDArray[np.uint8]]:
        return [self._slots[slot] for slot in compat.slots_of(job)]


def _identity_of(vllm_config: Any, offloading: Any, chunk_bytes: int) -> StateIdentity:
    fingerprint = compat.tier_numbers(vllm_config, offloading) | {GROUP: "0"}
    model = Path(vllm_config.model_config.model).name
    return chunk_identity(model, fingerprint, chunk_bytes, offloading.model.dtype)


def _group_of(identity: StateIdentity, chunk_bytes: int, index: int) -> ChunkGroup:
    return ChunkGroup(replace(identity, fingerprint={**identity.fingerprint, GROUP: str(index)}), chunk_bytes)
