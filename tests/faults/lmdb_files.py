"""Real LMDB files like the store's, and code that uses every part of one, for the tests of the file check."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import lmdb

DATABASES = (b"meta", b"roots", b"nodes", b"children", b"usage", b"payloads", b"entries", b"history", b"notes")


def open_file(folder: Path, **options: Any) -> Any:
    """An environment like the store's, except that it does not wait for the disk."""
    folder.mkdir(exist_ok=True)
    return lmdb.open(str(folder), map_size=1 << 30, max_dbs=16, meminit=False, **({"sync": False} | options))


def payload_key(name: bytes, index: int) -> bytes:
    return name + index.to_bytes(2, "big")


def child_keys(name: bytes) -> list[bytes]:
    """The keys of a node in the index of children: two that are nearly as long as LMDB allows, and a short one."""
    return [name[::-1] + bytes([part]) + (29 * name)[:size] + name for part, size in enumerate((464, 464, 72))]


class Churn:
    """Puts and deletes as the store does: a node has an index record, three keys in the index of children, a usage
    record and up to three payloads."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env = env
        self.random = random.Random(seed)
        self.names: list[bytes] = []
        self.databases = {name: env.open_db(name) for name in DATABASES}

    def publish(self, nodes: int, payload_bytes: int) -> None:
        """Add `nodes` in one transaction, with payloads of half to all of `payload_bytes`."""
        with self.env.begin(write=True) as txn:
            txn.put(b"format", b"\2\0\0\0", db=self.databases[b"meta"])
            for _ in range(nodes):
                name = self.random.randbytes(16)
                self.names.append(name)
                txn.put(name, self.random.randbytes(1200), db=self.databases[b"nodes"])
                txn.put(name, self.random.randbytes(32), db=self.databases[b"usage"])
                for key in child_keys(name):
                    txn.put(key, b"", db=self.databases[b"children"])
                for index in range(self.random.randrange(1, 4)):
                    size = self.random.randrange(payload_bytes // 2, payload_bytes)
                    txn.put(payload_key(name, index), b"\xab" * size, db=self.databases[b"payloads"])

    def evict(self, nodes: int) -> None:
        """Delete `nodes` in one transaction."""
        with self.env.begin(write=True) as txn:
            for _ in range(min(nodes, len(self.names))):
                name = self.names.pop(self.random.randrange(len(self.names)))
                txn.delete(name, db=self.databases[b"nodes"])
                txn.delete(name, db=self.databases[b"usage"])
                for key in child_keys(name):
                    txn.delete(key, db=self.databases[b"children"])
                for index in range(3):
                    txn.delete(payload_key(name, index), db=self.databases[b"payloads"])

    def rewrite(self) -> None:
        """Put one value three times in one transaction: long, short, long."""
        name = self.random.choice(self.names)
        with self.env.begin(write=True) as txn:
            for size in (90_000, 10, 30_000, 5000):
                txn.put(payload_key(name, 0), b"\xcd" * size, db=self.databases[b"payloads"])


def build_churned(folder: Path, *, seed: int = 1, payload_bytes: int = 60_000) -> Path:
    """Returns a data file after many publications and deletions: trees of depth 2, a free list of several pages."""
    env = open_file(folder)
    churn = Churn(env, seed)
    for _ in range(40):
        churn.publish(churn.random.randrange(3, 9), payload_bytes)
        if len(churn.names) > 90:
            churn.evict(churn.random.randrange(12))
    churn.evict(30)
    churn.publish(3, payload_bytes)
    churn.rewrite()
    env.close()
    return folder / "data.mdb"


def build_with_reader(folder: Path, *, seed: int = 1) -> Path:
    """Returns a data file in which a reader kept pages from being reused: the free list is a tree of depth 2."""
    env = open_file(folder)
    churn = Churn(env, seed)
    churn.publish(60, 20_000)
    with env.begin():
        for _ in range(60):
            churn.publish(2, 20_000)
            churn.evict(2)
    env.close()
    return folder / "data.mdb"


def use_hard(folder: Path, seed: int) -> str:
    """Read everything and change much, twice. Returns "used", or the error with which LMDB refused."""
    rng = random.Random(seed)
    try:
        for _ in range(2):
            env = open_file(folder)
            try:
                _read_everything(env)
                for _ in range(4):
                    _change(env, rng)
                env.set_mapsize(0)
                _read_everything(env)
            finally:
                env.close()
        _compact(folder)
    except lmdb.Error as error:
        return f"{type(error).__name__}: {error}"
    return "used"


def _read_everything(env: Any) -> None:
    """Read every key and value in both directions, and find every key."""
    with env.begin() as txn:
        for name in DATABASES:
            with suppress(lmdb.NotFoundError):
                database = env.open_db(name, txn, create=False)
                cursor = txn.cursor(database)
                forward = [(key, crc32(value)) for key, value in cursor.iternext()]
                backward = [key for key, _ in cursor.iterprev()]
                assert [key for key, _ in forward] == backward[::-1]
                assert all(crc32(txn.get(key, db=database)) == sum_ for key, sum_ in forward)
                assert all(txn.cursor(database).set_range(key) for key, _ in forward)


def _change(env: Any, rng: random.Random) -> None:
    """Commit puts of new and old keys, with small and large values, and deletions."""
    databases = {name: env.open_db(name) for name in DATABASES}
    with env.begin(write=True) as txn:
        payloads, nodes = databases[b"payloads"], databases[b"nodes"]
        for name, database in databases.items():
            keys = [key for key, _ in txn.cursor(database).iternext()]
            for key in rng.sample(keys, len(keys) // 6):
                txn.delete(key, db=database)
            for key in rng.sample(keys, len(keys) // 6):
                txn.put(key, rng.randbytes(rng.choice((24, 1200, 1900, 9000))), db=database)
            txn.put(rng.randbytes(16), name * rng.randrange(100), db=database)
        for _ in range(4):
            name = rng.randbytes(16)
            txn.put(name, rng.randbytes(1200), db=nodes)
            txn.put(payload_key(name, 0), b"\xef" * rng.randrange(1000, 200_000), db=payloads)
        if rng.random() < 0.1:
            txn.drop(databases[b"history"], delete=False)


def _compact(folder: Path) -> None:
    env = open_file(folder)
    try:
        copy = folder / "copy"
        copy.mkdir()
        env.copy(str(copy), compact=True)
    finally:
        env.close()
