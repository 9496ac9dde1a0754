from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from diskprefix.prefixstore.store import store as store_module
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.note_record import NoteKind, NoteTimes, encode_note, note_key
from diskprefix.prefixstore.store.notes import Notes
from diskprefix.prefixstore.store.schema import (
    ModelRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    child_keys,
    decode_node,
    decode_record,
    encode_node,
    encode_record,
    model_key,
    node_name,
    piece_key,
)
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.verify import StoreProblem, remove_damaged, verify_index, verify_payloads
from diskprefix.tokens import root_hash
from tests.faults.damage import Records, damaged
from tests.prefixstore.store import other_process
from tests.prefixstore.store.building import (
    BLOCK,
    ROOT,
    is_whole,
    layout_of,
    names_of_every_run,
    of_root,
    open_store,
    prompt,
    publication,
    read_payload,
)
from tests.prefixstore.store.other_process import beside

IDENTITY = "whose numbers these are"
OTHER_ROOT = root_hash(IDENTITY)
HYBRID_ROOT = b"h" * 16
LAYOUT = layout_of(1_200_000)
"""Blocks of three pieces."""
NOTE = "resp_1"
HYBRID = layout_of(60_000, 1_200_000)
"""Blocks of one piece, checkpoints of three."""


@dataclass
class Stored:
    """A closed store: two prompts under one root that share three blocks, one under a root with an identity, and one of
    a layout with states and checkpoints after its second and its last block. `ghosts` are the last three blocks of a
    prompt that was seen only; its first three are those of the first prompt."""

    folder: Path
    first: Publication
    second: Publication
    other: Publication
    hybrid: Publication
    ghosts: tuple[bytes, ...]

    @property
    def publications(self) -> tuple[Publication, ...]:
        return self.first, self.second, self.other, self.hybrid

    def name(self, index: int) -> bytes:
        """The name of a node of the first prompt."""
        return self.first.nodes[index].name

    def node(self, kind: NodeKind, end: int) -> bytes:
        """The name of a node of the prompt with states."""
        return next(node.name for node in self.hybrid.nodes if (node.kind, node_end(node)) == (kind, end))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("template")
    with names_of_every_run():
        store = open_store(folder)
    one, two = prompt(1, 4 * BLOCK + 5), prompt(1, 4 * BLOCK + 5)
    two[3 * BLOCK :] += 1
    first, second = (publication(store, tokens, layout=LAYOUT) for tokens in (one, two))
    second = replace(second, prompt_group=GROUP, ttl_s=3600.0)
    other = publication(store, prompt(2, 2 * BLOCK), root=OTHER_ROOT, layout=LAYOUT)
    other = of_root(other, structs.replace(other.root_record, identity=IDENTITY, tenant="a" * 32))
    token_ids = prompt(3, 4 * BLOCK + 5)
    points = (2 * BLOCK, 4 * BLOCK)
    hybrid = publication(store, token_ids, root=HYBRID_ROOT, layout=HYBRID, checkpoints=points)
    seen = publication(store, np.concatenate([one[: 3 * BLOCK], prompt(4, 3 * BLOCK)]), layout=LAYOUT)
    ghosts = tuple(node.name for node in seen.nodes[3:6])
    stored = Stored(folder, first, second, other, hybrid, ghosts)
    for pub in (*stored.publications, seen.without_nodes()):
        store.publish(pub)
    notes = Notes(store, lambda: None)
    notes.put(store.epochs.of(""), HYBRID_ROOT, hybrid.root_record, NoteKind.RESPONSE, NOTE, b"content", 1000.0)
    notes.write()
    store.close()
    return stored


@pytest.fixture
def stored(template: Stored, tmp_path: Path) -> Stored:
    shutil.copy(template.folder / "data.mdb", tmp_path / "data.mdb")
    return dataclasses.replace(template, folder=tmp_path)


def node_end(node: NewNode) -> int:
    return node.position + len(node.token_ids)


def nothing(_num_bytes: int) -> None:
    pass


