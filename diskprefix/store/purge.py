"""Removes the records that a user selects: by saved prompt, model, tenant or age, or all.

A plan is made from one snapshot, and carried out in small write transactions. Each transaction checks again, so nodes
that others have continued or saved meanwhile stay, and a kill leaves the store in order. A block is removed only
together with all its descendants, and a checkpoint of a saved prompt together with its block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict

from diskprefix.errors import EntryNotFound, StoreCorrupt
from diskprefix.printable import shown
from diskprefix.store.changes import NODES_AT_ONCE, RECORDS_AT_ONCE, Changes, batches
from diskprefix.store.epochs import EVERYONE, of_salt, of_tenants
from diskprefix.store.ghosts import PROMPTS_AT_ONCE, forget_prompts, newest_first
from diskprefix.store.note_record import ENCODED_TEXT, note_prompt
from diskprefix.store.schema import NodeRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.statistics.savings import forget_lines
from diskprefix.store.store import Store
from diskprefix.store.tree import PrefixTree
from diskprefix.tenant_ids import matches
from diskprefix.tokens import HASH_BYTES, LEAST_TOKENS, PromptDigest, TokenIds, common_prefix_length, num_common

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


class GoneText(Struct, frozen=True, eq=False):
    """A saved or seen prompt that a purge removes under a root, which has blocks of `block_size` tokens (0: unknown). A
    saved prompt that stays shares its first `num_kept` tokens. `key` is the key of a seen prompt, empty for a saved
    prompt."""

    root: bytes
    block_size: int
    token_ids: TokenIds
    num_kept: int
    key: bytes = b""

    def beginnings(self, secret: int, lengths: Iterable[int]) -> Iterator[tuple[bytes, int, bytes]]:
        """Yields root, length and digest of the prefixes with these lengths. Leaves out prefixes of a seen prompt that
        a saved prompt shares: notes of other turns of that conversation may have come from them."""
        min_length = self.num_kept if self.key else 0
        wanted = sorted(length for length in lengths if min_length < length <= len(self.token_ids))
        for length, digest in PromptDigest.of_beginnings(secret, self.token_ids, wanted):
            yield self.root, length, digest


class PurgePlan(Struct, frozen=True, kw_only=True):
    """The records that a purge removes. `nodes` are names, children first. `prompts`, `notes` and `models` are keys.
    `roots` may have no records left afterwards; `tenants` are their tenants, None if they are not known. `stored_bytes`
    is the size of the nodes in the file. `kept_blocks` is the number of blocks of the chosen entries that stay, because
    other blocks or saved prompts need them. `texts` are the chosen entries and the seen prompts that are removed with
    them; empty if the filter does not name entries.
    """

    entries: frozenset[bytes]
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
        _carry_out(store, plan, purged, advance)
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
    """One plan from one snapshot."""

    def __init__(self, snapshot: Snapshot, purge_filter: PurgeFilter, now: float) -> None:
        self._snapshot, self._filter, self._now = snapshot, purge_filter, now
        self._tree = PrefixTree(snapshot)
        self._nodes: dict[bytes, NodeRecord] = dict(self._tree.all_nodes())
        table = snapshot.usages()
        self._usage = dict(zip(table.names, table.records[["last_used", "stored_bytes"]].tolist(), strict=True))
        self._records = dict(snapshot.roots())
        self._entries = frozenset(snapshot.keys("entries"))

    def plan(self) -> PurgePlan:
        chosen = frozenset(filter(self._is_wanted, self._filter.entries & self._entries))
        texts: list[GoneText] = []
        if self._filter.entries:
            nodes = self._of_chosen(chosen)
            texts += self._texts(chosen | self._entries.intersection(nodes))
            pictures = list(self._encoded_of(texts))
            prompts = [text.key for text in texts if text.key]
            notes = list(self._notes_of([*texts, *(text for _, text in pictures)]))
        else:
            nodes = self._childless({*filter(self._is_wanted, self._nodes)})
            pictures, prompts, notes = [], list(self._old_prompts()), list(self._old_notes())
        entries = chosen | self._entries.intersection(nodes)
        nodes += [name for path, _ in pictures for name in reversed(path)]
        roots = {self._nodes[name].root for name in (*nodes, *entries)} | {
            key[:HASH_BYTES] for key in (*prompts, *notes)
        }
        if not self._filter.entries and self._filter.older_than_s is None:
            roots |= set(filter(self._is_wanted_root, self._records))
        tenants = (self._records[root].tenant for root in roots & self._records.keys())
        return PurgePlan(
            entries=entries,
            nodes=tuple(nodes),
            prompts=tuple(sorted(prompts)),
            notes=tuple(notes),
            roots=frozenset(roots),
            tenants=frozenset(tenants) if roots <= self._records.keys() else None,
            models=self._models(),
            stored_bytes=sum(self._usage[name][1] for name in nodes if name in self._usage),
            kept_blocks=len({node for name in chosen for node in self._tree.entry(name)}.difference(nodes)),
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

    def _is_wanted(self, name: bytes) -> bool:
        """Returns whether a node meets the conditions on its root and its age."""
        is_wanted = name in self._nodes and self._is_wanted_root(self._nodes[name].root)
        return is_wanted and self._is_old(self._usage[name][0] if name in self._usage else 0.0)

    def _of_chosen(self, chosen: Collection[bytes]) -> list[bytes]:
        """Returns the nodes of the chosen entries that nothing else needs, children first."""
        others = self._entries.difference(chosen)
        nodes = self._childless({node for name in chosen for node in self._tree.entry(name)} - others)
        # A checkpoint whose block stays can still be restored. But its tokens may belong only to a deleted prompt.
        blocks = set(nodes) - self._tree.checkpoints
        needed: set[bytes] = set()
        for name in others:
            # A damaged prompt needs nothing.
            with suppress(StoreCorrupt):
                needed.update(self._tree.entry(name))

        def is_gone(name: bytes) -> bool:
            node = self._nodes[name]
            return name in blocks or node.parent in blocks or (node.num_tokens > 0 and name not in needed)

        return list(filter(is_gone, nodes))

    def _childless(self, wanted: Collection[bytes]) -> list[bytes]:
        """Returns the wanted nodes that no other node continues, children first."""
        chosen: dict[bytes, None] = {}
        for name in reversed(list(self._tree.depth_first())):
            if name in wanted and all(child in chosen for child in self._tree.children.get(name, ())):
                chosen[name] = None
        return list(chosen)

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

    def _texts(self, gone: Collection[bytes]) -> Iterator[GoneText]:
        """Yields the texts of the entries in `gone`, and of the seen prompts that are removed with them."""
        for root in {self._nodes[name].root for name in gone}:
            size = self._records[root].block_size if root in self._records else 0
            saved: dict[bytes, TokenIds] = {
                name: np.concatenate([node.token_ids for node in self._tree.path(name).values()])
                for name in self._entries & self._nodes.keys()
                if self._nodes[name].root == root
            }
            kept = sorted(_ordered(text) for name, text in saved.items() if name not in gone)
            deleted = [saved[name] for name in gone if name in saved]
            for text in deleted:
                yield GoneText(root, size, text, _shared(kept, text))
            for seen in newest_first(self._snapshot, root):
                num_kept = _shared(kept, seen.token_ids)
                if any(_is_of(seen.token_ids, text, num_kept) for text in deleted):
                    yield GoneText(root, size, seen.token_ids, num_kept, seen.key)

    def _encoded_of(self, texts: Sequence[GoneText]) -> Iterator[tuple[list[bytes], GoneText]]:
        """Yields the nodes (parents first) and the token ids of each encoded picture in the deleted texts. Another
        prompt that needs the picture encodes it again."""
        owners = {root: (record.model, record.tenant) for root, record in self._records.items()}
        for root, record in self._records.items():
            own = [text for text in texts if record.has_pictures and owners.get(text.root) == owners[root]]
            deleted = [text.token_ids[text.num_kept :].tobytes() for text in own]
            for first in self._tree.children.get(root, ()) if deleted else ():
                path = [first]
                # Bound: each node has one parent, so none comes twice.
                while following := self._nodes.keys() & self._tree.children.get(path[-1], ()):
                    path += following
                ids = np.concatenate([self._nodes[name].token_ids for name in path])
                # A prompt may be kept up to the middle of a picture.
                if any(ids[:4].tobytes() in text for text in deleted):
                    yield path, GoneText(root, record.block_size, ids, 0)

    def _notes_of(self, texts: Sequence[GoneText]) -> Iterator[bytes]:
        """Yields the keys of the notes that came from these texts or from prefixes of them, and of all encoded texts
        under their roots, because any of these may be a part of a deleted text."""
        secret = self._snapshot.names().secret
        lengths: dict[bytes, set[int]] = {text.root: set() for text in texts}
        notes = [
            (note, note_prompt(self._snapshot.get_record("notes", note.key) or b""))
            for note in self._snapshot.notes()
            if note.root in lengths
        ]
        for note, prompt in notes:
            lengths[note.root].add(prompt.num_tokens)
        beginnings = {beginning for text in texts for beginning in text.beginnings(secret, lengths[text.root])}
        for note, prompt in notes:
            if note.kind == ENCODED_TEXT or (note.root, *prompt) in beginnings:
                yield note.key


def _is_of(prompt: TokenIds, text: TokenIds, num_kept: int) -> bool:
    """Returns whether a seen prompt is removed with a deleted text. The prompt must be longer than the `num_kept`
    tokens that it shares with saved prompts that stay. And one of the two must be a prefix of the other, or their
    common prefix must be longer than any template and longer than `num_kept`."""
    common = common_prefix_length(prompt, text)
    is_related = common == min(len(prompt), len(text)) or common >= max(LEAST_TOKENS, num_kept + 1)
    return num_kept < len(prompt) and is_related


def _shared(ordered: Sequence[bytes], token_ids: TokenIds) -> int:
    """Returns the length of the longest common prefix of `token_ids` and any of the texts. `ordered` are the sorted
    results of `_ordered`."""
    wanted = _ordered(token_ids)
    place = bisect_left(ordered, wanted)
    # The texts are sorted, so a neighbour of this place has the longest common prefix.
    return max((num_common(wanted, text) for text in ordered[max(0, place - 1) : place + 1]), default=0)


def _ordered(token_ids: TokenIds) -> bytes:
    return token_ids.astype(">i4").tobytes()


@_repair_hint()
def _carry_out(store: Store, plan: PurgePlan, purged: Purged, advance: Callable[[int], None]) -> None:
    """Carries out the parts of a plan that are still valid, and counts the removed records."""
    # Entries are removed last: after a kill, the same purge selects them again, and with them the remaining records.
    for some in batches(plan.prompts, PROMPTS_AT_ONCE):
        with store.changes() as changes:
            purged.prompts += forget_prompts(changes, some)
    for some in batches(plan.notes, RECORDS_AT_ONCE):
        with store.changes() as changes:
            purged.notes += sum(changes.delete_record("notes", key) for key in some)
    for some in batches(sorted(plan.entries.difference(plan.nodes)), RECORDS_AT_ONCE):
        with store.changes() as changes:
            purged.entries += sum(changes.delete_record("entries", name) for name in some)
    doomed = set(plan.entries)
    for some in batches(plan.nodes, NODES_AT_ONCE):
        before = purged.stored_bytes
        with store.changes() as changes:
            _delete_nodes(changes, some, doomed, purged)
            # What is left of a prompt stays listed in case this process is killed.
            doomed |= changes.moved_entries
        advance(purged.stored_bytes - before)
    with store.changes() as changes:
        purged.roots += changes.delete_bare_roots(set(plan.roots))
        for key in plan.models:
            changes.delete_record("meta", key)
    forget_lines(store, plan.roots)


def _delete_nodes(changes: Changes, names: Sequence[bytes], doomed: Collection[bytes], purged: Purged) -> None:
    """Deletes nodes, children first. Keeps nodes that were continued or saved as an entry since the plan was made, and
    nodes that have become ghosts."""
    for name in names:
        usage, has_entry, has_moved = (
            changes.usage(name),
            changes.has_record("entries", name),
            name in changes.moved_entries,
        )
        is_new = has_entry and name not in doomed and not has_moved
        if (usage is not None and usage.children) or is_new or changes.is_ghost(name):
            continue
        if changes.delete_node(name, changes.parent(name)):
            purged.blocks += 1
            purged.entries += has_entry and not has_moved
            purged.stored_bytes += usage.stored_bytes if usage is not None else 0
