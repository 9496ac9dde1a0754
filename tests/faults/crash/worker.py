"""Changes a store and records each deed in a ledger, until the process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from diskprefix.cli import cli
from diskprefix.store.changes import Use, batches
from diskprefix.store.codec.codec import Codec
from diskprefix.store.maintenance.purge import PurgeFilter, purge
from diskprefix.store.store import Publication, Store
from tests.faults.crash import ledger, prompts
from tests.faults.crash.ledger import Ledger
from tests.store.building import Clock

CLOCK_STEP_S = 11.0
"""The time between two publications, longer than nodes are kept from eviction after they were written."""
TTL_S = 20 * CLOCK_STEP_S
AHEAD = 40
"""The number of publications that are prepared at a time, so that a kill is likely to come while they are saved."""
NODES_IN_A_PART = 2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """`first` is the number of the first prompt to save, `files` the file to import for each prompt."""

    deed: str
    folder: str
    ledger: str
    budget_bytes: int
    first: int = 0
    codec: str = "RAW"
    files: dict[str, str]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def publish_in_parts(store: Store, publication: Publication) -> int:
    """Publishes a prompt as a daemon does, which writes its blocks while it computes it: the entry comes with the last
    part. Returns the number of evicted nodes."""
    evicted = 0
    *earlier, last = batches(publication.nodes, NODES_IN_A_PART)
    for nodes in earlier:
        evicted += store.publish(replace(publication, nodes=tuple(nodes), last_node=None, entry=None, prompt=None))
        store.evictor.pin(nodes[-1].name)
    evicted += store.publish(replace(publication, nodes=tuple(last)))
    for nodes in earlier:
        store.evictor.unpin(nodes[-1].name)
    return evicted


class Loop:
    """One process's store and ledger."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.ledger = Ledger(Path(plan.ledger))
        self.clock = Clock(1_700_000_000.0 + plan.first * CLOCK_STEP_S)
        self._saved = set(ledger.read(Path(plan.ledger)).saved)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Store]:
        self.ledger.begin("open")
        store = Store(Path(self.plan.folder), budget_bytes=self.plan.budget_bytes, clock=self.clock)
        self.ledger.end("open")
        store.codec = Codec[self.plan.codec]
        try:
            yield store
        finally:
            store.close()

    def publish_all(self, store: Store) -> Iterator[int]:
        """Publish one prompt after the other without end. Yields the number of each."""
        for first in count(self.plan.first, AHEAD):
            for publication in [prompts.publication(store, first + further) for further in range(AHEAD)]:
                yield self.publish(store, publication)

    def publish(self, store: Store, publication: Publication) -> int:
        assert publication.entry is not None
        number = int(publication.entry.preview)
        self.clock.now += CLOCK_STEP_S
        self.ledger.begin("publish", number)
        evicted = publish_in_parts(store, publication)
        self._saved.add(number)
        self._end(store, "publish", number, look=evicted > 0)
        return number

    def expire(self, store: Store) -> None:
        self.ledger.begin("expire")
        self._end(store, "expire", look=store.evictor.expire(TTL_S) > 0)

    def touch(self, store: Store, number: int) -> None:
        self.ledger.begin("touch", number)
        store.touch({prompts.last_node(store.secret, number): Use(self.clock.now)})
        self.ledger.end("touch", number)

    def delete(self, store: Store, rng: np.random.Generator) -> None:
        """Delete one of the prompts, as `purge ENTRY` does."""
        number = int(rng.choice(sorted(self._saved)))
        self.ledger.begin("delete", number)
        purge(
            store,
            PurgeFilter(entries=frozenset({prompts.last_node(store.secret, number)})),
            self.clock.now,
            lambda _: None,
        )
        self._end(store, "delete", number, look=True)

    def _end(self, store: Store, deed: str, number: int = -1, *, look: bool) -> None:
        """Record the end of a deed and the entries that it removed."""
        gone: set[int] = set()
        if look:
            with store.snapshot() as snapshot:
                present = set(snapshot.keys("entries"))
            gone = {known for known in self._saved if prompts.last_node(store.secret, known) not in present}
            self._saved -= gone
        self.ledger.end(deed, number, gone)


def save(loop: Loop) -> None:
    """Saves into a store with enough room, and uses of stored nodes between them."""
    rng = np.random.default_rng(loop.plan.first)
    with loop.opened() as store:
        for number in loop.publish_all(store):
            if rng.random() < 0.3:
                loop.touch(store, int(rng.integers(loop.plan.first, number + 1)))


def evict(loop: Loop) -> None:
    """Saves into a full store, each of which evicts, and expiries at intervals."""
    with loop.opened() as store:
        for number in loop.publish_all(store):
            if number % 3 == 0:
                loop.expire(store)


def compact(loop: Loop) -> None:
    """Some saves, some evictions, and then a compaction."""
    for number in count(loop.plan.first, 3):
        with loop.opened() as store:
            for further in range(3):
                loop.publish(store, prompts.publication(store, number + further))
            loop.expire(store)
        loop.ledger.begin("compact")
        command("compact", "--kv-cache-dir", loop.plan.folder)
        loop.ledger.end("compact")


def import_(loop: Loop) -> None:
    """Imports of exported prompts, one after the other."""
    for number, file in loop.plan.files.items():
        loop.ledger.begin("import", int(number))
        codec = ("--kv-cache-codec", loop.plan.codec.lower())
        command("import", file, "--kv-cache-dir", loop.plan.folder, "--kv-cache-min-free", "0", *codec)
        loop.ledger.end("import", int(number))


def command(*arguments: str) -> None:
    """Runs a command of diskprefix in this process, which must succeed. Raises `DiskPrefixError`."""
    code, _ = output(*arguments)
    assert not code, f"diskprefix {' '.join(arguments)}: exit code {code}"


def output(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and the output of a command of diskprefix in this process. Raises `DiskPrefixError`."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.main(list(arguments), prog_name="diskprefix", standalone_mode=False)
    return code or 0, text.getvalue()


def delete(loop: Loop) -> None:
    """Saves, and after every second one a deletion."""
    rng = np.random.default_rng(loop.plan.first)
    with loop.opened() as store:
        for number in loop.publish_all(store):
            if number % 2:
                loop.delete(store, rng)


DEEDS: dict[str, Callable[[Loop], None]] = {
    "save": save,
    "evict": evict,
    "compact": compact,
    "import": import_,
    "delete": delete,
}


def main(plan_file: str) -> None:
    # Whoever is to kill this process may be killed first; then nobody would end it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    plan = WorkerPlan(**json.loads(Path(plan_file).read_text(encoding="utf-8")))
    DEEDS[plan.deed](Loop(plan))
    signal.pause()