def problems_of(store: Store) -> list[StoreProblem]:
    """All that `verify` finds: index and payloads."""
    index = verify_index(store)
    return [*index.problems, *verify_payloads(store, index.stored_bytes, nothing).problems]


def test_a_sound_store_is_clean_and_every_piece_is_counted(stored: Stored) -> None:
    store = Store(stored.folder, read_only=True)
    index = verify_index(store)
    nodes = {node.name: node for pub in stored.publications for node in pub.nodes}
    assert index.problems == ()
    assert (index.num_nodes, index.num_entries, index.num_prompts, index.num_roots) == (len(nodes), 4, 5, 3)
    done: list[int] = []
    payloads = verify_payloads(store, index.stored_bytes, done.append)
    assert payloads.problems == ()
    assert payloads.num_pieces == sum(len(node.pieces) for node in nodes.values())
    assert payloads.num_bytes == sum(done) == sum(index.stored_bytes.values())


Damage = Callable[[Records, Stored], None]


def child_key(node: NewNode) -> bytes:
    """The first key of a node in the index of children."""
    return child_keys(node.name, node.parent, node.token_ids.tobytes())[0]


def list_with_other_tokens(records: Records, stored: Stored) -> None:
    key = child_key(stored.first.nodes[1])
    records.delete("children", key)
    records.put("children", key[:16] + bytes(4) + key[20:], b"")


def swap(records: Records, a: bytes, b: bytes) -> None:
    one, two = records.get("payloads", a), records.get("payloads", b)
    records.put("payloads", a, two)
    records.put("payloads", b, one)


def rename_node(records: Records, stored: Stored) -> None:
    node = decode_node(stored.name(-1), records.get("nodes", stored.name(-1)))
    records.delete("nodes", stored.name(-1))
    records.put("nodes", bytes(16), encode_node(bytes(16), node))


def shorten_piece(records: Records, stored: Stored) -> None:
    key = piece_key(stored.name(2), 1)
    records.put("payloads", key, records.get("payloads", key)[:-1])


def shorten_piece_and_its_record(records: Records, stored: Stored) -> None:
    node = stored.first.nodes[2]
    shorten_piece(records, stored)
    total = sum(len(records.get("payloads", piece_key(node.name, index))) for index in range(len(node.pieces)))
    records.change_node(node.name, stored_bytes=total)


def in_the_root(root: bytes = ROOT, **changes: object) -> Damage:
    """Another value in the record of a root, under a good checksum."""

    def apply(records: Records, _: Stored) -> None:
        record = decode_record(RootRecord, root, records.get("roots", root))
        records.put("roots", root, encode_record(root, structs.replace(record, **changes)))

    return apply


def change_entry(records: Records, stored: Stored) -> None:
    name, entry = stored.name(-1), stored.first.entry
    assert entry is not None
    changed = structs.replace(entry, num_tokens=entry.num_tokens + 1)
    records.put("entries", name, encode_record(name, changed))


def add_an_entry(records: Records, stored: Stored) -> None:
    assert stored.first.entry is not None
    records.put("entries", GONE, encode_record(GONE, stored.first.entry))


def put_note(records: Records, key: bytes) -> None:
    records.put("notes", key, encode_note(key, b"content", NoteTimes(1000.0, 1000.0, 1000)))


def put_prompt(records: Records, key: bytes, parent: bytes) -> None:
    prompt = PromptRecord(came_at=1000.0, parent=parent, rest=b"", group=GROUP)
    records.put("seen", key, encode_record(key, prompt))


def put_model(records: Records, model: str) -> None:
    """A served model under the key of the model `a`."""
    key = model_key("a")
    records.put("meta", key, encode_record(key, ModelRecord(model=model, identity=model)))


def continue_a_tail(records: Records, stored: Stored) -> None:
    """A block moved behind the tail of an empty rest, which ends where the block starts."""
    tail = stored.other.nodes[-1]
    assert tail.kind == NodeKind.TAIL
    assert not len(tail.token_ids)
    records.change_node(tail.name, kind=NodeKind.BLOCK)


