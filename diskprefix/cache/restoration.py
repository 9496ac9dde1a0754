"""Restoring the longest stored prefix of a prompt: match, verify, decode into the pages of a sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from diskprefix.cache.matching import Matcher, RestoreResult
from diskprefix.cache.tiers.loading import Loader
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import Tier, View, open_views
from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.evictor import Evictor
from diskprefix.tokens import Logits, floor_to_grid
from diskprefix.values import Refused, StateSource


class _LoadedPrefix(NamedTuple):
    """The result of loading: the first `stop` tokens were loaded by `loader` from the nodes of `path`, except the first
    `have` ones, which the sequence had."""

    path: Sequence[Node]
    stop: int
    have: int
    loader: Loader


class Restoration(Struct):
    """Restores one prompt. `run` is for one thread at a time.

    `tiers` are searched in order. The last matched node and the last restored node are pinned until `pins` is closed.
    `allows(num_tokens)` tells whether restoring pays, `pays(num_tokens, num_bytes)` whether loading so much more pays.
    `noted_logits` returns the logits at the prompt's end as bytes, if they were stored when its tail was replaced.
    `is_wanted` is called before each node and each piece; if it returns False, nothing more is read. For `on_logits`
    see `Fetch`, for `on_block` `Loader`, for `needs_logits` and `computes_last` `Matcher`.
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
    on_logits: Callable[[Logits], None]
    on_block: Callable[[int], None]
    is_wanted: Callable[[], bool]
    needs_logits: bool
    computes_last: bool
    prefetched: Collection[bytes] = ()
    """The names of the nodes that were fetched from the shared tier for this prompt."""
    _views: list[View] = field(default_factory=list)
    _logits: Bytes | None = None
    """The result of `noted_logits`."""
    _is_slower: bool = False
    num_intact: int = 0
    """The number of first tokens whose state the sequence surely has, also if `run` raises."""

    def run(self, sequence: KVSequence, have: int, logits: Logits | None, *, loads: bool) -> RestoreResult | None:
        """Restores into `sequence`, which has room for the prompt and already the state of its first `have` tokens.
        `logits` are those at the prompt's end, if the sequence has all of it. Without `loads`, nothing is loaded. A
        damaged node is removed, and the next shorter prefix is restored.

        Returns None if something is left to load, because of `loads` or `is_wanted`. Raises `CacheError`.
        """
        self.num_intact = have
        started = time.perf_counter()
        with open_views(self.tiers) as self._views:
            matcher = Matcher(
                self.nodes,
                self._views,
                self.layout.state_kind,
                self.needs_logits,
                partial(self._load_noted_logits, have),
                self.computes_last,
                self.is_wanted,
            )
            matcher.match()
            self._pin(matcher.deepest)
            path, stop = self._select(matcher, have)
            prefill_s = _prefill_s(matcher)
            matched = time.perf_counter()
            if self._logits is not None and stop == len(self.nodes.token_ids):
                self._send_logits(sequence, self._logits)
            prefix = self._load(matcher, path, stop, sequence, have, loads=loads)
        if prefix is None:
            return None
        loaded = time.perf_counter()
        stop, have, loader = prefix.stop, prefix.have, prefix.loader
        if stop > have:
            at_end = loader.logits if matcher.tail is not None else self._logits
            logits = sequence.logits_from(at_end) if at_end is not None and stop == len(self.nodes.token_ids) else None
        deepest, num_tokens = matcher.deepest, max(have, stop)
        return RestoreResult(
            num_tokens=num_tokens,
            num_bytes=loader.num_bytes,
            stored_tokens=stop,
            logits=logits,
            has_tail=matcher.tail is not None,
            blocks=matcher.blocks,
            partial_match=matcher.partial_match,
            last_node=prefix.path[-1].name if prefix.path else None,
            matched=max(deepest.end if deepest else 0, num_tokens),
            refused=self._why_refused(deepest, num_tokens),
            source=self._source(loader.path) if num_tokens else "none",
            prefill_s=prefill_s * num_tokens,
            lookup_ms=(matched - started) * 1e3,
            restore_ms=(loaded - matched) * 1e3,
        )

    def _load(
        self, matcher: Matcher[View], path: list[Node], stop: int, sequence: KVSequence, have: int, *, loads: bool
    ) -> _LoadedPrefix | None:
        """Loads the nodes of a path, see `run`. Returns None if something is left to load."""
        # Bound: each round but the last one removes a damaged node. The last one has nothing to load.
        for rounds_left in range(self.nodes.num_blocks + 2, -1, -1):
            missing = [(node, matcher.index_of[node.name]) for node in path if min(node.end, stop) > have]
            first_needed, on_logits = self._first_needed(matcher, stop), partial(self._send_logits, sequence)
            loader = Loader(
                self.nodes, missing, have, stop, first_needed, sequence, on_logits, self.on_block, self.is_wanted
            )
            if not missing:
                break
            if not loads:
                return None
            self._prepare(sequence, first_needed, have, stop)
            if (bad := loader.run(self.readers)) is None:
                if loader.is_cut:
                    return None
                break
            node, view, error = bad
            assert node.name not in view.damaged, "a view has no node that it dropped"
            view.drop(node, error)
            matcher.drop(node)
            have = self.num_intact
            sequence.truncate(have)
            path, stop = self._select(matcher, have) if rounds_left > 1 else ([], 0)
        return _LoadedPrefix(path, stop, have, loader)

    def _prepare(self, sequence: KVSequence, first_needed: Mapping[int, int], have: int, stop: int) -> None:
        """Takes the pages of a restore. Raises `MemoryError` if there are too few; the sequence keeps `num_intact`."""
        for number in range(len(self.layout.groups)):
            sequence.prepare_restore(number, floor_to_grid(first_needed[number], self.nodes.block_size), stop)
            if not sequence.continues_at(have):
                # Pages that a window has passed went back.
                self.num_intact = 0
        if self.layout.states:
            # Loading overwrites them.
            self.num_intact = 0

    def _send_logits(self, sequence: KVSequence, logits: Bytes) -> None:
        self.on_logits(sequence.logits_from(logits))

    def _pin(self, node: Node | None) -> None:
        """Pins a node before anything is loaded: the request will continue it."""
        if node is not None:
            self.evictor.pin(node.name)
            self.pins.callback(self.evictor.unpin, node.name)

    def _select(self, matcher: Matcher[View], have: int) -> tuple[list[Node], int]:
        """Returns the nodes of the prefix to restore, with the last one pinned, and the number of its tokens. Returns
        no nodes if computing the tokens behind the first `have` is faster."""
        nodes, stop = matcher.restorable()
        if not self.layout.states and stop % self.nodes.block_size and stop < len(self.nodes.token_ids):
            # All of the last node is read and verified, however little of it is used.
            last = nodes[-1]
            if stop > have and not self.pays(
                stop - max(last.position, have), self.layout.bytes_per_token * last.num_tokens
            ):
                nodes, stop = nodes[:-1], last.position
        self._is_slower = stop > have and not self.allows(stop - have)
        if self._is_slower:
            return [], 0
        self._pin(nodes[-1] if nodes else None)
        return nodes, stop

    def _why_refused(self, deepest: Node | None, num_tokens: int) -> Refused | None:
        """Returns the reason why not all stored tokens are restored, None if all are."""
        if any(view.damaged for view in self._views):
            return "damaged"
        if self._is_slower:
            return "faster_to_compute"
        if deepest is None or deepest.end <= num_tokens:
            return None
        at_end = deepest.end == len(self.nodes.token_ids)
        return "no_logits" if at_end and deepest.end - num_tokens <= self.nodes.block_size else "no_checkpoint"

    def _load_noted_logits(self, have: int) -> bool:
        """Loads the noted logits, unless the sequence has the whole prompt. Returns False without any."""
        content = self.noted_logits() if have < len(self.nodes.token_ids) else None
        if content is not None and len(content) == self.layout.logits_bytes:
            self._logits = np.frombuffer(bytearray(content), dtype=np.uint8)
        return self._logits is not None

    def _first_needed(self, matcher: Matcher[View], stop: int) -> dict[int, int]:
        """Returns for each group the first token to load, see `Loader`."""
        # The block in which the prompt goes on will be stored: all of it is needed.
        block_start = floor_to_grid(stop, self.nodes.block_size)
        first_needed = {n: min(g.first_needed(stop), block_start) for n, g in enumerate(self.layout.groups)}
        if matcher.tail is None or stop < len(self.nodes.token_ids):
            # Only the logits of the prompt's own tail are used.
            first_needed[self.nodes.layout.logits_group] = stop
        return first_needed

    def _source(self, loaded: Sequence[tuple[Node, View]]) -> StateSource:
        """Returns the farthest tier of the loaded nodes."""
        if any(node.name in self.prefetched for node, _ in loaded):
            return "remote"
        return "disk" if any(view.tier == "disk" for _, view in loaded) else "memory"


def _prefill_s(matcher: Matcher[View]) -> float:
    """Returns the mean seconds that computing a token of a block took; 0 if unknown."""
    costs = ((matcher.index_of[node.name].prefill_s(node), node.num_tokens) for node in matcher.blocks)
    known = [(seconds, num_tokens) for seconds, num_tokens in costs if seconds]
    return sum(seconds for seconds, _ in known) / sum(num_tokens for _, num_tokens in known) if known else 0.0
