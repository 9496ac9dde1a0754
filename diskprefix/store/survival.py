"""Finds out in a child process whether LMDB survives a data file.

LMDB trusts its file: a damaged page number, length or free list may end the process by a signal or hold it in a loop.
So a daemon leaves a mark in the folder while it has the file open for writing (`folder.FolderLock.mark`). Whoever finds
the mark of a process that is gone lets a child go through the file before it opens it. The child reads every page of
the B-trees, as LMDB's compacting copy does, which also counts the free pages; the first page of each payload, and all
other records; and looks each key up. If nobody else has the file open, it also deletes all and fills free pages in a
transaction that it gives up: so each page is written anew, where LMDB notices that one is both free and in use.

What is left is damage that LMDB can live with. Records have checksums, so it costs the nodes that it hits.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from diskprefix.errors import StoreCorrupt
from diskprefix.store.folder import DATA, LMDB_LOCK

log = logging.getLogger("diskprefix")

_CHILD = """
import os, resource, sys
from errno import EDQUOT, ENOSPC, EROFS
import lmdb

folder, has_lock, is_alone = sys.argv[1], sys.argv[2] == "lock", sys.argv[3] == "alone"
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
room = os.stat(os.path.join(folder, "data.mdb")).st_size + (1 << 30)
with lmdb.open(folder, map_size=room, max_dbs=32, create=False, readonly=not is_alone, lock=has_lock) as env:
    with open(os.devnull, "wb") as nowhere:
        env.copyfd(nowhere.fileno(), compact=True)
    with env.begin(buffers=True) as txn:
        for name in map(bytes, list(txn.cursor().iternext(values=False))):
            is_read_later = name == b"payloads"
            database = env.open_db(name, txn=txn, create=False)
            for key, value in txn.cursor(database):
                bytes(value[:1] if is_read_later else value)
                if txn.get(key, db=database) is None:
                    sys.exit("a key that it lists is not found")
    if is_alone:
        try:
            # The pages that the last commit freed are used by the commit after the next one.
            for change in (lambda txn: txn.put(b"~", b""), lambda txn: txn.delete(b"~")):
                with env.begin(write=True) as txn:
                    change(txn)
        except lmdb.Error as error:
            if not isinstance(error, lmdb.DiskError) and getattr(error, "code", 0) not in (ENOSPC, EDQUOT, EROFS):
                raise
        with env.begin(write=True) as txn:
            names = [bytes(name) for name in txn.cursor().iternext(values=False)]
            for name in names:
                cursor = txn.cursor(env.open_db(name, txn=txn, create=False))
                while cursor.first() and cursor.delete():
                    pass
            for number in range(4096):
                size = 3000 if number % 64 else 100000
                txn.put(number.to_bytes(4, "big"), bytes(size))
            txn.abort()
"""
_ATTEMPTS = 2
"""Without a place in LMDB's lock file, a reader may meet pages that another process has just written anew."""
_PATIENCE_S = 60.0
_BYTES_PER_S = 20e6
"""A slow disk that is read here and there."""


def require_survivable(path: Path, *, is_alone: bool = False) -> None:
    """Returns if LMDB can read the file in folder `path`, if there is one. `is_alone`: no other process has it open,
    and none opens it meanwhile.

    Raises `StoreCorrupt` if LMDB refuses the file, dies of it or does not come to an end, and `OSError`.
    """
    try:
        num_bytes = (path / DATA).stat().st_size
    except FileNotFoundError:
        return
    if not num_bytes:
        return
    has_lock = not is_alone and os.access(path / LMDB_LOCK, os.W_OK)
    command = [sys.executable, "-P", "-c", _CHILD, str(path.absolute())]
    command += ["lock" if has_lock else "no lock", "alone" if is_alone else "beside others"]
    for _ in range(_ATTEMPTS):
        why = _outcome(command, _PATIENCE_S + num_bytes / _BYTES_PER_S)
        if why is None:
            return
    raise StoreCorrupt(f"{path / DATA} is damaged: {why}")


def _outcome(command: list[str], timeout_s: float) -> str | None:
    """Returns why a child failed, None if it did not."""
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except OSError as error:
        log.warning("[disk-cache] the file is opened untried, because Python cannot be started to try it: %s", error)
        return None
    except subprocess.TimeoutExpired:
        return f"LMDB was not through it after {timeout_s:.0f} s"
    if ended.returncode == 0:
        return None
    if ended.returncode < 0:
        return f"it ended a process that read it (signal {-ended.returncode})"
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a process that read it ended with {ended.returncode}"
