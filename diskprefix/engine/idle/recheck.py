"""Computes a few stored blocks again after an upgrade, while the engine is idle.

A build has the same root as an earlier build if tiny models give equal bits with both (`model.bits`). This module finds
differences that the tiny models do not show: if a computed block differs from the stored block, this build gets another
root (`cache.build_bits`). Until the blocks are compared, stored state is restored, and nothing is saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from diskprefix.engine.idle.idle_work import IdleWork, Steps
from diskprefix.errors import CacheError
from diskprefix.kv.pages import Page
from diskprefix.kv.sequence import KVSequence
from diskprefix.store.schema import NodeKind, node_kind, node_root
from diskprefix.store.tree import PrefixTree
from diskprefix.tokens import TokenIds, floor_to_grid
from diskprefix.units import counted
from diskprefix.values import CacheOptions, Prompt, Scope, Tenant

log = logging.getLogger("diskprefix")

_PROMPTS, _MAX_TOKENS, _MAX_COMPUTED = 3, 4096, 1024
"""The number of saved prompts to check, the most tokens that are restored for each, and the most tokens that are
computed."""
_RETRY_S = 60.0
"""The minimum time between a failure and the next attempt."""


class _PromptToCheck(NamedTuple):
    """A prefix of a saved prompt."""

    tenant: Tenant
    token_ids: TokenIds


class Recheck:
    """The idle task of one process."""

    def __init__(self, idle: IdleWork) -> None:
        self._idle, self._cache = idle, idle.cache
        self._left: list[_PromptToCheck] | None = None
        """The prompts that were not computed again yet; None before they are chosen."""
        self._num_equal = self._num_failed = 0
        self._retry_at = -math.inf
        """The time, on the clock of `time.monotonic`, of the next attempt after a failure."""

    @property
    def wait_s(self) -> float | None:
        """The seconds until the next attempt after a failure. None without a failure: at the start, the end of the load
        wakes the engine."""
        if self._retry_at == -math.inf or not self._cache.must_recheck:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def next_steps(self) -> Steps | None:
        return self._compare_prompts() if self._cache.must_recheck and time.monotonic() >= self._retry_at else None

    def give_up(self, reason: str) -> None:
        """Leaves out the prompt that failed. The comparison is still required."""
        log.info("[disk-cache] what an earlier version has stored is not computed again now: %s", reason)
        self._retry_at = time.monotonic() + _RETRY_S
        if self._left:
            self._left.pop()
            self._num_failed += 1

    def _compare_prompts(self) -> Steps:
        if self._cache.bits.state == "unknown":
            yield (recalled := self._idle.submit_read(self._cache.recall_bits))
            recalled.result()
            return
        if self._left is None:
            yield (chosen := self._idle.submit_read(self._chosen))
            self._left = chosen.result()
        # Bound: each round compares a prompt.
        while self._left:
            is_equal = yield from self._is_equal(self._left[-1])
            # There is no `yield` between the comparison and its consequence, so a request that comes cannot hide a
            # difference.
            if is_equal is False:
                log.warning("[disk-cache] this version computes other bits than what is stored: it is used no more")
                self._cache.note_other_bits()
                return
            self._left.pop()
            self._num_equal += is_equal is True
        if self._num_failed and not self._num_equal:
            # Nothing was compared.
            self._left, self._num_failed = None, 0
            return
        self._cache.note_same_bits()
        found_equal = counted(self._num_equal, "stored prompt")
        log.info("[disk-cache] this version computes the bits of an earlier one: %s looked at", found_equal)

    def _chosen(self) -> list[_PromptToCheck]:
        """Returns saved prompts of the model, of any tenant; without any, stored prefixes. On the reader's thread."""
        chosen: list[_PromptToCheck] = []
        with self._cache.store.reads.snapshot() as snapshot:
            tree = PrefixTree(snapshot)
            own = dict[bytes, Tenant]()
            for root, record in snapshot.roots():
                with suppress(ValueError):
                    if self._cache.owner(tenant := Tenant.parse(record.tenant)).root == root:
                        own[root] = tenant
            ends = [(name, entry.root) for name, entry in snapshot.entries() if entry.root in own]
            if not ends:
                # After a kill, a prompt may have blocks but no entry.
                stored = ((name, node_root(value)) for name, value in snapshot.records("nodes") if _is_block(value))
                ends = [*islice(((name, root) for name, root in stored if root in own), _PROMPTS)]
            for name, root in ends[:: -(-len(ends) // _PROMPTS) or 1]:
                with suppress(CacheError):
                    nodes = tree.path(name).values()
                    if any(node.is_unverified for node in nodes):
                        # It tells nothing of an earlier build.
                        continue
                    ids = np.concatenate([node.token_ids for node in nodes])
                    pictures = np.flatnonzero(ids < 0)
                    chosen.append(_PromptToCheck(own[root], ids[: min([_MAX_TOKENS, *pictures[:1].tolist()])]))
        return chosen

    def _is_equal(self, stored: _PromptToCheck) -> Generator[Future[Any] | None, None, bool | None]:
        """Returns whether the last tokens of a prompt have the state that is stored; None if they cannot be computed
        from the stored state before them."""
        options, token_ids = CacheOptions(scope=Scope("full"), tenant=stored.tenant, save=False), stored.token_ids
        with self._idle.restoring(self._idle.served, Prompt(token_ids), options) as whole:
            yield whole.reading
            end, size = whole.num_restored(), self._cache.settings.block_size
            before = token_ids[: max(1, floor_to_grid(end - 1, size))]
            with self._idle.restoring(self._idle.served, Prompt(before), options) as again:
                yield again.reading
                start, sequence = again.num_restored(), again.sequence
                if not 0 < end - start <= _MAX_COMPUTED:
                    return None
                # Bound: each step computes at least one token.
                while sequence.num_tokens < end:
                    self._idle.compute_step(self._idle.served, sequence, token_ids[:end])
                    yield None
                sequence.complete_pages()
                return _has_state_of(sequence, whole.sequence, start, end)


def _is_block(record: bytes | memoryview) -> bool:
    return node_kind(record) == NodeKind.BLOCK


def _has_state_of(sequence: KVSequence, other: KVSequence, start: int, end: int) -> bool:
    """Returns whether two sequences have equal bits for the tokens from `start` to `end`, as far as windows need them,
    and equal states."""
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
    return all(np.array_equal(own.rows[:, part], stored.rows[:, part]) for own, stored, part in pairs)
