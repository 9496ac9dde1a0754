"""The identity of a store: its format, its id, and the secret that seeds the names of its nodes."""

from __future__ import annotations

import secrets
import struct
from pathlib import Path
from typing import Any

from diskprefix.errors import StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.store.changes import Changes
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.prefixstore.store.schema import DATABASES, FORMAT, FORMAT_VERSION, NAMES, NamesRecord, encode_record
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES

_U32 = struct.Struct("<I")


def identify(path: Path, env: Environment, now: float, namespace: NamespaceKey | None) -> NamesRecord:
    """Reads a store's identity, or writes it into a new store at time `now`, then opens all databases. `namespace`
    seeds the names of a new store; without it a random secret does.

    Nothing else in the file is used before its format is known. Raises `StoreFormatError` if the store has another
    format, `StoreCorrupt` if its identity is damaged, and `StoreUnavailable` if the file is not a store.
    """
    if not env.has_database("meta"):
        if not env.is_empty():
            env.require_survivable()
            lost = StoreCorrupt(f"{path / DATA} is damaged: its databases are not there")
            raise lost if env.is_ours else foreign_file(path)
        if env.read_only:
            raise StoreCorrupt(f"{path} holds no diskprefix store")
    env.open_databases(["meta"])
    with env.transaction() as txn:
        is_new = not any(Snapshot(env.databases, txn).keys("meta"))
    if is_new and env.read_only:
        raise StoreCorrupt(f"{path} holds no diskprefix store")
    if is_new:
        with env.transaction(write=True) as txn:
            # Another process may have written its identity meanwhile.
            if not any(Snapshot(env.databases, txn).keys("meta")):
                _create(Changes(env.databases, txn, now), now, namespace)
    with env.transaction() as txn:
        names = _read_identity(path, env, txn)
    env.open_databases(DATABASES)
    return names


def require_namespace(path: Path, names: NamesRecord, namespace: NamespaceKey | None) -> None:
    """Raises `StoreUnavailable` unless the names of the store in folder `path` are seeded with `namespace`."""
    if names.namespace == (namespace.digest if namespace else b""):
        return
    if not names.namespace:
        problem = "its names are not made with a namespace key; leave --namespace-key-file out"
    elif namespace is None:
        problem = "its names are made with a namespace key; give the file with --namespace-key-file"
    else:
        problem = "its names are made with another namespace key; give that one with --namespace-key-file"
    raise StoreUnavailable(f"{path / DATA}: {problem}, or choose another --kv-cache-dir")


def _create(changes: Changes, now: float, namespace: NamespaceKey | None) -> None:
    names = NamesRecord(
        store_id=secrets.token_bytes(HASH_BYTES),
        secret=namespace.names_seed if namespace else secrets.randbits(64),
        created_at=now,
        namespace=namespace.digest if namespace else b"",
    )
    changes.put_meta(FORMAT, _U32.pack(FORMAT_VERSION))
    changes.put_meta(NAMES, encode_record(NAMES.encode(), names))


def _read_identity(path: Path, env: Environment, txn: Any) -> NamesRecord:
    """Returns a store's identity."""
    snapshot = Snapshot(env.databases, txn)
    version, names = snapshot.meta(FORMAT), snapshot.meta(NAMES)
    if version is None and names is None:
        raise foreign_file(path)
    try:
        (number,) = _U32.unpack(version or b"")
        if number != FORMAT_VERSION:
            raise StoreFormatError(
                f"{path / DATA} has format {number}, and this version of diskprefix reads format {FORMAT_VERSION}: "
                "move the file away to start afresh, or choose another --kv-cache-dir"
            )
        return snapshot.names()
    except (struct.error, StoreCorrupt) as error:
        raise StoreCorrupt(
            f"{path / DATA}: the identity of the store is damaged; move the file away to start afresh"
        ) from error


def foreign_file(path: Path) -> StoreUnavailable:
    """Returns the error for a `data.mdb` of another program: a store neither adds to such a file nor moves it."""
    return StoreUnavailable(f"{path / DATA} belongs to another program; choose another --kv-cache-dir")
