"""Which nodes to give up, as a pure function: leaves first, least recently used first.

A node that others continue is never taken, whatever its age: everything that shares it would be lost. Once its last
child is chosen it becomes a leaf and competes by its own last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping

from diskprefix.store.schema import UsageRecord


def choose_victims(
    usage: Mapping[bytes, UsageRecord],
    parent_of: Callable[[bytes], bytes],
    *,
    bytes_wanted: int,
    pinned: Container[bytes],
) -> list[bytes]:
    """Node hashes in the order in which they may be deleted, children before parents.

    Stops when their stored bytes reach `bytes_wanted` or nothing evictable is left. `parent_of` may answer a root
    (a hash that is not in `usage`). Ties are broken by hash, so that the choice is a function of its arguments.
    """
    children = {name: record.children for name, record in usage.items() if record.children}
    leaves = [(r.last_used, name) for name, r in usage.items() if not r.children and name not in pinned]
    heapq.heapify(leaves)
    victims: list[bytes] = []
    freed = 0
    while leaves and freed < bytes_wanted:
        _, name = heapq.heappop(leaves)
        victims.append(name)
        freed += usage[name].stored_bytes
        parent = parent_of(name)
        if parent in children:
            children[parent] -= 1
            if children[parent] == 0 and parent not in pinned:
                heapq.heappush(leaves, (usage[parent].last_used, parent))
    return victims
