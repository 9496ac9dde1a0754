"""Looking for what was deleted: in the bytes of a store's file, and in the memory of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path

from diskprefix.store.note_record import NoteKind
from diskprefix.store.schema import DATABASES
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store

_LEAST_BYTES = 12
"""A shorter piece of a record may stand in the file by chance."""
_AT_ONCE_BYTES = 64 << 20

Record = tuple[str, bytes, bytes]


def records(folder: Path) -> set[Record]:
    with closing(Store(folder, read_only=True)) as store, store.snapshot() as snapshot:
        return records_in(snapshot)


def records_in(snapshot: Snapshot) -> set[Record]:
    """All that is stored, but for counts, which change with each use and say nothing of a prompt."""
    return {
        (database, key, bytes(value))
        for database in DATABASES
        if database not in ("meta", "usage")
        for key, value in snapshot.records(database)
        if database != "notes" or key[16] != NoteKind.SAVINGS
    }


def traces(records: set[Record]) -> set[bytes]:
    """Pieces of records: what names them, and of what they hold the middle and the end. Checksums and names of others
    stand at the beginning."""
    found = {key[16:] if database in ("seen", "ghosts", "notes") else key for database, key, _ in records}
    for _, _, value in records:
        found |= {value[len(value) // 2 :][:64], value[-64:]}
    return {trace for trace in found if len(trace) >= _LEAST_BYTES and trace.strip(b"\0")}


def left_in(folder: Path, wanted: set[bytes]) -> list[bytes]:
    content = (folder / "data.mdb").read_bytes()
    return [trace for trace in wanted if trace in content]


def is_in_memory(pid: int, wanted: bytes) -> bool:
    """Says whether the memory of a process has these bytes."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            addresses, access, *_ = line.split()
            if "r" in access and not line.rstrip().endswith(("[vvar]", "[vvar_vclock]", "[vsyscall]")):
                start, end = (int(address, 16) for address in addresses.split("-"))
                if any(wanted in part for part in _parts(memory, start, end)):
                    return True
    return False


def _parts(memory: FileIO, start: int, end: int) -> Iterator[bytes]:
    try:
        while start < end:
            memory.seek(start)
            part = memory.read(min(_AT_ONCE_BYTES, end - start))
            if not part:
                return
            yield part
            start += len(part)
    except OSError:
        """It was given back meanwhile, or cannot be read."""
