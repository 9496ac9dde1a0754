from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from msgspec.structs import replace as replace_struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store import purge as purging
from diskprefix.prefixstore.store.changes import NewNode, Use, touches
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.compact import compact_folder
from diskprefix.prefixstore.store.note_record import ENCODED_TEXT, NoteKind
from diskprefix.prefixstore.store.notes import Notes, TenantNotes
from diskprefix.prefixstore.store.purge import Purged, PurgeFilter, PurgePlan, plan_purge, purge
from diskprefix.prefixstore.store.schema import EntryRecord, ModelRecord, NodeKind, NodeRecord, RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally, read_savings
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.tokens import LEAST_TOKENS, TokenIds, root_hash
from diskprefix.values import SHARED, Tenant
from tests.examples import examples
from tests.faults.damage import damaged
from tests.prefixstore.store.building import (
    BLOCK,
    ROOT,
    Clock,
    is_clean,
    is_whole,
    layout_of,
    open_store,
    part_of,
    prompt,
    publication,
    recent_prompts,
)

ALICE, BOB = SHARED.with_salt("alice"), SHARED.with_salt("bob")


def saved(
    store: Store, token_ids: TokenIds, *, model: str = "tiny", tenant: Tenant | None = None, preview: str = "hello"
) -> Publication:
    """A published prompt of a model and a tenant, under a root of their own."""
    root = root_hash(f"{model} {tenant}")
    pub = publication(store, token_ids, root=root)
    record = RootRecord(
        model=model, block_size=BLOCK, layout=pub.root_record.layout, created_at=0.0, tenant=str(tenant or "")
    )
    entry = EntryRecord(root=root, num_tokens=len(token_ids), scope="full", preview=preview, created_at=1.0)
    pub = replace(pub, epoch=store.epochs.of(record.tenant), root_record=record, entry=entry)
    store.publish(pub)
    return pub


def last_node(pub: Publication) -> bytes:
    assert pub.last_node is not None
    return pub.last_node


def fork(token_ids: TokenIds, at: int) -> TokenIds:
    """The same up to `at`, another prompt from there on."""
    other = token_ids.copy()
    other[at:] += 1
    return other


def plan_of(store: Store, purge_filter: PurgeFilter, now: float = 0.0) -> PurgePlan:
    with store.snapshot() as snapshot:
        return plan_purge(snapshot, purge_filter, now)


def purge_now(store: Store, purge_filter: PurgeFilter, now: float = 0.0) -> Purged:
    done: list[int] = []
    purged = purge(store, purge_filter, now, done.append)
    assert sum(done) == purged.stored_bytes
    return purged


LAYOUTS = {"dense": layout_of(2_000), "with states": layout_of(2_000, 800)}

prompts = st.tuples(
    st.lists(st.integers(-1, 0), min_size=1, max_size=4),
    st.integers(0, 2),
    st.frozensets(st.integers(1, 4), max_size=2),
    st.booleans(),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(25), deadline=None)
