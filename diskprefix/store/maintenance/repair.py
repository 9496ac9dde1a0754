"""Mending what `store.verify` and `store.verify_payloads` find.

What is bad goes with all that continues it, what is miscounted is counted anew.
Safe beside running daemons: what is removed is looked at again inside the write transaction that removes it. A kill
between two transactions leaves less to mend than there was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import Changes, node_bytes
from diskprefix.store.maintenance.verify import (
    NodeCheck,
    Place,
    Problem,
    ProblemKind,
    is_sane,
    record_problem,
    usage_problem,
    verify_index,
)
from diskprefix.store.maintenance.verify_payloads import payload_problems
from diskprefix.store.schema import RootRecord, UsageRecord, piece_index
from diskprefix.store.store import Store
from diskprefix.tokens import HASH_BYTES

Item = TypeVar("Item")

_NODES_AT_ONCE = 64
"""Nodes deleted in one transaction: more would copy more pages than a full file has free."""
_RECORDS_AT_ONCE = 512
_PASSES = 3
"""What is removed may leave something behind that could not be seen before, such as pieces under a strange key."""


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What mending took away, and what is wrong with the index still.

    `entries` are the names of the saved prompts that went, `blocks` and `prompts` the numbers of blocks and of recent
    prompts.
    """

    left: tuple[Problem, ...]
    entries: tuple[bytes, ...]
    blocks: int
    prompts: int


def repair_index(store: Store, roots: Mapping[bytes, RootRecord] = MappingProxyType({})) -> int:
    """Mend all that is wrong with the index; payloads are not read. Answers how many problems were mended.

    For a daemon whose publication failed with `StoreCorrupt`. `roots` are the records that the caller would write
    itself: they replace missing or damaged ones, so that nothing is lost that is stored under them.
    """
    found = verify_index(store).problems
    _put_roots(store, roots)
    left = mend(store, found).left
    return len(found) - len(left)


def mend(store: Store, problems: Sequence[Problem]) -> Mended:
    """Mend these problems, and those of the index that they hide."""
    removed: list[tuple[str, bytes]] = []
    for _ in range(_PASSES):
        if not problems:
            break
        removed += _remove_nodes(store, [p.node for p in problems if _is_of_node(p)])
        removed += _remove_records(store, [p for p in problems if not _is_of_node(p) and p.database != "usage"])
        _recount(store, [p.node for p in problems if p.database == "usage"])
        problems = verify_index(store).problems
    counts = Counter(database for database, _ in removed)
    return Mended(
        left=tuple(problems),
        entries=tuple(key for database, key in removed if database == "entries"),
        blocks=counts["nodes"],
        prompts=counts["history"],
    )


def _is_of_node(problem: Problem) -> bool:
    """Whether a whole node is bad, so that it and what continues it must go."""
    return problem.database in ("nodes", "payloads") and problem.kind != ProblemKind.ORPHANED


def _put_roots(store: Store, roots: Mapping[bytes, RootRecord]) -> None:
    with store.changes() as changes:
        good = NodeCheck(changes, store.secret).roots
        for root, record in roots.items():
            if root not in good:
                changes.delete_record("roots", root)
                changes.put_root(root, record)


def _remove_nodes(store: Store, names: Iterable[bytes]) -> list[tuple[str, bytes]]:
    """Answers database and key of the nodes that went, and of the saved prompts that ended there."""
    removed = []
    left = list(dict.fromkeys(names))
    while left:
        some = left[:_NODES_AT_ONCE]
        with store.changes() as changes:
            check = NodeCheck(changes, store.secret)
            bad = {name: _parent(changes, name) for name in some if _is_bad(changes, check, name)}
            doomed = changes.subtrees(bad)
            for name, parent in doomed[:_NODES_AT_ONCE]:
                _drop_unreadable_usage(changes, parent)
                removed += [(database, name) for database in ("nodes", "entries") if _has(changes, database, name)]
                changes.delete_node(name, parent)
        if len(doomed) <= _NODES_AT_ONCE:
            left = left[_NODES_AT_ONCE:]
    return removed


def _parent(changes: Changes, name: bytes) -> bytes:
    """Of a record that is cut short, a name that no block has: its real parent is counted anew."""
    return changes.parent(name).ljust(HASH_BYTES, b"\0")


def _drop_unreadable_usage(changes: Changes, name: bytes) -> None:
    """So that a node that continues this one can be taken off it; `_recount` writes the record anew."""
    try:
        changes.usage(name)
    except StoreCorrupt:
        changes.delete_record("usage", name)


def _is_bad(changes: Changes, check: NodeCheck, name: bytes) -> bool:
    return check.place(name) is not None and bool(check.problems(name) or payload_problems(changes, name))


def _remove_records(store: Store, problems: Sequence[Problem]) -> list[tuple[str, bytes]]:
    """Answers database and key of the records that went."""
    removed = []
    for some in _batches(problems):
        with store.changes() as changes:
            check = NodeCheck(changes, store.secret)
            for problem in some:
                key = bytes.fromhex(problem.key)
                if _is_useless(changes, check, problem.database, key) and changes.delete_record(problem.database, key):
                    removed.append((problem.database, key))
    return removed


def _is_useless(changes: Changes, check: NodeCheck, database: str, key: bytes) -> bool:
    if database == "roots":
        return key not in check.roots
    if database in ("payloads", "usage"):
        name = key[:HASH_BYTES]
        return check.place(name) is None or (database == "payloads" and piece_index(key, name) is None)
    value = _value(changes, database, key)
    return value is not None and record_problem(check, database, key, value) is not None


def _value(changes: Changes, database: str, key: bytes) -> bytes | memoryview | None:
    found, value = next(changes.records(database, key), (b"", b""))
    return value if found == key else None


def _has(changes: Changes, database: str, key: bytes) -> bool:
    return _value(changes, database, key) is not None


def _recount(store: Store, names: Sequence[bytes]) -> None:
    """Write the usage records of these nodes anew where they are missing or wrong, and drop those of no node."""
    for some in _batches(sorted(names)):
        with store.changes() as changes:
            check = NodeCheck(changes, store.secret)
            children = Counter(bytes(value[:HASH_BYTES]) for _, value in changes.nodes())
            for name in some:
                place = check.place(name)
                if isinstance(place, Place):
                    _recount_node(changes, name, place, children[name])
                elif place is None:
                    changes.delete_record("usage", name)


def _recount_node(changes: Changes, name: bytes, place: Place, children: int) -> None:
    file_bytes = node_bytes(place.num_tokens, [len(stored) for _, stored in changes.pieces(name)])
    value = _value(changes, "usage", name)
    if value is None or usage_problem(value, children, place.stored_bytes, file_bytes):
        changes.put_usage(name, _mended(changes, name, children, file_bytes))


def _mended(changes: Changes, name: bytes, children: int, file_bytes: int) -> UsageRecord:
    """The old record with the right counts; where it cannot be read, that of a node that was stored just now."""
    try:
        old = changes.usage(name)
    except StoreCorrupt:
        old = None
    if old is None or not is_sane(old):
        now = time.time()
        old = UsageRecord(last_used=now, hits=0.0, children=0, stored_bytes=0, prefill_s=0.0, created_at=now)
    return replace(old, children=children, stored_bytes=file_bytes)


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), _RECORDS_AT_ONCE):
        yield items[start : start + _RECORDS_AT_ONCE]
