"""The context of one request: its prompt, its tenant and the cache, which every step of the request needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec.structs import replace

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.choosing import selection_of, sighting_of, ttl_at
from diskprefix.cache.cost_model import Use
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.policy.breaks import find_break, same_behind
from diskprefix.cache.policy.seen import Sighting
from diskprefix.cache.policy.select import Rules
from diskprefix.cache.policy.write_budget import Spending, within_budget
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched, PrefetchRequest, Upload
from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.store.changes import NewNode
from diskprefix.store.notes import TenantNotes
from diskprefix.store.save import Save
from diskprefix.store.savings import Tally
from diskprefix.store.schema import Kind, node_name
from diskprefix.store.store import Publication
from diskprefix.tokens import LEAST_TOKENS
from diskprefix.values import Break, CacheOptions, Lost, MissReason, Prompt, Selection

log = logging.getLogger("diskprefix")


@dataclass(eq=False)
class RequestContext:
    """A prompt with its options, its tenant's namespace and the cache. `goes_on`: the prompt ends at a grid point and
    is only a beginning, so its end is not kept."""

    cache: PrefixCache
    namespace: TenantNamespace
    prompt: Prompt
    options: CacheOptions
    goes_on: bool = False

    def __post_init__(self) -> None:
        self.epoch = self.cache.epoch
        """The epoch of the store and of the state in memory when the request began."""
        self.spending: Spending | None = None
        """The state of the write budget when the prompt was chosen."""
        self._sighting = Sighting()
        """Set by `choose`."""
        self._let_through: dict[Use, bool] = {}
        """The cost model's answers for the uses that do not pay."""

    @property
    def bypass(self) -> Literal["unsupported", "off", "upgraded"] | None:
        """The reason why the request does without the cache."""
        if self.cache.layout.unsupported:
            return "unsupported"
        if not self.cache.bits.is_current(self.namespace.record):
            return "upgraded"
        return "off" if self.options.scope.kind == "off" else None

    def require_known_bits(self) -> None:
        """Reads from the store whose bits it has, if that is not known yet. Raises `CacheError`, also if the request's
        root turns out to be that of another build."""
        if self.cache.bits.state == "unknown":
            self.cache.recall_bits()
            if self.bypass is not None:
                raise StoreUnavailable("what is stored has the bits of another version")

    def allows(self, use: Use, *, pays: bool) -> bool:
        """Returns whether a use is allowed, which `pays`, or which the cost model lets through. That is asked once."""
        if not pays and use not in self._let_through:
            self._let_through[use] = self.cache.cost_model.lets_through(use)
        return pays or self._let_through[use]

    def allows_saving(self, num_tokens: int) -> bool:
        """Returns whether to save the state of the first `num_tokens` tokens."""
        return self.cache.bits.state == "settled" and self.allows("save", pays=self.cache.cost_model.allows(num_tokens))

    @contextmanager
    def guarded(self, consequence: str) -> Iterator[None]:
        """Logs and counts errors of the cache inside, and goes on: the request does without the cache. No other place
        does so."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CacheError) and not is_out_of_memory(error):
                raise
            self.cache.count("errors")
            log.warning("[disk-cache] going on without the cache, %s: %s", consequence, error or type(error).__name__)

    def ttl_at(self, position: int) -> float | None:
        """Returns the time to live of a node that ends at a position; see `choosing.ttl_at`."""
        return ttl_at(position, self.prompt.marks, self.options.ttl_s)

    def notes(self, ttl_s: float | None = None) -> TenantNotes:
        """Returns the tenant's notes; see `PrefixCache.notes_of`."""
        return self.cache.notes_of(self.namespace.root, self.namespace.record, ttl_s, self.epoch)

    def choose(self, nodes: PromptNodes, restored: RestoreResult) -> Selection:
        """Returns the part of the prompt to save, by the policy, the write budget and the measured speeds. For the
        engine's thread."""
        cache = self.cache
        rules = Rules.of(cache.settings, cache.layout.state_kind, cache.layout.state_bytes)
        self.spending = cache.spending(self.options.tenant)
        prompt, options, stored = self.prompt, self.options, restored.stored_tokens
        self._sighting = sighting_of(self.namespace.seen, prompt, options, nodes.path.block_names)
        selection = selection_of(self._sighting, rules, prompt, options, stored)
        had, is_asked = max(restored.num_tokens, stored), options.is_asked
        selection = within_budget(selection, prompt, self.spending, rules, stored=stored, had=had, is_asked=is_asked)
        if self.goes_on and selection.keep_tail:
            # Only the states of the tail are kept, as a checkpoint.
            points = (*selection.checkpoints, selection.aligned) if cache.layout.states else ()
            selection = replace(selection, keep_tail=False, checkpoints=points, votes=())
        if selection.kept and cache.must_recheck:
            # What is stored may be of a build with other bits, which goes on with it.
            return selection.keeping_nothing("upgraded")
        if selection.kept and not self.allows_saving(selection.kept):
            return selection.keeping_nothing("faster_to_compute")
        if selection.reason == "write_budget":
            cache.count("unaffordable")
        if self.spending is not None:
            cache.spend(options.tenant, self.spending.cost(selection, stored))
        return selection

    def find_break(self, restored: RestoreResult, selection: Selection) -> Break | None:
        """Returns the break without which more of the prompt would have been restored; None if there is none."""
        known = max(selection.common, selection.seen, restored.num_tokens)
        earlier_prompts = (earlier.prompt for earlier in self._sighting.recent)
        recent = (prompt.token_ids for prompt in earlier_prompts if prompt.num_tokens > known)
        return find_break(self.prompt.token_ids, recent, known)

    def why_missed(self, restored: RestoreResult, selection: Selection, broken: Break | None) -> MissReason:
        """Returns the reason why no more was restored: `not_stored` if the next block was seen before; `image` if the
        prompt and an earlier one differ in a picture; `diverged` if they differ within the system message, or if there
        is a `broken` place. All prompts of a template share a few tokens: prompts that differ right behind these have
        diverged if they are equal again later."""
        prompt, settings = self.prompt, self.cache.settings
        num_tokens = len(prompt.token_ids)
        if restored.refused is not None:
            return restored.refused
        if num_tokens < settings.kv_cache_min_tokens:
            return "too_short"
        if max(selection.common, selection.seen) >= min(restored.num_tokens + settings.block_size, num_tokens):
            return "not_stored"
        common, recent = selection.common, self._sighting.recent
        here = prompt.token_ids[common : common + 1]
        others = (other.prompt.token_ids[common : common + 1] for other in recent if other.common == common)
        if (here < 0).any() and any((there < 0).any() for there in others):
            # Tokens of pictures are negative.
            return "image"
        leaves_early = common < (prompt.system_end or settings.block_size)
        is_like = common >= LEAST_TOKENS or any(
            same_behind(prompt.token_ids, earlier.prompt.token_ids) >= LEAST_TOKENS for earlier in recent
        )
        return "diverged" if broken is not None or (leaves_early and is_like) else "new"

    def lost(
        self, restored: RestoreResult, selection: Selection, broken: Break | None, reason: MissReason | None
    ) -> tuple[Lost, ...]:
        """Returns the tokens that are computed again: of the beginning that an earlier prompt had too, and behind the
        `broken` place. `reason` is that of a miss. Fewer tokens than lie between two restorable positions are left
        out."""
        num_tokens, is_upgraded = len(self.prompt.token_ids), restored.refused == "upgraded"
        known = num_tokens if is_upgraded else max(selection.common, selection.seen, restored.matched)
        cause: MissReason = restored.refused or "not_stored"
        if reason in ("error", "too_short"):
            cause = reason
        behind = 0 if broken is None else broken.at + broken.num_tokens - known
        lost = (
            Lost(cause, known - restored.num_tokens),
            Lost("image" if reason == "image" else "diverged", behind),
        )
        least = LEAST_TOKENS if self.cache.layout.state_kind == "token" else self.cache.settings.block_size
        return () if self.bypass else tuple(each for each in lost if each.num_tokens >= least)

    def is_outdated(self, nodes: PromptNodes) -> bool:
        """Returns whether another build has stored the first block of a prompt, or all of a shorter prompt. Reads the
        store. Raises `CacheError`."""
        first, store = nodes.token_ids[: nodes.block_size], self.cache.store
        kind = Kind.BLOCK if len(first) == nodes.block_size else Kind.TAIL
        if not self.namespace.outdated:
            return False
        with store.reads.snapshot() as snapshot:
            names = (node_name(store.secret, root, first, kind) for root in self.namespace.outdated)
            return any(snapshot.usage(name) is not None for name in names)

    def record_savings(self, restored: RestoreResult) -> None:
        """Counts the request, with the seconds that the cache saved."""
        cache, namespace, num_tokens = self.cache, self.namespace, restored.num_tokens
        prefill_s = restored.prefill_s or num_tokens * (cache.cost_model.prefill_s_per_token or 0.0)
        counts = Tally(
            requests=1,
            prompt_tokens=len(self.prompt.token_ids),
            restored_tokens=num_tokens,
            saved_s=max(0.0, prefill_s - restored.restore_ms / 1e3),
        )
        cache.writer.savings.record(self.epoch, namespace.root, namespace.record, counts)

    def prefetch(self, nodes: PromptNodes, is_cancelled: Callable[[], bool], have: int) -> Prefetched:
        """Fetches the nodes that the shared tier has and nearer tiers lack into the writer's buffer, where restores
        find them, and from where they go to the disk. Waits for up to `Settings.remote_deadline`. The first `have`
        tokens are in memory: for a few more, the shared tier is not asked."""
        cache, namespace, cost_model = self.cache, self.namespace, self.cache.cost_model
        if cache.remote is None or cache.store.problem is not None:
            return Prefetched()
        if (spending := cache.spending()) is not None and spending.is_spent:
            # Fetched nodes are written to the disk too.
            return Prefetched()
        save = Save(self.epoch)

        def publish(new_nodes: tuple[NewNode, ...]) -> bool:
            publication = Publication(self.epoch, namespace.root, namespace.record, new_nodes)
            if (room := cache.writer.reserve(publication.payload_bytes)) is not None:
                cache.writer.add(save, publication, [room])
            return room is not None

        request = PrefetchRequest(
            nodes=nodes,
            tiers=cache.tiers,
            publish=publish,
            max_s=cache.settings.remote_deadline,
            have=have,
            pays=lambda *sizes: self.allows("fetch", pays=cost_model.pays_remote(*sizes)),
            is_cancelled=is_cancelled,
            prefill_s_per_token=cost_model.prefill_s_per_token or 0.0,
            ttl_s=self.ttl_at(0),
            replaces=cache.layout.state_kind == "token",
        )
        try:
            prefetched = cache.remote.prefetch(request)
        finally:
            cache.writer.finish(save)
        cost_model.record_prefetch(prefetched)
        return prefetched

    def upload(self, nodes: PromptNodes, selection: Selection, restored: RestoreResult) -> None:
        """Queues the stored part of the prompt and its reply for the shared tier, by `--remote-write`."""
        cache = self.cache
        if cache.remote is None or not self.options.save:
            return
        num_tokens = selection.shared(cache.settings.remote_write, len(nodes.token_ids), restored.num_tokens)
        if num_tokens >= nodes.block_size:
            is_current = partial(cache.store.is_current, self.epoch)
            cache.remote.upload(Upload(nodes, num_tokens, self.namespace.record, cache.tiers, is_current))
