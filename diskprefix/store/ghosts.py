"""The prompts that were seen, as the store keeps them: leaves of a tree of ghosts.

A ghost is a block of which the token ids are kept, whether its state is stored or not. It has the name that the block
has in the tree of nodes. A prompt is the name of its last full block and the token ids behind it, so prompts that share
a beginning share its ghosts. A ghost goes with the last one that continues it: it counts ghosts and prompts. The
prompts of a root are numbered in the order in which they came; their times say how old they are. `README.md` gives the
format byte by byte.

What was seen under a root goes as a whole if a record of it is damaged: it costs no more than a few guesses.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import Changes
from diskprefix.store.schema import SEEN_TIMES, verified, with_checksum
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES, ID_BYTES, TokenIds, block_hash, block_hashes

log = logging.getLogger("diskprefix")

GHOST_SHARE = 16
"""The prompts that were seen, of all roots, take at most this part of the budget, with their ghosts."""
GROUP_BYTES = 8
PROMPTS_AT_ONCE = 64
"""Prompts removed in one transaction."""
_NUMBER = struct.Struct(">Q")
_PROMPT = struct.Struct(f"<{HASH_BYTES}s{GROUP_BYTES}s")
_GHOST = struct.Struct(f"<I{HASH_BYTES}s")
_NO_GROUP = bytes(GROUP_BYTES)
KEY_BYTES = {"seen": HASH_BYTES + _NUMBER.size, "ghosts": 2 * HASH_BYTES}
"""The lengths of the keys, by database."""


class GhostRecord(NamedTuple):
    """A block that `uses` ghosts and prompts continue. `token_ids` are int32, little-endian."""

    uses: int
    parent: bytes
    token_ids: bytes


class Leaf(NamedTuple):
    """The record of a prompt that came at `came_at`, in seconds since the epoch. `ttl_s` is its time to live in
    seconds, 0 for the daemon's. `parent` is its last full block, or its root."""

    came_at: float
    ttl_s: int
    parent: bytes
    group: bytes
    rest: bytes


@dataclass(frozen=True, eq=False)
class SeenRecord:
    """A prompt that was seen: its key and its record, and the names and ghosts of its full blocks."""

    key: bytes
    leaf: Leaf
    names: tuple[bytes, ...]
    ghosts: tuple[GhostRecord, ...]

    @property
    def token_ids(self) -> TokenIds:
        return np.frombuffer(b"".join([*(ghost.token_ids for ghost in self.ghosts), self.leaf.rest]), "<i4").astype(
            np.int32
        )


def see(
    changes: Changes,
    root: bytes,
    token_ids: TokenIds,
    *,
    secret: int,
    block_size: int,
    group: bytes = b"",
    ttl_s: int = 0,
) -> None:
    """Adds a prompt as the newest of a root. `secret` is the store's. `group` has 8 bytes or none, `ttl_s` the form of
    `eviction.recorded_ttl`."""
    content = token_ids.astype("<i4").tobytes()
    names = block_hashes(secret, root, content, block_size)
    num_known = len(names)
    while num_known and not changes.has_record("ghosts", root + names[num_known - 1]):
        num_known -= 1
    try:
        if num_known:
            _count(changes, root, names[num_known - 1], 1)
    except StoreCorrupt as error:
        forget_root(changes, root, error)
        num_known = 0
    path, size = [root, *names], ID_BYTES * block_size
    for number in range(num_known, len(names)):
        ghost = GhostRecord(1, path[number], content[number * size : (number + 1) * size])
        _put_ghost(changes, root, names[number], ghost)
    newest = next(changes.last_under("seen", root), (b"", b""))[0]
    number = _NUMBER.unpack_from(newest, HASH_BYTES)[0] + 1 if newest else 0
    leaf = Leaf(changes.now, ttl_s, path[-1], group, content[len(names) * size :])
    key = root + _NUMBER.pack(number)
    changes.put_seen("seen", key, encode_leaf(key, leaf))


