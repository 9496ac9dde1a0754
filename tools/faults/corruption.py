"""The corruption matrix: a daemon starts with a damaged `data.mdb`, thousands of times.

Each case copies a store, damages the copy, and lets a daemon's store and writer live on it twice, each time in a
process of its own with a time limit: open, restore every node, read the history and the list of entries, save what is
missing and something new, evict, close. Once, LMDB may crash or hang on the file; the next start must notice. A case
fails if a byte is wrong, if a process errs, or dies or hangs a second time, if it does not start, if a node that was
saved again is missing, if the last start has to throw the store away once more, or if a swap of two payloads is not
noticed. A seed damages the same records in every run.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Codec, populate
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.prefixstore.store.opening import DAMAGED
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.tree import list_entries
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.tokens import TokenIds
from tests.faults.file_damage import FILE_DAMAGE, RECORD_DAMAGE, damaged
from tests.faults.isolated import run_isolated
from tests.prefixstore.store.building import (
    BLOCK,
    ROOT,
    Clock,
    layout_of,
    names_of_every_run,
    prompt,
    publication,
    read_payload,
    recent_prompts,
)
from tools.measuring.options import FOLDER, JSON, seed_option
from tools.measuring.report import new_table

UNDAMAGED = "no damage"
NEVER_HARMLESS = frozenset({"swapped payloads"})
"""Kinds of damage that cost at least one node. Others may hit bytes that nothing reads."""
KINDS = (UNDAMAGED, *FILE_DAMAGE, *RECORD_DAMAGE)
CASE_TIMEOUT_S, FIRST_TIMEOUT_S = 60.0, 10.0
FLUSH_TIMEOUT_S = 30.0
BUDGET_BYTES = 10 << 20
BUILT_BYTES = BUDGET_BYTES - (1 << 20)
"""The budget while the store is built: smaller, so that a daemon has nothing to evict when it starts."""
NO_LIMIT = 1 << 30
MOST_BLOCKS = 6
"""Tokens in a prompt."""
HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
OTHER_ROOT, EARLIER_ROOT = b"o" * 16, b"c" * 16
SMALL, LARGE = layout_of(60_000), layout_of(1_200_000)
"""Layouts whose blocks have one piece, and several."""
HYBRID = layout_of(20_000, 60_000)
"""The layout of a model with states that exist at one position only."""
HISTORY_LIMIT = 100


@dataclass(frozen=True)
class Saved:
    """A prompt in the store before it is damaged."""

    token_ids: TokenIds
    layout: str
    root: bytes
    checkpoints: tuple[int, ...] = ()
    end_kind: NodeKind = NodeKind.TAIL

    def publication(self, store: Store) -> Publication:
        return publication(
            store,
            self.token_ids,
            layout=self.layout,
            root=self.root,
            checkpoints=self.checkpoints,
            end_kind=self.end_kind,
        )


@dataclass(frozen=True)
class Original:
    """The store that the cases damage copies of. `data` is its file, `older` the same file some publications earlier.

    `prompts` are stored whole. `left` are the parts of earlier prompts that are still stored. Every node of the store
    belongs to one of these.
    """

    data: bytes
    older: bytes
    prompts: list[Saved]
    left: list[Saved]


@dataclass(frozen=True, kw_only=True)
class Life:
    """The report of one daemon. `restored` of the `nodes` were restored at its start."""

    store_id: str
    restored: int
    nodes: int
    quarantined: int
    evicted: int
    dropped: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    seed: int
    verdict: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict not in VERDICTS


VERDICTS = ("nothing lost", "part lost", "fresh store", "died once")


class Failure(Exception):
    """A failed case: a verdict and its details."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(verdict)
        self.verdict = verdict
        self.detail = detail


def saved_prompts() -> list[Saved]:
    """Prompts of 3 to 6 blocks that share beginnings, under two roots, and two with large blocks. Before them two of a
    model with states: the second shares checkpoints of the first and continues differently."""
    shared = [prompt(seed, 2 * BLOCK) for seed in (1, 2)]
    prompts = [
        Saved(_join(shared[i % 2], prompt(10 + i, BLOCK + 5 + 9 * i)), SMALL, ROOT if i < 6 else OTHER_ROOT)
        for i in range(8)
    ]
    prompts += [Saved(prompt(30 + i, BLOCK + 7), LARGE, b"l" * 16) for i in range(2)]
    whole, reply = prompt(40, 4 * BLOCK + 5), _join(prompt(40, 4 * BLOCK + 5)[: 2 * BLOCK], prompt(41, 2 * BLOCK))
    points = (BLOCK, 2 * BLOCK, 4 * BLOCK)
    return [
        Saved(whole, HYBRID, b"h" * 16, points),
        Saved(reply, HYBRID, b"h" * 16, points),
        *prompts,
    ]


