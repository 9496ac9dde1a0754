"""Which nodes to give up: pure functions of the usage records, the tree and a time that the caller gives.

A node that others continue is never taken, whatever its score: everything that shares it would be lost. Once its last
child is chosen it becomes a leaf and competes by its own score. So what many prompts share outlives each of them, and
the score only has to rank leaves.

The score is the logarithm of the seconds of prefill that keeping a byte is expected to save in a given time:

    log2(1 if it was used again, else p^2)  -  log2(1 + age_s)  +  log2(prefill_s / stored_bytes, over the median)

What saves nothing by itself goes before all that has a score: a block of a layout with states that no checkpoint and
no tail continues any more. So when the deepest checkpoint of a prompt goes, its blocks go next, back to the one where
another checkpoint or prompt branches off. The checkpoints of one prompt compete with each other, each by the prefill
between it and the one before.

* What was not used for twice as long is worth half: the longer nobody came, the longer it will be until somebody comes.
  That needs no constant, so it holds for a busy daemon and for an idle one. With equal use and cost this is least
  recently used, and in a logarithm it still is after years.
* p is the share of all nodes that were used again since they were stored. Where nearly all are, as the turns of agents,
  the newest turn counts nearly as much as what was used, so conversations that go on outlive those that ended. Among
  prompts that come once it counts little, so a batch of them does not push out what is in use. It is squared because
  it flatters: of what nobody used, most is gone already. More uses add nothing: a lost node costs one miss however
  often it would be used after that, as the next request stores it again, and most are turns of one conversation, which
  ends.
* A node that took long to compute for its size is worth more: one deep in a long prompt, or of a slower model. A node
  whose time nobody measured counts as the median. The factor is bounded, so that one wrong measurement (a process
  that was suspended meanwhile) is outweighed by 64 times the age.

Clocks jump. What was used after `now` counts as used now, and no use is ever dated back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diskprefix.store.schema import USAGE_DTYPE, UsageRecord

HALF_LIFE_S = 300.0
"""In so much time the hits that a usage record holds halve."""
JUST_WRITTEN_S = 10.0
_EVICT_AHEAD = 64
"""A full store makes room for this part of its budget at a time: choosing reads every node's usage record."""
_MAX_COST_BITS = 6.0
_EXPIRY_INTERVAL_S = 60.0
_OWN_EXPIRY_INTERVAL_S = 30.0
_LOOK_INTERVAL_S = 3600.0
_MAX_TTL_S = 2.0**31 - 1
_SORTED_AT_FIRST = 1024
_MOST_RESTORES = 2**32 - 1

SavesNothing: TypeAlias = Callable[[bytes], bool] | NDArray[np.bool_]
"""Whether a node is of no use where nothing continues it: asked by its name, or a mask of shape [len(table.names)]."""


@dataclass(frozen=True, eq=False)
class UsageTable:
    """Usage records as columns: `records` has dtype `USAGE_DTYPE` and shape [len(names)], in the order of `names`.

    `rows`: the row of each name, for whoever has it at hand. A row that it does not name is nobody's, and must say that
    others continue it, and be zero otherwise.
    """

    names: Sequence[bytes]
    records: NDArray[np.void]
    rows: Mapping[bytes, int] | None = None

    @classmethod
    def of(cls, usage: Mapping[bytes, UsageRecord]) -> UsageTable:
        records = np.zeros(len(usage), USAGE_DTYPE)
        for field in fields(UsageRecord):
            records[field.name] = [getattr(record, field.name) for record in usage.values()]
        return cls(list(usage), records)

    @cached_property
    def row_of(self) -> Mapping[bytes, int]:
        return {name: row for row, name in enumerate(self.names)} if self.rows is None else self.rows

    @property
    def has_own_ttls(self) -> bool:
        """Whether a node may have to go that no daemon's `--kv-cache-ttl` speaks of."""
        return bool((self.records["ttl_s"] > 0).any())

    def ages_s(self, now: float) -> NDArray[np.float64]:
        """Seconds since each node's last use; 0 for one in the future, infinite for a time that is not a number."""
        ages: NDArray[np.float64] = now - self.records["last_used"]
        return np.maximum(np.where(np.isnan(ages), np.inf, ages), 0.0)


def decayed_hits(usage: UsageRecord, now: float) -> float:
    """The number of uses, each counted half as much for every half-life that has passed since."""
    return float(usage.hits * 2.0 ** (-max(0.0, now - usage.last_used) / HALF_LIFE_S))


