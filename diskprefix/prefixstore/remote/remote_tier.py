"""The shared tier of one process: fetches for requests, and uploads in the background. See `SharedTier`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.tiers.tier import Prefetched, PrefetchRequest, Upload, open_views
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.breaker import Breaker
from diskprefix.prefixstore.remote.bundle import BundleSlot, decode_bundle, max_object_bytes, slot_path
from diskprefix.prefixstore.remote.counts import Counts
from diskprefix.prefixstore.remote.fetchers import Fetchers, ObjectFetch
from diskprefix.prefixstore.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.prefixstore.remote.prefetching import MAX_CONCURRENT, FetchedNodes, PrefetchJob
from diskprefix.prefixstore.remote.signing import ObjectRefused
from diskprefix.prefixstore.remote.upkeep import NamespaceObjects
from diskprefix.prefixstore.remote.upload import num_first_blocks, write_prompt
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.following import GoneText
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.thread_pool import standing_thread

log = logging.getLogger("diskprefix")

_MAX_UPLOADS = 64
_FLUSH_SHARE = 0.8
"""The share of the closing time for queued uploads. The rest is for the upload that is being written."""


def open_tier(settings: StoreOptions) -> RemoteTier:
    """Returns the tier of `--remote-tier`. A thread makes one request, so that a refusal is known at the start; this
    does not wait for it. Raises `SettingsError`."""
    assert settings.remote_tier is not None, "the caller has looked"
    assert settings.namespace_key_file is not None, "the caller has looked"
    key = NamespaceKey.read(settings.namespace_key_file)
    objects = ObjectStore(settings.remote_tier, timeout_s=settings.remote_deadline)
    return RemoteTier(objects, key, writes=settings.remote_write != "off")


@dataclass
class RemoteTier:
    """The objects of one namespace. Methods are for any thread. Only `delete_texts` raises network errors. With
    `writes` False, nothing is ever written."""

    objects: ObjectStore
    key: NamespaceKey
    writes: bool = True
    counted: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._uploads: deque[Upload] = deque()
        self._has_upload = threading.Condition(self._lock)
        self._is_closing = False
        self._is_uploading = False
        self._fetchers: Fetchers[FetchedNodes] = Fetchers(MAX_CONCURRENT)
        self._late_breaker = Breaker()
        """The breaker for whole prompts: a bucket that always answers too late would cost each prompt the whole
        deadline."""
        self._writer = standing_thread(self._write_uploads, "remote-write")
        self._writer.start()

    def prefetch(self, request: PrefetchRequest) -> Prefetched:
        """See `SharedTier.prefetch`."""
        if self.objects.breaker.is_open:
            self.counted.count("skipped")
            return Prefetched(is_whole=False)
        nodes, started = request.nodes, time.monotonic()
        with open_views(request.tiers) as views:
            num_near = num_first_blocks(nodes, views, nodes.num_blocks)
        num_held = max(num_near * nodes.block_size, request.in_memory_tokens)
        if nodes.num_blocks * nodes.block_size - num_held < nodes.block_size:
            # Less than a block takes about as long to compute as to ask for.
            return Prefetched()
        num_bytes = (nodes.num_blocks - num_near) * nodes.layout.payload_bytes(nodes.block_size, NodeKind.BLOCK)
        if not request.pays(len(nodes.token_ids) - num_held, num_bytes):
            self.counted.count("slower")
            return Prefetched()
        if not self._late_breaker.allows():
            self.counted.count("skipped")
            return Prefetched(is_whole=False)
        job = PrefetchJob(request, num_near, started + request.max_s, self._fetchers, self._start_fetch)
        self._run(job)
        seconds = time.monotonic() - started
        return Prefetched(frozenset(job.names), job.num_bytes, num_bytes, seconds, job.is_whole, job.is_late)

    def _run(self, job: PrefetchJob) -> None:
        """Runs a job. If it fails, the request continues with the blocks that were fetched."""
        try:
            job.run()
        except RemoteUnavailable as error:
            job.is_whole = False
            log.debug("[remote] %s", error)
        except Exception:
            job.is_whole = False
            log.exception("[remote] going on without the rest of a prompt")
        if job.is_late:
            self.counted.count("late")
            if self._late_breaker.failed():
                log.warning("[remote] %s was too slow for several prompts: not used for a while", self.objects.url)
        elif job.is_whole:
            self._late_breaker.succeeded()

    def upload(self, upload: Upload) -> None:
        """Queues the upload of a prompt. Does not wait; if too many are queued, the oldest is dropped."""
        with self._has_upload:
            if self._is_closing or not self.writes:
                return
            if len(self._uploads) >= _MAX_UPLOADS:
                self._uploads.popleft()
                self.counted.count("dropped")
            self._uploads.append(upload)
            self._has_upload.notify_all()

    def delete_texts(self, texts: Sequence[GoneText], timeout_s: float) -> int:
        """Removes the objects of deleted texts; see `upkeep`. Waits up to `timeout_s` seconds for uploads. Returns the
        number of objects. Raises `RemoteUnavailable`."""
        self.flush(timeout_s)
        paths = NamespaceObjects(self.objects, self.key).delete_objects_of(texts)
        self.counted.forget(paths)
        return len(paths)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all uploads are written or have failed. Returns False if the time runs out first."""
        with self._has_upload:
            return self._has_upload.wait_for(lambda: not (self._uploads or self._is_uploading), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes the queued uploads, and ends. Takes at most `timeout_s` seconds; later uploads are lost."""
        deadline = time.monotonic() + timeout_s
        self.flush(_FLUSH_SHARE * timeout_s)
        with self._has_upload:
            self._is_closing = True
            self._uploads.clear()
            self._has_upload.notify_all()
        self._writer.join(max(0.0, deadline - time.monotonic()))
        self._fetchers.close()

    def stats(self) -> dict[str, Any]:
        """Returns the figures for `/props` and `/metrics`: counts of this process."""
        problem = self.objects.problem
        is_failing = bool(problem) or self.objects.breaker.is_failing or self._late_breaker.is_failing
        with self._lock:
            offered = len(self._uploads) + self._is_uploading
        state = "failing" if is_failing else "ok"
        return {
            "url": self.objects.url,
            "state": state,
            "problem": problem,
            "offered": offered,
            **self.counted.as_dict(),
        }

    def counts(self) -> Counter[str]:
        """See `SharedTier.counts`."""
        return self.counted.counters()

    def _start_fetch(self, request: PrefetchRequest, slot: BundleSlot, num_near: int) -> ObjectFetch[FetchedNodes]:
        """Returns the fetch of a bundle's nodes from block `num_near` on. Requests with a common prefix share it."""
        path = slot_path(self.key, request.nodes, slot)
        key = path, max(num_near, slot.first)
        return self._fetchers.share(key, partial(self._fetch, request, slot, num_near, path))

    def _fetch(self, request: PrefetchRequest, slot: BundleSlot, num_near: int, path: str) -> FetchedNodes:
        """Fetches the nodes of a bundle. Raises `RemoteUnavailable`."""
        if self.counted.is_bad(path):
            return None
        try:
            data = self.objects.get(path, max_object_bytes(request.nodes, slot))
            if data is None:
                self.counted.count("missing")
                self.counted.forget([path])
                return None
            bundle = decode_bundle(self.key, request.nodes, slot, path, data, num_near)
        except ObjectRefused as error:
            self.counted.refuse(path, error)
            return None
        except RemoteUnavailable:
            self.counted.count("failed")
            raise
        self.counted.add_known(path)
        self.counted.count("fetched")
        self.counted.count("fetched_bytes", len(data))
        return tuple(
            NewNode(
                name=node.name,
                parent=node.parent,
                position=node.position,
                token_ids=np.frombuffer(token_ids, dtype=np.int32),
                kind=node.kind,
                payload=payload,
                pieces=request.nodes.pieces(node),
                prefill_s=request.prefill_s_per_token * node.num_tokens,
                ttl_s=request.ttl_s,
                replaces=request.replaces,
            )
            for node, token_ids, payload in bundle
        )

    def _write_uploads(self) -> None:
        self.objects.probe()
        while True:
            with self._has_upload:
                self._is_uploading = False
                self._has_upload.notify_all()
                self._has_upload.wait_for(lambda: self._uploads or self._is_closing)
                if self._is_closing:
                    return
                upload, self._is_uploading = self._uploads.popleft(), True
            try:
                write_prompt(self.objects, self.key, self.counted, upload, lambda: self._is_closing)
            except CacheError as error:
                self.counted.count("dropped")
                log.debug("[remote] a prompt is not shared: %s", error)
            except Exception:
                self.counted.count("dropped")
                log.exception("[remote] a prompt is not shared")