@given(drawn=st.lists(prompts, min_size=1, max_size=5), chosen=st.sets(st.integers(0, 4), min_size=1))
def test_what_no_other_prompt_needs_goes_with_a_saved_one_and_nothing_else(
    layout: str, drawn: list[Any], chosen: set[int]
) -> None:
    """Prompts that branch, extend and end with a tail or a checkpoint."""
    with TemporaryDirectory() as folder, closing(open_store(Path(folder, "kv"))) as store:
        new: dict[bytes, NewNode] = {}
        entries: list[bytes] = []
        for blocks, num_rest, points, has_tail in drawn:
            token_ids = np.repeat(np.array(blocks, np.int32), BLOCK)
            token_ids = np.concatenate([token_ids, np.ones(num_rest, np.int32)])
            at = [BLOCK * point - point % 3 for point in points] if layout == "with states" else []
            pub = publication(store, token_ids, layout=LAYOUTS[layout], checkpoints=at)
            nodes = pub.nodes if has_tail else pub.nodes[:-1]
            assert pub.entry is not None
            entry = replace_struct(pub.entry, num_tokens=nodes[-1].end)
            store.publish(replace(pub, nodes=nodes, last_node=nodes[-1].name, entry=entry))
            new |= {node.name: node for node in nodes}
            entries += [nodes[-1].name] if nodes[-1].name not in entries else []

        def path(name: bytes) -> set[bytes]:
            return {name} | (path(new[name].parent) if new[name].position else set())

        def whole(name: bytes) -> set[bytes]:
            """The path of an entry, and the checkpoints on it that hold nothing but its tokens."""
            on = path(name)
            token_ids = np.concatenate([new[n].token_ids for n in sorted(on, key=lambda n: new[n].position)])
            points = {
                n: node for n, node in new.items() if node.kind == NodeKind.CHECKPOINT and node.end <= len(token_ids)
            }
            return on | {
                n
                for n, node in points.items()
                if node.parent in {ROOT, *on} and np.array_equal(token_ids[node.position : node.end], node.token_ids)
            }

        names = frozenset(name for number, name in enumerate(entries) if number in chosen)
        assume(names)
        of_others = {*entries} - names
        wanted = set().union(*map(whole, names))
        needed = set().union(*map(path, of_others | (new.keys() - wanted)))
        free = wanted - needed
        # Where others continue a block, a checkpoint stays that they can restore, too.
        left = set().union(*map(whole, of_others))
        gone = {
            n
            for n in free
            if new[n].kind != NodeKind.CHECKPOINT or new[n].parent in free or (len(new[n].token_ids) and n not in left)
        }
        plan = plan_of(store, PurgeFilter(entries=names))
        assert plan.kept_blocks == len(wanted - gone)
        done = purge_now(store, PurgeFilter(entries=names))
        assert (done.blocks, done.entries, done.left_blocks) == (len(gone), len(names), 0)
        assert done.stored_bytes == plan.stored_bytes
        with store.snapshot() as snapshot:
            assert set(snapshot.keys("usage")) == new.keys() - gone
            assert set(snapshot.keys("entries")) == of_others
        assert is_clean(store)


def test_by_salt_a_tenant_is_forgotten_whole_and_alone(store: Store) -> None:
    tokens = prompt(1, 3 * BLOCK + 2)
    shared, bob = saved(store, tokens), saved(store, tokens, tenant=BOB)
    alices = [saved(store, tokens, tenant=ALICE), saved(store, tokens, tenant=ALICE, model="other")]
    user = saved(store, tokens, tenant=ALICE.with_salt("browser"))
    # A part of a prompt, and a root with nothing but a recent prompt.
    store.publish(part_of(publication(store, prompt(7, 2 * BLOCK), root=alices[0].root)))
    bare = saved(store, prompt(8, BLOCK), tenant=ALICE, model="third")
    for node in reversed(bare.nodes):
        store.quarantine(node.name, node.parent)
    with store.changes() as changes:
        # As after a kill in the middle of a purge.
        changes.put_root(root_hash("nothing is left"), bare.root_record)
    purged = purge_now(store, PurgeFilter(salt="alice"))
    assert (purged.entries, purged.roots, purged.left_blocks) == (4, 5, 0)
    with store.snapshot() as snapshot:
        assert {root for root, _ in snapshot.roots()} == {shared.root, bob.root}
        assert {key[:16] for key in snapshot.keys("seen")} == {shared.root, bob.root}
        names = {node.name for pub in (*alices, user) for node in pub.nodes}
        for database in ("nodes", "usage", "payloads", "entries"):
            assert not names & {key[:16] for key in snapshot.keys(database)}
        assert not names & {key[-16:] for key in snapshot.keys("children")}
    assert is_whole(store, shared)
    assert is_whole(store, bob)
    assert is_clean(store)
    assert purge_now(store, PurgeFilter(salt="alice")) == Purged(
        entries=0, blocks=0, prompts=0, roots=0, stored_bytes=0, left_blocks=0
    )


def test_by_age_what_was_used_since_stays_with_all_that_it_continues(store: Store, clock: Clock) -> None:
    long = prompt(1, 4 * BLOCK)
    old, used = saved(store, fork(long, 2 * BLOCK)), saved(store, long)
    clock.now += 100
    new = saved(store, prompt(3, BLOCK))
    store.write([touches({last_node(used): Use(clock.now)})])
    purged = purge_now(store, PurgeFilter(older_than_s=50.0), clock.now)
    assert (purged.entries, purged.blocks, purged.prompts, purged.roots) == (1, 3, 2, 0)
    assert is_whole(store, used)
    assert is_whole(store, new)
    assert not is_whole(store, old)
    assert is_clean(store)
    purged = purge_now(store, PurgeFilter(older_than_s=0.0), clock.now + 1)
    assert (purged.entries, purged.roots, store.counts()["blocks"]) == (2, 1, 0)