def _join(first: TokenIds, second: TokenIds) -> TokenIds:
    joined: TokenIds = prompt(0, len(first) + len(second))
    joined[: len(first)], joined[len(first) :] = first, second
    return joined


def build(folder: Path) -> Original:
    """Makes a store that has evicted nodes. It has the same records in the same places each time."""
    clock = Clock()
    with names_of_every_run():
        store = Store(folder, budget_bytes=BUILT_BYTES, clock=clock)
    earlier = [Saved(prompt(seed, 6 * BLOCK), SMALL, EARLIER_ROOT) for seed in range(100, 130)]
    for saved in earlier:
        # What was written just now is not evicted.
        clock.now += HOUR_S
        store.publish(saved.publication(store))
    older = b""
    # So old that they are evicted before any of the prompts, whatever those weigh.
    clock.now += YEAR_S
    prompts = saved_prompts()
    for number, saved in enumerate(prompts):
        clock.now += HOUR_S
        store.codec = (Codec.RAW, Codec.ZSTD, Codec.PLANES)[number % 3]
        store.publish(saved.publication(store))
        if number == len(prompts) - 3:
            older = (folder / DATA).read_bytes()
    left = [part for saved in earlier if (part := _left_of(store, saved)) is not None]
    store.close()
    return Original((folder / DATA).read_bytes(), older, prompts, left)


def _left_of(store: Store, saved: Saved) -> Saved | None:
    """Returns the part of a prompt without checkpoints that is still stored. Eviction takes the last nodes first."""
    nodes = saved.publication(store).nodes
    with store.snapshot() as snapshot:
        num_stored = sum(snapshot.usage(node.name) is not None for node in nodes)
    if num_stored in (0, len(nodes)):
        return saved if num_stored else None
    return replace(saved, token_ids=saved.token_ids[: num_stored * BLOCK], end_kind=NodeKind.BLOCK)


def live(folder: Path, original: Original, seed: int) -> str:
    """Uses a folder as a daemon does. Returns JSON: a `Life`, or a verdict with details."""
    logging.getLogger("diskprefix").setLevel(logging.CRITICAL + 1)
    try:
        return json.dumps(asdict(_live(folder, original, seed)))
    except Failure as failure:
        return json.dumps({"verdict": failure.verdict, "detail": failure.detail})


def _live(folder: Path, original: Original, seed: int) -> Life:
    prompts = original.prompts
    with _daemon(folder) as (store, writer):
        new = Saved(prompt(1000 + seed, 4 * BLOCK + seed % BLOCK), SMALL, ROOT)
        fillers = [Saved(prompt(2000 + seed * 10 + i, 6 * BLOCK), SMALL, ROOT) for i in range(8)]
        publications = [saved.publication(store) for saved in [*prompts, *original.left]]
        restored = sum(_restore(store, writer, pub) for pub in publications)
        _look_around(store, [*prompts, new, *fillers])
        _save(store, writer, [*prompts, new])
        evicted = writer.evicted
        # A damaged node hides its descendants until it is stored again.
        tries = iter(range(MOST_BLOCKS))
        while (wrong := _unsaved(store, writer, [*prompts, new])) and next(tries, None) is not None:
            _save(store, writer, [*prompts, new])
        if wrong and not (writer.dropped or writer.error or store.problem or evicted):
            raise Failure("not saved again", f"{wrong} prompts are not there, and nothing was said")
        _save(store, writer, fillers)
        for saved in [*prompts, new, *fillers]:
            _restore(store, writer, saved.publication(store))
        if (writer.error or "").startswith("internal error"):
            raise Failure("error", writer.error or "")
        return Life(
            store_id=store.store_id.hex(),
            restored=restored,
            nodes=sum(len(pub.nodes) for pub in publications),
            quarantined=writer.housekeeping.quarantined,
            evicted=writer.evicted,
            dropped=writer.dropped,
            error=writer.error,
        )


