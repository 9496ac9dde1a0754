"""Forgetting on purpose: by saved prompt, model, tenant, age, or everything.

A plan is made from one snapshot and shows what would go and what must stay: a block goes only with all that continues
it, and the checkpoints on a saved prompt's path go where their blocks do. It is carried out in small write transactions
beside whoever else has the store open. Each of them looks again, so what others have continued or saved meanwhile
stays, and a kill between two leaves a store in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import Changes
from diskprefix.store.schema import Kind, decode_prompt, history_sequence, node_kind, node_root
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store
from diskprefix.tenant import matches
from diskprefix.tokens import HASH_BYTES, TokenIds, common_prefix_length

_NODES_AT_ONCE = 64
"""Nodes deleted in one transaction: more would copy more pages than a full file has free."""
_RECORDS_AT_ONCE = 512
_ROUNDS = 5
"""A block stays while a daemon continues it; a second round takes it with what came."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is to go: what meets every condition that is given; everything if none is.

    `entries` are names of saved prompts, `model` a root's model, `salt` what `tenant.matches` takes, `older_than_s` the
    seconds since the last use.
    """

    entries: frozenset[bytes] = frozenset()
    model: str | None = None
    salt: str | None = None
    older_than_s: float | None = None

    @property
    def takes_whole_roots(self) -> bool:
        """Whether all that is stored under a root goes, its recent prompts and its record too."""
        return not self.entries and self.older_than_s is None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would go. `nodes` are children first. `prompts` are keys of the history, `roots` those that become empty.

    `stored_bytes` is what the nodes take in the file. The blocks of the chosen entries that stay: `shared_blocks` and
    their bytes, as other saved prompts need them; `continued_blocks`, as blocks of no saved prompt continue them.
    """

    entries: tuple[bytes, ...]
    nodes: tuple[bytes, ...]
    prompts: tuple[bytes, ...]
    roots: frozenset[bytes]
    stored_bytes: int
    shared_blocks: int
    continued_blocks: int
    kept_bytes: int

    def __bool__(self) -> bool:
        return bool(self.entries or self.nodes or self.prompts or self.roots)


@dataclass(frozen=True, kw_only=True)
class Purged:
    """What went. `left_blocks` is what should have gone and did not: somebody kept continuing it, or it is damaged."""

    entries: int
    blocks: int
    prompts: int
    roots: int
    stored_bytes: int
    left_blocks: int


def plan_purge(snapshot: Snapshot, selection: Selection, now: float) -> Plan:
    """What a purge would remove at time `now`. Raises `StoreCorrupt` if what is stored cannot be judged."""
    with _hint():
        return _Planner(snapshot, selection, now).plan()


def purge(store: Store, selection: Selection, now: float, advance: Callable[[int], None]) -> Purged:
    """Remove what is selected. `advance` is told of stored bytes as they go.

    Raises `StoreCorrupt` as `plan_purge`, and `StoreUnavailable`.
    """
    gone: Counter[str] = Counter()
    plan = _plan(store, selection, now)
    for _ in range(_ROUNDS):
        if not plan:
            break
        with _hint():
            went = _carry_out(store, plan, advance)
        gone += went
        plan = _plan(store, selection, now)
        if not any(went.values()):
            break
    return Purged(
        entries=gone["entries"],
        blocks=gone["blocks"],
        prompts=gone["prompts"],
        roots=gone["roots"],
        stored_bytes=gone["bytes"],
        left_blocks=len(plan.nodes),
    )


def _plan(store: Store, selection: Selection, now: float) -> Plan:
    with store.snapshot() as snapshot:
        return plan_purge(snapshot, selection, now)


@contextmanager
def _hint() -> Iterator[None]:
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{error}; mend the store with `diskprefix verify --fix` first") from error


