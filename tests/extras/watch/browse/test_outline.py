"""The prefix tree, folded: what prompts share is one trunk, and nothing of the tree is lost."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from diskprefix.extras.watch.browse.outline import outline, walk
from diskprefix.extras.watch.browse.statistics import count_nodes
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication
from diskprefix.store.tree import EntryInfo, list_entries
from tests.extras.watch.browse.saved_chats import ALICE
from tests.faults.damage import damaged
from tests.store.building import BLOCK, layout_of, open_store, prompt, publication


def info_of(made: Publication) -> EntryInfo:
    """What a list says of an entry, as far as the outline looks at it."""
    names = {field.name: 0 for field in fields(EntryInfo)}
    return EntryInfo(**{**names, "id": "", "checkpoints": (), "preview": "", "num_tokens": len(made.nodes)})  # type: ignore[arg-type]


def test_what_prompts_share_is_one_trunk_and_each_ends_on_its_own(snapshot: Snapshot) -> None:
    found = outline(snapshot)
    main = next(root for root in found.roots if root.num_entries == 5 and not root.tenant)
    shared = max(main.trunks, key=lambda trunk: trunk.num_entries)
    assert (shared.start, shared.num_entries, shared.entries) == (0, 4, [])
    assert all(child.start == shared.end for child in shared.children)
    ends = [one for child in walk(shared.children) for one in child.entries]
    assert sorted(found.entries[one].preview.rsplit(" … ")[-1] for one in ends) == [
        "And now?",
        "When is high tide today?",
        "Which birds nest on the pier?",
        "Who drew the chart of the bay?",
    ]
    assert {root.tenant for root in found.roots} == {"", str(ALICE)}


def test_nothing_of_the_tree_is_lost(snapshot: Snapshot) -> None:
    found = outline(snapshot)
    trunks = [trunk for root in found.roots for trunk in walk(root.trunks)]
    assert sum(trunk.num_blocks for trunk in trunks) == count_nodes(snapshot, dict(snapshot.roots())).blocks
    assert {one for trunk in trunks for one in trunk.entries} == {info.id for info in list_entries(snapshot)}
    assert sum(root.stored_bytes for root in found.roots) == sum(trunk.stored_bytes for trunk in trunks)
    assert all(trunk.children == [] or trunk.end == trunk.children[0].start for trunk in trunks)


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
        (root,) = outline(snapshot, infos).roots
        assert sum(1 for _ in walk(root.trunks)) == len(made.nodes)
        assert root.trunks[0].num_entries == len(made.nodes)
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
        (trunk,) = outline(snapshot).roots[0].trunks
        assert (trunk.num_blocks, trunk.end, trunk.children) == (2, 2 * BLOCK, [])
    store.close()