def forget(changes: Changes, keys: Iterable[bytes]) -> int:
    """Removes prompts, given by their keys, with the ghosts that no other needs. Returns how many there were."""
    gone = 0
    for key in keys:
        value, root = changes.record("seen", key), key[:HASH_BYTES]
        try:
            if value is not None:
                name = decode_leaf(key, value).parent
                while name != root and (parent := _count(changes, root, name, -1)) is not None:
                    name = parent
                gone += changes.delete_record("seen", key)
        except StoreCorrupt as error:
            gone += forget_root(changes, root, error)
    return gone


def forget_root(changes: Changes, root: bytes, why: StoreCorrupt | str) -> int:
    """Removes all that was seen under a root. Returns the number of prompts."""
    log.warning("[disk-cache] what was seen under root %s is forgotten: %s", root.hex(), why)
    gone = 0
    for database in ("ghosts", "seen"):
        keys = list(changes.keys_under(database, root))
        gone = sum(changes.delete_record(database, key) for key in keys)
    return gone


def newest_first(snapshot: Snapshot, root: bytes, most_bytes: float = math.inf) -> Iterator[SeenRecord]:
    """Yields the prompts of a root, of all groups, newest first, until their ghosts have more than `most_bytes` of
    token ids. Each ghost is read once. A prompt that cannot be read is left out."""
    ghosts: dict[bytes, GhostRecord] = {}
    num_bytes = 0
    for key, value in snapshot.last_under("seen", root):
        if num_bytes > most_bytes:
            break
        try:
            leaf = decode_leaf(key, value)
            names: list[bytes] = []
            name = leaf.parent
            while name != root:
                if name not in ghosts:
                    ghosts[name] = read_ghost(snapshot, root, name)
                    num_bytes += len(ghosts[name].token_ids)
                names.append(name)
                name = ghosts[name].parent
        except StoreCorrupt as error:
            log.warning("[disk-cache] a recent prompt is left out: %s", error)
            continue
        path = tuple(reversed(names))
        yield SeenRecord(key, leaf, path, tuple(ghosts[name] for name in path))


def recent_prompts(snapshot: Snapshot, root: bytes, limit: int) -> list[tuple[bytes, TokenIds]]:
    """Returns the last `limit` prompts of a root, oldest first, as pairs of group and token ids. The group is empty if
    a prompt has none."""
    found = islice(newest_first(snapshot, root), limit)
    return [(prompt.leaf.group, prompt.token_ids) for prompt in found][::-1]


def beyond(snapshot: Snapshot, limit_bytes: int, now: float) -> list[bytes]:
    """Returns the keys of all prompts, oldest first, if they take more than the limit with their ghosts; else none."""
    if snapshot.seen_bytes() <= limit_bytes:
        return []
    # A time in the future is that of a clock that was wrong: that prompt is no younger than others.
    return [key for _, key in sorted((min(came_at, now), key) for key, came_at, _ in snapshot.seen_times())]


def has_expired(now: float, came_at: float, own_s: int, ttl_s: float) -> bool:
    """Returns whether a prompt's time to live is over. `own_s` is its own, 0 for the daemon's `ttl_s`, 0 for none. A
    time far in the future, from a clock that was wrong, must not keep a prompt."""
    limit_s = own_s or ttl_s
    return bool(limit_s) and not abs(now - came_at) < limit_s


def encode_leaf(key: bytes, leaf: Leaf) -> bytes:
    fixed = SEEN_TIMES.pack(leaf.came_at, leaf.ttl_s) + _PROMPT.pack(leaf.parent, leaf.group or _NO_GROUP)
    return with_checksum(key, fixed + leaf.rest)