def after_use(usage: UsageRecord, when: float, hits: int, ttl_s: int = 0) -> UsageRecord:
    """The record after `hits` uses at time `when`, which asked for `ttl_s` as `recorded_ttl` says it."""
    return replace(
        usage,
        last_used=max(usage.last_used, when),
        hits=decayed_hits(usage, when) + hits,
        restores=min(usage.restores + hits, _MOST_RESTORES),
        ttl_s=longer_ttl(usage.ttl_s, ttl_s),
    )


def use_path(records: NDArray[np.void], when: float, hits: int, ttl_s: int = 0) -> NDArray[np.void]:
    """`after_use` of many records at once: a changed copy of `records`, dtype `USAGE_DTYPE`, shape [n]."""
    used = records.copy()
    ages = np.maximum(0.0, when - records["last_used"])
    used["hits"] = records["hits"] * 2.0 ** (-ages / HALF_LIFE_S) + hits
    used["last_used"] = np.maximum(records["last_used"], when)
    used["restores"] = np.minimum(records["restores"].astype(np.int64) + hits, _MOST_RESTORES)
    own = np.maximum(np.abs(records["ttl_s"].astype(np.int64)), abs(ttl_s))
    used["ttl_s"] = np.where((records["ttl_s"] > 0) & (ttl_s > 0), own, -own)
    return used


def expiry_interval_s(ttl_s: float, *, has_own_ttls: bool) -> float:
    """How often to look for what has expired; so much later it is gone at most.

    `ttl_s` is the daemon's time to live, 0 for none. For nodes with times of their own it is not shorter for shorter
    ones: looking reads every usage record, and clients choose these times. Without any, another process may have left
    some behind.
    """
    interval_s = _OWN_EXPIRY_INTERVAL_S if has_own_ttls else _LOOK_INTERVAL_S
    return min(interval_s, _EXPIRY_INTERVAL_S, ttl_s / 10) if ttl_s else interval_s


def recorded_ttl(ttl_s: float | None) -> int:
    """A time to live as usage records hold it: whole seconds; 0 for None, which leaves it to the daemon."""
    return 0 if ttl_s is None else math.ceil(min(max(ttl_s, 1.0), _MAX_TTL_S))


def longer_ttl(a: int, b: int) -> int:
    """The longer of two times to live, both as usage records hold them, whatever the daemon's may be."""
    own = max(abs(a), abs(b))
    return own if a > 0 and b > 0 else -own


def _limits_s(table: UsageTable, ttl_s: float) -> NDArray[np.float64]:
    """After how many seconds without a use each node may go; infinite for one that may stay for ever."""
    recorded = table.records["ttl_s"].astype(np.float64)
    default = ttl_s or math.inf
    own = np.abs(recorded)
    return np.where(recorded > 0, own, np.where(recorded < 0, np.maximum(own, default), default))


def scores(table: UsageTable, now: float) -> NDArray[np.float64]:
    """How much each node is worth keeping, in powers of two; shape [len(table.names)]. See the module's docstring."""
    worth: NDArray[np.float64] = _use_bits(table) - np.log2(1.0 + table.ages_s(now)) + _cost_bits(table)
    return worth


def _use_bits(table: UsageTable) -> NDArray[np.float64]:
    """log2 of how likely each node is to be used again, over that of one that was: 0 for these, else below."""
    used = np.clip(np.nan_to_num(table.records["hits"]), 0.0, 1.0)
    is_node = table.records["stored_bytes"] > 0
    num_used = np.count_nonzero(used[is_node])
    unused = ((num_used + 1) / (np.count_nonzero(is_node) + 2)) ** 2
    bits: NDArray[np.float64] = np.log2(unused + (1.0 - unused) * used)
    return bits


def _cost_bits(table: UsageTable) -> NDArray[np.float64]:
    """log2 of prefill seconds per byte over the median of those that are known; 0 where it is not known."""
    seconds = table.records["prefill_s"].astype(np.float64)
    known = np.isfinite(seconds) & (seconds > 0)
    bits = np.zeros(len(seconds))
    if known.any():
        bits[known] = np.log2(seconds[known] / np.maximum(table.records["stored_bytes"][known], 1))
        bits[known] -= np.median(bits[known])
    return np.clip(bits, -_MAX_COST_BITS, _MAX_COST_BITS)


def usable_bytes(limit: int) -> int:
    """What the pages that hold data may take of a limit: all less a tenth.

    The tenth is for B-tree copies, the free list, and above all for runs of free pages that are long enough for a
    piece. With 1/32, three of a hundred publications found none after ten times the budget had been written, and
    with 1/12 writing became slower (`tools/bench soak`).
    """
    return limit - limit // 10 - 2**20


