"""Removes the records that a user selects: by saved prompt, model, tenant or age, or all.

A plan is made from one snapshot, and carried out in small write transactions. Each transaction checks again, so nodes
that others have continued or saved meanwhile stay, and a kill leaves the store in order. A block is removed only
together with all its descendants, and a checkpoint of a saved prompt together with its block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict

from diskprefix.errors import EntryNotFound, StoreCorrupt
from diskprefix.prefixstore.store.changes import NODES_AT_ONCE, RECORDS_AT_ONCE, Changes, batches
from diskprefix.prefixstore.store.epochs import EVERYONE, of_salt, of_tenants
from diskprefix.prefixstore.store.following import DeletedPrompts, GoneText
from diskprefix.prefixstore.store.ghosts import PROMPTS_AT_ONCE, forget_prompts
from diskprefix.prefixstore.store.removal import Removal
from diskprefix.prefixstore.store.schema import EntryRecord, RootRecord, node_root
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import forget_lines
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.printable import shown
from diskprefix.tenant_ids import matches
from diskprefix.tokens import HASH_BYTES, PromptDigest

_ROUNDS = 5
"""A block stays if a daemon continues it during a round. The next round removes both."""


class PurgeFilter(Struct, frozen=True, kw_only=True):
    """The conditions of a purge, which removes the records that meet all of them. `entries` are names of saved prompts;
    an empty set is no condition. `salt` is passed to `tenant_ids.matches`."""

    entries: frozenset[bytes] = frozenset()
    model: str | None = None
    salt: str | None = None
    older_than_s: float | None = None

    @property
    def is_everything(self) -> bool:
        return self == PurgeFilter()

    def purged(self, plan: PurgePlan) -> frozenset[str]:
        """Returns whose epoch a purge with this plan ends (see `Purges.ids`): of a saved prompt, its tenant's, with all
        models, because a draft model has read it too. `--salt` names tenants that may have unsaved state only."""
        if self.entries and plan.tenants is not None:
            return of_tenants(plan.tenants)
        return EVERYONE if self.salt is None else of_salt(self.salt)

    def is_of(self, model: str, tenant: str) -> bool:
        """Returns whether a root's model and tenant meet the conditions."""
        return (self.model is None or model == self.model) and (self.salt is None or matches(tenant, self.salt))


class PurgePlan(Struct, frozen=True, kw_only=True):
    """The records that a purge removes. `entries` are by the names of their nodes. `nodes` are names, children first.
    `prompts`, `notes` and `models` are keys. `roots` may have no records left afterwards; `tenants` are their tenants,
    None if they are not known. `stored_bytes` is the size of the nodes in the file. `kept_blocks` is the number of
    blocks of the chosen entries that stay, because other blocks or prompts need them. `texts` are the removed entries
    and the seen prompts that are removed with them; empty if the filter does not name entries.
    """

    entries: dict[bytes, EntryRecord]
    nodes: tuple[bytes, ...]
    prompts: tuple[bytes, ...]
    notes: tuple[bytes, ...]
    roots: frozenset[bytes]
    tenants: frozenset[str] | None
    models: tuple[bytes, ...]
    stored_bytes: int
    kept_blocks: int
    texts: tuple[GoneText, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries or self.nodes or self.prompts or self.notes or self.roots or self.models)


class Purged(Struct, kw_only=True):
    """The result of a purge. `left_blocks` could not be removed, because another process continued them again and
    again, or because they are damaged. `is_erased`: the file was rewritten, and no process has the old file open; None
    if rewriting was not requested. `remote_objects` is the number of objects removed from the bucket; None if there is
    no bucket, or if removing failed, for the reason `remote_error`. For `texts` see `PurgePlan`."""

    entries: int = 0
    blocks: int = 0
    prompts: int = 0
    notes: int = 0
    roots: int = 0
    stored_bytes: int = 0
    left_blocks: int = 0
    is_erased: bool | None = None
    remote_objects: int | None = None
    remote_error: str | None = None
    texts: list[GoneText] = field(default_factory=list)

    @property
    def is_something(self) -> bool:
        """Returns whether records were removed from the store."""
        return bool(self.entries or self.blocks or self.prompts or self.notes or self.roots)

    def counts(self) -> dict[str, Any]:
        """Returns all fields but the texts."""
        return {name: value for name, value in asdict(self).items() if name != "texts"}


