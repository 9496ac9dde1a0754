"""What a store says of itself in the database `meta`: its format, its id, and the secret that seeds its names."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from diskprefix.errors import StoreCorrupt, StoreFormatError
from diskprefix.store.changes import Changes
from diskprefix.store.environment import Environment
from diskprefix.store.folder import DATA
from diskprefix.store.opening import foreign_file
from diskprefix.store.schema import DATABASES, FORMAT_VERSION, identity_checksum
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES

_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")


@dataclass(frozen=True)
class Names:
    """What the names of a store's nodes are made with: the store's id (16 bytes), and the secret that seeds them."""

    store_id: bytes
    secret: int


def identify(path: Path, env: Environment, now: float) -> Names:
    """Read a store's identity, or write it into a new store at time `now`, then open all databases.

    Nothing else in the file is used before its format is known. Raises `StoreFormatError` if the store has another
    format, `StoreCorrupt` if its identity is damaged, and `StoreUnavailable` if the file is not a store.
    """
    env.open_databases(["meta"])
    if _is_empty(env):
        if env.read_only:
            raise StoreCorrupt(f"{path} holds no diskprefix store")
        with env.transaction(write=True) as txn:
            changes = Changes(env.databases, txn, now)
            # Another process may have written its identity meanwhile.
            if not any(changes.keys("meta")):
                _create(changes, now)
    with env.transaction() as txn:
        names = _read(path, Snapshot(env.databases, txn))
    env.open_databases(DATABASES)
    return names


def _is_empty(env: Environment) -> bool:
    with env.transaction() as txn:
        return not any(Snapshot(env.databases, txn).keys("meta"))


def _create(changes: Changes, now: float) -> None:
    store_id, secret = secrets.token_bytes(HASH_BYTES), secrets.randbits(64)
    for key, value in (
        ("format", _U32.pack(FORMAT_VERSION)),
        ("store_id", store_id),
        ("secret", _U64.pack(secret)),
        ("created_at", _F64.pack(now)),
        ("checksum", _U64.pack(identity_checksum(FORMAT_VERSION, store_id, secret, now))),
    ):
        changes.put_meta(key, value)


def _read(path: Path, snapshot: Snapshot) -> Names:
    meta = {key: snapshot.meta(key) or b"" for key in ("format", "store_id", "secret", "created_at", "checksum")}
    if not any(meta.values()):
        raise foreign_file(path)
    damaged = StoreCorrupt(f"{path / DATA}: the identity of the store is damaged; move the file away to start afresh")
    try:
        version = _U32.unpack(meta["format"])[0]
        if version != FORMAT_VERSION:
            raise StoreFormatError(
                f"{path / DATA} has format {version}, and this version of diskprefix reads format {FORMAT_VERSION}: "
                "move the file away to start afresh, or choose another --kv-cache-dir"
            )
        secret, created_at = _U64.unpack(meta["secret"])[0], _F64.unpack(meta["created_at"])[0]
        expected = _U64.unpack(meta["checksum"])[0]
    except struct.error as error:
        raise damaged from error
    store_id = meta["store_id"]
    if len(store_id) != HASH_BYTES or expected != identity_checksum(version, store_id, secret, created_at):
        raise damaged
    return Names(store_id, secret)
