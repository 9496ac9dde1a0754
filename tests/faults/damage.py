"""Changes the records of a closed store with LMDB, for tests of verification and repair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from diskprefix.prefixstore.store.schema import (
    DATABASES,
    NamesRecord,
    NodeRecord,
    UsageRecord,
    decode_node,
    decode_record,
    decode_usage,
    encode_node,
    encode_usage,
)


class Records:
    """The raw records of a store, in one write transaction."""

    def __init__(self, env: Any, txn: Any) -> None:
        self._databases = {name: env.open_db(name.encode(), txn=txn) for name in DATABASES}
        self._txn = txn

    @property
    def secret(self) -> int:
        return decode_record(NamesRecord, b"names", self.get("meta", b"names")).secret

    def get(self, database: str, key: bytes) -> bytes:
        value = self._txn.get(key, db=self._databases[database])
        assert value is not None, f"no record {key.hex()} in {database}"
        return bytes(value)

    def put(self, database: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> None:
        assert self._txn.delete(key, db=self._databases[database])

    def keys(self, database: str) -> list[bytes]:
        return [bytes(key) for key in self._txn.cursor(self._databases[database]).iternext(keys=True, values=False)]

    def flip(self, database: str, key: bytes, at: int) -> None:
        """Flip one bit in byte `at` of a record."""
        value = bytearray(self.get(database, key))
        value[at] ^= 1
        self.put(database, key, bytes(value))

    def change_node(self, name: bytes, **changes: Any) -> None:
        """Rewrite a node record with a good checksum."""
        node: NodeRecord = decode_node(name, self.get("nodes", name))
        self.put("nodes", name, encode_node(name, replace(node, **changes)))

    def change_usage(self, name: bytes, **changes: Any) -> None:
        usage: UsageRecord = decode_usage(self.get("usage", name))
        self.put("usage", name, encode_usage(usage._replace(**changes)))


@contextmanager
def damaged(folder: Path) -> Iterator[Records]:
    """Yields the raw records of the store in `folder`, which no process has open."""
    env = open_lmdb(folder, max_dbs=len(DATABASES), map_size=256 << 20)
    try:
        with env.begin(write=True) as txn:
            yield Records(env, txn)
    finally:
        env.close()
