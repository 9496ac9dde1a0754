"""Opens an image of a disk as a daemon does, and compares what is there with what was acknowledged."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.native.library import operators
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.epochs import Epochs
from diskprefix.prefixstore.store.folder import DATA, LOCK, FileMark
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.opening import DAMAGED
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import remove_damaged, verify_index
from diskprefix.runtime.files.packed_file import PackedFile, UnusableFile
from tests.faults.power import deeds, prompts
from tests.faults.power.images import UNORDERED, Image
from tests.prefixstore.store.building import Clock, names_of_every_run, read_payload, recent_prompts

Promise: TypeAlias = Literal["kept", "exact"]
""""kept": all that was acknowledged is there. "exact": nothing is wrong, but it may be missing."""

PROBE = 60
"""The prompt that is saved into every image."""
HISTORY = 8
"""The recent prompts of a model that `prompts.publication` keeps."""
TWICE = 4
"""One image of so many is started twice, and every one where something may be missing."""
WEAK_KINDS = ("meta page torn in its sector",)
_LATER_S = 1e6


class Wrong(Exception):
    """An image that is not as promised."""


@dataclass
class Account:
    """What was acknowledged at the moment of an image."""

    saved: list[int] = field(default_factory=list)
    """In the order in which they were saved."""
    noted: set[int] = field(default_factory=set)
    """Prompts with a note."""
    deleted: set[int] = field(default_factory=set)
    copied: bool = False
    replaced: bool = False
    imported: bool = False
    made: bool = False
    written: str | None = None

    @classmethod
    def of(cls, before: Sequence[int], marks: Sequence[str]) -> Account:
        account = cls(saved=[*before], noted={*before})
        for values in map(json.loads, marks):
            account._add(values)
        return account

    def _add(self, values: dict[str, Any]) -> None:
        if "saved" in values:
            self.saved = [n for n in (*self.saved, values["saved"]) if n not in values["gone"]]
        if "noted" in values:
            self.noted.add(values["noted"])
        if "deleting" in values:
            self.saved.remove(values["deleting"])
            self.noted.discard(values["deleting"])
        if "deleted" in values:
            self.deleted.add(values["deleted"])
        self.copied |= "copied" in values
        self.replaced |= "replaced" in values
        self.imported |= "imported" in values
        self.made |= "made" in values
        if "written" in values:
            self.written = values.get("version", "whole")


@dataclass(frozen=True)
class Recorded:
    """A deed that was recorded. `before` are the prompts that were on the disk, `final` the files at its end."""

    name: str
    before: tuple[int, ...] = ()
    promise: Promise = "kept"
    final: Mapping[str, bytes] = field(default_factory=dict)


def check(recorded: Recorded, image: Image, marks: Sequence[str], root: Path) -> None:
    """Writes an image below `root` and looks at it. Raises `Wrong`."""
    logging.disable(logging.CRITICAL)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, mode=0o700)
    image.write(root)
    account = Account.of(recorded.before, marks)
    is_weak = recorded.promise == "exact" or image.kind in WEAK_KINDS
    _CHECKS[recorded.name](_Look(recorded, image, account, root, is_weak))


@dataclass(frozen=True)
class _Look:
    recorded: Recorded
    image: Image
    account: Account
    root: Path
    is_weak: bool

    def store(
        self,
        place: str,
        saved: Sequence[int],
        *,
        noted: Collection[int] | None = None,
        has_history: bool = True,
        budget_bytes: int = deeds.BUDGET_BYTES,
    ) -> None:
        """Starts a daemon's store that must hold `saved` and the notes of `noted` (by default those of the account),
        some of them twice: then all records are checked, unless the disk may have damaged some that nobody has read."""
        folder, keeps = self.root / place, budget_bytes > deeds.TIGHT_BYTES
        live = partial(_live, folder, _numbers(self.recorded), budget_bytes)
        (folder / DAMAGED).unlink(missing_ok=True)
        # The history also has prompts that were evicted.
        recent = saved[1 - HISTORY :] if keeps and has_history else ()
        noted = self.account.noted if noted is None else noted
        found = live({*saved}, lambda store: self._require_remembered(store, recent, noted), is_weak=self.is_weak)
        if not self.is_weak and self.image.digest()[0] % TWICE:
            return
        (folder / DAMAGED).unlink(missing_ok=True)
        again = live({*found, PROBE} if keeps else {PROBE}, _pass if self.is_weak else _require_clean)
        if (folder / DAMAGED).exists() or not again:
            raise Wrong("the second start found damage again")

    def _require_remembered(self, store: Store, recent: Collection[int], noted: Collection[int]) -> None:
        """Compares the history and the notes. What is in `recent` and `noted` must be there."""
        numbers = _numbers(self.recorded)
        sent = {_token_ids(number): number for number in numbers}
        notes, found, left = Notes(store, lambda: None), set[int](), set[int]()
        with store.snapshot() as snapshot:
            for root in {_root(number) for number in numbers}:
                for _, token_ids in recent_prompts(snapshot, root, HISTORY):
                    if token_ids.tobytes() not in sent:
                        raise Wrong("the history has a prompt that nobody sent")
                    found.add(sent[token_ids.tobytes()])
        for number in numbers:
            content = notes.get(_root(number), "", deeds.NOTE, str(number))
            if content is not None and content != _note_content(number):
                raise Wrong(f"wrong bytes: note of prompt {number}")
            left |= set() if content is None else {number}
        if self.is_weak:
            return
        if lost := {*recent} - found:
            raise Wrong(f"acknowledged and lost: prompts {sorted(lost)} in the history")
        if lost := {*noted} - left:
            raise Wrong(f"acknowledged and lost: notes of prompts {sorted(lost)}")
        if back := self.account.deleted & (found | left):
            raise Wrong(f"deleted and remembered: prompts {sorted(back)}")


def _live(
    folder: Path,
    numbers: Sequence[int],
    budget_bytes: int,
    saved: set[int],
    and_then: Callable[[Store], None],
    *,
    is_weak: bool = False,
) -> set[int]:
    """One life of a daemon. Returns the prompts that were there whole at its start. On a drive that loses what it has
    acknowledged, it is the life after one that may have died of the file."""
    if is_weak:
        leave_mark(folder)
    with _opened(folder, budget_bytes) as store:
        if (folder / DAMAGED).exists() and saved and not is_weak:
            raise Wrong("the file was moved aside")
        found = {number for number in numbers if _is_whole(store, number, is_weak)}
        if not is_weak and (lost := saved - found):
            raise Wrong(f"acknowledged and lost: prompts {sorted(lost)}")
        and_then(store)
        _save(store, PROBE)
        if not _is_whole(store, PROBE, False):
            raise Wrong("what was saved afterwards is not there")
    return found


def _pass(_store: Store) -> None:
    """Where the disk may have damaged records that nobody has read."""


def _require_clean(store: Store) -> None:
    if problems := verify_index(store).problems:
        raise Wrong(f"not clean: {problems[0]}")


def leave_mark(folder: Path) -> None:
    """Leaves what a process leaves behind that had the store open for writing before the machine was started."""
    if folder.exists():
        with suppress(FileNotFoundError):
            mark = FileMark(boot="another", file=(folder / DATA).stat().st_ino)
            (folder / LOCK).touch(mode=0o600)
            (folder / LOCK).write_bytes(msgspec.json.encode(mark))


@contextmanager
def _opened(folder: Path, budget_bytes: int) -> Iterator[Store]:
    try:
        with names_of_every_run():
            store = Store(
                folder,
                budget_bytes=budget_bytes,
                clock=Clock(deeds.START_S + _LATER_S),
                on_corruption="quarantine",
                serving=True,
            )
    except CacheError as error:
        raise Wrong(f"does not open: {error}") from error
    if store.problem:
        raise Wrong(f"cannot be written: {store.problem}")
    try:
        yield store
    except CacheError as error:
        raise Wrong(f"fails: {error}") from error
    finally:
        store.close()


def _is_whole(store: Store, number: int, is_weak: bool) -> bool:
    """Compares what is there of a prompt, byte for byte. A damaged node is removed, as a daemon does."""
    publication = _publication(store.secret, store, number)
    damaged: NewNode | None = None
    with store.snapshot() as snapshot:
        for node in publication.nodes:
            try:
                if not _is_stored(snapshot, node):
                    return False
            except StoreCorrupt as error:
                if not is_weak:
                    raise Wrong(f"damaged: {error}") from error
                damaged = node
                break
    if damaged is not None:
        store.quarantine(damaged.name, damaged.parent)
    return damaged is None


_publications: dict[tuple[int, int], Publication] = {}


def _publication(secret: int, store: Store, number: int) -> Publication:
    if (secret, number) not in _publications:
        _publications[secret, number] = prompts.publication(store, number)
    return replace(_publications[secret, number], epoch=store.epochs.of(""))


def warm_up(recorded: Recorded) -> None:
    """Makes what every image is compared with, before a process is forked for each moment."""
    store: Any = SimpleNamespace(secret=7, epochs=Epochs(bytes(16), 7))
    for number in _numbers(recorded):
        _publication(7, store, number)
        _note_content(number)


def _numbers(recorded: Recorded) -> list[int]:
    """The prompts that a deed may have saved, and the one that is saved afterwards."""
    return [*(deeds.MEDIUM[:14] if recorded.name == "evict" else deeds.SMALL[:12]), PROBE]


def _is_stored(snapshot: Snapshot, node: NewNode) -> bool:
    token_ids = node.token_ids.tobytes()
    if not snapshot.has(node.name, node.parent, node.position, node.kind, token_ids):
        return False
    if read_payload(snapshot, node) != b"".join(node.payload):
        raise Wrong(f"wrong bytes: node {node.name.hex()}")
    return True


def _save(store: Store, number: int) -> None:
    """Saves a prompt. A damaged record is removed first, as the writer does."""
    publication = _publication(store.secret, store, number)
    try:
        store.publish(publication)
    except StoreCorrupt:
        remove_damaged(store)
        store.publish(publication)


@cache
def _token_ids(number: int) -> bytes:
    return prompts.token_ids(number).tobytes()


@cache
def _root(number: int) -> bytes:
    return prompts.root(number)


_note_content = cache(deeds.note_content)


def _compact(look: _Look) -> None:
    look.store(deeds.KV, look.account.saved)
    left = {path.name for path in (look.root / deeds.KV).iterdir()} - {DATA, *UNORDERED}
    if left:
        raise Wrong(f"left behind: {sorted(left)}")


def _backup(look: _Look) -> None:
    look.store(deeds.KV, look.account.saved)
    place = look.root / deeds.COPY
    if look.account.copied or (place / DATA).exists():
        look.store(deeds.COPY, look.account.saved)


def _restore(look: _Look) -> None:
    """The old store or the new one, and after its end the new one."""
    other, before = deeds.SMALL[5:9], look.recorded.before
    new = [*other, *(number for number in look.account.saved if number not in before)]
    if look.account.replaced:
        look.store(deeds.KV, new, noted=other)
    else:
        backup = look.root.with_name(f"{look.root.name}-second")
        try:
            look.store(deeds.KV, look.account.saved)
        except Wrong:
            shutil.rmtree(backup, ignore_errors=True)
            backup.mkdir(mode=0o700)
            look.image.write(backup)
            _Look(look.recorded, look.image, look.account, backup, look.is_weak).store(deeds.KV, new, noted=other)
    look.store(deeds.OTHER_KV, other, noted=other)


def _exchange(look: _Look) -> None:
    name = "entry.safetensors"
    _same(look, name, {look.recorded.final[name]}, is_there=look.account.written is not None)
    look.store(deeds.KV, look.account.saved)
    if look.account.imported:
        look.store(deeds.OTHER_KV, deeds.SMALL[:1], noted=(), has_history=False, budget_bytes=16 << 20)


def _profile(look: _Look) -> None:
    """The settings are whole or not there, which the next launch sees. A record of later settings would have it leave
    the earlier ones as they are."""
    name, versions = "agents/one/settings.json", ("first", "second")
    texts = {version: deeds.settings_text(version).encode() for version in versions}
    _same(look, name, {*texts.values()}, is_there=False)
    record = look.image.files.get("agents/one/written.json")
    if record is None:
        return
    try:
        digests = set(json.loads(record).values())
    except ValueError as error:
        raise Wrong(f"the record of what was written is damaged: {record[:40]!r}") from error
    found = look.image.files.get(name)
    if found == texts["first"] and hashlib.sha256(texts["second"]).hexdigest() in digests:
        raise Wrong("the record is newer than the settings")


def _same(look: _Look, name: str, contents: set[bytes], *, is_there: bool) -> None:
    """Checks a file that people read: one of the contents as a whole, or, before its end, nothing."""
    place = look.root / name
    if not place.exists():
        if is_there and not look.is_weak:
            raise Wrong(f"{name} is gone")
    elif place.read_bytes() not in contents:
        raise Wrong(f"{name} has {place.stat().st_size} bytes, not those that were written")


def _models(look: _Look) -> None:
    weights = look.root / "diskprefix/models/a-model/weights.bin"
    if not look.is_weak and weights.parent.is_dir() and weights.read_bytes() != deeds.model_bytes():
        raise Wrong("wrong bytes in a finished model")


def _weights(look: _Look) -> None:
    """What has the name of packed weights is whole, and as new as was acknowledged. On a drive that ignores barriers,
    what is not so is noticed."""
    path = look.root / deeds.WEIGHTS
    if not path.exists():
        if look.account.written and not look.is_weak:
            raise Wrong("packed weights that were kept are gone")
        return
    path.chmod(0o600)
    try:
        file = PackedFile.open(path, path.stem, operators())
        matrices = {matrix.content_digest: matrix.packed for matrix in file.others(())}
    except (UnusableFile, OSError) as error:
        if look.is_weak:
            return
        raise Wrong(f"packed weights cannot be used: {error}") from error
    for version in deeds.WEIGHTS_VERSIONS:
        expected = deeds.packed_matrices(version)
        if any(not np.array_equal(expected[name].packed, matrices[name]) for name in expected.keys() & matrices.keys()):
            raise Wrong("wrong bytes in a packed matrix")
        if matrices.keys() == expected.keys() and (version == "second" or look.account.written != "second"):
            return
    if not look.is_weak:
        raise Wrong(f"of the packed weights there are {[*matrices]}")


_CHECKS: dict[str, Callable[[_Look], None]] = {
    "save": lambda look: look.store(deeds.KV, look.account.saved),
    "faulty": lambda look: look.store(deeds.KV, look.account.saved),
    "evict": lambda look: look.store(deeds.KV, look.account.saved, budget_bytes=deeds.TIGHT_BYTES),
    "compact": _compact,
    "backup": _backup,
    "restore": _restore,
    "aside": lambda look: look.store(deeds.KV, look.account.saved),
    "exchange": _exchange,
    "profile": _profile,
    "models": _models,
    "weights": _weights,
}


class _Anything(int):
    """A checksum that every other equals."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _without_checksums() -> None:
    from diskprefix.prefixstore.store import schema
    from diskprefix.prefixstore.store.codec import codec
    from diskprefix.tokens import checksum

    for module in (codec, schema):
        vars(module)["checksum"] = lambda payload, seed=0: _Anything(checksum(payload, seed))


REMOVALS: dict[str, Callable[[], None]] = {
    "checksums": _without_checksums,
}
"""Protections of the reader, and how to take each away in its process."""