def test_conditions_must_all_hold(store: Store, clock: Clock) -> None:
    tokens = prompt(1, BLOCK)
    first = saved(store, tokens, tenant=ALICE)
    second = saved(store, tokens, tenant=ALICE, model="other")
    clock.now += 100
    third = saved(store, fork(tokens, 0), tenant=ALICE, model="other")
    now = clock.now
    both = frozenset({last_node(first), last_node(third)})
    assert plan_of(store, PurgeFilter(salt="bob", model="other")).nodes == ()
    assert set(plan_of(store, PurgeFilter(salt="alice", model="other", older_than_s=50), now).entries) == {
        last_node(second)
    }
    assert set(plan_of(store, PurgeFilter(entries=both, model="other")).entries) == {last_node(third)}
    assert set(plan_of(store, PurgeFilter(entries=both, older_than_s=50), now).entries) == {last_node(first)}
    assert not plan_of(store, PurgeFilter(entries=both, salt="bob"))


def test_what_a_daemon_adds_while_it_runs_goes_too_or_keeps_what_it_continues(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "NODES_AT_ONCE", 2)
    long = prompt(1, 6 * BLOCK)
    saved(store, long, tenant=ALICE)
    added: list[Publication] = []

    def serve(_num_bytes: int) -> None:
        """After the first two blocks are gone, the conversation goes on from the third."""
        if not added:
            added.append(saved(store, fork(long, 3 * BLOCK), tenant=ALICE))

    purged = purge(store, PurgeFilter(salt="alice"), 0.0, serve)
    assert purged.left_blocks == 0
    assert purged.entries == 2
    assert store.counts()["blocks"] == store.counts()["prompts"] == 0


def test_a_prompt_that_is_saved_meanwhile_keeps_its_blocks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "NODES_AT_ONCE", 2)
    long = prompt(1, 6 * BLOCK)
    first = saved(store, long)
    entry = EntryRecord(root=first.root, num_tokens=2 * BLOCK, scope="auto:30", preview="", created_at=2.0)

    def serve(_num_bytes: int) -> None:
        with store.changes() as changes:
            changes.put_entry(first.nodes[1].name, entry)

    purged = purge(store, PurgeFilter(entries=frozenset({last_node(first)})), 0.0, serve)
    assert (purged.entries, purged.blocks) == (1, 5)
    with store.snapshot() as snapshot:
        assert snapshot.entry(first.nodes[1].name) == entry
    assert is_clean(store)


def test_what_is_evicted_meanwhile_stays_seen(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "NODES_AT_ONCE", 2)
    long = prompt(1, 4 * BLOCK)
    saved(store, long)
    clock.now += 100.0
    later = fork(long, 3 * BLOCK)
    root = root_hash("tiny None")
    store.publish(replace(publication(store, later, root=root), nodes=(), last_node=None, entry=None))

    def evict(_num_bytes: int) -> None:
        store.evictor.expire(50.0)

    purge(store, PurgeFilter(older_than_s=50.0), clock.now, evict)
    with store.snapshot() as snapshot:
        assert [ids.tolist() for _, ids in recent_prompts(snapshot, root, 1 << 20)] == [later.tolist()]
    assert is_clean(store)


def test_a_stop_in_the_middle_leaves_a_store_in_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purging, "NODES_AT_ONCE", 2)
    pubs = [saved(store, prompt(seed, 4 * BLOCK)) for seed in range(4)]

    def stop(_num_bytes: int) -> None:
        if store.counts()["blocks"] < 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purge(store, PurgeFilter(), 0.0, stop)
    assert 0 < store.counts()["blocks"] < 12
    assert is_clean(store)
    assert purge_now(store, PurgeFilter()).left_blocks == 0
    assert is_whole(store, saved(store, prompt(1, 4 * BLOCK)))
    assert pubs


def noted(store: Store, pub: Publication, *ids: str) -> TenantNotes:
    notes = TenantNotes(Notes(store, lambda: None), pub.epoch, pub.root, pub.root_record, 1000.0)
    for id_ in ids:
        notes.put(NoteKind.RESPONSE, id_, b"content")
        notes.notes.write()
    return notes