@contextmanager
def _daemon(folder: Path) -> Iterator[tuple[Store, Writer]]:
    try:
        store = Store(folder, budget_bytes=BUDGET_BYTES, on_corruption="quarantine", serving=True)
    except CacheError as error:
        raise Failure("does not start", str(error)) from error
    store.codec = Codec.PLANES
    writer = Writer(store, buffer_bytes=NO_LIMIT)
    try:
        yield store, writer
    finally:
        writer.close(FLUSH_TIMEOUT_S)
        store.close()


def _restore(store: Store, writer: Writer, pub: Publication) -> int:
    """Restores the longest sound prefix as a request does, and compares it. Returns its number of nodes."""
    count = 0
    try:
        with store.snapshot() as snapshot:
            for node in pub.nodes:
                if not _is_stored(snapshot, writer, node):
                    break
                count += 1
    except CacheError:
        # A request that the store fails goes on without it.
        return count
    return count


def _is_stored(snapshot: Snapshot, writer: Writer, node: NewNode) -> bool:
    """Returns whether a node can be restored. The writer removes a damaged one."""
    try:
        token_ids = node.token_ids.tobytes()
        if not snapshot.has(node.name, node.parent, node.position, node.kind, token_ids):
            return False
        for index in range(len(node.pieces)):
            stored = snapshot.piece(node.name, index)
            if stored is not None:
                populate(stored)
        raw = read_payload(snapshot, node)
    except StoreCorrupt:
        writer.quarantine(node.name, node.parent)
        return False
    if raw != b"".join(node.payload):
        raise Failure("wrong bytes", f"node {node.name.hex()} at {node.position} is not what was saved")
    return True


def _look_around(store: Store, prompts: list[Saved]) -> None:
    """Reads as a daemon and `inspect` do: the history, the counts and the entries."""
    known = {(saved.root, saved.token_ids.tobytes()) for saved in prompts}
    try:
        with store.snapshot() as snapshot:
            for root in {saved.root for saved in prompts}:
                for _, remembered in recent_prompts(snapshot, root, HISTORY_LIMIT):
                    if (root, remembered.tobytes()) not in known:
                        raise Failure("wrong bytes", "a prompt in the history was never sent")
            store.counts()
            names = {saved.publication(store).last_node: len(saved.token_ids) for saved in prompts}
            for entry in list_entries(snapshot):
                length = names.get(bytes.fromhex(entry.id))
                if length is not None and entry.num_tokens != length:
                    raise Failure("wrong bytes", f"entry {entry.id} has {entry.num_tokens} tokens, not {length}")
    except CacheError:
        return


def _save(store: Store, writer: Writer, prompts: list[Saved]) -> None:
    for saved in prompts:
        pub = saved.publication(store)
        writer.queue_publication(Save(pub.epoch), pub, is_last=True)
    if not writer.flush(FLUSH_TIMEOUT_S):
        raise Failure("hang", "the writer does not finish")


def _unsaved(store: Store, writer: Writer, prompts: list[Saved]) -> int:
    publications = [saved.publication(store) for saved in prompts]
    return sum(_restore(store, writer, pub) < len(pub.nodes) for pub in publications)


def run_case(folder: Path, original: Original, kind: str, seed: int) -> Case:
    """Starts a daemon's store twice on a damaged copy. `folder` is created again."""
    data = original.data if kind == UNDAMAGED else damaged(original.data, original.older, kind, seed)
    return run_file(folder, original, data, kind, seed)


