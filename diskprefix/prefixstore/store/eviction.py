"""The choice of nodes to evict: pure functions of the usage records, the tree and the time.

The least recently used leaf is evicted first, after those that are useless and were not used for an hour. A node
becomes a leaf when its last child is chosen. A use of a node also counts for all its ancestors, so a trunk is as young
as its newest branch.

Clocks jump. A use after `now` counts as a use now, and the time of the last use never becomes earlier.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from diskprefix.prefixstore.store.schema import UsageRecord

RECENT_CHECKPOINTS = 4
"""The number of checkpoints that are kept at the end of a conversation: two prompts and their replies have four."""
_EVICT_AHEAD = 64
"""A full store evicts 1/64 of its budget at a time, because choosing reads every usage record."""
_USELESS_AFTER_S = 3600.0
"""The seconds without a use after which a useless leaf is evicted before all others. What is useless to this process
may be of use to another one: a daemon of another build uses its own state, and a checkpoint may follow a block soon."""
_EXPIRY_INTERVAL_S = 60.0
_OWN_EXPIRY_INTERVAL_S = 30.0
_UNKNOWN_EXPIRY_INTERVAL_S = 3600.0
_MAX_TTL_S = 2.0**31 - 1
_MAX_RESTORES = 2**32 - 1


class UsageTable(Struct, frozen=True, eq=False, dict=True):
    """Usage records as columns: `records` has dtype `USAGE_DTYPE` and shape [len(names)], in the order of `names`.

    `rows` maps each name to its row, if the caller has such a map already. It leaves out unused rows, whose fields are
    all 0 except `children`.
    """

    names: Sequence[bytes]
    records: NDArray[np.void]
    rows: Mapping[bytes, int] | None = None

    @cached_property
    def row_of(self) -> Mapping[bytes, int]:
        return {name: row for row, name in enumerate(self.names)} if self.rows is None else self.rows

    @property
    def has_own_ttls(self) -> bool:
        """Returns whether a node may expire by its own time to live."""
        return bool((self.records["ttl_s"] > 0).any())

    def ages_s(self, now: float) -> NDArray[np.float64]:
        """Returns the seconds since each node's last use; 0 for a use in the future, infinite for NaN."""
        ages: NDArray[np.float64] = now - self.records["last_used"]
        return np.maximum(np.where(np.isnan(ages), np.inf, ages), 0.0)


def after_use(records: NDArray[np.void], when: float, hits: int, ttl_s: int = 0) -> NDArray[np.void]:
    """Returns a copy of `records`, shape [n], with `hits` uses at time `when` added. `ttl_s` is their time to live in
    the form that `recorded_ttl` returns."""
    used = records.copy()
    used["last_used"] = np.maximum(records["last_used"], when)
    used["restores"] = np.minimum(records["restores"].astype(np.int64) + hits, _MAX_RESTORES)
    own = np.maximum(np.abs(records["ttl_s"].astype(np.int64)), abs(ttl_s))
    used["ttl_s"] = np.where((records["ttl_s"] > 0) & (ttl_s > 0), own, -own)
    return used


def with_uses(usage: UsageRecord, other: UsageRecord) -> UsageRecord:
    """Returns the record of a node (`usage`) with the uses of the node that it replaces (`other`) added."""
    return usage._replace(restores=min(usage.restores + other.restores, _MAX_RESTORES))


def expiry_interval_s(ttl_s: float, *, has_own_ttls: bool) -> float:
    """Returns the seconds between two searches for expired nodes.

    `ttl_s` is the daemon's time to live, 0 for none. Times to live that clients choose do not shorten the interval,
    because a search reads every usage record. Without any known times to live, the searches go on at long intervals,
    because another process may have stored some.
    """
    interval_s = _OWN_EXPIRY_INTERVAL_S if has_own_ttls else _UNKNOWN_EXPIRY_INTERVAL_S
    return min(interval_s, _EXPIRY_INTERVAL_S, ttl_s / 10) if ttl_s else interval_s


def recorded_ttl(ttl_s: float | None) -> int:
    """Returns a time to live in the form of usage records: whole seconds, at least 1, or 0 for None (the daemon's time
    to live)."""
    return 0 if ttl_s is None else math.ceil(min(max(ttl_s, 1.0), _MAX_TTL_S))


def longer_ttl(a: int, b: int) -> int:
    """Returns the longer of two times to live, both in the form of usage records. The result is the longer one for any
    setting of the daemon."""
    own = max(abs(a), abs(b))
    return own if a > 0 and b > 0 else -own


def limits_s(recorded: ArrayLike, ttl_s: float) -> NDArray[np.float64]:
    """Returns the seconds without a use after which a node expires (infinite: never), for each recorded time to live;
    the shape is the shape of `recorded`. `ttl_s` is the daemon's time to live, 0 for none."""
    own = np.asarray(recorded, np.float64)
    return np.where(own > 0, own, np.maximum(-own, ttl_s or math.inf))


