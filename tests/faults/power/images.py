"""The states in which a power failure may leave a disk: choices among the changes that no barrier covers.

A change is cut into sectors, and each is on the disk or not, whatever the order in which they were written. A file's
new size may come before its bytes, which are then zeros or what another file left there. Names come in their order or
not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from tests.faults.power.recording import FOLDER, PAGE, Change, Disk, NameChange, cut, put, renamed, resize

SECTOR, WORD = 512, 8
UNORDERED = ("lock.mdb", "diskprefix.lock", "names.lock")
"""Files whose content says nothing after a restart. They are as they were, or as written."""

Names = dict[str, bytes | None]
"""The content of each file, by its path; None for a folder."""


@dataclass(frozen=True)
class Image:
    """One state of the disk. `kind` and `seed` make it again."""

    kind: str
    seed: int
    files: Names

    def digest(self) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self.files.items()):
            found.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
            found.update(content or b"")
        return found.digest()

    def write(self, root: Path) -> None:
        """Writes the image into an empty folder. A file whose folder was lost is not there."""
        for name, content in sorted(self.files.items()):
            place = root / name
            if not place.parent.is_dir():
                continue
            if content is None:
                place.mkdir(mode=0o700)
            else:
                place.touch(mode=0o600)
                place.write_bytes(content)


class Moment:
    """A moment at which the power may fail."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        names = renamed(disk.names, disk.pending_names)
        volatile = {file for name, file in names.items() if Path(name).name in UNORDERED}
        self._bulk = {file: list(disk.files[file].pending) for file in volatile if file != FOLDER}
        self._pending = {
            number: list(file.pending) for number, file in disk.files.items() if file.pending and number not in volatile
        }

    def units(self, sector: int) -> list[tuple[int, Change]]:
        return [(file, part) for file, some in self._pending.items() for change in some for part in cut(change, sector)]

    def images(self, seed: int, samples: int) -> Iterator[Image]:
        """Yields images of every kind: every subset of pages and names if these are at most `samples`, then so many
        that are drawn."""
        pages, sectors = self.units(PAGE), self.units(SECTOR)
        names = self._disk.pending_names
        yield self._image("nothing written", 0, [], names=[])
        yield self._image("everything written", 0, pages, names=names)
        if not pages and not names:
            return
        yield self._image("content without names", 0, pages, names=[])
        yield self._image("names without content", 0, [], names=names)
        if 2 ** min(64, len(pages) + len(names)) <= samples:
            for number, chosen in enumerate(product((False, True), repeat=len(pages) + len(names))):
                yield self._image(
                    "every subset of pages and names",
                    number,
                    [unit for unit, is_there in zip(pages, chosen, strict=False) if is_there],
                    names=[name for name, is_there in zip(names, chosen[len(pages) :], strict=True) if is_there],
                )
        kinds: tuple[tuple[str, Callable[[random.Random], Image]], ...] = (
            ("pages reordered", lambda rng: self._sample("pages reordered", rng, pages)),
            ("sectors reordered", lambda rng: self._sample("sectors reordered", rng, sectors)),
            ("in order, the last torn", lambda rng: self._torn(rng, sectors)),
            ("one missing", lambda rng: self._one_missing(rng, sectors)),
            ("stale blocks behind the end", lambda rng: self._sample("stale blocks behind the end", rng, pages)),
            ("names reordered", lambda rng: self._sample("names reordered", rng, pages)),
        )
        for number in range(samples):
            kind, make = kinds[number % len(kinds)]
            if kind == "names reordered" and not names:
                continue
            yield make(random.Random(f"{kind} {seed} {number}"))
        yield from islice(self._torn_meta(seed), samples)

    def everything(self) -> Names:
        """Returns the files as the process saw them."""
        pages = [(file, change) for file, some in {**self._pending, **self._bulk}.items() for change in some]
        return self._image("everything written", 0, pages, names=self._disk.pending_names, bulk=False).files

    def _sample(self, kind: str, rng: random.Random, units: list[tuple[int, Change]]) -> Image:
        share = rng.choice((0.05, 0.3, 0.5, 0.7, 0.95))
        names = self._disk.pending_names
        some = names[: rng.randint(0, len(names))]
        if kind == "names reordered":
            some = [name for name in names if rng.random() < 0.5]
        chosen = [unit for unit in units if rng.random() < share]
        return self._image(kind, 0, chosen, names=some, rng=rng, stale=kind.startswith("stale"))

    def _torn(self, rng: random.Random, units: list[tuple[int, Change]]) -> Image:
        names = self._disk.pending_names
        kept = rng.randint(0, len(units))
        return self._image(
            "in order, the last torn", 0, units[:kept], names=names[: rng.randint(0, len(names))], rng=rng
        )

    def _one_missing(self, rng: random.Random, units: list[tuple[int, Change]]) -> Image:
        gone = rng.randrange(len(units)) if units else 0
        return self._image("one missing", 0, units[:gone] + units[gone + 1 :], names=self._disk.pending_names, rng=rng)

    def _torn_meta(self, seed: int) -> Iterator[Image]:
        """Tears LMDB's meta page, a single sector, between its words. Drives do not do that; the promise is weaker."""
        data = {file for name, file in self._disk.names.items() if Path(name).name == "data.mdb"}
        for file in data & self._pending.keys():
            changes = [change for change in self._pending[file] if change.data and change.offset < 2 * PAGE]
            if len(changes) != 1 or len(changes[0].data or b"") >= SECTOR:
                continue
            words = [(file, part) for part in cut(changes[0], WORD)]
            for number in range(1, len(words)):
                yield self._image("meta page torn in its sector", number, words[:number], names=[])
                yield self._image("meta page torn in its sector", -number, words[number:], names=[])
            rng = random.Random(seed)
            for number in range(len(words)):
                chosen = [word for word in words if rng.random() < 0.5]
                yield self._image("meta page torn in its sector", 1000 + number, chosen, names=[])

    def _image(
        self,
        kind: str,
        seed: int,
        chosen: list[tuple[int, Change]],
        *,
        names: list[NameChange],
        rng: random.Random | None = None,
        stale: bool = False,
        bulk: bool = True,
    ) -> Image:
        rng = rng or random.Random(seed)
        contents: dict[int, bytearray] = {}
        for file, change in [*chosen, *(self._bulk_changes(rng) if bulk else ())]:
            content = contents.setdefault(file, bytearray(self._disk.files[file].content))
            if change.data is None:
                resize(content, change.offset)
            else:
                if stale and len(content) < change.offset:
                    put(content, len(content), rng.randbytes(change.offset - len(content)))
                put(content, change.offset, change.data)
        if rng.random() < 0.3 and not any(change.data is None for _, change in self.units(PAGE)):
            # The new size is on the disk, some of the bytes are not.
            for file, some in self._pending.items():
                end = max(change.offset + len(change.data or b"") for change in some)
                content = contents.setdefault(file, bytearray(self._disk.files[file].content))
                missing = max(0, end - len(content))
                content += rng.randbytes(missing) if stale else bytes(missing)
        found = renamed(self._disk.names, names)
        files: Names = {
            name: None if file == FOLDER else bytes(contents.get(file, self._disk.files[file].content))
            for name, file in found.items()
        }
        return Image(kind, seed, files)

    def _bulk_changes(self, rng: random.Random) -> list[tuple[int, Change]]:
        share = rng.choice((0.0, 0.5, 1.0))
        return [(file, change) for file, some in self._bulk.items() for change in some if rng.random() < share]
