"""Seen prompts in the store: leaves in the tree of nodes.

The path of a seen prompt is its full blocks. A block of the path whose state is not stored is a *ghost*: a node with
token ids and without payload. The record of a prompt has the name of its last full block and the token ids after that
block, so prompts that share a prefix share the nodes of the prefix. A node counts the seen prompts that continue it,
and its children on the paths of seen prompts; a ghost with count 0 is removed. The prompts of a root are numbered in
the order in which they came. `FORMAT.md` gives the format byte by byte.

If the record of a prompt or of a block on its path is damaged, all seen prompts of its root are forgotten. That costs
only a few guesses of the policy.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.schema import NodeKind, NodeRecord, PromptRecord, decode_record
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES, TokenIds, TokenPath

log = logging.getLogger("diskprefix")

PROMPTS_AT_ONCE = 64
"""Prompts removed in one transaction."""
_KEPT_BYTES = 32 << 20
_NUMBER = struct.Struct(">Q")


class SeenRecord(Struct, frozen=True, eq=False):
    """A prompt that was seen: its key, its record, and its full blocks by name."""

    key: bytes
    record: PromptRecord
    blocks: dict[bytes, NodeRecord]

    @property
    def token_ids(self) -> TokenIds:
        rest = np.frombuffer(self.record.rest, "<i4").astype(np.int32)
        return np.concatenate([*(block.token_ids for block in self.blocks.values()), rest])


def see(changes: Changes, path: TokenPath, group: bytes = b"", ttl_s: int = 0) -> None:
    """Adds a prompt as the newest one of its root. If one of its blocks is damaged, forgets the seen prompts of the
    root instead. `group` has 8 bytes or none; `ttl_s` is as `eviction.recorded_ttl` returns it."""
    root, size, num_blocks = path.root, path.block_size, path.num_blocks
    newest = next(changes.last_under("seen", root), (b"", b""))[0]
    if newest and len(newest) != HASH_BYTES + _NUMBER.size:
        changes.forget_seen(root, f"a key of {len(newest)} bytes has no number")
        newest = b""
    try:
        for number in reversed(range(num_blocks)):
            tokens = path.token_ids[number * size : (number + 1) * size]
            ghost = NodeRecord(path.parent(number), root, number * size, tokens, NodeKind.GHOST, 0, 0, 0)
            if changes.count_seen(path.parent(number + 1), 1, ghost).seen_children > 1:
                break
    except StoreCorrupt as error:
        changes.forget_seen(root, error)
        return
    number = _NUMBER.unpack_from(newest, HASH_BYTES)[0] + 1 if newest else 0
    rest = path.token_ids[num_blocks * size :].astype("<i4").tobytes()
    prompt = PromptRecord(came_at=changes.now, parent=path.parent(num_blocks), rest=rest, group=group, ttl_s=ttl_s)
    changes.put_prompt(root + _NUMBER.pack(number), prompt)


def forget_prompts(changes: Changes, keys: Iterable[bytes]) -> int:
    """Removes prompts, given by their keys, and the ghosts that no other prompt needs. Returns the number of removed
    prompts."""
    num_removed = 0
    for key in keys:
        value, root = changes.get_record("seen", key), key[:HASH_BYTES]
        try:
            if value is not None:
                name = decode_record(PromptRecord, key, value).parent
                # Bound: a count that would be negative raises an error.
                while name != root and not (block := changes.count_seen(name, -1)).seen_children:
                    name = block.parent
                num_removed += changes.delete_record("seen", key)
        except StoreCorrupt as error:
            num_removed += changes.forget_seen(root, error)
    return num_removed


def newest_first(snapshot: Snapshot, root: bytes, max_bytes: float = math.inf) -> Iterator[SeenRecord]:
    """Yields the prompts of a root, of all groups, newest first, until more than `max_bytes` were read. Leaves out
    prompts that cannot be read."""
    blocks, num_bytes = _LastBlocks(snapshot), 0
    for key, value in snapshot.last_under("seen", root):
        if num_bytes + blocks.read_bytes > max_bytes:
            break
        num_bytes += len(value)
        try:
            yield _seen(key, value, blocks)
        except StoreCorrupt as error:
            log.warning("[disk-cache] a recent prompt is left out: %s", error)


def seen_prompt(snapshot: Snapshot, key: bytes) -> SeenRecord:
    """Returns a prompt by its key. Raises `StoreCorrupt`."""
    return _seen(key, snapshot.listed("seen", key), _LastBlocks(snapshot))


def _seen(key: bytes, value: bytes | memoryview, blocks: _LastBlocks) -> SeenRecord:
    root, record, path = key[:HASH_BYTES], decode_record(PromptRecord, key, value), dict[bytes, NodeRecord]()
    name, position = record.parent, math.inf
    # Bound: positions fall.
    while name != root:
        path[name] = block = blocks.block(name)
        if block.position >= position:
            raise StoreCorrupt(f"the blocks before {name.hex()} lead around in a circle")
        name, position = block.parent, block.position
    return SeenRecord(key, record, dict(reversed(path.items())))


class _LastBlocks:
    """Reads blocks of a snapshot. Keeps the most recently used blocks in memory, up to `_KEPT_BYTES` of token ids,
    because prompts share blocks. `read_bytes` counts the token ids that were read, in bytes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.read_bytes = 0
        self._snapshot = snapshot
        self._kept: OrderedDict[bytes, NodeRecord] = OrderedDict()
        self._kept_bytes = 0

    def block(self, name: bytes) -> NodeRecord:
        """Returns a block or ghost. Raises `StoreCorrupt` if it is missing or damaged."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        block = self._snapshot.node_or_ghost(name)
        if block is None:
            raise StoreCorrupt(f"the block {name.hex()} is missing")
        self._kept[name] = block
        self._kept_bytes += block.token_ids.nbytes
        self.read_bytes += block.token_ids.nbytes
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].token_ids.nbytes
        return block


def has_expired(now: float, came_at: float, own_s: int, ttl_s: float) -> bool:
    """Returns whether a prompt has expired. `own_s` is its own time to live in seconds; if that is 0, the daemon's
    `ttl_s` holds (0: none). A time far in the future, from a wrong clock, must not keep a prompt."""
    limit_s = own_s or ttl_s
    return bool(limit_s) and not abs(now - came_at) < limit_s