def test_notes_go_with_their_tenant_and_model_and_not_with_an_entry_of_another_prompt(store: Store) -> None:
    pubs = {name: saved(store, prompt(1, 2 * BLOCK), tenant=tenant) for name, tenant in (("a", ALICE), ("b", BOB))}
    alice, bob = (noted(store, pub, "resp_1", "resp_2") for pub in pubs.values())
    assert purge_now(store, PurgeFilter(entries=frozenset({last_node(pubs["a"])}))).notes == 0
    assert purge_now(store, PurgeFilter(salt="alice")).notes == 2
    assert alice.get(NoteKind.RESPONSE, "resp_1") is None
    assert bob.get(NoteKind.RESPONSE, "resp_1") == b"content"
    assert is_clean(store)
    assert purge_now(store, PurgeFilter(model="tiny")).notes == 2
    with store.snapshot() as snapshot:
        assert not list(snapshot.roots())


def test_notes_of_a_kind_that_is_no_longer_written_go_with_any_entry_of_their_tenant(store: Store) -> None:
    """Those were encoded texts, and an entry does not tell which of its tenant's texts are its own."""
    text = cast(NoteKind, ENCODED_TEXT)
    pubs = {name: saved(store, prompt(1, 2 * BLOCK), tenant=tenant) for name, tenant in (("a", ALICE), ("b", BOB))}
    alice, bob = (noted(store, pub, "resp_1") for pub in pubs.values())
    for notes in (alice, bob):
        notes.put(text, "Hello.", b"1234")
        notes.notes.write()
    assert purge_now(store, PurgeFilter(entries=frozenset({last_node(pubs["a"])}))).notes == 1
    assert alice.get(text, "Hello.") is None
    assert alice.get(NoteKind.RESPONSE, "resp_1") == bob.get(NoteKind.RESPONSE, "resp_1") == b"content"
    assert bob.get(text, "Hello.") == b"1234"


def test_replies_go_with_the_conversation_that_they_are_a_part_of_and_those_of_others_stay(store: Store) -> None:
    turns = prompt(1, 4 * BLOCK)
    pub, other = saved(store, turns), saved(store, fork(turns, BLOCK))
    notes = noted(store, pub)
    first, last, of_other = turns[: BLOCK + 3], turns[: 3 * BLOCK], fork(turns, BLOCK)[: 2 * BLOCK]
    for kind in (NoteKind.RESPONSE, NoteKind.TURN, NoteKind.LOGITS):
        for id_, token_ids in (("first", first), ("last", last), ("other", of_other), ("longer", prompt(1, 5 * BLOCK))):
            notes.put(kind, id_, b"content", token_ids)
    notes.notes.write()
    assert purge_now(store, PurgeFilter(entries=frozenset({last_node(pub)}))).notes == 9
    assert is_whole(store, other)
    for kind in (NoteKind.RESPONSE, NoteKind.TURN, NoteKind.LOGITS):
        assert notes.get(kind, "first") is notes.get(kind, "last") is None
        assert notes.get(kind, "longer") is None, "nothing tells that it is not from a later turn"
        assert notes.get(kind, "other") == b"content"