def move_a_checkpoint(records: Records, stored: Stored) -> None:
    """A checkpoint under the name that one of another block would have, its payload too."""
    name, to = stored.node(NodeKind.CHECKPOINT, 2 * BLOCK), bytes(16)
    record = replace(decode_node(name, records.get("nodes", name)), parent=stored.node(NodeKind.BLOCK, 3 * BLOCK))
    records.delete("nodes", name)
    records.put("nodes", to, encode_node(to, replace(record, position=3 * BLOCK)))
    for index in range(record.num_pieces):
        records.put("payloads", piece_key(to, index), records.get("payloads", piece_key(name, index)))


def swap_checkpoints(records: Records, stored: Stored) -> None:
    """The states of two positions change places."""
    first, second = stored.node(NodeKind.CHECKPOINT, 2 * BLOCK), stored.node(NodeKind.CHECKPOINT, 4 * BLOCK)
    for index in range(decode_node(first, records.get("nodes", first)).num_pieces):
        swap(records, piece_key(first, index), piece_key(second, index))


def renamed(kind: NodeKind, end: int, **changes: object) -> Damage:
    """A node of the prompt with states whose record says something else, under the name that goes with it."""

    def apply(records: Records, stored: Stored) -> None:
        name = stored.node(kind, end)
        old = decode_node(name, records.get("nodes", name))
        new = replace(old, **changes)
        to = node_name(records.secret, new.parent, new.token_ids, new.kind)
        records.delete("nodes", name)
        records.put("nodes", to, encode_node(to, new))
        for index in range(old.num_pieces):
            records.put("payloads", piece_key(to, index), records.get("payloads", piece_key(name, index)))

    return apply


def checkpoint_without_states(records: Records, stored: Stored) -> None:
    """A checkpoint of no bytes under a root whose layout has no states."""
    block = stored.other.nodes[1]
    name = node_name(records.secret, block.name, b"", NodeKind.CHECKPOINT)
    none = np.empty(0, np.int32)
    record = NodeRecord(block.name, OTHER_ROOT, 2 * BLOCK, none, NodeKind.CHECKPOINT, 0, 0, 0)
    records.put("nodes", name, encode_node(name, record))


def checkpoint_at_the_start(records: Records, stored: Stored) -> None:
    name = node_name(records.secret, HYBRID_ROOT, b"", NodeKind.CHECKPOINT)
    there = stored.node(NodeKind.CHECKPOINT, 2 * BLOCK)
    record = replace(decode_node(there, records.get("nodes", there)), parent=HYBRID_ROOT, position=0)
    records.put("nodes", name, encode_node(name, record))


def add_a_child_to_a_checkpoint(records: Records, stored: Stored) -> None:
    """A tail of no tokens that continues a checkpoint, which ends where the tail starts."""
    parent = stored.node(NodeKind.CHECKPOINT, 2 * BLOCK)
    renamed(NodeKind.TAIL, 4 * BLOCK + 5, parent=parent, position=2 * BLOCK)(records, stored)


def of_node(index: int, **changes: object) -> Damage:
    """Another value in the record of a node of the first prompt, under a good checksum."""
    return lambda records, stored: records.change_node(stored.name(index), **changes)


def of_usage(**changes: object) -> Damage:
    return lambda records, stored: records.change_usage(stored.name(2), **changes)


def of_state(state: NodeKind, end: int, **changes: object) -> Damage:
    """The same in the record of a node of the prompt with states."""
    return lambda records, stored: records.change_node(stored.node(state, end), **changes)


STRANGE_KEY = b"short"
GROUP = b"together"
GONE = bytes(range(16))

