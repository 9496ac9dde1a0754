"""Repairs what `verify` and `verify_payloads` find.

A damaged node is removed with everything that continues it. Wrong counts are counted again. Each record is checked
again inside the write transaction that removes it, so this is safe beside running daemons and may be killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import NODES_AT_ONCE, RECORDS_AT_ONCE, Changes, batches
from diskprefix.store.maintenance.verify import (
    ProblemKind,
    RecordCheck,
    StoreProblem,
    is_sane,
    payload_problems,
    verify_index,
)
from diskprefix.store.schema import RootRecord, UsageRecord
from diskprefix.store.store import Store
from diskprefix.tokens import HASH_BYTES

_PASSES = 3
"""Removing a record may uncover another problem, such as pieces under a key that is no piece's."""


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """The result of a repair: what it removed, and the problems of the index that are left.

    `entries` are the names of the saved prompts that were removed, `blocks` and `prompts` the numbers of blocks and of
    recent prompts.
    """

    left: tuple[StoreProblem, ...]
    entries: tuple[bytes, ...]
    blocks: int
    prompts: int


def repair_index(store: Store, roots: Mapping[bytes, RootRecord] = MappingProxyType({})) -> int:
    """Repairs every problem of the index, without reading payloads. Returns how many problems were repaired.

    A daemon calls this when a publication fails with `StoreCorrupt`. `roots` are the records that the caller would
    write itself: they replace missing or damaged ones, so that what is stored under them is kept.
    """
    found = verify_index(store).problems
    _put_roots(store, roots)
    left = repair_problems(store, found).left
    return len(found) - len(left)


def repair_problems(store: Store, problems: Sequence[StoreProblem]) -> RepairReport:
    """Repairs these problems, and those of the index that they hide."""
    removed: Counter[str] = Counter()
    entries: list[bytes] = []
    for _ in range(_PASSES):
        if not problems:
            break
        nodes = [problem.node for problem in problems if _is_of_node(problem)]
        miscounted = [problem.node for problem in problems if problem.kind == ProblemKind.MISCOUNTED]
        records = [p for p in problems if not _is_of_node(p) and p.kind != ProblemKind.MISCOUNTED]
        for database, key in [*_remove_nodes(store, nodes), *_mend_records(store, records)]:
            removed[database] += 1
            entries += [key] if database == "entries" else []
        _recount(store, miscounted)
        problems = verify_index(store).problems
    return RepairReport(
        left=tuple(problems), entries=tuple(entries), blocks=removed["nodes"], prompts=removed["history"]
    )


def _is_of_node(problem: StoreProblem) -> bool:
    """Returns whether a whole node is damaged, so that it and what continues it must be removed."""
    return problem.database in ("nodes", "payloads") and problem.kind != ProblemKind.ORPHANED


def _put_roots(store: Store, roots: Mapping[bytes, RootRecord]) -> None:
    with store.changes() as changes:
        sound = RecordCheck(changes, store.secret).roots
        for root, record in roots.items():
            if root not in sound:
                changes.delete_record("roots", root)
                changes.put_root(root, record)


def _remove_nodes(store: Store, names: Iterable[bytes]) -> list[tuple[str, bytes]]:
    """Returns database and key of the nodes that were removed, and of the saved prompts that ended there."""
    removed = []
    left = list(dict.fromkeys(names))
    while left:
        some = left[:NODES_AT_ONCE]
        with store.changes() as changes:
            check = RecordCheck(changes, store.secret)
            # A record that is cut short names no parent: then the real parent is counted again.
            damaged = {n: changes.parent(n).ljust(HASH_BYTES, b"\0") for n in some if _is_damaged(changes, check, n)}
            doomed = check.tree.subtrees(damaged)
            for name, parent in doomed[:NODES_AT_ONCE]:
                _drop_unreadable_usage(changes, parent)
                there = (database for database in ("nodes", "entries") if changes.has_record(database, name))
                removed += [(database, name) for database in there]
                changes.delete_node(name, parent)
        if len(doomed) <= NODES_AT_ONCE:
            left = left[NODES_AT_ONCE:]
    return removed


def _is_damaged(changes: Changes, check: RecordCheck, name: bytes) -> bool:
    return changes.has_record("nodes", name) and bool(check.problems("nodes", name) or payload_problems(changes, name))


def _drop_unreadable_usage(changes: Changes, name: bytes) -> None:
    """Removes a usage record that cannot be read, so that a child can be taken off it; `_recount` writes it again."""
    try:
        changes.usage(name)
    except StoreCorrupt:
        changes.delete_record("usage", name)


def _mend_records(store: Store, problems: Sequence[StoreProblem]) -> list[tuple[str, bytes]]:
    """Removes records that are wrong, and adds the keys that the index of children lacks. Returns database and key of
    the records that were removed."""
    removed = []
    for some in batches(problems, RECORDS_AT_ONCE):
        with store.changes() as changes:
            check = RecordCheck(changes, store.secret)
            for problem in some:
                key = bytes.fromhex(problem.key)
                is_there = any(found.location == problem.location for found in check.problems(problem.database, key))
                if is_there and problem.kind == ProblemKind.UNLISTED:
                    changes.put_child(key)
                elif is_there and changes.delete_record(problem.database, key):
                    removed.append((problem.database, key))
    return removed


def _recount(store: Store, names: Sequence[bytes]) -> None:
    """Writes the usage records of these nodes again where they are missing or wrong."""
    for some in batches(sorted(names), RECORDS_AT_ONCE):
        with store.changes() as changes:
            check = RecordCheck(changes, store.secret)
            for name in some:
                if any(problem.kind == ProblemKind.MISCOUNTED for problem in check.problems("usage", name)):
                    children = len(check.tree.children.get(name, ()))
                    file_bytes = check.file_bytes(name, check.node(name))
                    changes.put_usage(name, _recounted(changes, name, children, file_bytes))


def _recounted(changes: Changes, name: bytes, children: int, file_bytes: int) -> UsageRecord:
    """Returns the old record with the right counts. One that cannot be read is replaced by that of a new node."""
    try:
        old = changes.usage(name)
    except StoreCorrupt:
        old = None
    if old is None or not is_sane(old):
        now = time.time()
        old = UsageRecord(last_used=now, hits=0.0, children=0, stored_bytes=0, prefill_s=0.0, created_at=now)
    return old._replace(children=children, stored_bytes=file_bytes)
