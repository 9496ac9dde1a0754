"""Of a model whose prompts restore to the token, a node takes the place of those whose tokens it begins with. Of one
with states, later checkpoints of a conversation take the place of earlier ones."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.store.changes import Use, touches
from diskprefix.prefixstore.store.eviction import RECENT_CHECKPOINTS, recorded_ttl
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.tokens import TokenIds
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, layout_of, part_of, prompt, publication

TOKENS = prompt(1, 5 * BLOCK)


def save(
    store: Store,
    num_tokens: int,
    end_kind: NodeKind = NodeKind.BLOCK,
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
        nodes = [node for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
    return sorted(node.end for node in nodes if node.position == 2 * BLOCK)


def entries(store: Store) -> list[int]:
    with store.snapshot() as snapshot:
        return sorted(entry.num_tokens for _, entry in snapshot.entries())


@pytest.mark.parametrize("first", [NodeKind.BLOCK, NodeKind.TAIL])
@pytest.mark.parametrize("second", [NodeKind.BLOCK, NodeKind.TAIL])
@pytest.mark.parametrize("num_tokens", [2 * BLOCK + 4, 3 * BLOCK - 1, 3 * BLOCK, 4 * BLOCK + 2])
def test_a_longer_node_takes_the_place_of_a_shorter_one_with_its_entry(
    store: Store, first: NodeKind, second: NodeKind, num_tokens: int
) -> None:
    save(store, 2 * BLOCK + 3, first)
    pub = save(store, num_tokens, second)
    assert ends(store) == sorted({min(num_tokens, 3 * BLOCK)})
    assert entries(store) == [num_tokens]
    assert is_whole(store, pub)


@pytest.mark.parametrize(
    ("longer", "longer_kind"),
    [*((end, NodeKind.BLOCK) for end in (2 * BLOCK + 9, 3 * BLOCK, 4 * BLOCK + 1)), (2 * BLOCK + 3, NodeKind.TAIL)],
)
@pytest.mark.parametrize("kind", [NodeKind.BLOCK, NodeKind.TAIL])
def test_a_shorter_node_that_comes_later_is_not_stored_nor_a_block_beside_its_tail(
    store: Store, clock: Clock, longer: int, longer_kind: NodeKind, kind: NodeKind
) -> None:
    whole = save(store, longer, longer_kind)
    clock.now += 100
    save(store, 2 * BLOCK + 3, kind, ttl_s=500.0)
    assert ends(store) == [min(longer, 3 * BLOCK)]
    assert entries(store) == [longer]
    with store.snapshot() as snapshot:
        holder = snapshot.usage(whole.nodes[2].name)
    assert holder is not None
    assert (holder.last_used, holder.ttl_s) == (clock.now, -500)


def test_a_longer_node_takes_over_the_uses_of_all_that_it_replaces_and_what_is_kept_for_longer_stays(
    store: Store, clock: Clock
) -> None:
    for number, ttl_s in ((1, 60.0), (2, 60.0), (3, 600.0)):
        shorter = save(store, 2 * BLOCK + number, ttl_s=ttl_s, replaces=False)
        assert shorter.last_node is not None
        store.write([touches({shorter.last_node: Use(clock.now, number, recorded_ttl(ttl_s))})])
    whole = save(store, 2 * BLOCK + 9, ttl_s=60.0)
    assert ends(store) == entries(store) == [2 * BLOCK + 3, 2 * BLOCK + 9]
    with store.snapshot() as snapshot:
        holder = snapshot.usage(whole.nodes[2].name)
    assert holder is not None
    assert holder.restores == 1 + 2


def test_a_damaged_longer_node_holds_nothing(store: Store) -> None:
    longer = save(store, 2 * BLOCK + 9)
    assert longer.last_node is not None
    with store.changes() as changes:
        record = bytearray(changes.get_record("nodes", longer.last_node))
        record[-1] ^= 1
        changes._put_record("nodes", longer.last_node, bytes(record))
    shorter = publication(store, TOKENS[: 2 * BLOCK + 3], replaces=True, end_kind=NodeKind.BLOCK)
    store.publish(shorter)
    assert is_whole(store, shorter)


HYBRID = layout_of(2_000, 3_000)
SYSTEM = 5
"""Where the system message ends, an anchor."""
TURNS = [BLOCK - 2, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7, 3 * BLOCK + 3, 4 * BLOCK - 1, 4 * BLOCK + 9]


def turn(
    store: Store,
    num_tokens: int,
    *,
    tokens: TokenIds = TOKENS,
    anchors: tuple[int, ...] = (SYSTEM,),
    ttl_s: float | None = None,
    daemon_ttl_s: float = 0.0,
    end_kind: NodeKind = NodeKind.CHECKPOINT,
) -> Publication:
    """A turn of a conversation, with checkpoints at the end of its system message and at its own end."""
    pub = publication(store, tokens[:num_tokens], layout=HYBRID, checkpoints=(SYSTEM,), end_kind=end_kind)
    nodes = tuple(replace(node, ttl_s=ttl_s) for node in pub.nodes)
    return replace(pub, nodes=nodes, ttl_s=ttl_s, anchors=anchors, daemon_ttl_s=daemon_ttl_s)


def checkpoints(store: Store, *, tokens: TokenIds = TOKENS) -> list[int]:
    """The ends of the checkpoints and tails that hold tokens of a prompt only."""
    with store.snapshot() as snapshot:
        nodes = [node for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
    assert verify_index(store).problems == ()
    of_prompt = (node for node in nodes if np.array_equal(node.token_ids, tokens[node.position : node.end]))
    return sorted(node.end for node in of_prompt if node.kind != NodeKind.BLOCK)


def test_the_last_checkpoints_of_a_conversation_and_its_anchors_stay(store: Store) -> None:
    for count, end in enumerate(TURNS, start=1):
        pub = turn(store, end)
        store.publish(pub)
        assert checkpoints(store) == [SYSTEM, *TURNS[:count][-RECENT_CHECKPOINTS:]]
        assert entries(store) == [end], "what is kept is listed with the last turn"
        assert is_whole(store, pub)


def test_a_checkpoint_that_another_conversation_goes_on_from_stays_while_it_is_one_of_the_last_there(
    store: Store,
) -> None:
    other, other_end = np.concatenate([TOKENS[: TURNS[1] + 1], prompt(2, 4 * BLOCK)]), 2 * BLOCK + 3
    for end in TURNS[:2]:
        store.publish(turn(store, end))
    store.publish(turn(store, other_end, tokens=other))
    # The other conversation is one of the recent prompts: where it leaves is an anchor.
    for end in TURNS[2:]:
        store.publish(turn(store, end, anchors=(SYSTEM, TURNS[1])))
    assert checkpoints(store) == [SYSTEM, TURNS[1], *TURNS[-RECENT_CHECKPOINTS:]]
    assert checkpoints(store, tokens=other) == [SYSTEM, TURNS[1], other_end]
    assert entries(store) == [other_end, TURNS[-1]]
    # Later it is not: then its own checkpoints are left to it.
    store.publish(turn(store, TURNS[-1] + 1))
    assert checkpoints(store) == [SYSTEM, *TURNS[1 - RECENT_CHECKPOINTS :], TURNS[-1] + 1]
    assert checkpoints(store, tokens=other) == [SYSTEM, other_end]


def test_the_end_of_a_whole_prompt_counts_as_a_checkpoint(store: Store) -> None:
    for end in TURNS:
        store.publish(turn(store, end, end_kind=NodeKind.TAIL))
    assert checkpoints(store) == [SYSTEM, *TURNS[-RECENT_CHECKPOINTS:]]
    assert entries(store) == TURNS[-RECENT_CHECKPOINTS:], "each can be restored as a whole prompt"


def test_the_end_of_a_prompt_stays_listed_beside_its_reply(store: Store) -> None:
    """It holds tokens and logits of the prompt, and nothing else is listed with it: no deletion would find it."""
    asked, replied = turn(store, TURNS[3], end_kind=NodeKind.TAIL), turn(store, TURNS[4])
    for pub in (asked, replied):
        store.publish(pub)
    assert entries(store) == TURNS[3:5]
    for pub, left in ((replied, [TURNS[3]]), (asked, [])):
        assert pub.last_node is not None
        purge(store, PurgeFilter(entries=frozenset({pub.last_node})), 0.0)
        assert entries(store) == left
    assert store.counts()["blocks"] == 0


@pytest.mark.parametrize(("daemon_ttl_s", "stays"), [(60.0, True), (600.0, False), (0.0, False)])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_checkpoint_with_a_longer_time_to_live_stays_with_its_entry_and_does_not_count(
    store: Store, clock: Clock, daemon_ttl_s: float, stays: bool, is_used: bool
) -> None:
    """A cancelled prompt leaves one. A use that leaves the time to the daemon does not make it the longest."""
    left = turn(store, TURNS[0], ttl_s=600.0)
    assert left.last_node is not None
    store.publish(left)
    if is_used:
        store.write([touches({left.last_node: Use(clock.now, 1, recorded_ttl(None))})])
    own = [TURNS[0]] if stays else []
    for end in TURNS[1:]:
        store.publish(turn(store, end, daemon_ttl_s=daemon_ttl_s))
        others = TURNS[1:] if stays else TURNS
        assert checkpoints(store) == [SYSTEM, *own, *others[: others.index(end) + 1][-RECENT_CHECKPOINTS:]]
    assert entries(store) == [*own, TURNS[-1]]


def test_a_checkpoint_that_a_request_uses_stays_until_a_later_one_is_stored(store: Store) -> None:
    first = turn(store, TURNS[0])
    assert first.last_node is not None
    store.publish(first)
    store.evictor.pin(first.last_node)
    for end in TURNS[1:6]:
        store.publish(turn(store, end))
    assert checkpoints(store) == [SYSTEM, TURNS[0], *TURNS[:6][-RECENT_CHECKPOINTS:]]
    store.evictor.unpin(first.last_node)
    store.publish(turn(store, TURNS[6]))
    assert checkpoints(store) == [SYSTEM, *TURNS[-RECENT_CHECKPOINTS:]]


def test_a_prompt_that_was_not_saved_to_its_end_leaves_the_entries_of_earlier_turns(store: Store) -> None:
    """Its first batch is all that a kill, or a client that goes away, leaves of it."""
    for end in TURNS[:3]:
        store.publish(turn(store, end))
    store.publish(part_of(turn(store, TURNS[3])))
    assert checkpoints(store) == [SYSTEM, *TURNS[:4]]
    assert entries(store) == TURNS[2:4], "of what is left of it, a partial one"
    for end in TURNS[4:]:
        store.publish(part_of(turn(store, end)))
    assert checkpoints(store) == [SYSTEM, *TURNS[-RECENT_CHECKPOINTS:]]
    assert entries(store) == TURNS[-RECENT_CHECKPOINTS:], "no entry is left whose node is gone"


def test_a_publication_that_fails_supersedes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in TURNS[:5]:
        store.publish(turn(store, end))
    before = checkpoints(store)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr("diskprefix.prefixstore.store.store.see", fail)
    with pytest.raises(OSError, match="no more"):
        store.publish(turn(store, TURNS[5]))
    assert (checkpoints(store), entries(store)) == (before, [TURNS[4]])
