from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import Kind
from diskprefix.store.store import Publication, Store
from diskprefix.store.tree import PrefixTree
from tests.faults.damage import damaged
from tests.store.building import BLOCK, layout_of, open_store, prompt, publication

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
    assert list(path) == [node.name for node in pub.nodes if node.kind != Kind.CHECKPOINT]
    ends = [(node.end, node.kind) for node in entry.values()]
    assert ends == [
        (BLOCK, Kind.BLOCK),
        (2 * BLOCK, Kind.BLOCK),
        (2 * BLOCK, Kind.CHECKPOINT),
        (3 * BLOCK, Kind.BLOCK),
        (4 * BLOCK, Kind.BLOCK),
        (4 * BLOCK, Kind.CHECKPOINT),
        (4 * BLOCK + 5, Kind.TAIL),
    ]


def test_a_subtree_comes_children_first_and_without_what_it_shares(store: Store) -> None:
    first, second = saved(store), saved(store, fork_at=3 * BLOCK)
    top = first.nodes[[node.position for node in first.nodes].index(3 * BLOCK)]
    with store.snapshot() as snapshot:
        doomed = PrefixTree(snapshot).subtrees({top.name: top.parent})
    assert doomed[-1] == (top.name, top.parent)
    assert {name for name, _ in doomed} == {node.name for node in first.nodes if node.position >= 3 * BLOCK}
    assert not {name for name, _ in doomed} & {node.name for node in second.nodes}
    order = [name for name, _ in doomed]
    assert all(parent not in order[: order.index(name)] for name, parent in doomed)


def test_a_path_with_a_missing_block_and_a_node_under_another_name_are_errors(store: Store, tmp_path: Path) -> None:
    pub, other = saved(store), saved(store, seed=2)
    store.close()
    with damaged(tmp_path) as records:
        records.delete("nodes", pub.nodes[1].name)
        records.change_node(other.nodes[0].name, kind=Kind.TAIL)
    store = open_store(tmp_path)
    with store.snapshot() as snapshot:
        tree = PrefixTree(snapshot, store.secret)
        with pytest.raises(StoreCorrupt, match="missing from its path"):
            tree.path(end(pub))
        with pytest.raises(StoreCorrupt):
            tree.node(other.nodes[0].name)
        assert PrefixTree(snapshot).node(other.nodes[0].name) is not None
    store.close()


def test_a_path_that_goes_round_in_a_circle_is_an_error(store: Store, tmp_path: Path) -> None:
    pub = saved(store)
    store.close()
    blocks = [node for node in pub.nodes if node.kind == Kind.BLOCK]
    with damaged(tmp_path) as records:
        records.change_node(blocks[0].name, parent=blocks[1].name, position=2 * BLOCK)
    store = open_store(tmp_path)
    with store.snapshot() as snapshot, pytest.raises(StoreCorrupt, match="where its child starts"):
        PrefixTree(snapshot).path(end(pub))
    store.close()
