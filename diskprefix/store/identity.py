"""What a store says of itself in the database `meta`: its format, its id, and the secret that seeds its names."""

from __future__ import annotations

import secrets
import struct
from pathlib import Path

from diskprefix.errors import StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.changes import Changes
from diskprefix.store.environment import Environment
from diskprefix.store.folder import DATA
from diskprefix.store.opening import foreign_file
from diskprefix.store.schema import DATABASES, FORMAT_VERSION, NamesRecord, decode_record, encode_record
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES

_FORMAT, _NAMES = "format", "names"
_U32 = struct.Struct("<I")


def identify(path: Path, env: Environment, now: float, namespace: NamespaceKey | None) -> NamesRecord:
    """Read a store's identity, or write it into a new store at time `now`, then open all databases. `namespace` seeds
    the names of a new store; without it they are seeded with a secret of its own.

    Nothing else in the file is used before its format is known. Raises `StoreFormatError` if the store has another
    format, `StoreCorrupt` if its identity is damaged, and `StoreUnavailable` if the file is not a store.
    """
    env.open_databases(["meta"])
    with env.transaction() as txn:
        is_new = not any(Snapshot(env.databases, txn).keys("meta"))
    if is_new and env.read_only:
        raise StoreCorrupt(f"{path} holds no diskprefix store")
    if is_new:
        with env.transaction(write=True) as txn:
            changes = Changes(env.databases, txn, now)
            # Another process may have written its identity meanwhile.
            if not any(changes.keys("meta")):
                _create(changes, now, namespace)
    with env.transaction() as txn:
        names = _read(path, Snapshot(env.databases, txn))
    env.open_databases(DATABASES)
    return names


def require_namespace(path: Path, names: NamesRecord, namespace: NamespaceKey | None) -> None:
    """Raises `StoreUnavailable` unless the names of the store in folder `path` are seeded as `namespace` says."""
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
    changes.put_meta(_FORMAT, _U32.pack(FORMAT_VERSION))
    changes.put_meta(_NAMES, encode_record(_NAMES.encode(), names))


def names_of(snapshot: Snapshot) -> NamesRecord:
    """Returns what the names of an open store are made with. Raises `StoreCorrupt`."""
    return decode_record(NamesRecord, _NAMES.encode(), snapshot.meta(_NAMES) or b"")


def _read(path: Path, snapshot: Snapshot) -> NamesRecord:
    version, names = snapshot.meta(_FORMAT), snapshot.meta(_NAMES)
    if version is None and names is None:
        raise foreign_file(path)
    try:
        (found,) = _U32.unpack(version or b"")
        if found != FORMAT_VERSION:
            raise StoreFormatError(
                f"{path / DATA} has format {found}, and this version of diskprefix reads format {FORMAT_VERSION}: "
                "move the file away to start afresh, or choose another --kv-cache-dir"
            )
        return decode_record(NamesRecord, _NAMES.encode(), names or b"")
    except (struct.error, StoreCorrupt) as error:
        raise StoreCorrupt(
            f"{path / DATA}: the identity of the store is damaged; move the file away to start afresh"
        ) from error