def usable_bytes(limit: int) -> int:
    """Returns the bytes that pages with data may take of a limit: nine tenths, less 1 MiB.

    The rest is for B-tree copies, the free list, and above all for runs of free pages that are long enough for a piece.
    With 1/32, three of a hundred publications got no such run after ten times the budget had been written. With 1/12,
    writing became slower.
    """
    return limit - limit // 10 - 2**20


def bytes_to_free(*, used: int, need: int, usable: int, budget: int) -> int:
    """Returns how many bytes to evict before `need` bytes are stored; 0 if they fit beside the `used` bytes."""
    excess = used + need - usable
    return max(excess, budget // _EVICT_AHEAD) if excess > 0 else 0


def must_measure(refused: int, budget: int) -> bool:
    """Returns whether a full store that `refused` bytes looks anew at what it would evict: what is refused evicts
    nothing, so nothing else would tell that the stored state is no longer used, or that there is room again."""
    return refused >= budget // _EVICT_AHEAD


def bytes_to_measure(*, used: int, usable: int, budget: int) -> int:
    """Returns how many bytes a store would evict, whose age is then measured; 0 if it has room. A store that has just
    evicted has a part of that free, and is full all the same."""
    at_once = budget // _EVICT_AHEAD
    return at_once if used + 2 * at_once > usable else 0


def age_of(table: UsageTable, victims: Sequence[bytes], now: float) -> float:
    """Returns how long a store keeps what is not used: the median seconds since the last use of the nodes that it
    evicts, at least one."""
    return float(np.median(table.ages_s(now)[[table.row_of[name] for name in victims]]))


def choose_victims(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    *,
    bytes_wanted: int,
    pinned: Container[bytes],
    now: float,
    saves_nothing: Callable[[bytes], bool] | None = None,
) -> list[bytes]:
    """Returns node names in the order in which they may be deleted: children before parents, the least recently used
    first.

    Stops when their stored bytes reach `bytes_wanted` or no more nodes may be evicted. Omits pinned nodes, and nodes
    with a child that remains. `parent_of` may return a root, which is not in `table`. `saves_nothing` returns whether
    the leaf of this name is useless; after `_USELESS_AFTER_S` it is evicted before the others. None if no leaf is
    useless. Nodes of equal age are ordered by name, so the result depends on the arguments alone.
    """
    victims: list[bytes] = []
    freed, ages = 0, table.ages_s(now)
    for row in _leaves_first(table, parent_of, ages, np.ones(len(ages), bool), pinned, saves_nothing):
        if freed >= bytes_wanted:
            break
        victims.append(table.names[row])
        freed += int(table.records["stored_bytes"][row])
    return victims


def superseded_ends(ends: Iterable[int], anchors: Container[int]) -> set[int]:
    """Returns the ends (in tokens) of those checkpoints of one conversation that later checkpoints replace. A later
    turn restores the last one. The few checkpoints before the last one serve an edited message, and `anchors` serve
    other prompts."""
    return {end for end in sorted(set(ends))[:-RECENT_CHECKPOINTS] if end not in anchors}


def expired(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    *,
    ttl_s: float,
    pinned: Container[bytes],
    now: float,
) -> list[bytes]:
    """Returns the names of expired nodes in the order in which they may be deleted: children before parents.

    `ttl_s` is the time to live of nodes that have none of their own, 0 for no limit. A node stays as long as its
    children.
    """
    ages, limits = table.ages_s(now), limits_s(table.records["ttl_s"], ttl_s)
    return [table.names[row] for row in _leaves_first(table, parent_of, ages, ages >= limits, pinned)]


def _leaves_first(
    table: UsageTable,
    parent_of: Callable[[bytes], bytes],
    ages: NDArray[np.float64],
    free: NDArray[np.bool_],
    pinned: Container[bytes],
    saves_nothing: Callable[[bytes], bool] | None = None,
) -> Iterator[int]:
    """Yields the rows of leaves that are `free` and not pinned: the useless ones, then the others, the oldest first.
    Yields a row with children after all its children."""
    names, children = table.names, table.records["children"]
    is_unused, ranks = (ages >= _USELESS_AFTER_S).tolist(), (-ages).tolist()

    def place(row: int) -> tuple[bool, float, bytes, int]:
        name = names[row]
        is_useless = saves_nothing is not None and is_unused[row] and saves_nothing(name)
        return not is_useless, ranks[row], name, row

    leaves = list(map(place, np.flatnonzero(free & (children == 0)).tolist()))
    heapq.heapify(leaves)
    left: dict[int, int] = {}
    # Bound: a node becomes a leaf once, when its count of children falls to 0.
    while leaves:
        *_, name, row = heapq.heappop(leaves)
        if name in pinned:
            continue
        yield row
        parent = table.row_of.get(parent_of(name))
        if parent is None:
            continue
        left[parent] = left.get(parent, int(children[parent])) - 1
        if left[parent] == 0 and free[parent]:
            heapq.heappush(leaves, place(parent))