OF_NODES: dict[str, Damage] = {
    "a node under another name": rename_node,
    "a wrong position": of_node(3, position=2 * BLOCK),
    "a first block elsewhere": of_node(0, position=BLOCK),
    "another root in a node": of_node(3, root=OTHER_ROOT),
    "a block said to be a tail": of_node(0, kind=NodeKind.TAIL),
    "a tail said to be a block": continue_a_tail,
    "wrong raw bytes": of_node(1, raw_bytes=7),
    "wrong stored bytes": of_node(1, stored_bytes=7),
    "one piece fewer in the record": of_node(1, num_pieces=2),
    "a root with another block size": in_the_root(block_size=2 * BLOCK),
    "a root with another kind of numbers": in_the_root(layout=LAYOUT.replace("bfloat16", "float16")),
    "a piece too many": lambda r, s: r.put("payloads", piece_key(s.name(0), 700), b"x"),
    "two pieces swapped": lambda r, s: swap(r, piece_key(s.name(0), 0), piece_key(s.name(0), 1)),
    "a shortened piece and its record": shorten_piece_and_its_record,
    "a usage record that is gone": lambda r, s: r.delete("usage", s.name(1)),
    "too many children": of_usage(children=3),
    "a time that is no number": of_usage(last_used=float("nan")),
    "a negative time": of_usage(prefill_s=-1.0),
    "a block said to take nothing": of_usage(stored_bytes=0),
    "a block that the index of children lacks": lambda r, s: r.delete("children", child_key(s.first.nodes[1])),
    "a block that is listed with other tokens": list_with_other_tokens,
    "a checkpoint under another name": move_a_checkpoint,
    "two checkpoints swapped": swap_checkpoints,
    "a checkpoint whose block is gone": lambda r, s: r.delete("nodes", s.node(NodeKind.BLOCK, 2 * BLOCK)),
    "a checkpoint said to be elsewhere": of_state(NodeKind.CHECKPOINT, 2 * BLOCK, position=3 * BLOCK),
    "a checkpoint off the grid": of_state(NodeKind.CHECKPOINT, 2 * BLOCK, position=2 * BLOCK - 1),
    "a checkpoint at the start": checkpoint_at_the_start,
    "a checkpoint of a layout without states": checkpoint_without_states,
    "a checkpoint with tokens": of_state(NodeKind.BLOCK, BLOCK, kind=NodeKind.CHECKPOINT),
    "a checkpoint that is continued": add_a_child_to_a_checkpoint,
    "a checkpoint said to be a tail": of_state(NodeKind.CHECKPOINT, 2 * BLOCK, kind=NodeKind.TAIL),
}
OF_OTHERS: dict[str, tuple[Damage, str]] = {
    "a flipped bit in a root": (lambda r, _: r.flip("roots", ROOT, 12), "roots"),
    "a root of another identity": (in_the_root(OTHER_ROOT, identity="another's"), "roots"),
    "a root of no tenant": (in_the_root(tenant="alice"), "roots"),
    "a root with no layout": (in_the_root(layout="{}"), "roots"),
    "a piece key that is too long": (lambda r, s: r.put("payloads", s.name(0) + b"long key", b"x"), "payloads"),
    "pieces of no block": (lambda r, _: r.put("payloads", piece_key(GONE, 0), b"x"), "payloads"),
    "a payload under a strange key": (lambda r, _: r.put("payloads", STRANGE_KEY, b"x"), "payloads"),
    "a block that is listed in another part": (
        lambda r, s: r.put("children", GONE + child_key(s.first.nodes[1])[16:], b""),
        "children",
    ),
    "a listed block that is gone": (lambda r, _: r.put("children", ROOT + bytes(8) + GONE, b""), "children"),
    "a strange key in the index of children": (lambda r, _: r.put("children", STRANGE_KEY, b"x"), "children"),
    "usage of no block": (lambda r, _: r.put("usage", GONE, bytes(40)), "usage"),
    "an entry of another length": (change_entry, "entries"),
    "an entry of no block": (add_an_entry, "entries"),
    "an entry that is lost": (lambda r, s: r.delete("entries", s.name(-1)), "nodes"),
    "a recent prompt under a strange key": (lambda r, _: r.put("seen", STRANGE_KEY, b"x"), "seen"),
    "a recent prompt of no root": (lambda r, _: put_prompt(r, GONE + bytes(8), GONE), "seen"),
    "a recent prompt that continues no block": (lambda r, s: put_prompt(r, s.first.root + b"\xff" * 8, GONE), "seen"),
    "a block with another count of prompts": (lambda r, s: r.change_node(s.name(1), seen_children=7), "seen"),
    "a flipped bit in a ghost": (lambda r, s: r.flip("nodes", s.ghosts[1], 80), "nodes"),
    "a ghost with a payload": (lambda r, s: r.change_node(s.ghosts[1], raw_bytes=9), "nodes"),
    "a ghost that nothing continues": (lambda r, s: r.change_node(s.ghosts[1], seen_children=0), "seen"),
    "a ghost that is gone": (lambda r, s: r.delete("nodes", s.ghosts[1]), "seen"),
    "a ghost said to be stored": (lambda r, s: r.change_node(s.ghosts[1], kind=NodeKind.BLOCK), "nodes"),
    "a block said to be a ghost": (lambda r, s: r.change_node(s.name(1), kind=NodeKind.GHOST), "nodes"),
    "a note of an unknown kind": (lambda r, _: put_note(r, HYBRID_ROOT + b"\xff" * 17), "notes"),
    "a note under a root that is gone": (lambda r, _: put_note(r, note_key(GONE, NoteKind.TURN, "x")), "notes"),
    "a damaged record of a served model": (lambda r, _: r.put("meta", model_key("a"), b"x"), "meta"),
    "a served model under the key of another": (lambda r, _: put_model(r, "b"), "meta"),
}
"""Also the database of a problem that must be found."""
DAMAGE = {what: (damage, "nodes") for what, damage in OF_NODES.items()} | OF_OTHERS


