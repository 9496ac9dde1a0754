"""One restore: finds the longest stored prefix of a prompt, verifies it, and decodes it into the pages of a sequence.

The steps are for threads that may wait. The result is a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter, itemgetter
from typing import Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt, StoreUnavailable
from diskprefix.prefixstore.cache.context import RequestContext
from diskprefix.prefixstore.cache.matching import Matcher, RestoreResult
from diskprefix.prefixstore.cache.other_settings import StoredOtherwise, other_roots
from diskprefix.prefixstore.cache.policy.select import StateKind
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Prefetched, PrefetchRequest, View, open_views
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import BUILD_BYTES, NodeKind, node_name
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import Logits, TokenPath, floor_to_grid, root_hash
from diskprefix.values import MissReason, Refused, StateSource, is_miss

Step: TypeAlias = Literal["prefetch", "seen", "match", "load"]
_MAX_UNVERIFIED = 1 << 16
"""The most names of nodes from files that a process remembers."""


class Restore:
    """Restores the longest stored prefix of a prompt into `sequence`, which has room for the prompt, and already the
    exact state of its first `in_memory_tokens` tokens.

    The steps run one after the other, on any threads. Only `load` changes the sequence. The steps share with other
    requests: objects with locks (the writer's queues, the pins, the counters), the cost model's count of refused
    restores, and the namespace's `seen`, which one thread at a time may read. The request takes the result over with
    `CachedRequest.adopt_restore`, or leaves it. Then call `close` when no step runs any more.

    `logits` are the next-token logits at the prompt's end, shape [vocab]. They are required if the sequence has the
    whole prompt, unless that is only a beginning. `on_logits` is called with the logits, on any thread, as soon as they
    are loaded. Loading the rest may still fail, but the logits are right. For `on_block` see `Loader`, for
    `computes_last` `Matcher`. Steps call `is_wanted` again and again, and end soon after it returned False.
    """

    def __init__(
        self,
        context: RequestContext,
        nodes: PromptNodes,
        sequence: KVSequence,
        in_memory_tokens: int,
        logits: Logits | None,
        *,
        on_logits: Callable[[Logits], None],
        on_block: Callable[[int], None],
        is_wanted: Callable[[], bool],
        computes_last: bool,
    ) -> None:
        assert in_memory_tokens < len(nodes.token_ids) or logits is not None or context.is_prefix_only, (
            "there must be something to sample from"
        )
        self.sequence, self.in_memory_tokens = sequence, in_memory_tokens
        source: StateSource = "memory" if in_memory_tokens else "none"
        self.in_memory = RestoreResult(
            num_tokens=in_memory_tokens, logits=logits, matched=in_memory_tokens, source=source
        )
        """The result if nothing is restored."""
        self.restored = self.in_memory
        """The result."""
        self.miss_reason: MissReason | None = context.bypass or "error"
        """None once the match has an answer."""
        self.load_s = 0.0
        """Seconds that `load` took, without the wait for `prefetch`."""
        self.needs_load = False
        """Set by `match`."""
        self._context, self._cache, self._nodes = context, context.cache, nodes
        self._layout = context.cache.layout
        self._on_logits, self._on_block, self._is_wanted = on_logits, on_block, is_wanted
        self._computes_last = computes_last
        self._prefetched = Prefetched()
        self._noted_logits: Bytes | None = None
        """The logits at the prompt's end, if a note has them: they were stored when the prompt's tail was replaced."""
        self._num_intact = in_memory_tokens
        """The number of first tokens whose state the sequence surely has, also after an error."""
        self._is_slower = False
        """Computing the tokens is faster than restoring them."""
        self._last_node: bytes | None = None
        """The last node of the prefix that is restored."""
        self._pins = ExitStack()
        """The pins of the last matched node and of the last restored one."""

    # The steps.

    def steps(self, *, prefetches: bool) -> Iterator[tuple[Step, Callable[[], None]]]:
        """Yields the steps. Ask for the next one after the last one has run. With `prefetches`, the first step asks the
        shared tier."""
        if prefetches:
            yield "prefetch", partial(self.run_step, "prefetch")
        if not self._context.namespace.is_read:
            yield "seen", partial(self.run_step, "seen")
        yield "match", partial(self.run_step, "match")
        if self.needs_load:
            yield "load", partial(self.run_step, "load")

    def run(self, *, prefetches: bool = False) -> None:
        """Runs all steps, on this thread."""
        for _, run in self.steps(prefetches=prefetches):
            run()

    def run_step(self, step: Step) -> None:
        """Runs one step. `prefetch` fetches the nodes that only the shared tier has, and waits for the network. `seen`
        reads the tenant's earlier prompts from the store, once for a tenant, which may take a second. `match` finds the
        stored nodes, and sets `needs_load` if some of them are to be loaded. `load` copies these into the sequence."""
        context = self._context
        if context.bypass is not None:
            return
        if step == "prefetch":
            with context.guarded("nothing is fetched from the shared tier"):
                self._prefetched = self._prefetch()
        elif step == "seen":
            with context.guarded("the tenant's earlier prompts are not known"):
                self._cache.namespaces.read_seen(context.namespace, self._is_wanted)
        else:
            self._match_or_load(loads=step == "load")

    def close(self) -> None:
        """Unpins the matched nodes."""
        self._pins.close()

    def _match_or_load(self, *, loads: bool) -> None:
        restored, self.needs_load = None, False
        with self._context.guarded("nothing is restored"):
            self._require_known_bits()
            restored = self._restore(loads=loads)
            if restored is not None and not restored.matched and self._is_outdated():
                restored = replace(restored, refused="upgraded")
            elif restored is not None:
                with_other_key, otherwise = self._with_other_key(restored), self._stored_otherwise(restored)
                restored = replace(restored, with_other_key=with_other_key, otherwise=otherwise)
            self.needs_load = restored is None
        if restored is not None:
            self.load_s, waited_ms = restored.restore_ms / 1e3, self._prefetched.seconds * 1e3
            self.restored = replace(restored, restore_ms=restored.restore_ms + waited_ms)
            self.miss_reason = None
        elif self._num_intact < self.in_memory_tokens:
            self.restored = RestoreResult()

    # The shared tier.

    def _prefetch(self) -> Prefetched:
        """Fetches the nodes that the shared tier has and nearer tiers lack into the writer's buffer, where the match
        finds them, and from where they go to the disk. Waits for up to `Settings.remote_deadline`. If memory has all
        but a few tokens, the shared tier is not asked."""
        context, cache, cost_model = self._context, self._cache, self._cache.cost_model
        if cache.remote is None or cache.store.problem is not None or cache.bits.state != "settled":
            return Prefetched()
        if (spending := cache.spending()) is not None and spending.is_spent:
            # Fetched nodes are written to the disk too.
            return Prefetched()
        save, namespace, continued = Save(context.epoch), context.namespace, None

        def save_nodes(new_nodes: tuple[NewNode, ...]) -> bool:
            nonlocal continued
            own = (context.epoch, namespace.root, namespace.record, new_nodes)
            publication = Publication(*own, entry=context.entry(), continued=continued)
            continued = new_nodes[-1].name
            if (room := cache.writer.reserve(publication.payload_bytes)) is not None:
                cache.writer.queue_publication(save, publication, [room])
            return room is not None

        request = PrefetchRequest(
            nodes=self._nodes,
            tiers=context.tiers,
            publish=save_nodes,
            max_s=cache.settings.remote_deadline,
            in_memory_tokens=self.in_memory_tokens,
            pays=lambda *sizes: context.allows("fetch", pays=cost_model.pays_remote(*sizes)),
            is_cancelled=lambda: not self._is_wanted(),
            prefill_s_per_token=cost_model.prefill_s_per_token or 0.0,
            ttl_s=context.ttl_at(0),
            replaces=self._layout.state_kind == "token",
        )
        try:
            prefetched = cache.remote.prefetch(request)
        finally:
            cache.writer.finish(save)
        cost_model.record_prefetch(prefetched)
        return prefetched

    # Match and load. Both open the tiers, because their content may have changed in between.

    def _restore(self, *, loads: bool) -> RestoreResult | None:
        """Finds the longest stored prefix and loads it into the sequence. Without `loads`, nothing is loaded. Removes
        damaged nodes, and restores the next shorter prefix.

        Returns None if something is left to load, because of `loads` or `is_wanted`. Raises `CacheError`.
        """
        self._num_intact = self.in_memory_tokens
        started = time.perf_counter()
        with open_views(self._context.tiers) as views:
            matcher = Matcher(
                self._nodes,
                views,
                self._layout.state_kind,
                needs_logits=not self._context.is_prefix_only,
                has_logits=self._load_noted_logits,
                computes_last=self._computes_last,
                is_wanted=self._is_wanted,
            )
            matcher.match()
            self._pin(matcher.deepest)
            path, stop = self._select(matcher, self.in_memory_tokens)
            prefill_s, is_part = _prefill_s(matcher), _is_part(matcher)
            matched = time.perf_counter()
            if self._noted_logits is not None and stop == len(self._nodes.token_ids):
                self._send_logits(self._noted_logits)
            loader = self._load(matcher, path, stop, loads=loads)
        if loader is None:
            return None
        loaded = time.perf_counter()
        deepest, num_tokens = matcher.deepest, max(loader.in_memory_tokens, loader.stop)
        unverified_from = self._unverified_from(matcher, path, views, num_tokens)
        return RestoreResult(
            num_tokens=num_tokens,
            num_bytes=loader.num_bytes,
            stored_tokens=loader.stop,
            logits=self._logits_at_end(matcher, loader),
            has_tail=matcher.tail is not None,
            blocks=matcher.blocks,
            partial_match=matcher.partial_match,
            last_node=self._last_node if loader.stop else None,
            matched=max(deepest.end if deepest else 0, num_tokens),
            refused=self._why_refused(matcher, num_tokens),
            is_part=is_part,
            source=self._source(loader.path) if num_tokens else "none",
            prefill_s=prefill_s * num_tokens,
            unverified_from=unverified_from,
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _unverified_from(
        self, matcher: Matcher[View], path: list[Node], views: Sequence[View], num_tokens: int
    ) -> int | None:
        """Returns the first of the restored positions whose state came from a file, by the nodes that were found and by
        what this process has restored earlier: memory may keep state longer than the disk."""
        known, stored = self._cache.unverified, {name for view in views for name in view.unverified}
        if not stored and not known:
            return None
        partial = [] if matcher.partial_match is None else [matcher.partial_match.node]
        marked = [node for node in (*self._nodes.blocks, *path, *partial) if node.name in stored or node.name in known]
        # A block that is computed again is known to be right.
        known.difference_update(node.name for node in marked if node.position >= num_tokens and node.name not in stored)
        restored = [node for node in marked if node.position < num_tokens]
        if not restored:
            return None
        first = min(restored, key=attrgetter("position"))
        if len(known) < _MAX_UNVERIFIED:
            known.add(first.name)
        return first.position

    def _select(self, matcher: Matcher[View], in_memory_tokens: int) -> tuple[list[Node], int]:
        """Returns the nodes of the prefix to restore, with the last one pinned, and the number of its tokens. Returns
        no nodes if computing the tokens after the first `in_memory_tokens` is faster."""
        nodes, stop = matcher.restorable()
        cost_model, self._last_node = self._cache.cost_model, None
        if not self._layout.states and stop % self._nodes.block_size and stop < len(self._nodes.token_ids):
            # All of the last node is read and verified, however little of it is used.
            last = nodes[-1]
            num_bytes = self._layout.bytes_per_token * last.num_tokens
            if stop > in_memory_tokens and not cost_model.pays(stop - max(last.position, in_memory_tokens), num_bytes):
                nodes, stop = nodes[:-1], last.position
        self._is_slower = stop > in_memory_tokens and not self._context.allows(
            "restore", pays=cost_model.allows(stop - in_memory_tokens)
        )
        if self._is_slower:
            return [], 0
        if nodes:
            self._last_node = nodes[-1].name
            self._pin(nodes[-1])
        return nodes, stop

    def _load(self, matcher: Matcher[View], path: list[Node], stop: int, *, loads: bool) -> Loader | None:
        """Loads the nodes of a path; see `_restore`. Returns the loader that loaded them."""
        sequence, in_memory_tokens = self.sequence, self.in_memory_tokens
        # Bound: each round but the last one removes a damaged node. The last one has nothing to load.
        for rounds_left in range(self._nodes.num_blocks + 2, -1, -1):
            loader = Loader(
                self._nodes,
                [(node, matcher.index_of[node.name]) for node in path if min(node.end, stop) > in_memory_tokens],
                in_memory_tokens,
                stop,
                self._first_needed(matcher, stop),
                sequence.fill,
                self._send_logits,
                self._on_block,
                self._is_wanted,
            )
            if not loader.path:
                break
            if not loads:
                return None
            self._prepare_pages(loader.first_needed, in_memory_tokens, stop)
            if (bad := loader.run(self._cache.readers)) is None:
                if loader.became_unwanted:
                    return None
                break
            node, view, error = bad
            assert node.name not in view.damaged, "a view has no node that it dropped"
            view.drop_damaged(node, error)
            matcher.drop_node(node)
            in_memory_tokens = self._num_intact
            sequence.truncate(in_memory_tokens)
            path, stop = self._select(matcher, in_memory_tokens) if rounds_left > 1 else ([], 0)
        return loader

    def _prepare_pages(self, first_needed: Mapping[int, int], in_memory_tokens: int, stop: int) -> None:
        """Takes the pages of a restore. Raises `MemoryError` if there are too few; the sequence keeps `_num_intact`."""
        for number in range(len(self._layout.groups)):
            start = floor_to_grid(first_needed[number], self._nodes.block_size)
            self.sequence.prepare_restore(number, start, stop)
            if not self.sequence.continues_at(in_memory_tokens):
                # Pages that a window has passed went back.
                self._num_intact = 0
        if self._layout.states:
            # Loading overwrites them.
            self._num_intact = 0

    def _first_needed(self, matcher: Matcher[View], stop: int) -> dict[int, int]:
        """Returns for each group the first token to load, see `Loader`."""
        # The block in which the prompt goes on will be stored: all of it is needed.
        block_start = floor_to_grid(stop, self._nodes.block_size)
        first_needed = {n: min(g.first_needed(stop), block_start) for n, g in enumerate(self._layout.groups)}
        if matcher.tail is None or stop < len(self._nodes.token_ids):
            # Only the logits of the prompt's own tail are used.
            first_needed[self._nodes.layout.logits_group] = stop
        return first_needed

    def _pin(self, node: Node | None) -> None:
        """Pins a node before anything is loaded: the request will continue it."""
        if node is not None:
            evictor = self._cache.store.evictor
            evictor.pin(node.name)
            self._pins.callback(evictor.unpin, node.name)

    def _load_noted_logits(self) -> bool:
        """Loads the noted logits, unless the sequence has the whole prompt. Returns False without any."""
        content = None
        if self.in_memory_tokens < len(self._nodes.token_ids):
            content = self._context.notes().get(NoteKind.LOGITS, self._nodes.end_id)
        if content is not None and len(content) == self._layout.logits_bytes + BUILD_BYTES:
            logits, build = content[:-BUILD_BYTES], content[-BUILD_BYTES:]
            if self._cache.bits.accepts(build):
                self._noted_logits = np.frombuffer(bytearray(logits), dtype=np.uint8)
        return self._noted_logits is not None

    def _send_logits(self, logits: Bytes) -> None:
        self._on_logits(self.sequence.logits_from(logits))

    def _logits_at_end(self, matcher: Matcher[View], loader: Loader) -> Logits | None:
        """Returns the next-token logits at the prompt's end; None if the prompt was not restored to its end."""
        if loader.stop <= loader.in_memory_tokens:
            return self.in_memory.logits
        content = loader.logits if matcher.tail is not None else self._noted_logits
        if content is None or loader.stop < len(self._nodes.token_ids):
            return None
        return self.sequence.logits_from(content)

    def _why_refused(self, matcher: Matcher[View], num_tokens: int) -> Refused | None:
        """Returns the reason why not all stored tokens are restored, None if all are."""
        if any(view.damaged for view in matcher.indexes):
            return "damaged"
        if self._is_slower:
            return "faster_to_compute"
        deepest = matcher.deepest
        if deepest is None or deepest.end <= num_tokens:
            return None
        at_end = deepest.end == len(self._nodes.token_ids)
        return "no_logits" if at_end and deepest.end - num_tokens <= self._nodes.block_size else "no_checkpoint"

    def _source(self, loaded: Sequence[tuple[Node, View]]) -> StateSource:
        """Returns the farthest tier of the loaded nodes."""
        if any(node.name in self._prefetched.names for node, _ in loaded):
            return "remote"
        return "disk" if any(view.tier == "disk" for _, view in loaded) else "memory"

    # What the store has beside the prompt's own nodes. These read the store, and raise `CacheError`.

    def _require_known_bits(self) -> None:
        """Reads from the store whose bits it has, if that is not known yet. Raises `StoreUnavailable` if the request's
        root turns out to be that of another build."""
        if self._cache.bits.state == "unknown":
            self._cache.recall_bits()
            if self._context.bypass is not None:
                raise StoreUnavailable("what is stored has the bits of another version")

    def _is_outdated(self) -> bool:
        """Returns whether another build has stored the first block of the prompt, or all of a shorter prompt."""
        nodes, store, outdated = self._nodes, self._cache.store, self._context.namespace.outdated
        first = nodes.token_ids[: nodes.block_size]
        kind = NodeKind.BLOCK if len(first) == nodes.block_size else NodeKind.TAIL
        if not outdated:
            return False
        with store.reads.snapshot() as snapshot:
            names = (node_name(store.secret, root, first, kind) for root in outdated)
            return any(snapshot.usage(name) is not None for name in names)

    def _with_other_key(self, restored: RestoreResult) -> int:
        """Returns how many tokens another key of the user would restore; 0 if that would be a miss too, or if this is
        no miss."""
        cache, nodes, num_tokens = self._cache, self._nodes, len(self._nodes.token_ids)
        others = self._context.options.tenant.others
        if not others or not is_miss(num_tokens, restored.num_tokens):
            return 0
        roots = [root_hash(cache.root_record(other).identity) for other in others]
        most = max(self._restorable_below(root, nodes.block_size, self._layout.state_kind) for root in roots)
        return 0 if is_miss(num_tokens, most) else most

    def _stored_otherwise(self, restored: RestoreResult) -> StoredOtherwise:
        """Returns what a start with other options has stored of the prompt; nothing if that would be a miss too, or if
        this is no miss."""
        cache, token_ids, nothing = self._cache, self._nodes.token_ids, StoredOtherwise()
        if not cache.bits.options or not is_miss(len(token_ids), restored.num_tokens):
            return nothing
        record = self._context.namespace.record
        with suppress(StoreCorrupt):
            with cache.store.reads.snapshot() as snapshot:
                roots = list(other_roots(snapshot, record.identity, record.tenant, cache.bits.options))
            counts = [(self._restorable_below(root.name, root.block_size, root.state), root) for root in roots]
            num_tokens, longest = max(counts, key=itemgetter(0), default=(0, None))
            if longest is not None and not is_miss(len(token_ids), num_tokens):
                return StoredOtherwise(num_tokens, longest.options)
        return nothing

    def _restorable_below(self, root: bytes, block_size: int, state: StateKind) -> int:
        """Returns how many tokens of the prompt a request would restore from below a root, whose state has this
        kind."""
        path = TokenPath(self._cache.store.secret, root, self._nodes.token_ids, block_size)
        with open_views(self._cache.tiers) as views:
            matcher = Matcher(PromptNodes(path, self._nodes.layout), views, state, is_wanted=self._is_wanted)
            matcher.match()
            return matcher.restorable()[1]


def _is_part(matcher: Matcher[View]) -> bool:
    """Returns whether the deepest found node is the last one of a prompt that was not computed to its end."""
    match, last = matcher.partial_match, matcher.deepest
    if match is not None and match.end == match.node.end:
        last = match.node
    known = (None if last is None else view.is_part(last) for view in matcher.indexes)
    return next((is_part for is_part in known if is_part is not None), False)


def _prefill_s(matcher: Matcher[View]) -> float:
    """Returns the mean seconds that computing a token of a block took; 0 if unknown."""
    costs = ((matcher.index_of[node.name].prefill_s(node), node.num_tokens) for node in matcher.blocks)
    known = [(seconds, num_tokens) for seconds, num_tokens in costs if seconds]
    return sum(seconds for seconds, _ in known) / sum(num_tokens for _, num_tokens in known) if known else 0.0