def decode_leaf(key: bytes, value: bytes | memoryview) -> Leaf:
    """Raises `StoreCorrupt`."""
    packed = verified(key, value)
    start = SEEN_TIMES.size + _PROMPT.size
    if len(key) != KEY_BYTES["seen"] or len(packed) < start or (len(packed) - start) % ID_BYTES:
        raise StoreCorrupt(f"a recent prompt of {len(value)} bytes under a key of {len(key)} bytes cannot be")
    parent, group = _PROMPT.unpack_from(packed, SEEN_TIMES.size)
    came_at, ttl_s = SEEN_TIMES.unpack_from(packed)
    return Leaf(came_at, ttl_s, parent, b"" if group == _NO_GROUP else group, packed[start:])


def encode_ghost(key: bytes, ghost: GhostRecord) -> bytes:
    return with_checksum(key, _GHOST.pack(ghost.uses, ghost.parent) + ghost.token_ids)


def decode_ghost(key: bytes, value: bytes | memoryview) -> GhostRecord:
    """Raises `StoreCorrupt`."""
    packed = verified(key, value)
    if len(key) != KEY_BYTES["ghosts"] or len(packed) <= _GHOST.size or (len(packed) - _GHOST.size) % ID_BYTES:
        raise StoreCorrupt(f"a ghost of {len(value)} bytes under a key of {len(key)} bytes cannot be")
    uses, parent = _GHOST.unpack_from(packed)
    return GhostRecord(uses, parent, packed[_GHOST.size :])


def read_ghost(snapshot: Snapshot, root: bytes, name: bytes) -> GhostRecord:
    """Raises `StoreCorrupt`, also if there is none of this name."""
    value = snapshot.record("ghosts", root + name)
    if value is None:
        raise StoreCorrupt(f"the ghost {name.hex()} is missing")
    return decode_ghost(root + name, value)


class SeenCheck:
    """Checks what was seen, as one snapshot has it. `secret` is the store's."""

    def __init__(self, snapshot: Snapshot, secret: int) -> None:
        self._snapshot = snapshot
        self._secret = secret

    def check(self, database: str, key: bytes, value: bytes) -> None:
        """Raises `StoreCorrupt` if a record of `seen` or `ghosts` is damaged, or does not fit the others."""
        root = key[:HASH_BYTES]
        if database == "seen":
            parent = decode_leaf(key, value).parent
        else:
            ghost = decode_ghost(key, value)
            parent, name = ghost.parent, key[HASH_BYTES:]
            if block_hash(self._secret, parent, ghost.token_ids) != name:
                raise StoreCorrupt("its name is not the hash of its parent and its tokens")
            if ghost.uses != self._uses[key]:
                raise StoreCorrupt(f"it counts {ghost.uses} uses, and has {self._uses[key]}")
        if parent != root and not self._snapshot.has_record("ghosts", root + parent):
            raise StoreCorrupt("the ghost that it continues is missing")

    @cached_property
    def _uses(self) -> Counter[bytes]:
        """The number of ghosts and prompts that continue each ghost, by its key. Damaged ones continue none."""
        uses: Counter[bytes] = Counter()
        for database, decode in (("seen", decode_leaf), ("ghosts", decode_ghost)):
            for key, value in self._snapshot.records(database):
                with suppress(StoreCorrupt):
                    uses[key[:HASH_BYTES] + decode(key, value).parent] += 1
        return uses


def _put_ghost(changes: Changes, root: bytes, name: bytes, ghost: GhostRecord) -> None:
    changes.put_seen("ghosts", root + name, encode_ghost(root + name, ghost))


def _count(changes: Changes, root: bytes, name: bytes, number: int) -> bytes | None:
    """Adds to the uses of a ghost, and removes it when it has none. Returns its parent if it was removed."""
    ghost = read_ghost(changes, root, name)
    if ghost.uses + number > 0:
        _put_ghost(changes, root, name, ghost._replace(uses=ghost.uses + number))
        return None
    changes.delete_record("ghosts", root + name)
    return ghost.parent