OF_THE_OTHER_ROOT = {
    "a root of another identity",
    "a tail said to be a block",
    "a checkpoint of a layout without states",
}
LIES = {"a root with another block size", "a root with another kind of numbers"}
"""Records that say something else under a good checksum: nothing tells that it is not the blocks that are wrong."""


def entries(store: Store) -> set[bytes]:
    with store.snapshot() as snapshot:
        return set(snapshot.keys("entries"))


@pytest.mark.cases(8)
@pytest.mark.parametrize("what", DAMAGE)
def test_verify_finds_and_fix_mends(stored: Stored, what: str) -> None:
    damage, expected = DAMAGE[what]
    with damaged(stored.folder) as records:
        damage(records, stored)
    store = open_store(stored.folder)
    found = problems_of(store)
    assert expected in {problem.database for problem in found}, found
    before = entries(store)
    assert set(remove_damaged(store, found).entries) == before - entries(store)
    assert problems_of(store) == []
    # Nothing was taken of the root that was not touched.
    assert is_whole(store, stored.first if what in OF_THE_OTHER_ROOT else stored.other)
    # What went can be stored again.
    for pub in () if what in LIES else stored.publications:
        store.publish(pub)
        assert is_whole(store, pub)
    assert problems_of(store) == []


@pytest.mark.cases(7)
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_records_what_is_left_after_fix_is_right(stored: Stored, seed: int) -> None:
    rng = random.Random(seed)
    with damaged(stored.folder) as records:
        for _ in range(rng.choice((1, 1, 3, 20))):
            _damage_at_random(records, rng)
    store = open_store(stored.folder)
    remove_damaged(store, problems_of(store))
    assert problems_of(store) == []
    originals = {node.name: node for pub in stored.publications for node in pub.nodes}
    with store.snapshot() as snapshot:
        names = list(snapshot.keys("usage"))
        assert set(names) <= set(originals)
        for name in names:
            assert read_payload(snapshot, originals[name]) == b"".join(originals[name].payload)
    for pub in stored.publications:
        store.publish(pub)
        assert is_whole(store, pub)
    assert problems_of(store) == []


def _damage_at_random(records: Records, rng: random.Random) -> None:
    database = rng.choice(("roots", "nodes", "children", "usage", "payloads", "entries", "seen", "notes"))
    keys = records.keys(database)
    if not keys:
        return
    key, other = rng.choice(keys), rng.choice(keys)
    value = records.get(database, key)
    match rng.choice(("delete", "flip", "flip", "cut", "copy", "move", "zero")):
        case "delete":
            records.delete(database, key)
        case "flip":
            records.put(database, key, _flipped(value, rng))
        case "cut":
            records.put(database, key, value[: rng.randrange(len(value) + 1)])
        case "copy":
            records.put(database, other, value)
        case "move":
            records.put(database, rng.randbytes(rng.choice((1, len(key)))), value)
        case "zero":
            records.put(database, key, bytes(len(value)))


