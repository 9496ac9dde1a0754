"""The prefix tree: its paths and subtrees, and the index of children, which finds what shares most with a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store import schema
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from tests.faults.damage import damaged
from tests.prefixstore.store.building import BLOCK, ROOT, layout_of, new_node, open_store, prompt, publication

HYBRID = layout_of(60, 60)


def saved(store: Store, seed: int = 1, *, fork_at: int | None = None) -> Publication:
    token_ids = prompt(seed, 4 * BLOCK + 5)
    if fork_at is not None:
        token_ids[fork_at:] += 1
    pub = publication(store, token_ids, layout=HYBRID, checkpoints=(2 * BLOCK, 4 * BLOCK))
    store.publish(pub)
    return pub


def end(pub: Publication) -> bytes:
    assert pub.last_node is not None
    return pub.last_node


def test_a_path_has_the_blocks_in_order_and_an_entry_also_the_checkpoints_behind_their_blocks(store: Store) -> None:
    pub = saved(store)
    with store.snapshot() as snapshot:
        tree = PrefixTree(snapshot, store.secret)
        path, entry = tree.path(end(pub)), tree.entry(end(pub))
    assert list(path) == [node.name for node in pub.nodes if node.kind != NodeKind.CHECKPOINT]
    ends = [(node.end, node.kind) for node in entry.values()]
    assert ends == [
        (BLOCK, NodeKind.BLOCK),
        (2 * BLOCK, NodeKind.BLOCK),
        (2 * BLOCK, NodeKind.CHECKPOINT),
        (3 * BLOCK, NodeKind.BLOCK),
        (4 * BLOCK, NodeKind.BLOCK),
        (4 * BLOCK, NodeKind.CHECKPOINT),
        (4 * BLOCK + 5, NodeKind.TAIL),
    ]


def test_a_subtree_goes_children_first_and_without_what_it_shares(store: Store) -> None:
    first, second = saved(store), saved(store, fork_at=3 * BLOCK)
    top = first.nodes[[node.position for node in first.nodes].index(3 * BLOCK)]
    gone = store.remove_subtrees({top.name: top.parent}).nodes
    assert gone[-1] == top.name
    assert set(gone) == {node.name for node in first.nodes if node.position >= 3 * BLOCK}
    assert not set(gone) & {node.name for node in second.nodes}
    parents = {node.name: node.parent for node in first.nodes}
    assert all(parents[name] not in gone[:number] for number, name in enumerate(gone))


def test_a_path_with_a_missing_block_and_a_node_under_another_name_are_errors(store: Store, tmp_path: Path) -> None:
    pub, other = saved(store), saved(store, seed=2)
    store.close()
    with damaged(tmp_path) as records:
        records.delete("nodes", pub.nodes[1].name)
        records.change_node(other.nodes[0].name, kind=NodeKind.TAIL)
    store = open_store(tmp_path)
    with store.snapshot() as snapshot:
        tree = PrefixTree(snapshot, store.secret)
        with pytest.raises(StoreCorrupt, match="missing from its path"):
            tree.path(end(pub))
        with pytest.raises(StoreCorrupt):
            tree.node(other.nodes[0].name)
        assert PrefixTree(snapshot).node(other.nodes[0].name) is not None


def test_a_path_that_goes_round_in_a_circle_is_an_error(store: Store, tmp_path: Path) -> None:
    pub = saved(store)
    store.close()
    blocks = [node for node in pub.nodes if node.kind == NodeKind.BLOCK]
    with damaged(tmp_path) as records:
        records.change_node(blocks[0].name, parent=blocks[1].name, position=2 * BLOCK)
    store = open_store(tmp_path)
    with store.snapshot() as snapshot, pytest.raises(StoreCorrupt, match="where its child starts"):
        PrefixTree(snapshot).path(end(pub))


LAYOUT = layout_of(1000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path, budget_bytes=64 << 20)


def tail(store: Store, token_ids: TokenIds) -> NewNode:
    return new_node(store.secret, ROOT, token_ids, 0, len(token_ids), NodeKind.TAIL, LAYOUT)


def put(store: Store, nodes: Sequence[NewNode]) -> None:
    with store.changes() as changes:
        for node in nodes:
            changes.put_node(ROOT, node, Codec.RAW)


def similar(store: Store, token_ids: TokenIds) -> list[bytes]:
    with store.snapshot() as snapshot:
        return list(snapshot.similar_children(ROOT, token_ids.tobytes()))


token_lists = st.lists(st.integers(-1, 1), min_size=1, max_size=9).map(as_token_ids)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(children=st.lists(token_lists, max_size=12), wanted=token_lists)
def test_all_that_share_a_token_are_found_and_those_that_share_most_come_first(
    store: Store, monkeypatch: pytest.MonkeyPatch, children: list[TokenIds], wanted: TokenIds
) -> None:
    """With keys that have room for two tokens, so that most children have several keys."""
    monkeypatch.setattr(schema, "CHILD_IDS_BYTES", 8)
    nodes = {node.name: node for node in (tail(store, token_ids) for token_ids in children)}
    put(store, list(nodes.values()))
    names = similar(store, wanted)
    shared = [common_prefix_length(nodes[name].token_ids, wanted) for name in names]
    assert shared == sorted(shared, reverse=True)
    assert sorted(names) == sorted(n for n, node in nodes.items() if node.token_ids[0] == wanted[0])
    with store.changes() as changes:
        for name in nodes:
            assert changes.delete_node(name, ROOT)
        assert list(changes.keys("children")) == []


def test_children_of_another_parent_and_prompts_that_share_nothing_are_not_found(store: Store) -> None:
    pub = publication(store, prompt(1, 2 * BLOCK))
    store.publish(pub)
    assert similar(store, prompt(1, BLOCK)) == [pub.nodes[0].name]
    assert similar(store, prompt(1, 2 * BLOCK)[BLOCK:]) == []
    assert similar(store, prompt(2, BLOCK)) == []


def test_a_node_whose_record_is_damaged_or_gone_leaves_the_index(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    pub, other = publication(store, prompt(1, 3 * BLOCK + 5)), publication(store, prompt(2, BLOCK))
    store.publish(pub)
    store.publish(other)
    store.close()
    first, second = pub.nodes[:2]
    with damaged(tmp_path) as records:
        # A token id: the record names other keys now.
        records.flip("nodes", first.name, 80)
        records.delete("nodes", second.name)
    store = open_store(tmp_path)
    for node in (second, first):
        store.quarantine(node.name, node.parent)
    with store.snapshot() as snapshot:
        assert {key[-16:] for key in snapshot.keys("children")} == {other.nodes[0].name}