@pytest.mark.parametrize("is_seen", [False, True])
def test_deleting_one_prompt_reads_no_more_blocks_beside_many_others(
    store: Store, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share its beginning, as prompts of agents do, or leave it at once."""
    shared, read = prompt(1, 40 * BLOCK), list[bytes]()
    gone = saved(store, np.concatenate([shared, prompt(2, BLOCK + 3)]))
    node_of = Snapshot.node_or_ghost

    def node_or_ghost(self: Snapshot, name: bytes) -> NodeRecord | None:
        read.append(name)
        return node_of(self, name)

    monkeypatch.setattr(Snapshot, "node_or_ghost", node_or_ghost)
    counts = list[int]()
    for others in (range(3, 8), range(8, 40)):
        for number in others:
            begin = shared if number % 2 else prompt(number, 10 * BLOCK)
            pub = publication(store, np.concatenate([begin, prompt(100 + number, BLOCK)]), root=gone.root)
            store.publish(pub if is_seen else replace(pub, prompt=None))
        read.clear()
        assert plan_of(store, PurgeFilter(entries=frozenset({last_node(gone)}))).nodes
        counts.append(len(read))
    few, many = counts
    assert many - few <= (3 * 32 if is_seen else 0), "those that were seen: where they leave the deleted one"


TURNS = prompt(1, 4 * BLOCK)
LEFT_AT = {end: fork(TURNS, end) for end in (LEAST_TOKENS - 1, 2 * BLOCK, 3 * BLOCK)}


@pytest.mark.parametrize(
    ("deleted", "kept", "seen", "goes"),
    [
        (TURNS, None, TURNS[:5], True),
        (TURNS[:5], None, TURNS, True),
        (TURNS, None, LEFT_AT[2 * BLOCK], True),
        (TURNS, None, LEFT_AT[LEAST_TOKENS - 1], False),
        (TURNS, LEFT_AT[2 * BLOCK], LEFT_AT[3 * BLOCK], True),
        (TURNS, LEFT_AT[2 * BLOCK], fork(LEFT_AT[2 * BLOCK], 3 * BLOCK), False),
        (TURNS[: 2 * BLOCK], TURNS, TURNS[: 3 * BLOCK], False),
    ],
    ids=["beginning", "continuation", "branch", "template", "nearer", "nearer to one that stays", "of one that stays"],
)
def test_a_seen_prompt_goes_with_a_deleted_one_that_shares_most_with_it(
    store: Store, deleted: TokenIds, kept: TokenIds | None, seen: TokenIds, goes: bool
) -> None:
    pub = saved(store, deleted)
    if kept is not None:
        saved(store, kept)
    store.publish(publication(store, seen, root=pub.root).without_nodes())
    purge_now(store, PurgeFilter(entries=frozenset({last_node(pub)})))
    with store.snapshot() as snapshot:
        left = [token_ids.tolist() for _, token_ids in recent_prompts(snapshot, pub.root, 9)]
    assert (seen.tolist() in left) != goes


def test_a_recent_prompt_that_a_saved_one_begins_with_stays_with_that_one(store: Store) -> None:
    long = prompt(1, 4 * BLOCK)
    system, conversation = saved(store, long[: 2 * BLOCK]), saved(store, long)
    notes = noted(store, conversation)
    notes.put(NoteKind.RESPONSE, "resp_1", b"content", long[: 3 * BLOCK])
    notes.notes.write()
    purged = purge_now(store, PurgeFilter(entries=frozenset({last_node(system)})))
    assert (purged.prompts, purged.notes) == (0, 0)
    assert notes.get(NoteKind.RESPONSE, "resp_1") == b"content"
    assert is_whole(store, conversation)


def test_a_purge_forgets_the_lines_because_of_which_tokens_were_computed_again(store: Store) -> None:
    gone, kept = saved(store, prompt(1, 2 * BLOCK)), saved(store, prompt(2, 2 * BLOCK))
    log, lost = SavingsLog(store), [LostTokens(hour=1, cause="diverged", line=line, tokens=1) for line in ("", "x")]
    log.record_request(store.epochs.of(""), kept.root, kept.root_record, Tally(requests=2), lost)
    store.write_from(log.writing)
    purge_now(store, PurgeFilter(entries=frozenset({last_node(gone)})))
    with store.snapshot() as snapshot:
        [found] = read_savings(snapshot).values()
    assert (found.total.requests, found.lost) == (2, lost[:1])


def test_by_age_a_root_goes_with_its_last_note_or_prompt_and_stays_for_a_young_note(store: Store, clock: Clock) -> None:
    root, layout, notes = root_hash("x"), layout_of(1000), Notes(store, lambda: None)
    store.publish(publication(store, prompt(1, BLOCK)).without_nodes())
    record = RootRecord(model="tiny", block_size=BLOCK, layout=layout, created_at=0.0)
    notes.put(store.epochs.of(""), root, record, NoteKind.RESPONSE, "old", b"content", 1000.0)
    notes.write()
    clock.now += 100
    notes.put(store.epochs.of(""), root, record, NoteKind.RESPONSE, "young", b"content", 1000.0)
    notes.write()
    older = PurgeFilter(older_than_s=50.0)
    purged = purge_now(store, older, clock.now)
    assert (purged.notes, purged.prompts, purged.roots, store.counts()["notes"]) == (1, 1, 1, 1)
    clock.now += 100
    assert purge_now(store, older, clock.now).roots == 1


@pytest.mark.parametrize(
    ("purge_filter", "is_told"),
    [
        (PurgeFilter(entries=frozenset({b"of nobody's name"})), False),
        (PurgeFilter(older_than_s=1e6), False),
        (PurgeFilter(salt="carol"), True),
        (PurgeFilter(), True),
    ],
    ids=["entry", "age", "tenant", "everything"],
)
def test_daemons_drop_memories_unless_the_purge_can_have_matched_none(
    purge_filter: PurgeFilter, is_told: bool, store: Store
) -> None:
    """What a tenant could not save is in the memory of daemons alone."""
    purge_now(store, purge_filter, now=1.0)
    with store.snapshot() as snapshot:
        assert (snapshot.meta("purges") is not None) == is_told


@pytest.mark.parametrize("database", ["roots", "usage", "nodes"])
def test_a_damaged_store_is_to_be_mended_first(store: Store, tmp_path: Path, database: str) -> None:
    store.publish(publication(store, prompt(1, BLOCK)))
    store.close()
    with damaged(tmp_path) as records:
        records.put(database, records.keys(database)[0], b"x")
    store = open_store(tmp_path)
    with pytest.raises(StoreCorrupt, match="verify --fix"):
        purge(store, PurgeFilter(), 0.0, lambda _: None)


def test_counts_that_are_too_high_leave_blocks_and_say_so(store: Store, tmp_path: Path) -> None:
    pub = saved(store, prompt(1, 2 * BLOCK))
    store.close()
    with damaged(tmp_path) as records:
        records.change_usage(pub.nodes[1].name, children=7)
    store = open_store(tmp_path)
    purged = purge(store, PurgeFilter(), 0.0, lambda _: None)
    assert (purged.blocks, purged.left_blocks) == (1, 2)


def test_after_purge_and_compact_no_byte_of_a_tenant_is_in_the_file(store: Store, tmp_path: Path) -> None:
    store.codec = Codec.RAW
    text = "what alice wrote, word for word"
    alice = [saved(store, prompt(seed, 6 * BLOCK + 5), tenant=ALICE, preview=f"{text} {seed}") for seed in range(1, 12)]
    bob = [saved(store, prompt(100 + seed, 5 * BLOCK + 3), tenant=BOB, preview="bob's") for seed in range(12)]
    # Payloads of the tests are drawn from the sum of the tokens, so that two prompts may have one in common.
    bobs = {b"".join(node.payload) for pub in bob for node in pub.nodes}
    traces = [text.encode(), str(ALICE).encode()]
    for node in (node for pub in alice for node in pub.nodes if b"".join(node.payload) not in bobs):
        traces += [node.name, node.token_ids.tobytes(), bytes(node.payload[0][:64]), bytes(node.payload[-1][-64:])]
    file = tmp_path / "data.mdb"
    before = file.read_bytes()
    assert all(trace in before for trace in traces)
    purge_now(store, PurgeFilter(salt="alice"))
    # Others go on, in the room that became free.
    bob += [saved(store, prompt(200 + seed, 2 * BLOCK + 1), tenant=BOB, preview="bob's") for seed in range(4)]
    store.close()
    compact_folder(tmp_path)
    after = file.read_bytes()
    assert [trace for trace in traces if trace in after] == []
    store = open_store(tmp_path)
    assert all(is_whole(store, pub) for pub in bob)
    assert is_clean(store)


HYBRID = layout_of(20_000, 8_000)


def test_a_model_is_forgotten_with_all_that_is_stored_of_it_and_not_with_a_part(store: Store) -> None:
    def models() -> set[str]:
        with store.snapshot() as snapshot:
            return {record.model for _, record in snapshot.models()}

    pub = saved(store, prompt(1, BLOCK))
    with store.changes() as changes:
        for name in ("tiny", "unused", "other"):
            changes.put_model(ModelRecord(model=name, identity=f"numbers of {name}"))
    for part in (
        PurgeFilter(entries=frozenset({last_node(pub)})),
        PurgeFilter(model="tiny", salt="alice"),
        PurgeFilter(model="tiny", older_than_s=0.0),
    ):
        purge_now(store, part, now=1e6)
    assert models() == {"tiny", "unused", "other"}
    purge_now(store, PurgeFilter(model="tiny"))
    assert models() == {"unused", "other"}
    assert plan_of(store, PurgeFilter(model="unused"))
    purge_now(store, PurgeFilter(model="unused"))
    assert models() == {"other"}
    purge_now(store, PurgeFilter())
    assert models() == set()
    assert not plan_of(store, PurgeFilter())