def bytes_to_free(*, used: int, need: int, usable: int, budget: int) -> int:
    """How many bytes to evict before `need` more are stored; 0 if they fit beside the `used` ones."""
    excess = used + need - usable
    return max(excess, budget // _EVICT_AHEAD) if excess > 0 else 0


def choose_victims(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    *,
    bytes_wanted: int,
    pinned: Container[bytes],
    now: float,
    saves_nothing: SavesNothing | None = None,
    rank: Callable[[UsageTable, float], NDArray[np.float64]] = scores,
) -> list[bytes]:
    """Node hashes in the order in which they may be deleted, children before parents, the least worth first.

    Stops when their stored bytes reach `bytes_wanted` or nothing evictable is left. Never takes a node that is pinned,
    that one which stays continues, or that was written within the last `JUST_WRITTEN_S`: the request that wrote it may
    not have come to its second turn. `parent_of` may answer a root (a hash that is not in `table`). `saves_nothing`
    tells of a node that nothing continues whether it is of no use so, by its name or its row; None is never. `rank`
    says how much each row is worth keeping, as `scores` does. Ties are broken by hash, so that the choice is a function
    of its arguments.
    """
    # A time of writing far in the future is a clock that was wrong: it must not protect until that time comes.
    settled = ~(np.abs(now - table.records["created_at"]) < JUST_WRITTEN_S)
    sizes = table.records["stored_bytes"]
    victims: list[bytes] = []
    freed = 0
    for row in _leaves_first(table, parent_of, rank(table, now), settled, pinned, saves_nothing):
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
    """Node hashes not used for as long as was asked for, in the order in which they may be deleted, children before
    parents.

    `ttl_s` is for those that no use asked a time for; 0 keeps them. A node that one in use or pinned continues is in
    use, whatever its own record says.
    """
    ages = table.ages_s(now)
    rows = _leaves_first(table, parent_of, -ages, ages >= _limits_s(table, ttl_s), pinned, None)
    return [table.names[row] for row in rows]


def _leaves_first(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    rank: NDArray[np.float64],
    free: NDArray[np.bool_],
    pinned: Container[bytes],
    saves_nothing: SavesNothing | None,
) -> Iterator[int]:
    """Rows of the leaves that are `free` and not pinned, lowest rank first, before them those that save nothing; a row
    once all that continue it were. What has no rank goes first too.

    Few of many are asked for as a rule, so no more is sorted than that.
    """
    names, children = table.names, table.records["children"]
    rows = np.flatnonzero(free & (children == 0))
    rank = np.where(np.isnan(rank), -np.inf, rank)
    if saves_nothing is not None:
        rank[rows[_bare(table, rows, saves_nothing)]] = -np.inf
    leaves = _ascending(rank, names, rows)
    leaf = next(leaves, None)
    opened: list[tuple[float, bytes, int]] = []
    """A heap of those that became leaves meanwhile."""
    left: dict[int, int] = {}
    while leaf is not None or opened:
        if opened and (leaf is None or opened[0] < leaf):
            _, name, row = heapq.heappop(opened)
        else:
            assert leaf is not None
            (_, name, row), leaf = leaf, next(leaves, None)
        if name in pinned:
            continue
        yield row
        parent = table.row_of.get(parent_of(name))
        if parent is None:
            continue
        left[parent] = left.get(parent, int(children[parent])) - 1
        if left[parent] == 0 and free[parent]:
            is_bare = saves_nothing is not None and bool(_bare(table, np.array([parent]), saves_nothing)[0])
            heapq.heappush(opened, (-math.inf if is_bare else float(rank[parent]), names[parent], parent))


def _bare(table: UsageTable, rows: NDArray[np.intp], saves_nothing: SavesNothing) -> NDArray[np.bool_]:
    if isinstance(saves_nothing, np.ndarray):
        mask: NDArray[np.bool_] = saves_nothing[rows]
        return mask
    return np.fromiter((saves_nothing(table.names[row]) for row in rows.tolist()), np.bool_, len(rows))


def _ascending(
    rank: NDArray[np.float64], names: Sequence[bytes], rows: NDArray[np.intp]
) -> Iterator[tuple[float, bytes, int]]:
    """Rank, name and row, the lowest rank first, equal ones by name; more and more of them are sorted at a time."""
    num_wanted = _SORTED_AT_FIRST
    while len(rows):
        some, ranks = rows, rank[rows]
        if num_wanted < len(rows):
            near = ranks <= np.partition(ranks, num_wanted)[num_wanted]
            some, rows, ranks = rows[near], rows[~near], ranks[near]
        else:
            rows = rows[:0]
        numbers = some.tolist()
        yield from sorted(zip(ranks.tolist(), [names[row] for row in numbers], numbers, strict=True))
        num_wanted *= 4
