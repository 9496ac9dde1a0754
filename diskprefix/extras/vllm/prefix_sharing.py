"""The scheduler's side of the shared tier: the requests that wait for it, and the uploads to it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from diskprefix.cache.tiers.tier import SharedTier
from diskprefix.extras.vllm.fetching import Fetcher
from diskprefix.extras.vllm.plans import RankIdentity, Share
from diskprefix.extras.vllm.shared_store import SharedStore
from diskprefix.extras.vllm.tracked import Tracked
from diskprefix.nouns import Selection, StateSource


class PrefixSharing:
    """Fetches and uploads for the scheduler's thread, which it never keeps waiting."""

    def __init__(self, shared: SharedStore, remote: SharedTier, ranks: Sequence[RankIdentity]) -> None:
        self._block_size, self._write = shared.settings.block_size, shared.settings.remote_write
        self._fetcher = Fetcher(shared, remote, ranks)
        self._fetching: set[str] = set()
        self._shares: list[Share] = []

    def is_fetching(self, tracked: Tracked) -> bool:
        """Returns whether a request still waits for its fetch."""
        if tracked.fetch is not None and not tracked.fetch.is_done:
            return True
        self._fetching.discard(tracked.request.request_id)
        return False

    def begins_to_fetch(self, tracked: Tracked) -> bool:
        """Starts to fetch what the store lacks of a prompt: once for each request, and only if it is a block at
        least."""
        have = max(tracked.num_cached, tracked.num_matched * self._block_size)
        if tracked.fetch is not None or len(tracked.prompt) - have < self._block_size:
            return False
        ttl_s = tracked.options.cache.ttl_s
        tracked.fetch = self._fetcher.begin(str(tracked.tenant), tracked.prompt, tracked.num_cached, ttl_s)
        self._fetching.add(tracked.request.request_id)
        return True

    def forget(self, tracked: Tracked) -> None:
        """Cancels the fetch of a request that has ended."""
        self._fetching.discard(tracked.request.request_id)
        if tracked.fetch is not None:
            tracked.fetch.is_cancelled.set()

    def time(self, tracked: Tracked) -> None:
        """Measures how long the engine computes a prompt, up to its first token. That decides whether fetching pays."""
        request, now = tracked.request, time.monotonic()
        if tracked.computing is None:
            tracked.computing = (now, request.num_computed_tokens)
        elif request.num_tokens > len(tracked.prompt) and not tracked.is_timed:
            since, start = tracked.computing
            self._fetcher.cost_model.record_prefill(len(tracked.prompt) - start, now - since)
            tracked.is_timed = True

    def share(self, tracked: Tracked, selection: Selection) -> None:
        """Queues the stored part of a request for upload, as the settings say."""
        had, num_tokens = max(tracked.num_restored, tracked.num_cached), tracked.num_stored * self._block_size
        num_blocks = selection.shared(self._write, num_tokens, had) // self._block_size
        if num_blocks and tracked.options.cache.save:
            self._shares.append(Share(str(tracked.tenant), tracked.token_ids[: 4 * num_blocks * self._block_size]))

    def take_plan(self) -> tuple[tuple[Share, ...], bool]:
        """Returns the uploads since the last call, and whether requests wait for fetches."""
        shares, self._shares = self._shares, []
        return tuple(shares), bool(self._fetching)

    def close(self) -> None:
        self._fetcher.close()


def source_of(tracked: Tracked) -> StateSource:
    """Returns the farthest tier from which something was restored."""
    if not tracked.num_restored:
        return "none"
    loaded = tracked.names[0][1 : tracked.num_matched + 1]
    return "disk" if tracked.fetch is None or tracked.fetch.names.isdisjoint(loaded) else "remote"
