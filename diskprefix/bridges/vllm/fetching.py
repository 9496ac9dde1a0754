"""Fetches blocks of prompts from the bucket that machines share, before the scheduler looks them up."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event

from msgspec import Struct

from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Prefetched, PrefetchRequest, SharedTier
from diskprefix.prefixstore.shared_store import SharedStore
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import EntryRecord
from diskprefix.prefixstore.store.store import Publication
from diskprefix.processors import unbind
from diskprefix.tokens import PromptDigest, TokenIds, TokenPath

log = logging.getLogger("diskprefix")

_THREADS = 8
"""Prompts that are fetched at once."""


class PromptFetch(Struct, eq=False):
    """The fetch of one prompt's blocks, which `stop` ends early. The scheduler's thread waits for it until
    `gives_up_at`, on the clock of `time.monotonic`; None until it first asks."""

    running: Future[list[Prefetched]]
    stop: Event
    gives_up_at: float | None = None


class PromptFetcher:
    """Starts fetches, and says when they have ended. For the scheduler's thread, which never waits for the network."""

    def __init__(self, shared: SharedStore, remote: SharedTier, ranks: Sequence[StateIdentity]) -> None:
        self._shared, self._remote, self._ranks = shared, remote, ranks
        self._layouts = [PayloadLayout.parse(rank.layout) for rank in ranks]
        self._max_s = shared.settings.remote_deadline
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-fetch", initializer=unbind)
        self._fetches: set[PromptFetch] = set()

    def start(self, token_ids: TokenIds, tenant: str, ttl_s: float | None) -> PromptFetch | None:
        """Starts the fetch of whole blocks. Returns None if there are none."""
        if not len(token_ids):
            return None
        stop = Event()
        fetch = PromptFetch(self._threads.submit(self._fetch, stop, token_ids, tenant, ttl_s), stop)
        self._fetches.add(fetch)
        return fetch

    def has_ended(self, fetch: PromptFetch) -> bool:
        """Returns whether a request need not wait any longer: the fetch has ended, or its time is over."""
        now = time.monotonic()
        if fetch.gives_up_at is None:
            fetch.gives_up_at = now + self._max_s
        if not fetch.running.done() and now < fetch.gives_up_at:
            return False
        self.give_up(fetch)
        return True

    def give_up(self, fetch: PromptFetch) -> None:
        """Ends a fetch. What it has fetched stays."""
        fetch.stop.set()
        fetch.running.cancel()
        self._fetches.discard(fetch)

    def wait(self, timeout_s: float) -> None:
        """Waits until a fetch ends; at once if none is running."""
        wait([fetch.running for fetch in self._fetches], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Ends all fetches, and does not wait for the network."""
        for fetch in list(self._fetches):
            self.give_up(fetch)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, stop: Event, token_ids: TokenIds, tenant: str, ttl_s: float | None) -> list[Prefetched]:
        """Fetches the blocks that this machine lacks into the write buffer. Returns a result for each rank."""
        ends_at = time.monotonic() + self._max_s
        fetched: list[Prefetched] = []
        try:
            for rank, layout in zip(self._ranks, self._layouts, strict=True):
                if stop.is_set() or self._shared.store.problem is not None:
                    break
                fetched.append(self._fetch_rank(rank, layout, stop, token_ids, tenant, ttl_s, ends_at))
            if self._shared.num_users == 1 and any(result.names for result in fetched):
                # The workers are other processes, which see only the disk.
                self._shared.writer.flush(max(0.0, ends_at - time.monotonic()))
        except CacheError as error:
            log.debug("[disk-cache] nothing is fetched from the bucket: %s", error)
        except Exception:
            log.exception("[disk-cache] nothing is fetched from the bucket")
        return fetched

    def _fetch_rank(
        self,
        rank: StateIdentity,
        layout: PayloadLayout,
        stop: Event,
        token_ids: TokenIds,
        tenant: str,
        ttl_s: float | None,
        ends_at: float,
    ) -> Prefetched:
        store, writer, root, record = self._shared.store, self._shared.writer, rank.root(tenant), rank.record(tenant)
        save = Save(store.epochs.of(tenant))

        entry = EntryRecord(
            root=root,
            num_tokens=0,
            scope="",
            preview="",
            created_at=store.clock(),
            kind="partial",
            came_from=PromptDigest.of(save.epoch.secret, token_ids),
            ttl_s=recorded_ttl(ttl_s),
        )

        def publish(nodes: tuple[NewNode, ...]) -> bool:
            publication = Publication(epoch=save.epoch, root=root, root_record=record, nodes=nodes, entry=entry)
            if (room := writer.reserve(publication.payload_bytes)) is not None:
                writer.queue_publication(save, publication, [room])
            return room is not None

        request = PrefetchRequest(
            nodes=PromptNodes(TokenPath(store.secret, root, token_ids, rank.block_size), layout),
            tiers=self._shared.tiers,
            publish=publish,
            max_s=ends_at - time.monotonic(),
            is_cancelled=stop.is_set,
            ttl_s=ttl_s,
        )
        try:
            return self._remote.prefetch(request)
        finally:
            writer.finish(save)


def fetched_names(fetched: Collection[Prefetched]) -> frozenset[bytes]:
    """Returns the names of all fetched blocks."""
    return frozenset().union(*(result.names for result in fetched))
