"""What a process did to the files of a folder, and the state in which a disk may be at any moment of it.

`recorder.c` is preloaded into the process. It is compiled on the first use.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("recorder.c")
_HEADER = struct.Struct("<IIQQQ")
PAGE = 4096
"""Bytes of a page of the kernel's cache, which is written as a whole."""


class Op(IntEnum):
    """The records of `recorder.c`, in its order."""

    WRITE = 1
    TRUNCATE = 2
    SYNC = 3
    SYNC_FAILED = 4
    CREATE = 5
    MKDIR = 6
    RENAME = 7
    LINK = 8
    UNLINK = 9
    MARK = 10
    EXTEND = 11


@dataclass(frozen=True)
class Event:
    """One record. `path` is relative to the folder, and the text of a mark. `other` is the new name of a rename. `size`
    is the number of bytes that a barrier covers, 0 for all of the file."""

    op: Op
    ino: int
    offset: int
    size: int
    path: str
    other: str
    data: bytes


@cache
def recorder() -> Path:
    """Returns the compiled recorder. Raises `CalledProcessError`, or `OSError` without a compiler."""
    folder = tempfile.mkdtemp(prefix="diskprefix-recorder-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "recorder.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
    return library


def preloaded(root: Path, log: Path) -> dict[str, str]:
    """Returns the environment of a process that is recorded. Raises as `recorder` does."""
    return {"LD_PRELOAD": str(recorder()), "POWER_ROOT": str(root), "POWER_LOG": str(log)}


def record(arguments: Sequence[str], root: Path, log: Path, timeout_s: float = 900.0) -> list[Event]:
    """Runs Python with `arguments` and returns what it did below `root`. Raises `RuntimeError` if it failed."""
    log.unlink(missing_ok=True)
    environment = os.environ | preloaded(root, log) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}: {done.stderr[-3000:]}")
    return list(_events(log.read_bytes(), str(root.resolve())))


def _events(content: bytes, root: str) -> Iterator[Event]:
    at = 0
    while at < len(content):
        op, path_bytes, ino, offset, size = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        path, other, *_ = [*content[at : at + path_bytes].decode().split("\0"), ""]
        at += path_bytes
        num_bytes = size if op == Op.WRITE else 0
        data = content[at : at + num_bytes]
        at += num_bytes
        if op != Op.MARK:
            path, other = (os.path.relpath(name, root) if name else "" for name in (path, other))
        yield Event(Op(op), ino, offset, size, path.removesuffix(" (deleted)"), other, data)


@dataclass
class Change:
    """A change of a file that may not be on the disk yet: bytes at an offset, or a new size (`data` is None)."""

    offset: int
    data: bytes | None


def cut(change: Change, sector: int) -> list[Change]:
    """Returns the parts of a change that reach the disk one by one."""
    if change.data is None:
        return [change]
    parts, at = [], change.offset
    end = at + len(change.data)
    while at < end:
        stop = min(end, at - at % sector + sector)
        parts.append(Change(at, change.data[at - change.offset : stop - change.offset]))
        at = stop
    return parts


