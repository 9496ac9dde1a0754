from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diskprefix.store.eviction import choose_victims
from diskprefix.store.schema import UsageRecord


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[bytes, UsageRecord], dict[bytes, bytes]]:
    """A forest of nodes: usage records, and each node's parent (b"" for a first block)."""
    count = draw(st.integers(1, 25))
    parents = {name(i): draw(st.sampled_from([b"", *(name(j) for j in range(i))])) for i in range(count)}
    usage = {
        node: UsageRecord(
            last_used=float(draw(st.integers(0, 5))),
            hits=0,
            children=sum(parent == node for parent in parents.values()),
            stored_bytes=draw(st.integers(1, 100)),
        )
        for node in parents
    }
    return usage, parents


@given(trees(), st.integers(0, 3000), st.sets(st.integers(0, 24), max_size=4))
def test_only_leaves_are_taken_and_no_more_than_needed(
    tree: tuple[dict[bytes, UsageRecord], dict[bytes, bytes]], wanted: int, pins: set[int]
) -> None:
    usage, parents = tree
    pinned = {name(i) for i in pins}
    victims = choose_victims(usage, parents.__getitem__, bytes_wanted=wanted, pinned=pinned)
    gone: set[bytes] = set()
    for victim in victims:
        assert victim not in pinned
        assert all(child in gone for child, parent in parents.items() if parent == victim)
        assert sum(usage[v].stored_bytes for v in gone) < wanted
        gone.add(victim)
    kept = set(usage) - gone
    if sum(usage[v].stored_bytes for v in gone) < wanted:
        assert all(_is_protected(node, kept, parents, pinned) for node in kept)


def _is_protected(node: bytes, kept: set[bytes], parents: dict[bytes, bytes], pinned: set[bytes]) -> bool:
    return node in pinned or any(parents[child] == node for child in kept)


@given(trees())
def test_the_choice_is_a_function_of_its_arguments(tree: tuple[dict[bytes, UsageRecord], dict[bytes, bytes]]) -> None:
    usage, parents = tree
    reordered = dict(reversed(usage.items()))
    total = sum(u.stored_bytes for u in usage.values())
    first = choose_victims(usage, parents.__getitem__, bytes_wanted=total, pinned=())
    assert first == choose_victims(reordered, parents.__getitem__, bytes_wanted=total, pinned=())
    assert set(first) == set(usage)


def test_an_ancestor_that_others_continue_outlives_a_newer_leaf() -> None:
    usage = {
        name(0): UsageRecord(1.0, 0, 1, 10),
        name(1): UsageRecord(9.0, 0, 0, 10),
        name(2): UsageRecord(5.0, 0, 0, 10),
    }
    parents = {name(0): b"", name(1): name(0), name(2): b""}
    assert choose_victims(usage, parents.__getitem__, bytes_wanted=10, pinned=()) == [name(2)]
