"""A store that has only names. It chooses victims with the code of the real store."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import accumulate, islice, takewhile

import numpy as np
from msgspec import Struct

from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.store.eviction import (
    UsageTable,
    after_use,
    age_of,
    bytes_to_free,
    bytes_to_measure,
    choose_victims,
    expired,
    expiry_interval_s,
    limits_s,
    longer_ttl,
    must_measure,
    recorded_ttl,
    superseded_ends,
    usable_bytes,
    with_uses,
)
from diskprefix.prefixstore.store.schema import USAGE_DTYPE, NodeKind, UsageRecord
from diskprefix.tokens import TokenIds, num_common

_UNUSED = np.zeros((), USAGE_DTYPE)
_UNUSED["children"] = 1


class NewEntry(Struct, frozen=True):
    """A node to store. `num_bytes` is its size in the file, `prefill_s` the time to compute its tokens. For `ttl_s` see
    `store.changes.NewNode`. `token_ids` (int32, little-endian) are given for models that are exact at every token: the
    node is found by a prefix of its tokens, and replaces shorter nodes."""

    node: Node
    num_bytes: int
    prefill_s: float
    ttl_s: float | None = None
    token_ids: bytes | None = None


class SimulatedStore:
    """Nodes within a budget in bytes, None for no limit. `has_states`: a block without a later checkpoint or tail is
    useless (see `store.eviction`). Nodes expire `ttl_s` seconds after their last use; 0 keeps them."""

    def __init__(self, budget_bytes: int | None, *, has_states: bool, ttl_s: float = 0.0) -> None:
        self.stays_s = math.inf
        """As `Evictor.stays_s`."""
        self._refused_bytes = 0
        self.used_bytes = 0
        self.evicted = 0
        self.dropped = 0
        self._budget_bytes = budget_bytes
        self._has_states = has_states
        self._ttl_s = ttl_s
        self._expired_at = -math.inf
        self._has_own_ttls = False
        self._rows: dict[bytes, int] = {}
        self._nodes: list[Node] = []
        self._records = np.zeros(1024, USAGE_DTYPE)
        """A row for each node. Rows of deleted nodes are unused (see `UsageTable`) until a new node takes them."""
        self._free: list[int] = []
        self._token_ids: dict[bytes, bytes] = {}
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """The sorted token ids and names of the nodes that continue a node or root."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def parent(self, name: bytes) -> bytes:
        """Returns the name of a node's parent, or b"" if the node is not stored."""
        row = self._rows.get(name)
        return b"" if row is None else self._nodes[row].parent

    def has(self, node: Node, token_ids: bytes) -> bool:  # noqa: ARG002 (here a name is proof; see `NodeIndex`)
        return node.name in self._rows

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        """Yields the child of `parent` with the longest common prefix with these tokens, and the child's tokens."""
        children, wanted = self._children.get(parent, []), token_ids.tobytes()
        # The neighbours in sorted order have the longest common prefix.
        place = bisect_left(children, (wanted, b""))
        near = children[max(place - 1, 0) : place + 1]
        if near:
            _, name, listed = max((num_common(wanted, listed), name, listed) for listed, name in near)
            yield self._nodes[self._rows[name]], np.frombuffer(listed, dtype=np.int32)

    def num_children(self, parent: bytes) -> int:
        row = self._rows.get(parent)
        return 0 if row is None else int(self._records["children"][row])

    def pass_time(self, now: float) -> None:
        """Removes expired nodes, at the daemon's intervals."""
        if now < self._expired_at + expiry_interval_s(self._ttl_s, has_own_ttls=self._has_own_ttls):
            return
        self._expired_at = now
        if self._ttl_s or self._has_own_ttls:
            self._delete(expired(self._table(), self.parent, ttl_s=self._ttl_s, pinned=frozenset(), now=now))

    def publish(self, entries: Iterable[NewEntry], last_node: bytes | None, ttl_s: float | None, now: float) -> bool:
        """Stores nodes, parents first, and evicts others if needed. If not all fit, stores the first ones, as a daemon
        does. Returns False if none fits. `last_node` is the last node of the used path."""
        new = [entry for entry in entries if entry.node.name not in self._rows]
        for entry in tuple(new):
            if (longer := self._longer(entry)) is not None:
                new.remove(entry)
                last_node = longer if last_node == entry.node.name else last_node
        keep = {entry.node.parent for entry in new} | ({last_node} if last_node else set())
        num_fitting = self._make_room([entry.num_bytes for entry in new], keep, now)
        if num_fitting < len(new):
            self.dropped += 1
            last_node = new[num_fitting - 1].node.name if num_fitting else None
        for entry in new[:num_fitting]:
            self._put(entry, now)
            self._remove_shorter(entry)
        if last_node is not None:
            self.touch(last_node, now, 0, ttl_s)
        return num_fitting > 0 or not new

    def remove_superseded(self, nodes: PromptNodes, entry: NewEntry, anchors: Container[int]) -> None:
        """Removes the checkpoints of a prompt that `entry` supersedes, as `Changes.remove_superseded` does."""
        last, own_s = entry.node, limits_s(recorded_ttl(entry.ttl_s), self._ttl_s)
        names_at = {last.end: [last.name]}
        for num_blocks in range(last.position // nodes.block_size + 1):
            parent = nodes.parent(num_blocks)
            if num_blocks and self.num_children(parent) < 2:
                continue
            for node in nodes.checkpoints(num_blocks, last.end):
                row = self._rows.get(node.name)
                if row is None or node.name == last.name:
                    continue
                if limits_s(self._records["ttl_s"][row], self._ttl_s) <= own_s:
                    names_at.setdefault(node.end, []).append(node.name)
        for position in superseded_ends(names_at, anchors):
            self._delete(names_at[position])

    def touch(self, name: bytes, now: float, hits: int, ttl_s: float | None) -> None:
        """Records a use of a node and its ancestors."""
        path: list[int] = []
        while (row := self._rows.get(name)) is not None:
            path.append(row)
            name = self._nodes[row].parent
        if path:
            self._has_own_ttls |= ttl_s is not None
            rows = np.array(path)
            self._records[rows] = after_use(self._records[rows], now, hits, recorded_ttl(ttl_s))

    def _put(self, entry: NewEntry, now: float) -> None:
        node = entry.node
        if not self._free:
            self._free.append(len(self._nodes))
            self._nodes.append(node)
            if len(self._nodes) > len(self._records):
                self._records = np.concatenate([self._records, np.zeros_like(self._records)])
        row = self._rows[node.name] = self._free.pop()
        self._nodes[row] = node
        if entry.token_ids is not None:
            self._token_ids[node.name] = entry.token_ids
            insort(self._children.setdefault(node.parent, []), (entry.token_ids, node.name))
        self._has_own_ttls |= entry.ttl_s is not None
        self._records[row] = (now, now, entry.prefill_s, 0, entry.num_bytes, 0, recorded_ttl(entry.ttl_s))
        self.used_bytes += entry.num_bytes
        if (parent := self._rows.get(node.parent)) is not None:
            self._records["children"][parent] += 1

    def _remove_shorter(self, entry: NewEntry) -> None:
        """Removes the nodes that a new one replaces, as `Changes.remove_shorter` does."""
        if entry.token_ids is None or len(self._children[entry.node.parent]) == 1:
            return
        own = self._rows[entry.node.name]
        for size in range(len(entry.token_ids), -1, -4):
            prefix = entry.token_ids[:size]
            for name in [name for listed, name in self._starting_with(entry.node.parent, prefix) if listed == prefix]:
                shorter, node = self._usage(self._rows[name]), self._usage(own)
                if name != entry.node.name and longer_ttl(shorter.ttl_s, node.ttl_s) == node.ttl_s:
                    self._delete([name])
                    self._records[own] = with_uses(node, shorter)

    def _longer(self, entry: NewEntry) -> bytes | None:
        """Returns a stored node that makes a new one redundant, or None. `Changes.put_node` has the same rule."""
        if not entry.token_ids:
            return None
        for listed, name in self._starting_with(entry.node.parent, entry.token_ids):
            has_logits = self._nodes[self._rows[name]].kind == NodeKind.TAIL and entry.node.kind == NodeKind.BLOCK
            if len(listed) > len(entry.token_ids) or has_logits:
                return name
        return None

    def _starting_with(self, parent: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields token ids and names of the children of `parent` that start with these token ids."""
        children = self._children.get(parent, [])
        following = islice(children, bisect_left(children, (prefix, b"")), None)
        return takewhile(lambda child: child[0].startswith(prefix), following)

    def _usage(self, row: int) -> UsageRecord:
        return UsageRecord(*self._records[row].item())

    def _make_room(self, sizes: Sequence[int], keep: Container[bytes], now: float) -> int:
        """Evicts nodes to make room for nodes of these sizes. Returns how many of the first ones fit."""
        if self._budget_bytes is None:
            return len(sizes)
        usable = usable_bytes(self._budget_bytes)
        wanted = bytes_to_free(used=self.used_bytes, need=sum(sizes), usable=usable, budget=self._budget_bytes)
        if not wanted:
            return len(sizes)
        victims = self._victims(wanted, keep, now)
        self._measure(victims, now)
        room = usable - self.used_bytes
        room += sum(int(self._records["stored_bytes"][self._rows[name]]) for name in victims)
        num_fitting = sum(total <= room for total in accumulate(sizes))
        if num_fitting:
            self._delete(victims)
            self.evicted += len(victims)
        return num_fitting

    def _victims(self, bytes_wanted: int, keep: Container[bytes], now: float) -> list[bytes]:
        saves_nothing: Callable[[bytes], bool] | None = None
        if self._has_states:
            saves_nothing = lambda name: self._nodes[self._rows[name]].kind == NodeKind.BLOCK  # noqa: E731
        return choose_victims(
            *(self._table(), self.parent),
            bytes_wanted=bytes_wanted,
            pinned=keep,
            now=now,
            saves_nothing=saves_nothing,
        )

    def refuse(self, num_bytes: int, now: float) -> None:
        """Counts state that is not stored for want of room, and measures again how long state stays, as `Evictor`
        does."""
        self._refused_bytes += num_bytes
        budget = self._budget_bytes
        if budget is None or not must_measure(self._refused_bytes, budget):
            return
        self._refused_bytes = 0
        wanted = bytes_to_measure(used=self.used_bytes, usable=usable_bytes(budget), budget=budget)
        if wanted:
            self._measure(self._victims(wanted, frozenset(), now), now)
        else:
            self.stays_s = math.inf

    def _measure(self, victims: Sequence[bytes], now: float) -> None:
        self.stays_s = age_of(self._table(), victims, now) if victims else self.stays_s

    def _delete(self, names: Sequence[bytes]) -> None:
        for name in names:
            row = self._rows.pop(name)
            node = self._nodes[row]
            if (token_ids := self._token_ids.pop(name, None)) is not None:
                children = self._children[node.parent]
                del children[bisect_left(children, (token_ids, name))]
                if not children:
                    del self._children[node.parent]
            self.used_bytes -= int(self._records["stored_bytes"][row])
            if (parent := self._rows.get(node.parent)) is not None:
                self._records["children"][parent] -= 1
            self._records[row] = _UNUSED
            self._free.append(row)

    def _table(self) -> UsageTable:
        return UsageTable([node.name for node in self._nodes], self._records[: len(self._nodes)], self._rows)