@contextmanager
def _repair_hint() -> Iterator[None]:
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{error}; repair the store with `diskprefix verify --fix` first") from error


@_repair_hint()
def plan_purge(snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> PurgePlan:
    """Returns the plan of a purge at time `now`. Raises `StoreCorrupt` if a record cannot be read."""
    return _Planner(snapshot, purge_filter, now).plan()


def purge(
    store: Store, purge_filter: PurgeFilter, now: float, advance: Callable[[int], None] = lambda _bytes: None
) -> Purged:
    """Removes the records that the filter selects, and has daemons drop their state in memory. Afterwards, no process
    stores anything for a request that began before the last round. `advance` is called with the stored bytes that were
    just removed.

    Raises `StoreCorrupt` if a record cannot be read, and `StoreUnavailable`.
    """
    purged = Purged()
    plan, number = _planned(store, purge_filter, now)
    # A purge by model, by tenant or of everything ends epochs even if nothing is stored, because daemons may have
    # unsaved state.
    if not plan and (purge_filter.entries or purge_filter.older_than_s):
        return purged
    whose = purge_filter.purged(plan)
    for rounds_left in reversed(range(_ROUNDS + 1)):
        # The state of a request that began before this transaction is in the plan, or is never stored. The last plan is
        # empty. A plan reads all records, so it is made outside the transaction: other writers would wait for that.
        with store.changes() as changes:
            is_current = changes.number == number + 1
            changes.record_purge(whose)
        store.read_epochs()
        if not is_current:
            plan, number = _planned(store, purge_filter, now)
        purged.left_blocks = len(plan.nodes)
        if not (plan and rounds_left):
            break
        purged.texts += plan.texts
        _carry_out(store, plan, purge_filter.entries, purged, advance)
        plan, number = _planned(store, purge_filter, now)
    return purged


def _planned(store: Store, purge_filter: PurgeFilter, now: float) -> tuple[PurgePlan, int]:
    """Returns a plan, and the number of the transaction that it was made from."""
    with store.reads.snapshot() as snapshot:
        return plan_purge(snapshot, purge_filter, now), snapshot.number


def delete_entry(entry_id: str, remove: Callable[[PurgeFilter], Purged]) -> Purged:
    """Calls `remove` for the saved prompt with this id. Raises `EntryNotFound`, and the errors of `remove`."""
    names: frozenset[bytes] = frozenset()
    with suppress(ValueError):
        names = frozenset({bytes.fromhex(entry_id)})
    if not names or not (purged := remove(PurgeFilter(entries=names))).entries:
        raise EntryNotFound(f"there is no saved prompt with the id {shown(entry_id)!r}")
    return purged


class _Planner:
    """One plan from one snapshot. What is read of nodes grows with what is removed, unless whole roots are."""

    def __init__(self, snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> None:
        self._snapshot, self._filter, self._now = snapshot, purge_filter, now
        self._records = dict(snapshot.roots())

    def plan(self) -> PurgePlan:
        if self._filter.entries:
            return self._of_chosen()
        return self._of_roots() if self._filter.older_than_s is None else self._of_old()

    def _of_chosen(self) -> PurgePlan:
        """Returns the plan for some entries, with all that came from their prompts."""
        named = {name: entry for name in self._filter.entries if (entry := self._snapshot.entry(name)) is not None}
        chosen = {name: entry for name, entry in named.items() if self._is_wanted(name, entry.root)}
        gone, removal = self._with_others(chosen, guesses=True)
        texts = list(gone.texts(removal))
        pictures = list(self._encoded_of(texts))
        sizes = {name: self._size(name) for path, _ in pictures for name in reversed(path)}
        return self._plan(
            entries=gone.entries,
            nodes=removal.nodes | sizes,
            prompts=[text.key for text in texts if text.key],
            notes=[*gone.notes(texts), *gone.notes([text for _, text in pictures])],
            kept_blocks=len(set[bytes]().union(*map(removal.left, chosen))),
            texts=texts,
            roots={text.root for _, text in pictures},
        )

    def _of_old(self) -> PurgePlan:
        """Returns the plan for the entries that were not used for a time, with all that came from their prompts, and
        for older prompts and notes."""
        old = {name: entry for name, entry in self._snapshot.entries() if self._is_wanted(name, entry.root)}
        gone, removal = self._with_others(old, guesses=False)
        nodes = self._childless(lambda record: not record.has_prompts)
        return self._plan(
            entries=gone.entries,
            nodes=removal.nodes | nodes,
            prompts=list(self._old_prompts()),
            notes=list(self._old_notes()),
            roots=self._roots_of(nodes),
        )

    def _of_roots(self) -> PurgePlan:
        """Returns the plan for all that is stored under some roots."""
        nodes = self._childless(lambda _: True)
        return self._plan(
            entries={name: entry for name, entry in self._snapshot.entries() if self._is_wanted_root(entry.root)},
            nodes=nodes,
            prompts=list(self._old_prompts()),
            notes=list(self._old_notes()),
            roots={*self._roots_of(nodes), *filter(self._is_wanted_root, self._records)},
        )

    def _with_others(self, chosen: dict[bytes, EntryRecord], *, guesses: bool) -> tuple[DeletedPrompts, Removal]:
        gone = DeletedPrompts(self._snapshot, self._records, chosen, guesses=guesses)
        removal = Removal(self._snapshot, self._records, gone.entries)
        for name in gone.entries:
            removal.remove(name)
        return gone, removal

    def _plan(
        self,
        *,
        entries: dict[bytes, EntryRecord],
        nodes: dict[bytes, int],
        prompts: Sequence[bytes],
        notes: Sequence[bytes],
        roots: Collection[bytes],
        kept_blocks: int = 0,
        texts: Sequence[GoneText] = (),
    ) -> PurgePlan:
        """Returns a plan. `nodes` have their sizes in the file. `roots` are the roots beyond those of the entries, the
        prompts and the notes."""
        whole = {*roots, *(entry.root for entry in entries.values()), *(key[:HASH_BYTES] for key in (*prompts, *notes))}
        tenants = (self._records[root].tenant for root in whole & self._records.keys())
        return PurgePlan(
            entries=entries,
            nodes=tuple(nodes),
            prompts=tuple(sorted(prompts)),
            notes=tuple(notes),
            roots=frozenset(whole),
            tenants=frozenset(tenants) if whole <= self._records.keys() else None,
            models=self._models(),
            stored_bytes=sum(nodes.values()),
            kept_blocks=kept_blocks,
            texts=tuple(texts),
        )

    def _is_wanted_root(self, root: bytes) -> bool:
        if self._filter.model is None and self._filter.salt is None:
            return True
        record = self._records.get(root)
        return record is not None and self._filter.is_of(record.model, record.tenant)

    def _is_old(self, last_used: float) -> bool:
        older_than_s = self._filter.older_than_s
        return older_than_s is None or last_used < self._now - older_than_s

    def _is_wanted(self, name: bytes, root: bytes) -> bool:
        """Returns whether a node meets the conditions on its root and its age."""
        usage = self._snapshot.usage(name)
        return self._is_wanted_root(root) and self._is_old(usage.last_used if usage else 0.0)

    def _size(self, name: bytes) -> int:
        usage = self._snapshot.usage(name)
        return usage.stored_bytes if usage else 0

    def _childless(self, are_wanted: Callable[[RootRecord], bool]) -> dict[bytes, int]:
        """Returns the sizes of the nodes that meet the conditions, under the roots that `are_wanted` or that have no
        record, and that no other node continues, children first."""
        tree, chosen = PrefixTree(self._snapshot), dict[bytes, int]()
        wanted = {root for root, record in self._records.items() if are_wanted(record)}
        for name in reversed(list(tree.depth_first())):
            node = self._snapshot.node(name)
            if node is None or not (node.root in wanted or node.root not in self._records):
                continue
            is_wanted = self._is_wanted(name, node.root)
            if is_wanted and all(child in chosen for child in tree.children.get(name, ())):
                chosen[name] = self._size(name)
        return chosen

    def _roots_of(self, nodes: Iterable[bytes]) -> set[bytes]:
        return {node_root(self._snapshot.get_record("nodes", name)) for name in nodes}

    def _old_prompts(self) -> Iterator[bytes]:
        """Yields the keys of the seen prompts that meet the conditions."""
        older_than_s = self._filter.older_than_s
        for key, came_at, _ in self._snapshot.seen_times():
            # A time in the future is from a wrong clock.
            is_old = older_than_s is None or abs(self._now - came_at) > older_than_s
            if is_old and self._is_wanted_root(key[:HASH_BYTES]):
                yield key

    def _old_notes(self) -> Iterator[bytes]:
        for note in self._snapshot.notes():
            if self._is_wanted_root(note.root) and self._is_old(note.times.last_used):
                yield note.key

    def _models(self) -> tuple[bytes, ...]:
        """Returns the keys of the models that are removed as a whole."""
        if self._filter.entries or self._filter.older_than_s is not None or self._filter.salt is not None:
            return ()
        return tuple(key for key, model in self._snapshot.models() if self._filter.model in (None, model.model))

    def _encoded_of(self, texts: Sequence[GoneText]) -> Iterator[tuple[list[bytes], GoneText]]:
        """Yields the nodes (parents first) and the token ids of each encoded picture in the deleted texts. Another
        prompt that needs the picture encodes it again."""
        owners = {root: (record.model, record.tenant) for root, record in self._records.items()}
        for root, record in self._records.items():
            own = [text for text in texts if record.has_pictures and owners.get(text.root) == owners[root]]
            deleted = [text.token_ids[text.num_kept :].tobytes() for text in own if (text.token_ids < 0).any()]
            for first in self._snapshot.children(root, self._snapshot.names().secret) if deleted else ():
                path = [first]
                # Bound: each node has one parent, so none comes twice.
                while following := self._snapshot.children(path[-1], self._snapshot.names().secret):
                    path += following
                nodes = [node for name in path if (node := self._snapshot.node(name)) is not None]
                ids = np.concatenate([node.token_ids for node in nodes])
                # A prompt may be kept up to the middle of a picture.
                if any(ids[:4].tobytes() in text for text in deleted):
                    yield path, GoneText(root, record.block_size, ids, 0)


@_repair_hint()
def _carry_out(
    store: Store, plan: PurgePlan, named: Collection[bytes], purged: Purged, advance: Callable[[int], None]
) -> None:
    """Carries out the parts of a plan that are still valid, and counts the removed records."""
    # Entries are removed last, the `named` ones after those that follow them: after a kill, the same purge selects them
    # again, and with them the remaining records.
    for some in batches(plan.prompts, PROMPTS_AT_ONCE):
        with store.changes() as changes:
            purged.prompts += forget_prompts(changes, some)
    for some in batches(plan.notes, RECORDS_AT_ONCE):
        with store.changes() as changes:
            purged.notes += sum(changes.delete_record("notes", key) for key in some)
    deleted = {entry.id for entry in plan.entries.values()}
    without_nodes = plan.entries.keys() - set(plan.nodes)
    _delete_entries(store, without_nodes - set(named), deleted, purged)
    for some in batches(plan.nodes, NODES_AT_ONCE):
        before = purged.stored_bytes
        with store.changes() as changes:
            _delete_nodes(changes, some, plan.entries.keys(), deleted, purged)
        advance(purged.stored_bytes - before)
    _delete_entries(store, without_nodes & set(named), deleted, purged)
    with store.changes() as changes:
        purged.roots += changes.delete_bare_roots(set(plan.roots))
        for key in plan.models:
            changes.delete_record("meta", key)
    forget_lines(store, plan.roots)


def _delete_entries(
    store: Store, names: Collection[bytes], deleted: Collection[tuple[float, PromptDigest, str]], purged: Purged
) -> None:
    """Deletes the entries at nodes that stay, unless their prompts were saved again since the plan was made."""
    for some in batches(sorted(names), RECORDS_AT_ONCE):
        with store.changes() as changes:
            for name in some:
                entry = changes.entry(name)
                if entry is not None and entry.id in deleted:
                    purged.entries += changes.delete_record("entries", name)


def _delete_nodes(
    changes: Changes,
    names: Sequence[bytes],
    ends: Collection[bytes],
    deleted: Collection[tuple[float, PromptDigest, str]],
    purged: Purged,
) -> None:
    """Deletes nodes, children first. Keeps nodes that were continued or saved since the plan was made, and nodes that
    have become ghosts. Entries with the ids `deleted` end at the nodes `ends`. What is left of their prompts stays
    listed until it is deleted too, in case this process is killed."""
    for name in names:
        usage, entry = changes.usage(name), changes.entry(name)
        is_new = entry is not None and entry.id not in deleted
        if (usage is not None and usage.children) or is_new or changes.is_ghost(name):
            continue
        if changes.delete_node(name, changes.parent(name)):
            purged.blocks += 1
            purged.entries += entry is not None and name in ends
            purged.stored_bytes += usage.stored_bytes if usage is not None else 0
