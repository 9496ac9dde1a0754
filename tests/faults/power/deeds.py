"""What is recorded: one deed per process on the files below a folder, with a mark after all that is acknowledged.

`python -m tests.faults.power.deeds NAME ROOT [ARGUMENT…] [PROTECTION…]`: without the protections that are named.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from diskprefix.daemon.cli import cli
from diskprefix.errors import CacheError
from diskprefix.native.library import operators
from diskprefix.prefixstore.store import store_file
from diskprefix.prefixstore.store.changes import Use, batches, touches
from diskprefix.prefixstore.store.compact import compact_folder, copy_store, replace_store
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.runtime.files.packed_file import PackedMatrix
from tests.faults.power import prompts
from tests.prefixstore.store.building import Clock, names_of_every_run, part_of

ON_WRITE, ON_SYNC, ON_NAMES, ON_DSYNC = 1, 2, 4, 8
KV, OTHER_KV, COPY = "data/kv", "other", "backups/today"
BUDGET_BYTES = 8 << 20
TIGHT_BYTES = 3 << 20
START_S = 1_700_000_000.0
SMALL = [*range(5), *range(15, 20), *range(30, 35), *range(45, 50), *range(60, 65)]
"""The numbers of prompts whose blocks take 4 KiB."""
MEDIUM = [*range(5, 10), *range(20, 25), *range(35, 40), *range(50, 55), *range(65, 70)]
"""Those whose blocks take 32 KiB."""
NOTE = NoteKind.RESPONSE
_NOTE_TTL_S = 1e9
_NODES_IN_A_PART = 2
WEIGHTS_DIGEST, WEIGHTS_VERSIONS = "0123456789abcdef" * 2, ("first", "second")
WEIGHTS = f"{WEIGHTS_DIGEST}.packed"


def control() -> Any:
    """The functions of the preloaded recorder; they do nothing without it."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "power_mark"):
        return SimpleNamespace(power_mark=lambda _: None, power_ignore=lambda _: None)
    return library


def mark(**values: Any) -> None:
    """Records what was acknowledged."""
    control().power_mark(json.dumps(values).encode())


