"""Fetching from the shared tier: threads prefetch prompts to the store while the engine continues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from diskprefix.cache.cost_model import CostModel
from diskprefix.cache.tiers.local import publisher
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched, PrefetchRequest, SharedTier
from diskprefix.errors import CacheError
from diskprefix.extras.vllm.plans import RankIdentity
from diskprefix.extras.vllm.processors import unbind
from diskprefix.extras.vllm.shared_store import SharedStore
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_MOST_AT_ONCE = 16
"""Requests that fetch at the same time. Others wait for their turn."""


@dataclass
class PromptFetch:
    """The fetch of one request. `names` are those of the fetched nodes, once it is done."""

    names: frozenset[bytes] = frozenset()
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    future: Future[None] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.future.done()


class Fetcher:
    """Fetches prompts for the scheduler's side, whose thread never waits for it."""

    def __init__(self, shared: SharedStore, remote: SharedTier, ranks: Sequence[RankIdentity]) -> None:
        self._shared, self._remote, self._ranks = shared, remote, tuple(ranks)
        self._layouts = [PayloadLayout.parse(rank.layout) for rank in ranks]
        block_size = shared.settings.block_size
        block_bytes = sum(layout.payload_bytes(block_size, Kind.BLOCK) for layout in self._layouts)
        self.cost_model = CostModel("auto", lambda num_tokens: num_tokens * block_bytes // block_size)
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="remote-prefetch", initializer=unbind)
        self._closing = threading.Event()

    def begin(self, tenant: str, prompt: TokenIds, have: int, ttl_s: float | None) -> PromptFetch:
        """Starts to fetch what the store lacks of a prompt, for all ranks. The engine has the first `have` tokens."""
        fetch = PromptFetch()
        fetch.future = self._threads.submit(self._fetch, fetch, tenant, prompt, have, ttl_s)
        return fetch

    def close(self) -> None:
        """Ends the threads. Waits until they see that they are no longer wanted."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, fetch: PromptFetch, tenant: str, prompt: TokenIds, have: int, ttl_s: float | None) -> None:
        """Fetches a prompt. Whatever happens, the request continues with what has come."""
        started, found = time.monotonic(), list[Prefetched]()
        try:
            for number in range(len(self._ranks)):
                left_s = self._shared.settings.remote_deadline - (time.monotonic() - started)
                found.append(self._remote.prefetch(self._wish(fetch, number, tenant, prompt, have, ttl_s, left_s)))
            if any(one.names for one in found) and self._shared.num_users == 1:
                # The workers are other processes: they see what is on the disk.
                self._shared.writer.flush(self._shared.settings.remote_deadline)
        except CacheError as error:
            log.warning("[remote] a prompt is not fetched: %s", error)
        except Exception:
            log.exception("[remote] a prompt is not fetched")
        prefetched = Prefetched.together(found, time.monotonic() - started)
        fetch.names = prefetched.names
        self.cost_model.record_prefetch(prefetched)

    def _wish(
        self,
        fetch: PromptFetch,
        number: int,
        tenant: str,
        prompt: TokenIds,
        have: int,
        ttl_s: float | None,
        left_s: float,
    ) -> PrefetchRequest:
        rank, layout, shared = self._ranks[number], self._layouts[number], self._shared
        root, names = rank.root(tenant), shared.store.names
        return PrefetchRequest(
            nodes=PromptNodes(names.secret, root, prompt, shared.settings.block_size, layout),
            tiers=shared.tiers,
            publish=publisher(shared.writer, names.store_id, root, rank.record(tenant)),
            most_s=left_s,
            have=have,
            pays=lambda num_tokens, num_bytes: self.cost_model.pays_remote(num_tokens, len(self._ranks) * num_bytes),
            is_cancelled=lambda: fetch.is_cancelled.is_set() or self._closing.is_set(),
            ttl_s=ttl_s,
        )