class _Tree:
    """Which block continues which, as the records say without being decoded."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.parent_of: dict[bytes, bytes] = {}
        self.root_of: dict[bytes, bytes] = {}
        self.continuations: dict[bytes, list[bytes]] = {}
        self.checkpoints: set[bytes] = set()
        for name, value in snapshot.nodes():
            parent = bytes(value[:HASH_BYTES])
            if len(value) < 2 * HASH_BYTES:
                raise StoreCorrupt(f"the record of block {name.hex()} is cut short")
            self.parent_of[name], self.root_of[name] = parent, node_root(value)
            self.continuations.setdefault(parent, []).append(name)
            if node_kind(value) == Kind.CHECKPOINT:
                self.checkpoints.add(name)

    def entry(self, name: bytes) -> set[bytes]:
        """All blocks of the saved prompt that ends with `name`, and the checkpoints that continue them."""
        path = set(self.path(name))
        return path | {
            child for block in path for child in self.continuations.get(block, ()) if child in self.checkpoints
        }

    def path(self, name: bytes) -> Iterator[bytes]:
        """Blocks from `name` up to the first; damaged records may go round in a circle, which ends it too."""
        seen: set[bytes] = set()
        while name in self.parent_of and name not in seen:
            yield name
            seen.add(name)
            name = self.parent_of[name]

    def removable(self, wanted: Collection[bytes]) -> list[bytes]:
        """Those of the wanted blocks that nothing else continues, children first."""
        queue = [name for name, parent in self.parent_of.items() if parent not in self.parent_of]
        for name in queue:
            queue.extend(self.continuations.get(name, ()))
        found: dict[bytes, None] = {}
        for name in reversed(queue):
            if name in wanted and all(child in found for child in self.continuations.get(name, ())):
                found[name] = None
        return list(found)


class _Planner:
    """One plan from one snapshot."""

    def __init__(self, snapshot: Snapshot, selection: Selection, now: float) -> None:
        self._snapshot = snapshot
        self._selection = selection
        self._cutoff = None if selection.older_than_s is None else now - selection.older_than_s
        self._tree = _Tree(snapshot)
        table = snapshot.usages()
        self._last_used = dict(zip(table.names, table.records["last_used"].tolist(), strict=True))
        self._sizes = dict(zip(table.names, table.records["stored_bytes"].tolist(), strict=True))
        self._records = dict(snapshot.roots())
        self._entry_names = set(snapshot.keys("entries"))

    def plan(self) -> Plan:
        chosen = {name for name in self._selection.entries & self._entry_names if self._is_wanted(name)}
        nodes = self._removable(chosen)
        doomed = frozenset(nodes)
        prompts = self._prompts(chosen)
        entries = chosen | (self._entry_names & doomed)
        on_other_paths = {node for name in self._entry_names - entries for node in self._tree.entry(name)}
        kept = {node for name in chosen for node in self._tree.entry(name)} - doomed
        return Plan(
            entries=tuple(sorted(entries)),
            nodes=tuple(nodes),
            prompts=tuple(prompts),
            roots=self._emptied_roots(doomed, frozenset(prompts)),
            stored_bytes=self._bytes_of(nodes),
            shared_blocks=len(kept & on_other_paths),
            continued_blocks=len(kept - on_other_paths),
            kept_bytes=self._bytes_of(kept),
        )

    def _bytes_of(self, nodes: Iterable[bytes]) -> int:
        return sum(self._sizes.get(name, 0) for name in nodes)

    def _is_wanted_root(self, root: bytes) -> bool:
        model, salt = self._selection.model, self._selection.salt
        if model is None and salt is None:
            return True
        record = self._records.get(root)
        return (
            record is not None
            and (model is None or record.model == model)
            and (salt is None or matches(record.tenant, salt))
        )

    def _is_wanted(self, node: bytes) -> bool:
        """Whether a block meets the conditions on its root and its age."""
        if not self._is_wanted_root(self._tree.root_of.get(node, b"")):
            return False
        return self._cutoff is None or self._last_used.get(node, 0.0) < self._cutoff

    def _removable(self, chosen: Collection[bytes]) -> list[bytes]:
        """The nodes that go, children first."""
        if not self._selection.entries:
            return self._tree.removable({name for name in self._tree.parent_of if self._is_wanted(name)})
        wanted = {node for name in chosen for node in self._tree.entry(name)} - (self._entry_names - set(chosen))
        nodes = self._tree.removable(wanted)
        # What stays of the path can be restored as before: others go on from it.
        blocks = set(nodes) - self._tree.checkpoints
        return [name for name in nodes if name in blocks or self._tree.parent_of[name] in blocks]

    def _prompts(self, chosen: Collection[bytes]) -> list[bytes]:
        """Keys of the recent prompts that go: under the wanted roots, or those that begin with a chosen entry."""
        if self._selection.entries:
            return sorted({key for name in chosen for key in self._prompts_of(name)})
        return [
            key
            for key in self._snapshot.keys("history")
            if self._is_wanted_root(key[:HASH_BYTES])
            and (self._cutoff is None or history_sequence(key) < self._cutoff * 1e6)
        ]

    def _prompts_of(self, entry: bytes) -> Iterator[bytes]:
        path = self._snapshot.path(entry)
        token_ids: TokenIds = np.concatenate([node.token_ids for _, node in path])
        for key, value in self._snapshot.history(path[0][1].root):
            prompt = decode_prompt(key, value)
            if common_prefix_length(prompt, token_ids) == len(token_ids):
                yield key

    def _emptied_roots(self, nodes: Collection[bytes], prompts: Collection[bytes]) -> frozenset[bytes]:
        """Roots of which nothing would be left, and that lose something or were asked for."""
        left = {root for name, root in self._tree.root_of.items() if name not in nodes}
        left |= {key[:HASH_BYTES] for key in self._snapshot.keys("history") if key not in prompts}
        touched = {self._tree.root_of[name] for name in nodes} | {key[:HASH_BYTES] for key in prompts}
        if self._selection.takes_whole_roots:
            touched |= {root for root in self._records if self._is_wanted_root(root)}
        return frozenset((touched & self._records.keys()) - left)


def _carry_out(store: Store, plan: Plan, advance: Callable[[int], None]) -> Counter[str]:
    """Carry out a plan as far as it still holds. Answers how much went, under the names of `Purged`."""
    gone: Counter[str] = Counter()
    nodes, entries = frozenset(plan.nodes), frozenset(plan.entries)
    for some in _batches([name for name in plan.entries if name not in nodes], _RECORDS_AT_ONCE):
        with store.changes() as changes:
            gone["entries"] += sum(changes.delete_record("entries", name) for name in some)
    for some in _batches(plan.nodes, _NODES_AT_ONCE):
        with store.changes() as changes:
            went = _delete_nodes(changes, some, entries)
        gone += went
        advance(went["bytes"])
    for some in _batches(plan.prompts, _RECORDS_AT_ONCE):
        with store.changes() as changes:
            gone["prompts"] += sum(changes.delete_record("history", key) for key in some)
    with store.changes() as changes:
        gone["roots"] += _delete_empty_roots(changes, plan.roots)
        # Daemons then read the recent prompts anew.
        changes.note_purge()
    return gone


def _delete_nodes(changes: Changes, names: Sequence[bytes], entries: Collection[bytes]) -> Counter[str]:
    """Delete blocks, children first, unless one was continued, or saved as a prompt's end, since the plan was made."""
    gone: Counter[str] = Counter()
    for name in names:
        usage, saved = changes.usage(name), changes.entry(name) is not None
        if (usage is not None and usage.children) or (saved and name not in entries):
            continue
        if changes.delete_node(name, changes.parent(name)):
            gone["blocks"] += 1
            gone["entries"] += saved
            gone["bytes"] += usage.stored_bytes if usage is not None else 0
    return gone


def _delete_empty_roots(changes: Changes, roots: Collection[bytes]) -> int:
    before = set(changes.keys("roots"))
    changes.delete_bare_roots({root for root in roots if next(changes.history(root), None) is None})
    return len(before - set(changes.keys("roots")))


def _batches(items: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
