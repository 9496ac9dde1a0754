"""Of a model whose prompts restore to the token, a node takes the place of those whose tokens it begins with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diskprefix.store.changes import Changes, Use
from diskprefix.store.eviction import HALF_LIFE_S, recorded_ttl
from diskprefix.store.maintenance.verify import verify_index
from diskprefix.store.schema import Kind, UsageRecord
from diskprefix.store.store import Publication, Store
from diskprefix.tokens import TokenIds
from tests.store.building import BLOCK, Clock, is_whole, prompt, publication

TOKENS = prompt(1, 5 * BLOCK)


def save(
    store: Store,
    num_tokens: int,
    end_kind: Kind = Kind.BLOCK,
    *,
    tokens: TokenIds = TOKENS,
    ttl_s: float | None = None,
    replaces: bool = True,
) -> Publication:
    pub = publication(store, tokens[:num_tokens], replaces=replaces, end_kind=end_kind)
    nodes = tuple(replace(node, ttl_s=ttl_s) for node in pub.nodes)
    pub = replace(pub, nodes=nodes, ttl_s=ttl_s)
    store.publish(pub)
    assert verify_index(store).problems == ()
    return pub


def ends(store: Store) -> list[int]:
    """The ends of the nodes behind the second block."""
    with store.snapshot() as snapshot:
        nodes = [node for name in snapshot.keys("nodes") if (node := snapshot.node(name)) is not None]
    return sorted(node.end for node in nodes if node.position == 2 * BLOCK)


def entries(store: Store) -> list[int]:
    with store.snapshot() as snapshot:
        return sorted(entry.num_tokens for _, entry in snapshot.entries())


def usage(store: Store, pub: Publication) -> UsageRecord:
    assert pub.last_node is not None
    with store.snapshot() as snapshot:
        found = snapshot.usage(pub.last_node)
    assert found is not None
    return found


@pytest.mark.parametrize("first", [Kind.BLOCK, Kind.TAIL])
@pytest.mark.parametrize("second", [Kind.BLOCK, Kind.TAIL])
@pytest.mark.parametrize("num_tokens", [2 * BLOCK + 4, 3 * BLOCK - 1, 3 * BLOCK, 4 * BLOCK + 2])
def test_a_longer_node_takes_the_place_of_a_shorter_one_with_its_entry(
    store: Store, first: Kind, second: Kind, num_tokens: int
) -> None:
    save(store, 2 * BLOCK + 3, first)
    pub = save(store, num_tokens, second)
    assert ends(store) == sorted({min(num_tokens, 3 * BLOCK)})
    assert entries(store) == [num_tokens]
    assert is_whole(store, pub)


def test_the_logits_at_the_end_of_a_prompt_alone_go_too(store: Store) -> None:
    save(store, 2 * BLOCK, Kind.TAIL)
    assert ends(store) == [2 * BLOCK]
    save(store, 2 * BLOCK + 1)
    assert ends(store) == [2 * BLOCK + 1]


@pytest.mark.parametrize("longer", [2 * BLOCK + 9, 3 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.TAIL])
def test_a_shorter_node_that_comes_later_is_not_stored(store: Store, clock: Clock, longer: int, kind: Kind) -> None:
    whole = save(store, longer)
    clock.now += 100
    save(store, 2 * BLOCK + 3, kind, ttl_s=500.0)
    assert ends(store) == [min(longer, 3 * BLOCK)]
    assert entries(store) == [longer]
    with store.snapshot() as snapshot:
        holder = snapshot.usage(whole.nodes[2].name)
    assert holder is not None
    assert (holder.last_used, holder.ttl_s) == (clock.now, -500)


def test_the_end_of_a_prompt_takes_the_place_of_a_block_with_the_same_tokens(store: Store) -> None:
    save(store, 2 * BLOCK + 3)
    tail = save(store, 2 * BLOCK + 3, Kind.TAIL)
    assert ends(store) == [2 * BLOCK + 3]
    assert is_whole(store, tail)
    # The other way round there is nothing to be gained.
    save(store, 2 * BLOCK + 3)
    assert is_whole(store, tail)
    assert (ends(store), entries(store)) == ([2 * BLOCK + 3], [2 * BLOCK + 3])


def test_what_leaves_a_node_stays_beside_it(store: Store) -> None:
    save(store, 2 * BLOCK + 5)
    other = np.concatenate([TOKENS[: 2 * BLOCK + 4], prompt(2, 9)])
    save(store, len(other), tokens=other)
    assert ends(store) == [2 * BLOCK + 5, 2 * BLOCK + 13]
    assert entries(store) == [2 * BLOCK + 5, 2 * BLOCK + 13]


@pytest.mark.parametrize(
    ("asked", "asked_later", "stays"),
    [
        (None, None, False),
        (60.0, 60.0, False),
        (60.0, 90.0, False),
        (90.0, 60.0, True),
        (60.0, None, True),
        (None, 60.0, True),
    ],
)
def test_what_was_asked_to_be_kept_for_longer_stays(
    store: Store, asked: float | None, asked_later: float | None, stays: bool
) -> None:
    """A node with a time of its own outlives the others of a daemon with a short one, and not those of one without."""
    save(store, 2 * BLOCK + 3, ttl_s=asked)
    save(store, 2 * BLOCK + 5, ttl_s=asked_later)
    assert ends(store) == ([2 * BLOCK + 3] if stays else []) + [2 * BLOCK + 5]


def test_the_uses_of_what_was_replaced_count_on(store: Store, clock: Clock) -> None:
    first = save(store, 2 * BLOCK + 3)
    assert first.last_node is not None
    store.touch({first.last_node: Use(clock.now, 4, recorded_ttl(None))})
    clock.now += HALF_LIFE_S
    longer = save(store, 2 * BLOCK + 5)
    found = usage(store, longer)
    assert (found.restores, found.created_at) == (4, clock.now)
    assert found.hits == pytest.approx(2.0)
    # A shorter one that comes later has none of them.
    store.touch({first.last_node: Use(clock.now, 4, recorded_ttl(None))})
    assert usage(store, longer).restores == 4


def test_a_pin_does_not_keep_what_a_longer_node_holds(store: Store) -> None:
    """A request that restores it has a snapshot, and continues its parent."""
    first = save(store, 2 * BLOCK + 3)
    assert first.last_node is not None
    store.evictor.pin(first.last_node)
    with store.snapshot() as snapshot:
        save(store, 2 * BLOCK + 5)
        assert snapshot.node(first.last_node) is not None
        assert snapshot.piece(first.last_node, 0) is not None
    assert ends(store) == [2 * BLOCK + 5]
    store.evictor.unpin(first.last_node)


def test_a_publication_that_fails_replaces_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(store, 2 * BLOCK + 3)

    def fail(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(Changes, "remember", fail)
    with pytest.raises(OSError, match="no more"):
        save(store, 2 * BLOCK + 5)
    assert is_whole(store, first)
    assert entries(store) == [2 * BLOCK + 3]


def test_a_damaged_longer_node_holds_nothing(store: Store) -> None:
    longer = save(store, 2 * BLOCK + 9)
    assert longer.last_node is not None
    with store.changes() as changes:
        record = bytearray(changes.record("nodes", longer.last_node))
        record[-1] ^= 1
        changes._put("nodes", longer.last_node, bytes(record))
    shorter = publication(store, TOKENS[: 2 * BLOCK + 3], replaces=True, end_kind=Kind.BLOCK)
    store.publish(shorter)
    assert is_whole(store, shorter)
