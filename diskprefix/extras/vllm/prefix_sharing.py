"""The scheduler's side of the shared tier: threads prefetch prompts to the store while the engine continues, and the
workers receive prompts to upload."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diskprefix.cache.cost_model import CostModel
from diskprefix.cache.tiers.local import publisher
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched, PrefetchRequest, SharedTier
from diskprefix.errors import CacheError
from diskprefix.extras.vllm.plans import RankIdentity, Share
from diskprefix.extras.vllm.processors import unbind
from diskprefix.extras.vllm.shared_store import SharedStore
from diskprefix.extras.vllm.tracked import PromptFetch, Tracked
from diskprefix.nouns import Selection, StateSource
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind

log = logging.getLogger("diskprefix")

_MOST_AT_ONCE = 16
"""The maximum number of requests that fetch at the same time."""


class PrefixSharing:
    """Fetches and uploads for the scheduler's thread, which never waits for them."""

    def __init__(self, shared: SharedStore, remote: SharedTier, ranks: Sequence[RankIdentity]) -> None:
        self._shared, self._remote, self._ranks = shared, remote, tuple(ranks)
        self._layouts = [PayloadLayout.parse(rank.layout) for rank in ranks]
        self._block_size = shared.settings.block_size
        block_bytes = sum(layout.payload_bytes(self._block_size, Kind.BLOCK) for layout in self._layouts)
        self.cost_model = CostModel("auto", lambda num_tokens: num_tokens * block_bytes // self._block_size)
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="remote-prefetch", initializer=unbind)
        self._closing = threading.Event()
        self._fetching: set[str] = set()
        self._shares: list[Share] = []

    def is_fetching(self, tracked: Tracked) -> bool:
        """Returns whether a request still waits for its fetch."""
        if tracked.fetch is not None and not tracked.fetch.future.done():
            return True
        self._fetching.discard(tracked.request.request_id)
        return False

    def begins_to_fetch(self, tracked: Tracked) -> bool:
        """Starts to fetch what the store lacks of a prompt, once for each request. Returns False if that is less than a
        block."""
        have = max(tracked.num_cached, tracked.num_matched * self._block_size)
        if tracked.fetch is not None or len(tracked.prompt) - have < self._block_size:
            return False
        tracked.fetch = fetch = PromptFetch()
        fetch.future = self._threads.submit(self._fetch, tracked, fetch)
        self._fetching.add(tracked.request.request_id)
        return True

    def forget(self, tracked: Tracked) -> None:
        """Cancels the fetch of a request that has ended."""
        self._fetching.discard(tracked.request.request_id)
        if tracked.fetch is not None:
            tracked.fetch.is_cancelled.set()

    def time(self, tracked: Tracked) -> None:
        """Measures the time from the start of a prompt's computation to its first token. The cost model compares
        fetches with it."""
        request, now = tracked.request, time.monotonic()
        if tracked.computing is None:
            tracked.computing = (now, request.num_computed_tokens)
        elif request.num_tokens > len(tracked.prompt) and not tracked.is_timed:
            since, start = tracked.computing
            self.cost_model.record_prefill(len(tracked.prompt) - start, now - since)
            tracked.is_timed = True

    def share(self, tracked: Tracked, selection: Selection) -> None:
        """Queues the stored part of a request for upload, by the rule `remote_write`."""
        had, num_tokens = max(tracked.num_restored, tracked.num_cached), tracked.num_stored * self._block_size
        num_blocks = selection.shared(self._shared.settings.remote_write, num_tokens, had) // self._block_size
        if num_blocks and tracked.options.cache.save:
            self._shares.append(Share(str(tracked.tenant), tracked.token_ids[: 4 * num_blocks * self._block_size]))

    def take_plan(self) -> tuple[tuple[Share, ...], bool]:
        """Returns the uploads since the last call, and whether requests wait for fetches."""
        shares, self._shares = self._shares, []
        return tuple(shares), bool(self._fetching)

    def close(self) -> None:
        """Cancels all fetches, and waits until the threads end."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, tracked: Tracked, fetch: PromptFetch) -> frozenset[bytes]:
        """Fetches a prompt for all ranks, and returns the names of the fetched nodes. Errors are logged: the request
        continues with what was fetched before."""
        started, found = time.monotonic(), list[Prefetched]()
        deadline_s = self._shared.settings.remote_deadline
        try:
            for rank, layout in zip(self._ranks, self._layouts, strict=True):
                left_s = deadline_s - (time.monotonic() - started)
                found.append(self._remote.prefetch(self._wish(tracked, fetch, rank, layout, left_s)))
            if any(one.names for one in found) and self._shared.num_users == 1:
                # The workers are other processes, which read from the disk only.
                self._shared.writer.flush(deadline_s)
        except CacheError as error:
            log.warning("[remote] a prompt is not fetched: %s", error)
        except Exception:
            log.exception("[remote] a prompt is not fetched")
        prefetched = Prefetched.together(found, time.monotonic() - started)
        self.cost_model.record_prefetch(prefetched)
        return prefetched.names

    def _wish(
        self, tracked: Tracked, fetch: PromptFetch, rank: RankIdentity, layout: PayloadLayout, left_s: float
    ) -> PrefetchRequest:
        shared, tenant = self._shared, str(tracked.tenant)
        root, names = rank.root(tenant), shared.store.names
        return PrefetchRequest(
            nodes=PromptNodes(names.secret, root, tracked.prompt, self._block_size, layout),
            tiers=shared.tiers,
            publish=publisher(shared.writer, names.store_id, root, rank.record(tenant)),
            most_s=left_s,
            have=tracked.num_cached,
            pays=lambda num_tokens, num_bytes: self.cost_model.pays_remote(num_tokens, len(self._ranks) * num_bytes),
            is_cancelled=lambda: fetch.is_cancelled.is_set() or self._closing.is_set(),
            ttl_s=tracked.options.cache.ttl_s,
        )


def source_of(tracked: Tracked) -> StateSource:
    """Returns the farthest tier from which something was restored."""
    if not tracked.num_restored:
        return "none"
    loaded = tracked.names[0][1 : tracked.num_matched + 1]
    future = None if tracked.fetch is None else tracked.fetch.future
    is_known = future is not None and future.done() and not future.cancelled()
    return "remote" if future is not None and is_known and not future.result().isdisjoint(loaded) else "disk"