def run_file(folder: Path, original: Original, data: bytes, kind: str, seed: int) -> Case:
    """Starts a daemon's store twice on a file with these bytes. `folder` is created again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    file = folder / DATA
    file.write_bytes(data)
    file.chmod(0o600)
    starts = partial(live, folder, original, seed)
    try:
        answer = run_isolated(starts, FIRST_TIMEOUT_S)
        death = answer if _has_died(answer) else ""
        first = _outcome(run_isolated(starts, CASE_TIMEOUT_S) if death else answer, "start")
        aside = _moved_aside(folder)
        answer = run_isolated(starts, CASE_TIMEOUT_S)
        if not death and _has_died(answer):
            # The damage that the first start survived ended this one. The next start finds its mark.
            death, answer = answer, run_isolated(starts, CASE_TIMEOUT_S)
        second = _outcome(answer, "second start")
        if second.store_id != first.store_id and aside in (0, _moved_aside(folder)):
            # The file that the first start survived was moved aside at its end, or by the second start.
            first = second
            second = _outcome(run_isolated(starts, CASE_TIMEOUT_S), "third start")
    except Failure as failure:
        return Case(kind=kind, seed=seed, verdict=failure.verdict, detail=failure.detail)
    if second.store_id != first.store_id:
        return Case(kind=kind, seed=seed, verdict="fresh store again", detail="the last start found damage again")
    if death:
        return Case(kind=kind, seed=seed, verdict="died once", detail=death)
    if _moved_aside(folder):
        return Case(kind=kind, seed=seed, verdict="fresh store")
    lost = first.restored < first.nodes
    if lost and kind == UNDAMAGED:
        return Case(kind=kind, seed=seed, verdict="lost without damage", detail=f"{first.restored} of {first.nodes}")
    if not lost and kind in NEVER_HARMLESS:
        return Case(kind=kind, seed=seed, verdict="damage not noticed", detail=f"all {first.nodes} nodes were restored")
    return Case(kind=kind, seed=seed, verdict="part lost" if lost else "nothing lost")


def _moved_aside(folder: Path) -> int:
    """Returns the inode of the file that was moved aside last, 0 if none was."""
    file = folder / DAMAGED
    return file.stat().st_ino if file.exists() else 0


def _has_died(answer: str) -> bool:
    return answer.startswith(("signal", "hang"))


def _outcome(answer: str, when: str) -> Life:
    try:
        values = json.loads(answer)
    except json.JSONDecodeError:
        verdict = answer if _has_died(answer) else "error"
        raise Failure(verdict, f"{when}: {answer}") from None
    if "verdict" in values:
        raise Failure(values["verdict"], f"{when}: {values['detail']}")
    return Life(**values)


def kind_of(seed: int) -> str:
    """Returns the kind of damage of a seed's case: as many seeds one behind the other as there are kinds try each."""
    return KINDS[seed % len(KINDS)]


def run_matrix(folder: Path, cases: int, seed: int, console: Console) -> list[Case]:
    original = build(folder / "original")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results: list[Case] = []
    # A thread that refreshes the screen could hold a lock in the moment of a fork.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("damaged stores", total=cases)
        for number in range(cases):
            case = run_case(folder / "case", original, kind_of(seed + number), seed + number)
            results.append(case)
            if case.failed:
                progress.console.print(f"[red]{case.verdict}[/red] {case.kind}, seed {case.seed}: {case.detail}")
            progress.update(task, advance=1, refresh=True)
    return results


def summary(results: list[Case]) -> Table:
    table = new_table("Damaged stores, each started twice", left=("damage",), right=("cases", *VERDICTS, "failed"))
    for kind in (*KINDS, None):
        some = [case for case in results if kind in (None, case.kind)]
        counts = Counter("failed" if case.failed else case.verdict for case in some)
        row = [str(counts[column]) for column in (*VERDICTS, "failed")]
        table.add_row(kind or "all", str(len(some)), *row, style="bold" if kind is None else None)
    return table


@click.command()
@click.option(
    "--cases", type=click.IntRange(min=1), default=3000, show_default=True, help="The number of damaged stores."
)
@seed_option(
    "damaged stores", "The seed of the first case, which decides its damage. Each later case has the next number."
)
@FOLDER
@JSON
def main(cases: int, seed: int, folder: Path | None, as_json: bool) -> None:
    """Damage a store in many ways, and start a daemon's store on each until one lives, and once more.

    Exits with 1 if a byte was wrong, a process erred, a second one died or hung, or a last start found damage again.
    --folder should be in memory.
    """
    with tempfile.TemporaryDirectory(prefix="diskprefix-damage-", dir=folder) as workspace:
        results = run_matrix(Path(workspace), cases, seed, Console(stderr=True))
    failures = [case for case in results if case.failed]
    if as_json:
        report = {"cases": [asdict(case) for case in results], "failed": len(failures)}
        click.echo(json.dumps(report, indent=2))
    else:
        Console().print(summary(results))
    sys.exit(1 if failures else 0)