def test_a_long_subtree_goes_in_several_transactions_and_a_stop_between_them_leaves_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    pub, other = publication(store, prompt(1, 20 * BLOCK)), publication(store, prompt(2, 3 * BLOCK))
    store.publish(pub)
    store.publish(other)
    store.close()
    with damaged(tmp_path) as records:
        records.flip("payloads", piece_key(pub.nodes[1].name, 0), 100)
    monkeypatch.setattr(store_module, "NODES_AT_ONCE", 4)
    store = open_store(tmp_path)
    found = problems_of(store)
    transactions = 0
    changes = store.changes

    def stopping() -> object:
        nonlocal transactions
        transactions += 1
        if transactions == 3:
            raise KeyboardInterrupt
        return changes()

    monkeypatch.setattr(store, "changes", stopping)
    with pytest.raises(KeyboardInterrupt):
        remove_damaged(store, found)
    monkeypatch.setattr(store, "changes", changes)
    assert store.counts()["blocks"] == len(pub.nodes) - 8 + len(other.nodes)
    assert problems_of(store) == found
    remove_damaged(store, found)
    assert store.counts()["blocks"] == 1 + len(other.nodes)
    assert is_whole(store, other)


def test_a_node_that_goes_while_payloads_are_checked_is_passed_over(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.prefixstore.store.verify._SLICE_BYTES", 1)
    store = open_store(stored.folder)
    index = verify_index(store)

    def evict(_num_bytes: int) -> None:
        """After every slice one more prompt's last block goes; nobody holds a snapshot meanwhile."""
        for pub in stored.publications:
            for node in reversed(pub.nodes):
                if node.name in index.stored_bytes:
                    store.quarantine(node.name, node.parent)

    payloads = verify_payloads(store, index.stored_bytes, evict)
    assert payloads.problems == ()
    # Which node comes first is a matter of its name, and so of the store's secret.
    largest = max(len(node.pieces) for pub in stored.publications for node in pub.nodes)
    assert 0 < payloads.num_pieces <= largest
    assert store.counts()["blocks"] == 0


def test_a_publication_replaces_the_damaged_record_of_its_root_and_what_lies_under_it_stays(stored: Stored) -> None:
    with damaged(stored.folder) as records:
        records.flip("roots", OTHER_ROOT, 10)
    store = open_store(stored.folder)
    store.publish(stored.other)
    assert problems_of(store) == []
    assert is_whole(store, stored.other)


@pytest.mark.parametrize(("has_lock", "pauses_s"), [(True, []), (False, [0.1, 1.0])])
def test_only_a_reader_that_no_writer_sees_looks_again_and_a_while_later(
    store: Store, monkeypatch: pytest.MonkeyPatch, has_lock: bool, pauses_s: list[float]
) -> None:
    store.environment.has_lock = has_lock
    with store.changes() as changes:
        changes._put_record("usage", b"n" * 16, b"x")
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            with store.changes() as changes:
                changes.delete_record("usage", b"n" * 16)

    monkeypatch.setattr("diskprefix.prefixstore.store.verify.time.sleep", sleep)
    assert len(verify_index(store).problems) == has_lock
    assert slept == pauses_s


def test_a_store_that_another_process_fills_and_evicts_from_has_no_problems(tmp_path: Path) -> None:
    with beside(other_process.churn, tmp_path, 16 << 20, 400_000) as writer:
        store = Store(tmp_path)
        seen = 0
        for _ in range(15):
            index = verify_index(store)
            payloads = verify_payloads(store, index.stored_bytes, nothing)
            assert (*index.problems, *payloads.problems) == ()
            seen += payloads.num_pieces
            assert remove_damaged(store, index.problems).records == 0
        assert seen
        assert writer.is_alive()
        store.close()


def _flipped(value: bytes, rng: random.Random) -> bytes:
    """With one other bit; a bit where there was none."""
    changed = bytearray(value or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