@dataclass
class DiskFile:
    """A file's bytes that are on the disk, and the changes since the last barrier."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def settle(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.data is None:
                resize(self.content, change.offset)
            else:
                put(self.content, change.offset, change.data)


@dataclass(frozen=True)
class NameChange:
    """A change of names: `path` gets file `file`, or a folder (-1), or vanishes (None). `old` is the name that a rename
    takes away."""

    path: str
    file: int | None
    old: str = ""


FOLDER = -1


class Disk:
    """What is on the disk, and what may be, after each event.

    After a barrier that failed, the kernel counts its changes as written, so no later barrier writes them. They are on
    the disk if `fail_keeps`.
    """

    def __init__(self, fail_keeps: bool = False) -> None:
        self.files: dict[int, DiskFile] = {}
        self.names: dict[str, int] = {}
        self.pending_names: list[NameChange] = []
        self.marks: list[str] = []
        self._by_ino: dict[int, int] = {}
        self._now: dict[str, int] = {}
        """The names as the process sees them."""
        self.fail_keeps = fail_keeps

    def load(self, root: Path) -> None:
        """Takes what is below `root` as durable, before anything is recorded."""
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            self.names[name] = FOLDER if path.is_dir() else self._new(path.lstat().st_ino)
            if path.is_file():
                self.files[self.names[name]].content += path.read_bytes()
        self._now = dict(self.names)

    def apply(self, event: Event) -> None:
        match event.op:
            case Op.WRITE:
                self._pending(event.ino).append(Change(event.offset, event.data))
            case Op.TRUNCATE:
                self._pending(event.ino).append(Change(event.offset, None))
            case Op.EXTEND:
                if (size := self.size_now(event.ino)) < event.offset:
                    self._pending(event.ino).append(Change(size, bytes(event.offset - size)))
            case Op.SYNC | Op.SYNC_FAILED:
                self._barrier(event)
            case Op.CREATE:
                self._change_name(NameChange(event.path, self._new(event.ino)))
            case Op.MKDIR:
                self._change_name(NameChange(event.path, FOLDER))
            case Op.RENAME | Op.LINK:
                old = event.path if event.op == Op.RENAME else ""
                self._change_name(NameChange(event.other, self._now.get(event.path, FOLDER), old))
            case Op.UNLINK:
                self._change_name(NameChange(event.path, None))
            case Op.MARK:
                self.marks.append(event.path)

    def size_now(self, ino: int) -> int:
        """Returns the size of a file as the process sees it."""
        file = self.files[self._by_ino[ino]]
        size = len(file.content)
        for change in file.pending:
            size = change.offset if change.data is None else max(size, change.offset + len(change.data))
        return size

    def _new(self, ino: int) -> int:
        self._by_ino[ino] = len(self.files)
        self.files[len(self.files)] = DiskFile()
        return len(self.files) - 1

    def _pending(self, ino: int) -> list[Change]:
        if ino not in self._by_ino:
            # Made without a name.
            self._new(ino)
        return self.files[self._by_ino[ino]].pending

    def _barrier(self, event: Event) -> None:
        failed = event.op == Op.SYNC_FAILED
        if event.ino in self._by_ino and self._now.get(event.path, 0) != FOLDER:
            file = self.files[self._by_ino[event.ino]]
            parts = file.pending
            if event.size:
                parts = [part for change in file.pending for part in cut(change, PAGE)]
            if not failed or self.fail_keeps:
                file.settle([part for part in parts if _is_within(part, event)])
            file.pending = [part for part in parts if not _is_within(part, event)]
        elif not failed:
            self._settle_names(event.path)

    def _settle_names(self, folder: str) -> None:
        """Makes the names in a folder durable. A rename into or out of it goes as a whole, with what came before on
        its names."""
        durable, touched, left = list[NameChange](), set[str](), list[NameChange]()
        for change in reversed(self.pending_names):
            names = {change.path, change.old} - {""}
            if folder in map(_parent, names) or names & touched:
                durable.append(change)
                touched |= names
            else:
                left.append(change)
        self.names = renamed(self.names, durable[::-1])
        self.pending_names = left[::-1]

    def _change_name(self, change: NameChange) -> None:
        self.pending_names.append(change)
        self._now = renamed(self._now, [change])


def _is_within(part: Change, event: Event) -> bool:
    """Returns whether a barrier covers a change: it reaches from the first page of its range to the last."""
    if not event.size:
        return True
    start = event.offset - event.offset % PAGE
    return part.data is not None and start <= part.offset < event.offset + event.size


def _parent(path: str) -> str:
    return str(Path(path).parent)


def renamed(names: dict[str, int], changes: Sequence[NameChange]) -> dict[str, int]:
    """Returns the names after some changes. What lies in a renamed folder goes with it."""
    names = dict(names)
    for change in changes:
        if change.old:
            names.pop(change.old, None)
            below = f"{change.old}/"
            for name in [name for name in names if name.startswith(below)]:
                names[f"{change.path}/{name.removeprefix(below)}"] = names.pop(name)
        if change.file is None:
            names.pop(change.path, None)
        else:
            names[change.path] = change.file
    return names


def put(content: bytearray, offset: int, data: bytes) -> None:
    """Writes bytes into a file's content, which grows with zeros."""
    if len(content) < offset:
        content += bytes(offset - len(content))
    content[offset : offset + len(data)] = data


def resize(content: bytearray, size: int) -> None:
    del content[size:]
    content += bytes(size - len(content))
