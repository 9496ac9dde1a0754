"""Restoring the longest stored prefix of a prompt: match, verify, decode into the pages of a sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from diskprefix.cache.matching import Matcher, RestoreResult
from diskprefix.cache.tiers.loading import Loader
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import Tier, View, open_views
from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.evictor import Evictor
from diskprefix.tokens import floor_to_grid
from diskprefix.values import Refused, StateSource


@dataclass
class Restoration:
    """Restores one prompt. `run` is for one thread at a time.

    `tiers` are searched in order. `pins` collects what unpins the last node that matched and the last one that is
    restored. `allows(num_tokens)` tells whether restoring is worth it, `pays(num_tokens, num_bytes)` whether loading
    that much more is. `noted_logits` returns the logits at the prompt's end as bytes, if they were kept when its tail
    was replaced. `on_logits` is called with the logits at the prompt's end, shape [vocab], on any thread, before all of
    the state is loaded, which may still fail. `is_wanted` is called before each node and each piece. If it returns
    False, nothing more is read. For `on_block` see `Loader`, for `needs_logits` and `computes_last` see `Matcher`.
    """

    nodes: PromptNodes
    layout: Layout
    tiers: Sequence[Tier]
    evictor: Evictor
    readers: Executor
    pins: ExitStack
    allows: Callable[[int], bool]
    pays: Callable[[int, int], bool]
    noted_logits: Callable[[], bytes | None]
    on_logits: Callable[[torch.Tensor], None] = lambda _: None
    on_block: Callable[[int], None] = lambda _: None
    is_wanted: Callable[[], bool] = lambda: True
    needs_logits: bool = True
    computes_last: bool = False
    prefetched: Collection[bytes] = ()
    """The names of the nodes that were fetched from the shared tier for this prompt."""
    _views: list[View] = field(default_factory=list)
    _logits: Bytes | None = None
    """The result of `noted_logits`."""
    _is_slower: bool = False
    kept: int = 0
    """The number of tokens whose state the sequence still has if `run` raises."""

    def run(
        self, sequence: KVSequence, have: int = 0, logits: torch.Tensor | None = None, *, loads: bool = True
    ) -> RestoreResult | None:
        """Restores into `sequence`, which has room for the prompt and already has the state of its first `have` tokens.
        `logits` are those at the prompt's end, if the sequence has all of it. Without `loads`, only looks what is
        stored. A damaged node is removed, and the next shorter prefix is restored.

        Returns None if not all was loaded, because of `loads` or `is_wanted`. Then, and when it raises `CacheError`,
        the state behind the first `kept` tokens is undefined.
        """
        self.kept = have
        started = time.perf_counter()
        with open_views(self.tiers) as self._views:
            matcher = Matcher(
                self.nodes,
                self._views,
                self.layout.state_kind,
                self.needs_logits,
                partial(self._has_logits, have),
                self.computes_last,
                self.is_wanted,
            )
            matcher.match()
            self._pin(matcher.deepest)
            path, end = self._worth_restoring(matcher, have)
            prefill_s = _prefill_s(matcher)
            matched = time.perf_counter()
            if self._logits is not None and end == len(self.nodes.token_ids):
                self._tell_logits(sequence, self._logits)
            while True:
                missing = [(node, matcher.found_in[node.name]) for node in path if min(node.end, end) > have]
                first_needed = self._first_needed(matcher, end)
                on_logits = partial(self._tell_logits, sequence)
                loader = Loader(
                    self.nodes, missing, have, end, first_needed, sequence, on_logits, self.on_block, self.is_wanted
                )
                if not missing:
                    break
                if not loads:
                    return None
                self.kept = 0
                for number in range(len(self.layout.groups)):
                    sequence.prepare_restore(number, floor_to_grid(first_needed[number], self.nodes.block_size), end)
                if not self.layout.states and sequence.continues_at(have):
                    # Neither are states overwritten, nor have windows moved on.
                    self.kept = have
                if (bad := loader.run(self.readers)) is None:
                    if loader.is_cut:
                        return None
                    break
                node, view, error = bad
                view.drop(node, error)
                matcher.drop(node)
                have = self.kept
                sequence.truncate(have)
                path, end = self._worth_restoring(matcher, have)
        loaded = time.perf_counter()
        if end > have:
            at_end = loader.logits if matcher.tail is not None else self._logits
            logits = sequence.logits_from(at_end) if at_end is not None and end == len(self.nodes.token_ids) else None
        deepest, num_tokens = matcher.deepest, max(have, end)
        return RestoreResult(
            num_tokens=num_tokens,
            num_bytes=loader.num_bytes,
            stored_tokens=end,
            logits=logits,
            has_tail=matcher.tail is not None,
            blocks=matcher.blocks,
            partial_match=matcher.partial_match,
            last_node=path[-1].name if path else None,
            matched=max(deepest.end if deepest else 0, num_tokens),
            refused=self._why_refused(deepest, num_tokens),
            source=self._source(missing) if num_tokens else "none",
            prefill_s=prefill_s * num_tokens,
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _tell_logits(self, sequence: KVSequence, logits: Bytes) -> None:
        self.on_logits(sequence.logits_from(logits))

    def _pin(self, node: Node | None) -> None:
        """Pins a node before anything is loaded: the request will continue it."""
        if node is not None:
            self.evictor.pin(node.name)
            self.pins.callback(self.evictor.unpin, node.name)

    def _worth_restoring(self, matcher: Matcher[View], have: int) -> tuple[list[Node], int]:
        """Returns the nodes of the prefix to restore, the last of them pinned, and where it ends. Returns no nodes if
        computing the tokens behind the first `have` is faster."""
        nodes, end = matcher.restorable()
        if not self.layout.states and end % self.nodes.block_size and end < len(self.nodes.token_ids):
            # All of the last node is read and verified, however little of it is used.
            last = nodes[-1]
            if end > have and not self.pays(
                end - max(last.position, have), self.layout.bytes_per_token * last.num_tokens
            ):
                nodes, end = nodes[:-1], last.position
        self._is_slower = end > have and not self.allows(end - have)
        if self._is_slower:
            return [], 0
        self._pin(nodes[-1] if nodes else None)
        return nodes, end

    def _why_refused(self, deepest: Node | None, num_tokens: int) -> Refused | None:
        """Returns the reason why not all stored tokens are restored. None if all are."""
        if any(view.damaged for view in self._views):
            return "damaged"
        if self._is_slower:
            return "faster_to_compute"
        if deepest is None or deepest.end <= num_tokens:
            return None
        at_end = deepest.end == len(self.nodes.token_ids)
        return "no_logits" if at_end and deepest.end - num_tokens <= self.nodes.block_size else "no_checkpoint"

    def _has_logits(self, have: int) -> bool:
        """See `Matcher`. Not asked if the sequence has the whole prompt."""
        found = self.noted_logits() if have < len(self.nodes.token_ids) else None
        if found is not None and len(found) == self.layout.logits_bytes:
            self._logits = np.frombuffer(bytearray(found), dtype=np.uint8)
        return self._logits is not None

    def _first_needed(self, matcher: Matcher[View], end: int) -> dict[int, int]:
        """See `Loader`."""
        # A block that the prompt goes on in will be stored: all of it is needed.
        block_start = floor_to_grid(end, self.nodes.block_size)
        first_needed = {n: min(g.first_needed(end), block_start) for n, g in enumerate(self.layout.groups)}
        if matcher.tail is None or end < len(self.nodes.token_ids):
            # Logits are those at the prompt's end, and not those of a longer tail.
            first_needed[self.nodes.layout.logits_group] = end
        return first_needed

    def _source(self, loaded: Sequence[tuple[Node, View]]) -> StateSource:
        """Returns the farthest tier that something came from."""
        if any(node.name in self.prefetched for node, _ in loaded):
            return "remote"
        return "disk" if any(view.tier == "disk" for _, view in loaded) else "memory"


def _prefill_s(matcher: Matcher[View]) -> float:
    """Returns the mean seconds that computing a token took, over the blocks for which that is known; 0 without any."""
    found = ((matcher.found_in[node.name].prefill_s(node), node.num_tokens) for node in matcher.blocks)
    known = [(seconds, num_tokens) for seconds, num_tokens in found if seconds]
    return sum(seconds for seconds, _ in known) / sum(num_tokens for _, num_tokens in known) if known else 0.0
