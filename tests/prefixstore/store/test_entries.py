"""Every node belongs to an entry, in each transaction, and a deletion takes what came from a deleted prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.notes import Notes, TenantNotes
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import EntryKind, NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.tokens import NO_PROMPT, PromptDigest, TokenIds, root_hash
from diskprefix.values import SHARED
from tests.prefixstore.store.building import BLOCK, ROOT, Clock, is_whole, layout_of, part_of, prompt, publication

TURNS = prompt(1, 6 * BLOCK)
WITHOUT = np.concatenate([TURNS[: 2 * BLOCK], prompt(2, 2 * BLOCK + 3)])
"""The same history without what was thought."""
STATES = layout_of(2_000, 800)
DRAFT = root_hash("a draft model")


def saved(store: Store, token_ids: TokenIds, root: bytes = ROOT, tenant: str = "") -> Publication:
    pub = publication(store, token_ids, root=root)
    record = replace(pub.root_record, tenant=tenant)
    store.publish(replace(pub, epoch=store.epochs.of(tenant), root_record=record))
    return pub


def computed(
    store: Store,
    token_ids: TokenIds,
    came_from: TokenIds,
    kind: EntryKind,
    root: bytes = ROOT,
    tenant: str = "",
    end_kind: NodeKind = NodeKind.TAIL,
) -> bytes:
    """Stores what was computed of tokens that came from a prompt, and returns the name of its entry."""
    pub = part_of(publication(store, token_ids, root=root, end_kind=end_kind))
    assert pub.entry is not None
    entry = replace(pub.entry, kind=kind, came_from=PromptDigest.of(store.secret, came_from))
    record = replace(pub.root_record, tenant=tenant)
    store.publish(replace(pub, entry=entry, epoch=store.epochs.of(tenant), root_record=record))
    return pub.nodes[-1].name


def listed(store: Store) -> dict[bytes, tuple[str, int]]:
    assert verify_index(store).problems == ()
    with store.snapshot() as snapshot:
        return {name: (entry.kind, entry.num_tokens) for name, entry in snapshot.entries()}


def delete(store: Store, *names: bytes) -> None:
    purge(store, PurgeFilter(entries=frozenset(names)), store.clock())


def end(pub: Publication) -> bytes:
    assert pub.last_node is not None
    return pub.last_node


@pytest.mark.parametrize("kind", ["ahead", "opening", "partial"])
@pytest.mark.parametrize("came_from", [TURNS, TURNS[: BLOCK + 3], np.concatenate([TURNS, prompt(3, 9)])])
def test_what_came_from_a_deleted_prompt_its_beginning_or_its_next_turn_goes(
    store: Store, kind: EntryKind, came_from: TokenIds
) -> None:
    pub, other = saved(store, TURNS), saved(store, prompt(7, 3 * BLOCK))
    store.publish(replace(publication(store, came_from), nodes=(), last_node=None, entry=None))
    computed(store, WITHOUT, came_from, kind)
    computed(store, WITHOUT, came_from, kind, root=DRAFT)
    of_another = computed(store, WITHOUT, came_from, kind, root=b"t" * 16, tenant=str(SHARED.with_salt("bob")))
    delete(store, end(pub))
    assert listed(store).keys() == {end(other), of_another}
    with store.snapshot() as snapshot:
        assert snapshot.num_records("seen") == 1, "the other prompt"


@pytest.mark.parametrize("is_seen", [False, True])
def test_what_came_from_a_prompt_that_nothing_shows_goes_with_any_shorter_one(store: Store, is_seen: bool) -> None:
    pub, unknown = saved(store, TURNS[: 2 * BLOCK]), prompt(5, 4 * BLOCK)
    if is_seen:
        store.publish(replace(publication(store, unknown), nodes=(), last_node=None, entry=None))
    name = computed(store, WITHOUT, unknown, "ahead")
    delete(store, end(pub))
    assert (name in listed(store)) == is_seen


@pytest.mark.parametrize(("kind", "token_ids"), [("ahead", WITHOUT), ("opening", WITHOUT), ("partial", TURNS[:-BLOCK])])
@pytest.mark.parametrize("is_seen", [False, True])
def test_replies_go_with_what_was_made_of_a_prompt_that_nothing_shows(
    store: Store, kind: EntryKind, token_ids: TokenIds, is_seen: bool
) -> None:
    """If the text differs from its prompt, only a seen prompt tells which replies are of its beginnings."""
    if is_seen:
        store.publish(replace(publication(store, TURNS), nodes=(), last_node=None, entry=None))
    name, other = computed(store, token_ids, TURNS, kind), saved(store, prompt(7, 3 * BLOCK))
    notes = TenantNotes(Notes(store, lambda: None), other.epoch, ROOT, other.root_record, 1000.0)
    of_prompts = {"own": TURNS[: 3 * BLOCK], "other": prompt(7, 2 * BLOCK), "unknown": prompt(8, 2 * BLOCK)}
    for id_, of_prompt in of_prompts.items():
        notes.put(NoteKind.RESPONSE, id_, b"content", of_prompt)
    notes.notes.write()
    delete(store, name)
    left = {id_ for id_ in of_prompts if notes.get(NoteKind.RESPONSE, id_) is not None}
    assert left == ({"other", "unknown"} if is_seen or kind == "partial" else {"other"})


def test_what_came_from_a_saved_prompt_that_stays_stays_beside_one_that_is_deleted(store: Store) -> None:
    first, second = saved(store, TURNS[: 3 * BLOCK + 1]), saved(store, TURNS)
    name = computed(store, WITHOUT, TURNS, "ahead")
    delete(store, end(first))
    assert listed(store).keys() == {end(second), name}
    delete(store, end(second))
    assert listed(store) == {}


def test_a_copy_is_deleted_by_its_own_id_with_what_came_from_it_and_its_prompt_stays(store: Store) -> None:
    pub = saved(store, TURNS)
    name = computed(store, WITHOUT, TURNS, "ahead")
    computed(store, np.concatenate([WITHOUT, prompt(4, BLOCK)]), np.concatenate([WITHOUT, prompt(4, BLOCK)]), "partial")
    assert len(listed(store)) == 3
    delete(store, name)
    assert listed(store).keys() == {end(pub)}


def test_what_came_from_what_was_computed_ahead_goes_too_and_the_prompts_that_go_on_from_it_stay(store: Store) -> None:
    pub, day, of_day = saved(store, TURNS), prompt(4, 2 * BLOCK), np.concatenate([prompt(4, 2 * BLOCK), prompt(6, 9)])
    computed(store, day, TURNS, "opening", end_kind=NodeKind.BLOCK)
    longer = saved(store, np.concatenate([day, prompt(5, BLOCK)]))
    store.publish(replace(publication(store, of_day), nodes=(), last_node=None, entry=None))
    computed(store, WITHOUT, TURNS, "ahead")
    # It came from the history as that was computed ahead.
    next_turn = np.concatenate([WITHOUT, prompt(4, BLOCK)])
    computed(store, next_turn, next_turn, "partial")
    kept = computed(store, prompt(9, 3 * BLOCK), of_day, "ahead")
    delete(store, end(pub))
    assert listed(store).keys() == {end(longer), kept}


def test_a_copys_prompt_goes_with_it_and_what_came_from_that_unless_it_is_saved(store: Store) -> None:
    store.publish(replace(publication(store, TURNS), nodes=(), last_node=None, entry=None))
    name = computed(store, WITHOUT, TURNS, "ahead")
    computed(store, prompt(9, 5 * BLOCK), TURNS[: 3 * BLOCK], "opening")
    of_another = computed(store, WITHOUT, TURNS, "ahead", root=b"t" * 16, tenant=str(SHARED.with_salt("bob")))
    delete(store, name)
    assert listed(store).keys() == {of_another}
    with store.snapshot() as snapshot:
        assert snapshot.num_records("seen") == 0


def test_what_a_draft_model_computed_of_a_copys_prompt_goes_with_the_copy(store: Store) -> None:
    longer = np.concatenate([WITHOUT, prompt(4, 3 * BLOCK)])
    name = computed(store, longer, TURNS, "ahead")
    computed(store, longer, TURNS, "ahead", root=DRAFT)
    delete(store, name)
    assert listed(store) == {}


def test_a_seen_prompt_goes_with_what_was_made_of_it_under_another_root(store: Store) -> None:
    pub, next_turn = saved(store, TURNS), np.concatenate([TURNS, prompt(3, 9)])
    store.publish(replace(publication(store, next_turn, root=DRAFT), nodes=(), last_node=None, entry=None))
    computed(store, prompt(8, 2 * BLOCK), next_turn, "opening", root=DRAFT)
    delete(store, end(pub))
    assert listed(store) == {}
    with store.snapshot() as snapshot:
        assert snapshot.num_records("seen") == 0


def test_of_two_tenants_that_delete_at_once_each_loses_what_came_from_its_own_prompts(store: Store) -> None:
    bob, root = str(SHARED.with_salt("bob")), b"t" * 16
    mine, his = saved(store, TURNS), saved(store, prompt(7, 7 * BLOCK), root, bob)
    kept = computed(store, WITHOUT, TURNS, "ahead", root, bob)
    delete(store, end(mine), end(his))
    assert listed(store).keys() == {kept}


def test_what_came_from_no_known_prompt_goes_with_any_and_a_part_of_another_prompt_stays(store: Store) -> None:
    pub = saved(store, TURNS[: 2 * BLOCK])
    part = computed(store, prompt(5, 3 * BLOCK), prompt(5, 5 * BLOCK), "partial")
    of_none = part_of(publication(store, prompt(6, 3 * BLOCK)))
    assert of_none.entry is not None
    store.publish(replace(of_none, entry=replace(of_none.entry, kind="ahead", came_from=NO_PROMPT)))
    delete(store, end(pub))
    assert listed(store).keys() == {part}


def test_by_age_what_came_from_an_unknown_prompt_stays(store: Store, clock: Clock) -> None:
    saved(store, TURNS[: 2 * BLOCK])
    clock.now += 1000.0
    name = computed(store, WITHOUT, prompt(5, 4 * BLOCK), "ahead")
    # The first blocks are not shared.
    other = computed(store, prompt(8, 2 * BLOCK), prompt(5, 4 * BLOCK), "ahead")
    purge(store, PurgeFilter(older_than_s=500.0), store.clock())
    assert listed(store).keys() == {name, other}


SHORT = TURNS[: 2 * BLOCK]
ENDS: dict[str, tuple[TokenIds, NodeKind, str, tuple[int, ...]]] = {
    "a block": (SHORT, NodeKind.BLOCK, "", ()),
    "a block with a checkpoint": (SHORT, NodeKind.BLOCK, STATES, (2 * BLOCK,)),
    "a checkpoint behind a block": (SHORT, NodeKind.CHECKPOINT, STATES, ()),
    "a checkpoint in a block": (SHORT[: BLOCK + 7], NodeKind.CHECKPOINT, STATES, ()),
    "a tail behind a checkpoint of both": (SHORT[: BLOCK + 9], NodeKind.TAIL, STATES, (BLOCK + 7,)),
    "another block behind a checkpoint of both": (
        np.concatenate([SHORT[: BLOCK + 7], prompt(9, BLOCK)]),
        NodeKind.TAIL,
        STATES,
        (BLOCK + 7,),
    ),
}


@pytest.mark.parametrize("where", ENDS)
def test_a_prompt_within_a_deleted_one_keeps_all_of_its_nodes(where: str, store: Store) -> None:
    token_ids, end_kind, layout, points = ENDS[where]
    short = publication(store, token_ids, layout=layout, checkpoints=points, end_kind=end_kind)
    longer = publication(store, TURNS, layout=layout, checkpoints=points)
    for pub in (short, longer):
        store.publish(pub)
    delete(store, end(longer))
    assert listed(store).keys() == {end(short)}
    assert is_whole(store, short)
    assert store.counts()["blocks"] == len(short.nodes)


def test_replies_to_a_saved_prompt_stay_beside_a_copy_that_is_deleted(store: Store) -> None:
    pub, name = saved(store, TURNS), computed(store, WITHOUT, TURNS, "ahead")
    notes = TenantNotes(Notes(store, lambda: None), pub.epoch, ROOT, pub.root_record, 1000.0)
    notes.put(NoteKind.RESPONSE, "resp_1", b"content", TURNS)
    notes.notes.write()
    delete(store, name)
    assert notes.get(NoteKind.RESPONSE, "resp_1") == b"content"


def test_while_a_prompt_is_saved_it_has_one_entry_at_the_end_of_what_is_stored(store: Store) -> None:
    whole = publication(store, TURNS, layout=STATES, checkpoints=(2 * BLOCK, 3 * BLOCK + 5))
    before = None
    for node in whole.nodes[:-1]:
        store.publish(part_of(replace(whole, nodes=(node,), continued=before)))
        before = node.name
        assert listed(store) == {node.name: ("partial", node.end)}
    store.publish(replace(whole, nodes=whole.nodes[-1:], continued=before))
    assert listed(store) == {end(whole): ("saved", len(TURNS))}


@pytest.mark.parametrize("layout", ["", STATES])
def test_what_is_left_of_an_evicted_prompt_stays_listed_until_all_of_it_is_gone(store: Store, layout: str) -> None:
    points = (BLOCK, 2 * BLOCK, 2 * BLOCK + 7, 4 * BLOCK + 1) if layout else ()
    pub = publication(store, TURNS[:-2], layout=layout, checkpoints=points)
    store.publish(pub)
    left = sorted(pub.nodes, key=lambda node: (node.end, node.kind != NodeKind.BLOCK))
    while left:
        gone = left.pop()
        store.evictor._evict([gone.name])
        if left and left[-1].end == gone.end:
            store.evictor._evict([left.pop().name])
        assert listed(store) == ({left[-1].name: ("partial", left[-1].end)} if left else {})
    assert store.counts()["blocks"] == 0


def test_an_entry_of_a_lower_kind_gives_way_to_the_prompts_own_and_not_the_reverse(store: Store) -> None:
    name = computed(store, TURNS, TURNS, "ahead")
    assert listed(store) == {name: ("ahead", len(TURNS))}
    pub = saved(store, TURNS)
    assert pub.entry is not None
    computed(store, TURNS, TURNS, "partial")
    store.publish(replace(pub, entry=replace(pub.entry, kind="imported"), epoch=store.epochs.of("")))
    assert listed(store) == {name: ("saved", len(TURNS))}


def test_a_checkpoint_that_another_prompt_goes_on_from_gets_no_entry_of_an_evicted_one(store: Store) -> None:
    common = TURNS[: 2 * BLOCK]
    more: dict[str, Any] = {"layout": STATES, "checkpoints": (2 * BLOCK, 2 * BLOCK + 5)}
    gone, other = (
        publication(store, np.concatenate([common, prompt(seed, 5)]), end_kind=NodeKind.CHECKPOINT, **more)
        for seed in (7, 8)
    )
    for pub in (gone, other):
        store.publish(pub)
    store.evictor._evict([end(gone)])
    assert listed(store) == {end(other): ("saved", 2 * BLOCK + 5)}


def test_an_interim_checkpoint_stays_if_a_saved_prompt_ends_there(store: Store) -> None:
    pub = publication(store, TURNS[: 2 * BLOCK], layout=STATES, end_kind=NodeKind.CHECKPOINT)
    store.publish(pub)
    with store.changes() as changes:
        changes.remove_interim(end(pub), pub.nodes[-1].parent)
    assert listed(store) == {end(pub): ("saved", 2 * BLOCK)}


def test_a_checkpoint_at_the_end_of_a_prompts_last_block_belongs_to_its_entry(store: Store) -> None:
    points = (2 * BLOCK,)
    pub = publication(store, TURNS[: 2 * BLOCK], layout=STATES, checkpoints=points, end_kind=NodeKind.BLOCK)
    store.publish(pub)
    assert listed(store) == {pub.nodes[1].name: ("saved", 2 * BLOCK)}
    delete(store, pub.nodes[1].name)
    assert store.counts()["blocks"] == 0


def test_a_later_checkpoint_replaces_an_interim_one_and_its_entry(store: Store) -> None:
    whole = publication(store, TURNS, layout=STATES, checkpoints=(2 * BLOCK,))
    interim = next(node for node in whole.nodes if node.kind == NodeKind.CHECKPOINT)
    first, rest = ([node for node in whole.nodes if (node.end > 2 * BLOCK) == is_rest] for is_rest in (False, True))
    store.publish(part_of(replace(whole, nodes=tuple(first))))
    assert listed(store) == {interim.name: ("partial", 2 * BLOCK)}
    store.publish(part_of(replace(whole, nodes=tuple(rest[:2]), replaced=(interim.name, interim.parent))))
    assert listed(store) == {rest[1].name: ("partial", rest[1].end)}


def test_a_prompt_that_is_removed_from_its_first_block_counts_as_one_entry(store: Store) -> None:
    pub = saved(store, TURNS)
    removed = store.remove_subtrees({pub.nodes[0].name: ROOT})
    assert (removed.entries, len(removed.nodes)) == ([end(pub)], len(pub.nodes))


def test_a_purge_that_is_killed_is_carried_on_by_the_same_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's own blocks stay, because another one continues them."""
    monkeypatch.setattr("diskprefix.prefixstore.store.purge.NODES_AT_ONCE", 2)
    first = publication(store, TURNS[: 2 * BLOCK], end_kind=NodeKind.BLOCK)
    store.publish(first)
    second = saved(store, TURNS)
    computed(store, prompt(9, 4 * BLOCK), TURNS[: 2 * BLOCK], "opening")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(store, PurgeFilter(entries=frozenset({end(first)})), 0.0, stop)
    assert len(listed(store)) == 3
    delete(store, end(first))
    assert listed(store).keys() == {end(second)}


def test_of_a_purge_that_is_killed_the_rest_stays_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.store.purge.NODES_AT_ONCE", 2)
    pub = saved(store, TURNS)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(store, PurgeFilter(entries=frozenset({end(pub)})), 0.0, stop)
    ((name, entry),) = listed(store).items()
    assert entry == ("partial", len(TURNS) - BLOCK)
    delete(store, name)
    assert store.counts()["blocks"] == 0