class Loop:
    """A store whose publications are marked."""

    def __init__(self, folder: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        self._clock = Clock(START_S)
        with names_of_every_run():
            self.store = Store(
                folder, budget_bytes=budget_bytes, clock=self._clock, on_corruption="quarantine", serving=True
            )
        self._saved: set[int] = set()

    def publish(self, number: int) -> None:
        self._clock.now += 11.0
        evicted = publish_in_parts(self.store, prompts.publication(self.store, number))
        self._saved.add(number)
        gone: list[int] = []
        if evicted:
            with self.store.snapshot() as snapshot:
                present = set(snapshot.keys("entries"))
            gone = [n for n in self._saved if prompts.last_node(self.store, n) not in present]
            self._saved -= {*gone}
        mark(saved=number, gone=gone)

    def note(self, number: int) -> None:
        """Stores a note that came from a prompt."""
        publication = prompts.publication(self.store, number)
        notes = Notes(self.store, lambda: None)
        prompt = prompts.token_ids(number)
        root, record, epoch = publication.root, publication.root_record, self.store.epochs.of("")
        notes.put(epoch, root, record, NOTE, str(number), note_content(number), _NOTE_TTL_S, prompt)
        notes.write()
        mark(noted=number)

    def touch(self, number: int) -> None:
        self.store.write([touches({prompts.last_node(self.store, number): Use(self._clock.now)})])

    def purge(self, *numbers: int) -> None:
        names = frozenset(prompts.last_node(self.store, number) for number in numbers)
        purge(self.store, PurgeFilter(entries=names), self._clock.now, lambda _: None)

    def delete(self, number: int) -> None:
        mark(deleting=number)
        self.purge(number)
        self._saved.discard(number)
        mark(deleted=number)


def publish_in_parts(store: Store, publication: Publication) -> int:
    """Publishes a prompt as a daemon does, which writes its blocks while it computes it: the entry comes with the last
    part. Returns the number of evicted nodes."""
    evicted = 0
    *earlier, last = batches(publication.nodes, _NODES_IN_A_PART)
    for nodes in earlier:
        evicted += store.publish(part_of(replace(publication, nodes=tuple(nodes))))
        store.evictor.pin(nodes[-1].name)
    evicted += store.publish(replace(publication, nodes=tuple(last)))
    for nodes in earlier:
        store.evictor.unpin(nodes[-1].name)
    return evicted


def command(*arguments: str) -> None:
    """Runs a command of diskprefix in this process, which must succeed. Raises `DiskPrefixError`."""
    with redirect_stdout(io.StringIO()):
        assert not cli.main(list(arguments), prog_name="diskprefix", standalone_mode=False), arguments


def note_content(number: int) -> bytes:
    return random.Random(number).randbytes(3000)


@contextmanager
def opened(folder: Path, budget_bytes: int = BUDGET_BYTES) -> Iterator[Loop]:
    loop = Loop(folder, budget_bytes)
    try:
        yield loop
    finally:
        loop.store.close()


def save(root: Path) -> None:
    """A store in a new folder: prompts, notes, uses, deletions, closed and opened again between."""
    with opened(root / KV) as loop:
        for number in SMALL[:6]:
            loop.publish(number)
        for number in SMALL[:2]:
            loop.note(number)
        loop.touch(SMALL[0])
        loop.delete(SMALL[1])
    with opened(root / KV) as loop:
        for number in SMALL[6:10]:
            loop.publish(number)
        loop.delete(SMALL[7])
        loop.publish(SMALL[10])


def evict(root: Path) -> None:
    """Prompts that drive others out."""
    with opened(root / KV, TIGHT_BYTES) as loop:
        for number in MEDIUM[:14]:
            loop.publish(number)


def fill(folder: Path, numbers: list[int]) -> None:
    """Makes a store whose prompts count as durable, because nothing is recorded."""
    with opened(folder) as loop:
        for number in numbers:
            loop.publish(number)
            loop.note(number)


def compact(root: Path) -> None:
    """A compaction, and saves into the new file."""
    compact_folder(root / KV)
    mark(done="compact")
    with opened(root / KV) as loop:
        for number in SMALL[5:7]:
            loop.publish(number)


def backup(root: Path) -> None:
    """A backup into a folder below one that does not exist either."""
    copy_store(root / KV, root / COPY)
    mark(copied=COPY)


def restore(root: Path) -> None:
    """A store in the place of another, and saves into it."""
    replace_store(root / OTHER_KV, root / KV)
    mark(replaced=KV)
    with opened(root / KV) as loop:
        loop.publish(SMALL[10])


def aside(root: Path) -> None:
    """A damaged file that is moved aside, and saves into the new one."""
    with opened(root / KV) as loop:
        for number in SMALL[5:8]:
            loop.publish(number)


def faulty(root: Path, kind: str, error: str, times: str, step: str) -> None:
    """The same deeds in a folder for each call of a kind (writes, barriers, names), or each `step`-th, in which that
    call fails, and `times` in all. Then the disk is well again, and everything must be saved."""
    store_file._RETRY_S = 0.0
    call = {"write": ON_WRITE, "sync": ON_SYNC, "names": ON_NAMES}[kind]
    # Half a write, where there is no such error.
    number = getattr(errno, error, -1)
    for section in count(0, int(step)):
        # The names are equally long and what is drawn is the same, so that records are equal until the fault.
        vars(secrets)["token_bytes"] = random.Random(0).randbytes
        folder = root / f"{section:04}"
        mark(section=folder.name)
        control().power_fail(call, section, int(times), number)
        left = _with_faults(folder / KV)
        was_hit = control().power_seen(call) > section
        control().power_fail(call, 0, 0, 0)
        with opened(folder / KV) as loop:
            for prompt in left:
                loop.publish(prompt)
            loop.note(SMALL[2])
            loop.delete(SMALL[0])
        if not was_hit:
            return


def _with_faults(folder: Path) -> list[int]:
    """Saves and deletes what the disk takes. Returns the prompts that were not acknowledged."""
    left = SMALL[:4]
    try:
        with opened(folder) as loop:
            for number in SMALL[:4]:
                with suppress(CacheError):
                    loop.publish(number)
                    left.remove(number)
                loop.store.maintain()
                if number == SMALL[2] and SMALL[1] not in left:
                    with suppress(CacheError):
                        loop.delete(SMALL[1])
                    loop.store.maintain()
    except CacheError:
        return left
    return left


def exchange(root: Path) -> None:
    """An export to a file, and its import into a new store."""
    with opened(root / KV) as loop:
        name = prompts.last_node(loop.store, SMALL[0])
    command("export", name.hex(), "--kv-cache-dir", str(root / KV), "-o", str(root / "entry.safetensors"))
    mark(written="entry.safetensors")
    with opened(root / OTHER_KV, 16 << 20):
        pass
    command("import", str(root / "entry.safetensors"), "--kv-cache-dir", str(root / OTHER_KV), "--force", "--trust")
    mark(imported=OTHER_KV)


def profile(root: Path) -> None:
    """The settings of a launched agent, written twice, and a record of them."""
    write: Any = import_module("diskprefix.desk.clients.agent_profile").AgentProfile(folder=root / "agents/one")._write
    for version in ("first", "second"):
        file = SimpleNamespace(path=str(root / "agents/one/settings.json"), text=settings_text(version))
        write(file, lambda _: None)
        mark(written="agents/one/settings.json", version=version)


def settings_text(version: str) -> str:
    return json.dumps({version: "x" * 6000})


def models(root: Path) -> None:
    """A model that is made from a file, kept in the cache folder."""
    os.environ["XDG_CACHE_HOME"] = str(root)
    from diskprefix.runtime.fetch.made_once import build_once

    def build(work: Path) -> Path:
        made = work / "made"
        made.mkdir()
        (made / "weights.bin").write_bytes(model_bytes())
        (made / "config.json").write_text("{}")
        return made

    build_once("a-model", build, lambda _: None)
    mark(made="a-model")


def model_bytes() -> bytes:
    return bytes(range(251)) * 120


def weights(root: Path) -> None:
    """Packed weights that are kept, and then made anew with other matrices."""
    from diskprefix.runtime.load import packed_weights

    packed_weights.LEAST_BYTES = 0
    for version in WEIGHTS_VERSIONS:
        packing: Any = SimpleNamespace(matrices=packed_matrices(version), stored=None, operators=operators())
        for _ in packed_weights.PackedFiles(root).keep(WEIGHTS_DIGEST, [], packing):
            pass
        assert (root / WEIGHTS).is_file()
        mark(written=WEIGHTS, version=version)


def packed_matrices(version: str) -> dict[bytes, PackedMatrix]:
    """Returns three matrices of a few pages, by their names in a file."""
    made = {}
    for number in range(3):
        name = f"{version} {number}".encode()
        packed = np.random.default_rng([*name]).integers(0, 256, (2, 1, 4000 + 700 * number), np.uint8)
        made[name] = PackedMatrix(name, "Q4_1", packed)
    return made


def slow(root: Path) -> None:
    """A disk that does not answer: nobody waits for it but the writer, and what was read before can be read."""
    store = Store(root / KV, budget_bytes=BUDGET_BYTES, serving=True)
    store.publish(prompts.publication(store, SMALL[0]))
    writer = Writer(store, buffer_bytes=1 << 30)
    control().power_hold(1)
    try:
        for number in SMALL[1:3]:
            publication = prompts.publication(store, number)
            writer.queue_publication(Save(publication.epoch), publication, is_last=True)
            writer.touch(prompts.last_node(store, SMALL[0]), START_S)
        with store.snapshot() as snapshot:
            assert snapshot.usage(prompts.last_node(store, SMALL[0])) is not None
        assert not writer.flush(0.05)
        assert writer.num_pending
    finally:
        control().power_hold(0)
    assert writer.flush(60.0)
    assert writer.error is None
    assert writer.close(60.0)
    store.close()


def prepare(name: str, root: Path) -> tuple[int, ...]:
    """Makes what is on the disk before a deed. Returns the prompts in the store."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, mode=0o700)
    if name in ("compact", "backup", "restore", "exchange", "aside"):
        fill(root / KV, SMALL[:4])
    if name == "restore":
        fill(root / OTHER_KV, SMALL[5:9])
    if name == "aside":
        content = (root / KV / "data.mdb").read_bytes()
        (root / KV / "data.mdb").write_bytes(content[: len(content) // 2])
    return tuple(SMALL[:4]) if name in ("compact", "backup", "restore", "exchange") else ()


DEEDS: dict[str, Callable[..., None]] = {
    "save": save,
    "evict": evict,
    "compact": compact,
    "backup": backup,
    "restore": restore,
    "aside": aside,
    "exchange": exchange,
    "profile": profile,
    "models": models,
    "weights": weights,
    "faulty": faulty,
    "slow": slow,
}


def _with_lmdb_unsynced() -> None:
    import lmdb

    real = lmdb.open
    vars(lmdb)["open"] = lambda *args, **options: real(*args, **options | {"sync": False})


def _without_sync(of_folders: bool) -> None:
    from diskprefix.prefixstore.store import folder

    real = folder.sync

    def sync(path: Path) -> None:
        if path.is_dir() != of_folders:
            real(path)

    for module in list(sys.modules.values()):
        if getattr(module, "sync", None) is real:
            vars(module)["sync"] = sync
    folder.sync = sync


def _without_export_sync() -> None:
    from diskprefix.prefixstore.packs import pack_file

    vars(pack_file)["os"] = SimpleNamespace(**vars(os) | {"fsync": lambda _fd: None})


def _without_weights_sync() -> None:
    from diskprefix.runtime.files import packed_file

    vars(packed_file)["os"] = SimpleNamespace(**vars(os) | {"fsync": lambda _fd: None})


REMOVALS: dict[str, Callable[[], None]] = {
    "LMDB's barriers": _with_lmdb_unsynced,
    "the barrier between pages and meta page": lambda: control().power_ignore(ON_SYNC),
    "all barriers": lambda: control().power_ignore(ON_SYNC | ON_DSYNC),
    "the barrier of a copied file": lambda: _without_sync(of_folders=False),
    "the barrier of names": lambda: _without_sync(of_folders=True),
    "the barrier of an export": _without_export_sync,
    "the barrier of packed weights": _without_weights_sync,
}
"""Protections of the writer, and how to take each away in its process."""


_MODULES = {
    "exchange": ("diskprefix.prefixstore.packs.pack_file",),
    "profile": ("diskprefix.desk.clients.agent_profile",),
    "models": ("diskprefix.runtime.fetch.made_once",),
    "weights": ("diskprefix.runtime.load.packed_weights",),
}
"""Modules that are imported before a protection is taken out of them."""


def main(name: str, root: str, *arguments: str) -> None:
    removed = [argument for argument in arguments if argument in REMOVALS]
    for module in _MODULES.get(name, ()):
        import_module(module)
    for protection in removed:
        REMOVALS[protection]()
    DEEDS[name](Path(root), *(argument for argument in arguments if argument not in REMOVALS))


if __name__ == "__main__":
    main(*sys.argv[1:])
