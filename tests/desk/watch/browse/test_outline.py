"""The prefix tree, folded: what prompts share is one trunk, and nothing of the tree is lost. The figures of trees and
of one saved prompt."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import fields, replace

from diskprefix.desk.watch.browse.outline import outline
from diskprefix.desk.watch.inspect.stats_view import figures
from diskprefix.prefixstore.store.schema import NodeKind, decode_node
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import read_savings
from diskprefix.prefixstore.store.store import Publication
from diskprefix.prefixstore.store.tree import EntryInfo, list_entries
from tests.desk.watch.browse.saved_chats import ALICE, SavedChats
from tests.faults.damage import damaged
from tests.prefixstore.store.building import BLOCK, layout_of, open_store, prompt, publication


def info_of(made: Publication) -> EntryInfo:
    """What a list says of an entry, as far as the outline looks at it."""
    names = {field.name: 0 for field in fields(EntryInfo)}
    known = {"id": "", "kind": "saved", "checkpoints": (), "preview": "", "num_tokens": len(made.nodes)}
    return EntryInfo(**{**names, **known})  # type: ignore[arg-type]


def test_prompts_share_one_trunk_and_end_separately(snapshot: Snapshot) -> None:
    found = outline(snapshot)
    main = next(tree for tree in found.trees if tree.num_entries == 5 and not tree.tenant)
    shared = max(main.nodes, key=lambda trunk: trunk.num_entries)
    assert (shared.start, shared.parent, shared.num_entries, shared.entries) == (0, None, 4, [])
    children = [trunk for trunk in main.nodes if trunk.parent == shared.id]
    assert [found.entries[one].preview.rsplit(" … ")[-1] for child in children for one in child.entries] == [
        "And now?",
        "Who drew the chart of the bay?",
        "Which birds nest on the pier?",
        "When is high tide today?",
    ]
    assert {tree.tenant for tree in found.trees} == {"", str(ALICE)}


def test_trunks_cover_the_whole_tree_without_gaps(snapshot: Snapshot) -> None:
    entries = list_entries(snapshot)
    found = outline(snapshot, entries)
    trunks = {trunk.id: trunk for tree in found.trees for trunk in tree.nodes}
    nodes = [decode_node(name, value) for name, value in snapshot.records("nodes")]
    blocks = [node for node in nodes if node.kind != NodeKind.CHECKPOINT]
    assert sum(trunk.num_blocks for trunk in trunks.values()) == sum(tree.blocks for tree in found.trees) == len(blocks)
    for name in ("stored_bytes", "raw_bytes"):
        assert sum(getattr(tree, name) for tree in found.trees) == sum(getattr(node, name) for node in nodes), name
    assert sum(trunk.stored_bytes for trunk in trunks.values()) == sum(node.stored_bytes for node in nodes)
    assert {one for trunk in trunks.values() for one in trunk.entries} == {info.id for info in entries}
    seen = dict[str | None, int]({None: 0})
    for trunk in trunks.values():
        assert trunk.start == seen[trunk.parent], "parents come first"
        seen[trunk.id] = trunk.end
    listed = json.loads(json.dumps(found.listing(with_texts=False)))
    assert [tree["root"] for tree in listed["trees"]] == [tree.root for tree in found.trees]
    assert (listed["total"], {entry["preview"] for entry in listed["entries"]}) == (len(entries), {None})


def test_a_tree_as_deep_as_a_long_conversation_is_folded_without_recursion(tmp_path: Path) -> None:
    """Each turn of it was saved, so that no two blocks fold into one."""
    store = open_store(tmp_path)
    made = publication(store, prompt(3, 1500 * BLOCK), layout=layout_of(64))
    store.publish(made)
    assert made.entry is not None
    with store.changes() as changes:
        for node in made.nodes:
            changes.put_entry(node.name, made.entry)
    with store.snapshot() as snapshot:
        infos = [replace(info_of(made), id=node.name.hex()) for node in made.nodes]
        (tree,) = outline(snapshot, infos).trees
        assert [trunk.num_entries for trunk in tree.nodes] == list(range(len(made.nodes), 0, -1))
    store.close()


def test_a_damaged_node_is_left_out_with_what_continues_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    made = publication(store, prompt(1, 4 * BLOCK))
    store.publish(made)
    store.close()
    with damaged(tmp_path) as records:
        records.flip("nodes", made.nodes[2].name, 60)
    store = open_store(tmp_path)
    with store.snapshot() as snapshot:
        (trunk,) = outline(snapshot).trees[0].nodes
        assert (trunk.num_blocks, trunk.end) == (2, 2 * BLOCK)
    store.close()


def test_each_model_and_tenant_has_its_own_figures(snapshot: Snapshot, chats: SavedChats) -> None:
    entries = list_entries(snapshot)
    rows = figures(outline(snapshot, entries), read_savings(snapshot), chats.clock.now)
    main, alice = max(rows, key=lambda row: row["entries"]), next(row for row in rows if row["tenant"] == str(ALICE))
    mine = [info for info in entries if info.model == "tiny" and not info.tenant]
    assert main["listed_bytes"] == sum(info.raw_bytes for info in mine if info.preview.find("older build") < 0)
    assert main["shared_bytes"] == main["listed_bytes"] - main["raw_bytes"] > 0
    assert (alice["entries"], alice["shared_bytes"]) == (1, 0)
    assert (main["total"]["requests"], main["restored_share"]) == (10, 0.5)
    assert main["today"]["saved_s"] == main["total"]["saved_s"] == 5 * 1.5
    assert main["since"] <= chats.clock.now
