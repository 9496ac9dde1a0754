"""Computes a few stored blocks again after an upgrade, while the engine is idle, or beside requests if it never is.

A build has the same root as an earlier build if tiny models give equal bits with both (`model.bits`). This module finds
differences that the tiny models do not show: if a computed block differs from the stored block, this build gets another
root (`cache.build_bits`), and also if nothing of the stored state can be compared. Until a block was compared, stored
state is restored, and nothing is saved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Generator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from diskprefix.daemon.engine.idle.idle_work import IdleWork, Steps
from diskprefix.errors import CacheError
from diskprefix.prefixstore.kv.pages import Page
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.schema import NodeKind, NodeRecord, is_unverified, node_build, node_kind, node_root
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.tokens import LEAST_TOKENS, TokenIds, floor_to_grid
from diskprefix.units import counted
from diskprefix.values import CacheOptions, Prompt, Scope, Tenant

log = logging.getLogger("diskprefix")

_PROMPTS, _LOOKED_AT = 3, 64
"""The number of saved prompts to compare, and the most among which they are chosen."""
_MAX_TOKENS, _MAX_COMPUTED = 4096, 1024
"""If state can be cut anywhere, the most tokens that are restored for each prompt. The most tokens that are computed
for each prompt but the first: one is compared whatever it takes, because it would have to be computed anyway if the
stored state were not used."""
_RETRY_S = 60.0
"""The minimum time between a failure and the next attempt."""
_IDLE_WITHIN_S = 3600.0
"""The seconds after the start within which the engine must have been idle for long enough. Then the comparison goes on
beside requests: nothing is saved before it."""


class _StoredPrefix(NamedTuple):
    """A prefix of a saved prompt, whose state can be restored at its end and after its first `start` tokens (0:
    nothing is restored). Behind these, other builds with the digests `builds` have computed some of its state."""

    tenant: Tenant
    token_ids: TokenIds
    start: int
    builds: frozenset[bytes]

    @property
    def num_computed(self) -> int:
        return len(self.token_ids) - self.start


class Recheck:
    """The idle task of one process."""

    def __init__(self, idle: IdleWork) -> None:
        self._idle, self._cache = idle, idle.cache
        self._left: list[_StoredPrefix] | None = None
        """The prefixes that were not computed again yet; None before they are chosen."""
        self._num_equal = 0
        self._equal_builds: frozenset[bytes] = frozenset()
        """The number of prefixes that were computed again, and the builds that had computed them before."""
        self._since, self._retry_at = self._now, -math.inf
        """The times, on the engine's clock, since which a comparison is due, and of the next attempt after a
        failure."""

    @property
    def _now(self) -> float:
        return self._idle.served.clock()

    @property
    def goes_beside(self) -> bool:
        return self._cache.must_recheck and self._now - self._since > _IDLE_WITHIN_S

    def note_due(self) -> None:
        """Notes that a comparison is due from now on. For any thread."""
        self._since = self._now

    @property
    def wait_s(self) -> float | None:
        """The seconds until the next attempt after a failure. None without a failure: at the start, the end of the load
        wakes the engine."""
        if self._retry_at == -math.inf or not self._cache.must_recheck:
            return None
        return max(0.0, self._retry_at - self._now)

    def next_steps(self) -> Steps | None:
        return self._compare_prompts() if self._cache.must_recheck and self._now >= self._retry_at else None

    def give_up(self, reason: str) -> None:
        """Leaves out the prefix that failed. The comparison is still required."""
        log.info("[disk-cache] what an earlier version has stored is not computed again now: %s", reason)
        self._retry_at = self._now + _RETRY_S
        if self._left:
            self._left.pop()

    def _compare_prompts(self) -> Steps:
        if self._cache.bits.state == "unknown":
            yield (recalled := self._idle.submit_read(self._cache.recall_bits))
            recalled.result()
            return
        if self._left is None:
            yield (chosen := self._idle.submit_read(self._chosen))
            self._left = chosen.result()
            if not self._left:
                if self._cache.note_nothing_compared(is_stored=self._left is not None):
                    log.warning("[disk-cache] nothing that another version has stored can be compared: it is not used")
                self._begin_again()
                return
        if self._left and self.goes_beside:
            log.info("[disk-cache] what an earlier version has stored is computed again beside requests")
        # Bound: each round compares a prefix.
        while self._left:
            prefix = self._left[-1]
            is_equal = yield from self._is_equal(prefix)
            # There is no `yield` between the comparison and its consequence, so a request that comes cannot hide a
            # difference.
            if is_equal is False:
                log.warning("[disk-cache] this version computes other bits than what is stored: it is used no more")
                self._cache.note_other_bits(prefix.builds)
                self._begin_again()
                return
            if is_equal is None:
                self.give_up("it was evicted meanwhile")
            else:
                self._left.pop()
                self._num_equal += 1
                self._equal_builds |= prefix.builds
        # If nothing was compared, that is no sign of equal bits.
        if self._num_equal:
            self._cache.note_same_bits(self._equal_builds)
            found_equal = counted(self._num_equal, "stored prompt")
            log.info("[disk-cache] this version computes the bits of an earlier one: %s compared", found_equal)
        self._begin_again()

    def _begin_again(self) -> None:
        """Forgets what was chosen: a further build may come."""
        self._left, self._num_equal, self._equal_builds = None, 0, frozenset()

    def _chosen(self) -> list[_StoredPrefix] | None:
        """Returns stored prefixes of the model, of any tenant, the one with the fewest tokens to compute last. Returns
        None if no other build has stored anything. On the reader's thread."""
        bits = self._cache.bits
        with self._cache.store.reads.snapshot() as snapshot:
            bits.look_at_record(snapshot)
            tree, own = PrefixTree(snapshot), dict[bytes, Tenant]()
            for root, record in snapshot.roots():
                with suppress(ValueError):
                    if self._cache.owner(tenant := Tenant.parse(record.tenant)).root == root:
                        own[root] = tenant
            # State from a file tells nothing of an earlier build.
            root_of = {
                name: root
                for name, value in snapshot.records("nodes")
                if (root := node_root(value)) in own
                and node_kind(value) != NodeKind.GHOST
                and not is_unverified(value)
                and bits.is_to_compare(node_build(value))
            }
            if not root_of:
                return None
            # After a kill, a prompt may have nodes but no entry.
            ends = [name for name, _ in snapshot.entries() if name in root_of] or [*root_of]
            of_ends = (self._prefix_of(tree, name, own[root_of[name]]) for name in ends)
            prefixes = [*islice((prefix for prefix in of_ends if prefix is not None), _LOOKED_AT)]
        prefixes.sort(key=lambda prefix: (prefix.num_computed, len(prefix.token_ids)))
        others = [prefix for prefix in prefixes[1:_PROMPTS] if prefix.num_computed <= _MAX_COMPUTED]
        return [*others[::-1], *prefixes[:1]]

    def _prefix_of(self, tree: PrefixTree, name: bytes, tenant: Tenant) -> _StoredPrefix | None:
        """Returns a prefix of the prompt that ends at a node, None if none can be compared. If the model has states,
        the prefix goes from a checkpoint, or the beginning, to the next checkpoint. Otherwise its last tokens that
        another build has computed are computed again."""
        layout, size = self._cache.layout, self._cache.settings.block_size
        try:
            nodes, path = tree.entry(name).values(), tree.path(name).values()
        except CacheError:
            return None
        if any(node.is_unverified for node in nodes):
            return None
        token_ids = np.concatenate([node.token_ids for node in path])
        end = min([len(token_ids), *np.flatnonzero(token_ids < 0)[:1].tolist()])
        if layout.states:
            points = {node.end for node in nodes if node.kind != NodeKind.BLOCK and LEAST_TOKENS <= node.end <= end}
            pairs = [pair for pair in pairwise([0, *sorted(points)]) if self._builds_of(nodes, *pair)]
            start, end = min(pairs, key=lambda pair: (pair[1] - pair[0], pair[1]), default=(0, 0))
        else:
            first = min((node.end for node in path if self._cache.bits.is_to_compare(node.build)), default=0)
            end = min(end, max(_MAX_TOKENS, first))
            if end < len(token_ids) and layout.exact_at == "grid":
                end = floor_to_grid(end, size)
            start = floor_to_grid(end - 1, size)
        builds = self._builds_of(nodes, start, end)
        return _StoredPrefix(tenant, token_ids[:end], start, builds) if builds and end >= LEAST_TOKENS else None

    def _builds_of(self, nodes: Collection[NodeRecord], start: int, end: int) -> frozenset[bytes]:
        """Returns the other builds that have surely computed the state which a restore of the tokens from `start` to
        `end` reads."""
        if self._cache.layout.states:
            # Tokens after the last full block come from a checkpoint at the end, which two builds may have stored.
            at_end = {node.build for node in nodes if node.kind != NodeKind.BLOCK and node.end == end}
            among = {node.build for node in nodes if node.kind == NodeKind.BLOCK and start < node.end <= end}
            among |= at_end if len(at_end) == 1 else set()
        else:
            among = {node.build for node in nodes if node.position < end and start < node.end}
        return frozenset(filter(self._cache.bits.is_to_compare, among))

    def _is_equal(self, stored: _StoredPrefix) -> Generator[Future[Any] | None, None, bool | None]:
        """Returns whether the last tokens of a prefix have the state that is stored; None if it is not stored any
        more."""
        options, token_ids = CacheOptions(scope=Scope("full"), tenant=stored.tenant, save=False), stored.token_ids
        with self._idle.restoring(self._idle.served, Prompt(token_ids), options, of_any_build=True) as whole:
            yield whole.reading
            end = whole.num_restored()
            before = Prompt(token_ids[: max(1, stored.start)])
            with self._idle.restoring(self._idle.served, before, options, of_any_build=True) as again:
                yield again.reading
                start, sequence = again.num_restored(), again.sequence
                if end < len(token_ids) or end - start > max(_MAX_COMPUTED, stored.num_computed):
                    return None
                # Bound: each step computes at least one token.
                while sequence.num_tokens < end:
                    self._idle.compute_step(self._idle.served, sequence, token_ids)
                    yield None
                sequence.complete_pages()
                return _has_state_of(sequence, whole.sequence, start, end)


def _has_state_of(sequence: KVSequence, other: KVSequence, start: int, end: int) -> bool | None:
    """Returns whether two sequences have equal bits for the tokens from `start` to `end`, as far as windows need them,
    and equal states. Returns None if nothing was compared."""
    size, pairs = sequence.pool.block_size, list[tuple[Page, Page, slice]]()
    for number, table in enumerate(sequence.tables):
        first = max(start, table.group.first_needed(end))
        for block in range(first // size, -(-end // size)):
            own, stored = (of.tables[number].pages[block] for of in (sequence, other))
            if own is not None and stored is not None:
                width = own.num_bytes // own.num_rows // size
                of_block = slice(max(first - block * size, 0) * width, min(end - block * size, size) * width)
                pairs.append((own, stored, of_block))
    pairs += [(own, stored, slice(None)) for own, stored in zip(sequence.states, other.states, strict=True)]
    return (
        all(np.array_equal(own.rows[:, part], stored.rows[:, part]) for own, stored, part in pairs) if pairs else None
    )
