"""Removes what a user wants to be forgotten: by saved prompt, model, tenant, age, or everything.

A plan is made from one snapshot. A block is removed only together with everything that continues it, and the
checkpoints of a saved prompt with their blocks. The plan is carried out in small write transactions. Each checks again,
so what others have continued or saved meanwhile stays, and a kill leaves the store in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from diskprefix.errors import EntryNotFound, StoreCorrupt
from diskprefix.printable import shown
from diskprefix.store.changes import NODES_AT_ONCE, RECORDS_AT_ONCE, Changes, batches
from diskprefix.store.listing import grown_from, has_grown
from diskprefix.store.note_record import NoteKind
from diskprefix.store.schema import NodeRecord, decode_prompt, history_sequence
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.store.tree import PrefixTree
from diskprefix.tenant import matches
from diskprefix.tokens import HASH_BYTES, TokenIds, common_prefix_length

_ROUNDS = 5
"""A block stays if a daemon continues it during a round. The next round removes both."""


@dataclass(frozen=True, kw_only=True)
class PurgeFilter:
    """What to remove: what meets every condition that is given, or everything if there is none.

    `entries` are names of saved prompts. `salt` is what `tenant.matches` takes.
    """

    entries: frozenset[bytes] = frozenset()
    model: str | None = None
    salt: str | None = None
    older_than_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PurgePlan:
    """What a purge removes. `nodes` are in the order children first. `prompts` are keys of the history, `notes` those
    of notes, `models` those of the models to forget. `roots` are those that become empty. `stored_bytes` is the size
    of the nodes in the file.

    The blocks of the chosen entries that stay: `shared_blocks`, because other saved prompts need them, and
    `continued_blocks`, because blocks of no saved prompt continue them; `kept_bytes` is the size of both in the file.
    """

    entries: tuple[bytes, ...]
    nodes: tuple[bytes, ...]
    prompts: tuple[bytes, ...]
    notes: tuple[bytes, ...]
    roots: frozenset[bytes]
    models: tuple[bytes, ...]
    stored_bytes: int
    shared_blocks: int
    continued_blocks: int
    kept_bytes: int

    def __bool__(self) -> bool:
        return bool(self.entries or self.nodes or self.prompts or self.notes or self.roots or self.models)


@dataclass(kw_only=True)
class Purged:
    """What a purge removed. `left_blocks` is the number of blocks that it could not remove: another process kept
    continuing them, or they are damaged."""

    entries: int = 0
    blocks: int = 0
    prompts: int = 0
    notes: int = 0
    roots: int = 0
    stored_bytes: int = 0
    left_blocks: int = 0


@contextmanager
def _repair_hint() -> Iterator[None]:
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{error}; repair the store with `diskprefix verify --fix` first") from error


@_repair_hint()
def plan_purge(snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> PurgePlan:
    """Returns what a purge at time `now` would remove. Raises `StoreCorrupt` if a record cannot be read."""
    return _Planner(snapshot, purge_filter, now).plan()


def purge(store: Store, purge_filter: PurgeFilter, now: float, advance: Callable[[int], None]) -> Purged:
    """Remove what the filter selects. `advance` is called with the stored bytes that were removed.

    Raises `StoreCorrupt` if a record cannot be read, and `StoreUnavailable`.
    """
    gone = Purged()
    for rounds_left in reversed(range(_ROUNDS + 1)):
        with store.snapshot() as snapshot:
            plan = plan_purge(snapshot, purge_filter, now)
        gone.left_blocks = len(plan.nodes)
        if not (plan and rounds_left):
            break
        _carry_out(store, plan, gone, advance)
    return gone


def delete_entry(store: Store, entry_id: str) -> Purged:
    """Remove the saved prompt with this id. Raises `EntryNotFound`, which names what has grown out of it; also what
    `purge` raises."""
    try:
        chosen = PurgeFilter(entries=frozenset({bytes.fromhex(entry_id)}))
    except ValueError:
        chosen = None
    purged = purge(store, chosen, store.clock(), lambda _bytes: None) if chosen is not None else Purged()
    if not purged.entries:
        with store.snapshot() as snapshot:
            ids = grown_from(snapshot, store.secret, entry_id)
        raise EntryNotFound(
            has_grown(entry_id, ids) if ids else f"there is no saved prompt with the id {shown(entry_id)!r}"
        )
    return purged


class _Planner:
    """One plan from one snapshot."""

    def __init__(self, snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> None:
        self._snapshot = snapshot
        self._filter = purge_filter
        self._cutoff = None if purge_filter.older_than_s is None else now - purge_filter.older_than_s
        self._tree = PrefixTree(snapshot)
        self._nodes: dict[bytes, NodeRecord] = {
            name: node for name in snapshot.keys("nodes") if (node := self._tree.node(name)) is not None
        }
        table = snapshot.usages()
        self._last_used = dict(zip(table.names, table.records["last_used"].tolist(), strict=True))
        self._sizes = dict(zip(table.names, table.records["stored_bytes"].tolist(), strict=True))
        self._records = dict(snapshot.roots())
        self._entry_names = set(snapshot.keys("entries"))

    def plan(self) -> PurgePlan:
        chosen = {name for name in self._filter.entries & self._entry_names if self._is_wanted(name)}
        nodes = self._removable(chosen)
        doomed = frozenset(nodes)
        prompts, notes = self._prompts(chosen), self._notes(chosen)
        entries = chosen | (self._entry_names & doomed)
        on_other_paths = {node for name in self._entry_names - entries for node in self._tree.entry(name)}
        kept = {node for name in chosen for node in self._tree.entry(name)} - doomed
        return PurgePlan(
            entries=tuple(sorted(entries)),
            nodes=tuple(nodes),
            prompts=tuple(prompts),
            notes=tuple(notes),
            roots=self._emptied_roots(doomed, frozenset(prompts), frozenset(notes)),
            models=self._models(),
            stored_bytes=self._bytes_of(nodes),
            shared_blocks=len(kept & on_other_paths),
            continued_blocks=len(kept - on_other_paths),
            kept_bytes=self._bytes_of(kept),
        )

    def _bytes_of(self, nodes: Iterable[bytes]) -> int:
        return sum(self._sizes.get(name, 0) for name in nodes)

    def _is_wanted_root(self, root: bytes) -> bool:
        model, salt = self._filter.model, self._filter.salt
        if model is None and salt is None:
            return True
        record = self._records.get(root)
        return (
            record is not None
            and (model is None or record.model == model)
            and (salt is None or matches(record.tenant, salt))
        )

    def _is_wanted(self, name: bytes) -> bool:
        """Returns whether a node meets the conditions on its root and its age."""
        if name not in self._nodes or not self._is_wanted_root(self._nodes[name].root):
            return False
        return self._cutoff is None or self._last_used.get(name, 0.0) < self._cutoff

    def _removable(self, chosen: Collection[bytes]) -> list[bytes]:
        """Returns the nodes to remove, children first."""
        if not self._filter.entries:
            return self._without_children({name for name in self._nodes if self._is_wanted(name)})
        wanted = {node for name in chosen for node in self._tree.entry(name)} - (self._entry_names - set(chosen))
        nodes = self._without_children(wanted)
        # A checkpoint whose block stays can be restored as before: others continue that block.
        blocks = set(nodes) - self._tree.checkpoints
        return [name for name in nodes if name in blocks or self._nodes[name].parent in blocks]

    def _without_children(self, wanted: Collection[bytes]) -> list[bytes]:
        """Returns those of the wanted nodes that no other node continues, children first."""
        found: dict[bytes, None] = {}
        for name in reversed(list(self._tree.depth_first())):
            if name in wanted and all(child in found for child in self._tree.children.get(name, ())):
                found[name] = None
        return list(found)

    def _prompts(self, chosen: Collection[bytes]) -> list[bytes]:
        """Returns the keys of the recent prompts to remove: those under the wanted roots, or those that begin with a
        chosen entry."""
        if self._filter.entries:
            return sorted({key for name in chosen for key in self._prompts_of(name)})
        return [
            key
            for key in self._snapshot.keys("history")
            if self._is_wanted_root(key[:HASH_BYTES])
            and (self._cutoff is None or history_sequence(key) < self._cutoff * 1e6)
        ]

    def _notes(self, chosen: Collection[bytes]) -> list[bytes]:
        """Returns the keys of the notes to remove: those under the wanted roots. None belongs to an entry, but an
        encoded text may be a part of one, so all of those go that are under the roots of chosen entries."""
        if self._filter.entries:
            roots = {self._nodes[name].root for name in chosen}
            notes = (note for note in self._snapshot.notes() if note.kind == NoteKind.ENCODING)
            return [note.key for note in notes if note.root in roots]
        return [
            note.key
            for note in self._snapshot.notes()
            if self._is_wanted_root(note.root) and (self._cutoff is None or note.times.last_used < self._cutoff)
        ]

    def _models(self) -> tuple[bytes, ...]:
        """Returns the keys of the models that are to be forgotten as a whole."""
        if self._filter.entries or self._cutoff is not None or self._filter.salt is not None:
            return ()
        return tuple(key for key, model in self._snapshot.models() if self._filter.model in (None, model.model))

    def _prompts_of(self, entry: bytes) -> Iterator[bytes]:
        nodes = list(self._tree.path(entry).values())
        token_ids: TokenIds = np.concatenate([node.token_ids for node in nodes])
        for key, value in self._snapshot.history(nodes[0].root):
            prompt = decode_prompt(key, value)
            if common_prefix_length(prompt, token_ids) == len(token_ids):
                yield key

    def _emptied_roots(
        self, nodes: Collection[bytes], prompts: Collection[bytes], notes: Collection[bytes]
    ) -> frozenset[bytes]:
        """Returns the roots that become empty, and that lose something or were asked for."""
        left = {node.root for name, node in self._nodes.items() if name not in nodes}
        left |= {key[:HASH_BYTES] for key in self._snapshot.keys("history") if key not in prompts}
        left |= {key[:HASH_BYTES] for key in self._snapshot.keys("notes") if key not in notes}
        touched = {self._nodes[name].root for name in nodes} | {key[:HASH_BYTES] for key in (*prompts, *notes)}
        if not self._filter.entries and self._cutoff is None:
            touched |= {root for root in self._records if self._is_wanted_root(root)}
        return frozenset((touched & self._records.keys()) - left)


@_repair_hint()
def _carry_out(store: Store, plan: PurgePlan, gone: Purged, advance: Callable[[int], None]) -> None:
    """Carry out a plan as far as it still holds, and count what is removed."""
    nodes, entries = frozenset(plan.nodes), frozenset(plan.entries)
    for some in batches([name for name in plan.entries if name not in nodes], RECORDS_AT_ONCE):
        with store.changes() as changes:
            gone.entries += sum(changes.delete_record("entries", name) for name in some)
    for some in batches(plan.nodes, NODES_AT_ONCE):
        before = gone.stored_bytes
        with store.changes() as changes:
            _delete_nodes(changes, some, entries, gone)
        advance(gone.stored_bytes - before)
    for some in batches(plan.prompts, RECORDS_AT_ONCE):
        with store.changes() as changes:
            gone.prompts += sum(changes.delete_record("history", key) for key in some)
    for some in batches(plan.notes, RECORDS_AT_ONCE):
        with store.changes() as changes:
            gone.notes += sum(changes.delete_record("notes", key) for key in some)
    with store.changes() as changes:
        gone.roots += changes.delete_bare_roots(set(plan.roots))
        for key in plan.models:
            changes.delete_record("meta", key)
        # This makes daemons read the recent prompts again.
        changes.note_purge()


def _delete_nodes(changes: Changes, names: Sequence[bytes], entries: Collection[bytes], gone: Purged) -> None:
    """Delete nodes, children first. A node stays if it was continued, or saved as an entry, since the plan was made."""
    for name in names:
        usage, saved = changes.usage(name), changes.entry(name) is not None
        if (usage is not None and usage.children) or (saved and name not in entries):
            continue
        if changes.delete_node(name, changes.parent(name)):
            gone.blocks += 1
            gone.entries += saved
            gone.stored_bytes += usage.stored_bytes if usage is not None else 0
