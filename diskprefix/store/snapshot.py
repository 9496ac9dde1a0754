"""The read side of the store: one consistent view of the tree, its payloads, entries and history."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import lmdb

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec import decode_tokens
from diskprefix.store.schema import (
    DATABASES,
    EntryRecord,
    NodeRecord,
    RootRecord,
    UsageRecord,
    decode_entry,
    decode_node,
    decode_root,
    decode_usage,
    history_key,
)
from diskprefix.tokens import HASH_BYTES, TokenIds

log = logging.getLogger("diskprefix")

_HISTORY_MAX_TOKENS = 1 << 24


class Snapshot:
    """One consistent view of the store. Not thread-safe, except that payload views may be read from any thread."""

    def __init__(self, databases: Mapping[str, Any], txn: lmdb.Transaction) -> None:
        self._databases = databases
        self._txn = txn

    def node(self, name: bytes) -> NodeRecord | None:
        """The index record of a node. Raises `StoreCorrupt`."""
        value = self._get("nodes", name)
        return None if value is None else decode_node(value)

    def payload(self, name: bytes) -> memoryview | None:
        """The stored bytes of a payload, a view of the memory map: good until the snapshot is closed."""
        view: memoryview | None = self._get("payloads", name)
        return view

    def usage(self, name: bytes) -> UsageRecord | None:
        value = self._get("usage", name)
        return None if value is None else decode_usage(value)

    def usages(self) -> dict[bytes, UsageRecord]:
        """Every node's usage record, for choosing what to evict."""
        return {bytes(key): decode_usage(value) for key, value in self._txn.cursor(self._databases["usage"])}

    def parent(self, name: bytes) -> bytes:
        """The node or root that a node continues; empty if there is no such node."""
        value = self._get("nodes", name)
        return b"" if value is None else bytes(value[:HASH_BYTES])

    def root(self, root: bytes) -> RootRecord | None:
        value = self._get("roots", root)
        return None if value is None else decode_root(value)

    def entries(self) -> Iterator[tuple[bytes, EntryRecord]]:
        for key, value in self._txn.cursor(self._databases["entries"]):
            yield bytes(key), decode_entry(value)

    def path(self, name: bytes) -> list[tuple[bytes, NodeRecord]]:
        """The nodes from the first block to `name`. Raises `StoreCorrupt` when one is missing or they do not join."""
        path: list[tuple[bytes, NodeRecord]] = []
        end: int | None = None
        while True:
            node = self.node(name)
            if node is None:
                raise StoreCorrupt(f"node {name.hex()} is missing from its path")
            if end is not None and node.end != end:
                raise StoreCorrupt(f"node {name.hex()} ends at {node.end}, its child starts at {end}")
            path.append((name, node))
            if node.position == 0:
                return path[::-1]
            name, end = node.parent, node.position

    def recent_prompts(self, root: bytes, limit: int) -> list[TokenIds]:
        """The last `limit` remembered prompts of a root, oldest first. A record that cannot be read is left out."""
        prompts: list[TokenIds] = []
        for _, value in self.history(root):
            if len(prompts) >= limit:
                break
            try:
                prompts.append(decode_tokens(value, max_tokens=_HISTORY_MAX_TOKENS))
            except StoreCorrupt as error:
                log.warning("[disk-cache] history: %s", error)
        return prompts[::-1]

    def counts(self) -> dict[str, int]:
        """Number of `entries`, `blocks` (tails included) and `prompts` in the history."""
        names = {"entries": "entries", "blocks": "nodes", "prompts": "history"}
        return {key: self._stat(name)["entries"] for key, name in names.items()}

    def used_bytes(self) -> int:
        """Bytes of the pages that hold data; free pages inside the file are not counted."""
        stats = [self._stat(name) for name in DATABASES]
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def history(self, root: bytes) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """Keys and encoded prompts of a root, newest first."""
        cursor = self._txn.cursor(self._databases["history"])
        past_the_end = history_key(root, 2**64 - 1)
        found = cursor.set_range(past_the_end)
        found = cursor.prev() if found else cursor.last()
        while found and bytes(cursor.key()).startswith(root):
            yield bytes(cursor.key()), cursor.value()
            found = cursor.prev()

    def _get(self, database: str, key: bytes) -> Any:
        return self._txn.get(key, db=self._databases[database])

    def _stat(self, database: str) -> Any:
        return self._txn.stat(self._databases[database])
