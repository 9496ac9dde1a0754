"""Which nodes to give up: pure functions of the usage records, the tree and a time that the caller gives.

A node that others continue is never taken, whatever its score: everything that shares it would be lost. Once its last
child is chosen it becomes a leaf and competes by its own score. So what many prompts share outlives each of them, and
the score only has to rank leaves.

The score is the logarithm of the seconds of prefill that keeping a byte is expected to save:

    log2(1 + min(hits, 1))  -  age / HALF_LIFE_S  +  log2(prefill_s / stored_bytes, relative to the median)

What saves nothing by itself goes before all that has a score: a block of a layout with states that no checkpoint and
no tail continues any more. So when the deepest checkpoint of a prompt goes, its blocks go next, back to the one where
another checkpoint or prompt branches off. The checkpoints of one prompt compete with each other, each by the prefill
between it and the one before.

* What was not used for one half-life is worth half. With equal hits and cost this is least recently used, and in a
  logarithm it still is after years, when the power itself would have become 0.
* A node that was used again since it was stored is worth twice a prompt that came once, so a batch of such prompts
  does not push out what is in use. More hits add nothing: a lost node costs one miss however often it would be used
  after that, because the next request stores it again, and most hits are turns of one conversation, which ends.
* A node that took long to compute for its size is worth more: one deep in a long prompt, or of a slower model. A node
  whose time nobody measured counts as the median. The factor is bounded, so that one wrong measurement (a process
  that was suspended meanwhile) is outweighed after half an hour.

Clocks jump. What was used after `now` counts as used now, and no use is ever dated back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from diskprefix.store.schema import USAGE_DTYPE, UsageRecord

HALF_LIFE_S = 300.0
"""Replays of recorded conversations and of a production trace, with and without batches of one-off prompts: a shorter
one approaches plain least recently used, a longer one keeps conversations that have ended."""
JUST_WRITTEN_S = 10.0
_MAX_HITS = 1.0
_MAX_COST_BITS = 6.0


@dataclass(frozen=True, eq=False)
class UsageTable:
    """Usage records as columns: `records` has dtype `USAGE_DTYPE` and shape [len(names)], in the order of `names`."""

    names: list[bytes]
    records: NDArray[np.void]

    @classmethod
    def of(cls, usage: Mapping[bytes, UsageRecord]) -> UsageTable:
        records = np.zeros(len(usage), USAGE_DTYPE)
        for field in fields(UsageRecord):
            records[field.name] = [getattr(record, field.name) for record in usage.values()]
        return cls(list(usage), records)

    def ages_s(self, now: float) -> NDArray[np.float64]:
        """Seconds since each node's last use; 0 for one in the future, infinite for a time that is not a number."""
        ages: NDArray[np.float64] = now - self.records["last_used"]
        return np.maximum(np.where(np.isnan(ages), np.inf, ages), 0.0)


def decayed_hits(usage: UsageRecord, now: float) -> float:
    """The number of uses, each counted half as much for every half-life that has passed since."""
    return float(usage.hits * 2.0 ** (-max(0.0, now - usage.last_used) / HALF_LIFE_S))


def after_use(usage: UsageRecord, when: float, hits: float) -> UsageRecord:
    """The record after `hits` uses at time `when`."""
    return replace(usage, last_used=max(usage.last_used, when), hits=decayed_hits(usage, when) + hits)


def scores(table: UsageTable, now: float) -> NDArray[np.float64]:
    """How much each node is worth keeping, in powers of two; shape [len(table.names)]. See the module's docstring."""
    hits = np.clip(np.nan_to_num(table.records["hits"]), 0.0, _MAX_HITS)
    worth: NDArray[np.float64] = np.log2(1.0 + hits) - table.ages_s(now) / HALF_LIFE_S + _cost_bits(table)
    return worth


def _cost_bits(table: UsageTable) -> NDArray[np.float64]:
    """log2 of prefill seconds per byte over the median of those that are known; 0 where it is not known."""
    seconds = table.records["prefill_s"].astype(np.float64)
    known = np.isfinite(seconds) & (seconds > 0)
    bits = np.zeros(len(seconds))
    if known.any():
        bits[known] = np.log2(seconds[known] / np.maximum(table.records["stored_bytes"][known], 1))
        bits[known] -= np.median(bits[known])
    return np.clip(bits, -_MAX_COST_BITS, _MAX_COST_BITS)


def choose_victims(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    *,
    bytes_wanted: int,
    pinned: Container[bytes],
    now: float,
    saves_nothing: Callable[[bytes], bool] = lambda _name: False,
) -> list[bytes]:
    """Node hashes in the order in which they may be deleted, children before parents, the least worth first.

    Stops when their stored bytes reach `bytes_wanted` or nothing evictable is left. Never takes a node that is pinned,
    that one which stays continues, or that was written within the last `JUST_WRITTEN_S`: the request that wrote it may
    not have come to its second turn. `parent_of` may answer a root (a hash that is not in `table`). `saves_nothing`
    tells of a node that nothing continues whether it is of no use so. Ties are broken by hash, so that the choice is a
    function of its arguments.
    """
    # A time of writing far in the future is a clock that was wrong: it must not protect until that time comes.
    settled = ~(np.abs(now - table.records["created_at"]) < JUST_WRITTEN_S)
    sizes = table.records["stored_bytes"]
    victims: list[bytes] = []
    freed = 0
    for row in _leaves_first(table, parent_of, scores(table, now), settled, pinned, saves_nothing):
        if freed >= bytes_wanted:
            break
        victims.append(table.names[row])
        freed += int(sizes[row])
    return victims


def expired(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    *,
    ttl_s: float,
    pinned: Container[bytes],
    now: float,
) -> list[bytes]:
    """Node hashes not used for `ttl_s` seconds, in the order in which they may be deleted, children before parents.

    A node that one in use or pinned continues is in use, whatever its own record says.
    """
    ages = table.ages_s(now)
    rows = _leaves_first(table, parent_of, -ages, ages >= ttl_s, pinned, lambda _name: False)
    return [table.names[row] for row in rows]


def _leaves_first(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    rank: NDArray[np.float64],
    free: NDArray[np.bool_],
    pinned: Container[bytes],
    saves_nothing: Callable[[bytes], bool],
) -> Iterator[int]:
    """Rows of the leaves that are `free` and not pinned, lowest rank first, before them those that save nothing; a row
    once all that continue it were."""
    names, ranks = table.names, rank.tolist()
    children = table.records["children"].tolist()

    def leaf(row: int) -> tuple[float, bytes, int]:
        return -math.inf if saves_nothing(names[row]) else ranks[row], names[row], row

    leaves = list(map(leaf, np.flatnonzero(free & (table.records["children"] == 0)).tolist()))
    heapq.heapify(leaves)
    row_of = {name: row for row, name in enumerate(names)}
    while leaves:
        _, name, row = heapq.heappop(leaves)
        if name in pinned:
            continue
        yield row
        parent = row_of.get(parent_of(name))
        if parent is None:
            continue
        children[parent] -= 1
        if children[parent] == 0 and free[parent]:
            heapq.heappush(leaves, leaf(parent))
