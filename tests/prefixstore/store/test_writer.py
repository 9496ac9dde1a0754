from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix import thread_pool
from diskprefix.errors import CacheError, StoreCorrupt, StoreFull, StoreUnavailable
from diskprefix.prefixstore.store import environment
from diskprefix.prefixstore.store import writer as writer_module
from diskprefix.prefixstore.store.changes import Changes, NewNode, SmallWrite
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.folder import FolderUnavailable
from diskprefix.prefixstore.store.note_record import NoteKind, note_key
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import ModelRecord, NodeKind
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics import savings
from diskprefix.prefixstore.store.statistics.savings import Tally, read_savings
from diskprefix.prefixstore.store.store import EXPIRED, OUTDATED, Publication, Store
from diskprefix.prefixstore.store.verify import remove_problems, verify_index
from diskprefix.prefixstore.store.writer import Writer, WriterLimits
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, open_store, part_of, prompt, publication
from tests.prefixstore.store.other_process import fill
from tests.waiting import wait_for


class Gate:
    """Holds a store's `publish` until it is opened; may fail it."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.failure: Exception | None = None
        publish = store.publish

        def gated(pub: Publication) -> int:
            assert self.open.wait(30)
            if self.failure is not None:
                raise self.failure
            return publish(pub)

        monkeypatch.setattr(store, "publish", gated)


def submit(writer: Writer, pub: Publication) -> None:
    """One save of one publication."""
    writer.queue_publication(Save(pub.epoch), pub, is_last=True)


class Pages:
    """The hold of some payloads. Counts how often each is released."""

    def __init__(self, *, frees: bool = True) -> None:
        self.num_released, self._frees = 0, frees

    def release(self) -> None:
        self.num_released += 1

    def frees(self) -> bool:
        return self._frees


def test_waiting_nodes_are_visible_and_held_until_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, pages = Gate(store, monkeypatch), Pages()
    pub, writer = publication(store, prompt(1, 2 * BLOCK)), Writer(store, buffer_bytes=10)
    writer.queue_publication(Save(store.epochs.of("")), pub, [pages], is_last=True)
    assert set(writer.pending) == {node.name for node in pub.nodes}
    assert (writer.pending_bytes, writer.num_pending, pages.num_released) == (pub.payload_bytes, 1, 0)
    assert not is_whole(store, pub)
    gate.open.set()
    assert writer.close(30)
    assert is_whole(store, pub)
    assert not writer.pending
    assert (writer.pending_bytes, writer.num_pending, pages.num_released) == (0, 0, 1)


def test_releasing_a_reservation_returns_its_bytes_once(store: Store) -> None:
    writer = Writer(store, buffer_bytes=100)
    first = writer.reserve(60)
    assert first is not None
    assert not writer.reserve(41)
    second = writer.reserve(40)
    assert second is not None
    for room in (first, first, second):
        room.release()
    assert writer.room_bytes == 100
    assert writer.close(30)
    assert not writer.reserve(1)


def chained(store: Store, num_blocks: int) -> list[Publication]:
    """A prompt in one publication for each block; the last one brings the entry."""
    whole = publication(store, prompt(1, num_blocks * BLOCK))
    beginning = [part_of(replace(whole, nodes=(node,))) for node in whole.nodes[:-1]]
    return [*beginning, replace(whole, nodes=whole.nodes[-1:])]


def submit_all(writer: Writer, pubs: Sequence[Publication], holds: Sequence[Pages] = ()) -> Save:
    """One save of several publications. `holds` has the hold of each publication."""
    save = Save(pubs[0].epoch)
    for number, pub in enumerate(pubs):
        writer.queue_publication(save, pub, holds[number : number + 1])
    writer.finish(save)
    return save


@pytest.mark.parametrize("why", ["", "its state is not finite"], ids=["no room", "not finite"])
def test_losing_a_publication_fails_the_rest_of_its_save_and_counts_once(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    pubs = [with_values(pub, is_finite=not why or index not in (1, 3)) for index, pub in enumerate(chained(store, 4))]
    publish = store.publish
    written: list[Publication] = []

    def fail_for_the_second(pub: Publication) -> int:
        if not why and pub.nodes is pubs[1].nodes:
            raise StoreFull("no room")
        written.append(pub)
        return publish(pub)

    monkeypatch.setattr(store, "publish", fail_for_the_second)
    save = submit_all(writer, pubs)
    assert writer.close(30)
    assert (writer.dropped, writer.pending_bytes, save.lost) == (1, 0, why)
    assert len([record for record in caplog.records if (why or "without saving") in record.message]) == 1
    # Of the last publication, only the seen prompt is left.
    assert [len(pub.nodes) for pub in written] == [1, 0]
    with store.snapshot() as snapshot:
        assert [snapshot.usage(pub.nodes[0].name) is not None for pub in pubs] == [True, *[False] * (len(pubs) - 1)]
        assert [entry.kind for _, entry in snapshot.entries()] == ["partial"]
        assert snapshot.counts()["prompts"] == 1


def test_memory_pressure_drops_the_newest_publication_that_frees_pages(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(store, monkeypatch)
    pages = [Pages(frees=number < 3) for number in range(5)]
    # Later publications would free no pages that others need.
    save = submit_all(writer, chained(store, 5), pages)
    submit_all(writer, [publication(store, prompt(7, BLOCK))], [Pages(frees=False)])
    wait_for(lambda: writer._writing is not None)
    with writer.view():
        assert not writer.drop_pages(), "it could still be read"
    assert writer.drop_pages()
    assert [one.num_released for one in pages] == [0, 0, 1, 1, 1]
    assert writer.drop_pages()
    assert not writer.drop_pages(), "it is being written"
    assert [one.num_released for one in pages] == [0, 1, 1, 1, 1]
    gate.open.set()
    assert writer.close(30)
    assert [one.num_released for one in pages] == [1] * 5
    assert (writer.dropped, writer.pending_bytes, len(store.evictor.pinned())) == (1, 0, 0)
    assert save.lost == "its memory was needed before the disk had room for it"
    assert len([record for record in caplog.records if "not saved" in record.message]) == 1
    with store.snapshot() as snapshot:
        counts = snapshot.counts()
    assert (counts["blocks"], counts["entries"], counts["prompts"]) == (3, 2, 2), "a prompt, and a part of another"


def test_full_queue_refuses_prompts_and_writes_the_waiting_ones(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.limits = WriterLimits(max_saves=2)
    gate, pages = Gate(store, monkeypatch), Pages()
    pubs = [publication(store, prompt(seed, BLOCK)) for seed in range(3)]
    saves = [submit_all(writer, [pub], [pages]) for pub in pubs]
    assert [save.lost for save in saves] == [None, None, "too many prompts wait for the disk"]
    assert (writer.num_pending, writer.dropped, pages.num_released) == (2, 1, 1)
    gate.open.set()
    assert writer.close(30)
    assert [is_whole(store, pub) for pub in pubs] == [True, True, False]
    assert pages.num_released == 3


def test_save_pins_its_parent_and_then_its_last_written_node_until_it_ends(store: Store, writer: Writer) -> None:
    pubs = chained(store, 3)
    store.publish(pubs[0])
    save = Save(store.epochs.of(""))
    writer.pause_writing()
    writer.queue_publication(save, pubs[1])
    assert store.evictor.pinned() == {pubs[0].nodes[0].name}
    assert writer.flush(30)
    assert store.evictor.pinned() == {pubs[1].nodes[0].name}
    writer.finish(save)
    assert not store.evictor.pinned()


def with_values(pub: Publication, *, is_finite: bool) -> Publication:
    """The publication with state that is checked. Only its last value may be NaN. Logits are NaN, and not checked."""
    nodes = []
    for node in pub.nodes:
        num_checked = len(node.pieces) - (node.kind == NodeKind.TAIL)
        payload = [np.full(piece.num_bytes // 2, 0x7FC0, np.uint16) for piece in node.pieces]
        for values in payload[:num_checked]:
            values[: len(values) - (not is_finite)] = 0x3F80
        found = tuple(values.view(np.uint8).data for values in payload)
        nodes.append(replace(node, payload=found, num_checked=num_checked))
    return replace(pub, nodes=tuple(nodes))


@pytest.mark.parametrize("broken", ["none", "uses", "notes", "savings", "publication"])
def test_waiting_records_share_one_transaction_and_a_failing_one_stops_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    log = savings.SavingsLog(store)
    writer = Writer(store, buffer_bytes=1 << 30, also_writes=(log.writing,))
    first, second = (publication(store, prompt(seed, BLOCK)) for seed in (1, 2))
    store.publish(first)
    # The writer's thread has ended, so this thread writes the waiting records.
    assert writer.close(30)
    changes, commits = store.changes, list[int]()

    def counted() -> AbstractContextManager[Changes]:
        commits.append(1)
        return changes()

    def fail(*_: object) -> None:
        raise StoreUnavailable("broken")

    assert second.last_node is not None
    assert first.last_node is not None
    writer.touch(first.last_node, 5000.0)
    writer.notes.put(store.epochs.of(""), second.root, second.root_record, NoteKind.TURN, "turn", b"x", 3600.0)
    log.record_request(store.epochs.of(""), second.root, second.root_record, Tally(requests=1))
    methods = {"uses": "touch", "notes": "put_note", "publication": "put_node"}
    if broken == "savings":
        monkeypatch.setattr(savings, "put_savings", fail)
    elif broken != "none":
        monkeypatch.setattr(Changes, methods[broken], fail)
    monkeypatch.setattr(store, "changes", counted)
    save = Save(store.epochs.of(""))
    save.waiting.append(second)
    writer._write_all(save)
    with store.snapshot() as snapshot:
        used = snapshot.usage(first.last_node)
        found = {
            "uses": used is not None and used.last_used == 5000.0,
            "notes": snapshot.get_record("notes", note_key(second.root, NoteKind.TURN, "turn")) is not None,
            "savings": second.root in read_savings(snapshot),
            "publication": snapshot.usage(second.last_node) is not None,
        }
    # A publication is a use, and savings are a note.
    lost = {broken} | {"uses": {"publication"}, "notes": {"savings"}}.get(broken, set())
    assert found == {name: name not in lost for name in found}
    assert broken != "none" or len(commits) == 1


def test_use_recorded_during_a_write_is_counted_once(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pub = publication(store, prompt(1, BLOCK))
    store.publish(pub)
    assert writer.close(30)
    write, name = store.write, pub.nodes[0].name

    def write_slowly(small_writes: Sequence[SmallWrite]) -> None:
        writer.touch(name, 6000.0)
        write(small_writes)

    writer.touch(name, 5000.0)
    monkeypatch.setattr(store, "write", write_slowly)
    writer._write_all(None)
    monkeypatch.setattr(store, "write", write)
    writer._write_all(None)
    with store.snapshot() as snapshot:
        found = snapshot.usage(name)
    assert found is not None
    assert (found.last_used, found.restores) == (6000.0, 2)


NO_ROOM, NO_QUOTA, BROKEN = (FolderUnavailable(Path(), OSError(n, "")) for n in (errno.ENOSPC, errno.EDQUOT, errno.EIO))


@pytest.mark.parametrize(
    ("failure", "needs_whole"), [(NO_ROOM, True), (NO_QUOTA, True), (StoreFull(""), True), (BROKEN, False)]
)
def test_a_lack_of_room_ends_with_a_whole_prompt_and_another_failure_with_any_state(
    store: Store, monkeypatch: pytest.MonkeyPatch, failure: CacheError, needs_whole: bool
) -> None:
    """A small publication may find room on a full disk, again and again."""
    gate = Gate(store, monkeypatch)
    gate.failure = failure
    gate.open.set()
    writer = Writer(store, buffer_bytes=1 << 30)
    submit(writer, publication(store, prompt(2, BLOCK)))
    assert writer.flush(30)
    gate.failure = None
    *beginning, last = chained(store, 3)
    save = Save(store.epochs.of(""))
    submit(writer, replace(last, nodes=(), last_node=None, entry=None))
    assert writer.flush(30)
    assert writer.error is not None
    for pub in beginning:
        writer.queue_publication(save, pub)
    assert writer.flush(30)
    assert (writer.error is not None) == needs_whole
    writer.queue_publication(save, last, is_last=True)
    assert writer.flush(30)
    assert not writer.error
    assert writer.close(30)


@pytest.mark.parametrize(("free", "ends"), [(0, True), (1 << 40, False)])
def test_a_full_disk_is_reported_until_its_free_space_is_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, free: int, ends: bool
) -> None:
    """Also while no prompt is saved. A disk that fails for want of room, and shows free space, ends nothing."""
    gate, found = Gate(store, monkeypatch), [free]
    # After evicting everything else, a short prompt would fit.
    monkeypatch.setattr(store.evictor, "lacks_room", lambda _need_bytes: False)
    monkeypatch.setattr("diskprefix.prefixstore.store.evictor.free_bytes", lambda _path: found[0])
    gate.failure = NO_ROOM
    gate.open.set()
    writer = Writer(store, buffer_bytes=1 << 30)
    writer.housekeeping.least_bytes = 1
    submit(writer, publication(store, prompt(2, BLOCK)))
    assert writer.flush(30)
    writer.housekeeping.check_room()
    assert writer.error is not None
    found[0] = 1 << 40
    writer.housekeeping.check_room()
    assert (writer.error is None) == ends
    assert writer.close(30)


def test_use_of_a_waiting_node_counts_after_the_node_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pubs = chained(store, 2)
    writer = Writer(store, buffer_bytes=1 << 30)
    gate = Gate(store, monkeypatch)
    submit_all(writer, pubs)
    writer.touch(pubs[1].nodes[0].name, 2000.0)
    gate.open.set()
    assert writer.close(30)
    with store.snapshot() as snapshot:
        usages = [snapshot.usage(pub.nodes[0].name) for pub in pubs]
    assert [usage.restores for usage in usages if usage is not None] == [1, 1, 0], "the node and what it continues"


@pytest.mark.parametrize("failure", [StoreUnavailable("none left"), MemoryError("none left")], ids=repr)
def test_store_failure_and_recovery_are_logged_once_and_a_bug_with_its_traceback(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    gate = Gate(store, monkeypatch)
    gate.failure = failure
    gate.open.set()
    pubs = [publication(store, prompt(seed, BLOCK)) for seed in range(3)]
    for pub in pubs[:2]:
        submit(writer, pub)
        assert writer.flush(30)
    is_bug = isinstance(failure, MemoryError)
    assert writer.error is not None
    assert "none left" in writer.error if is_bug else writer.error == "none left"
    assert (writer.dropped, writer.pending_bytes, "Traceback" in caplog.text) == (2, 0, is_bug)
    assert len([r for r in caplog.records if "serving without saving" in r.message]) == (not is_bug)
    gate.failure = None
    submit(writer, pubs[2])
    assert writer.flush(30)
    assert is_whole(store, pubs[2])
    assert writer.close(30)
    assert [r.message for r in caplog.records if r.message.endswith("saving again")]


@pytest.mark.parametrize("fate", ["written", "failed", "not finite", "cannot be read"])
def test_payloads_are_released_exactly_once(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    gate, pages = Gate(store, monkeypatch), [Pages() for _ in range(4)]
    gate.failure = StoreFull("no room") if fate == "failed" else None
    pubs = [with_values(pub, is_finite=fate != "not finite") for pub in chained(store, 3)]
    if fate == "cannot be read":
        pubs = [replace(pub, nodes=tuple(replace(node, payload=()) for node in pub.nodes)) for pub in pubs]
    submit_all(writer, pubs, pages)
    gate.open.set()
    assert writer.flush(30)
    assert [one.num_released for one in pages] == [1, 1, 1, 1]
    assert writer.close(30)
    assert (writer.dropped, writer.pending_bytes) == (fate != "written", 0)


def test_closed_writer_loses_and_releases_new_publications(store: Store) -> None:
    writer, pages = Writer(store, buffer_bytes=1 << 30), Pages()
    assert writer.close(30)
    save = submit_all(writer, [publication(store, prompt(1, BLOCK))], [pages])
    assert (pages.num_released, save.has_failed, writer.dropped) == (1, True, 1)
    assert (writer.pending_bytes, writer.num_pending, len(writer.pending)) == (0, 0, 0)


def shown(writer: Writer) -> list[NewNode]:
    with writer.view() as waiting:
        return list(waiting.nodes.values())


def test_nodes_of_an_epoch_that_is_over_are_not_shown_whenever_they_are_queued(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pages = Gate(store, monkeypatch), [Pages() for _ in range(3)]
    being_written, waiting, late = (publication(store, prompt(seed, BLOCK)) for seed in range(3))
    saves = [submit_all(writer, [pub], [hold]) for pub, hold in zip((being_written, waiting), pages, strict=False)]
    wait_for(lambda: writer._writing is saves[0])
    assert set(shown(writer)) == {*being_written.nodes, *waiting.nodes}
    with store.changes() as changes:
        changes.record_purge()
    store.read_epochs()
    # Nobody has told the writer.
    assert shown(writer) == []
    saves.append(submit_all(writer, [late], pages[2:]))
    assert shown(writer) == []
    # The same prompt in the new epoch, while the purged one is still being written.
    again = publication(store, prompt(0, BLOCK))
    submit(writer, again)
    assert shown(writer) == [*again.nodes]
    gate.open.set()
    assert writer.flush(30)
    assert [save.lost for save in saves] == [OUTDATED] * 3
    assert [hold.num_released for hold in pages] == [1, 1, 1]
    assert [is_whole(store, pub) for pub in (again, waiting, late)] == [True, False, False]


@pytest.mark.parametrize(
    ("waits_s", "has_ended", "is_there"), [(15.0, True, True), (21.0, True, False), (21.0, False, True)]
)
def test_the_time_to_live_of_what_waits_for_the_disk_counts_from_the_end_of_its_request(
    store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock, waits_s: float, has_ended: bool, is_there: bool
) -> None:
    gate, writer = Gate(store, monkeypatch), Writer(store, buffer_bytes=1 << 30, ttl_s=20.0)
    submit(writer, publication(store, prompt(1, BLOCK)))
    wait_for(lambda: writer._writing is not None)
    save, pub = Save(store.epochs.of("")), publication(store, prompt(2, BLOCK))
    writer.queue_publication(save, pub, is_last=has_ended)
    assert set(pub.nodes) <= {*shown(writer)}
    # As if it waited that long.
    save.ended_at -= waits_s
    assert (set(pub.nodes) <= {*shown(writer)}) == is_there
    gate.open.set()
    assert writer.flush(30)
    assert (is_whole(store, pub), save.lost) == (is_there, None if is_there else EXPIRED)
    with store.snapshot() as snapshot:
        found = snapshot.usage(pub.nodes[-1].name)
        came_at = [round(at) for _, at, _ in snapshot.seen_times()]
    if is_there:
        used_at = round(clock.now - waits_s * has_ended)
        assert found is not None
        assert (round(found.last_used), came_at) == (used_at, [round(clock.now), used_at])
    assert len(came_at) == 1 + is_there
    assert writer.close(30)


def test_closing_stops_at_the_time_limit_and_counts_unwritten_saves(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, pages = Gate(store, monkeypatch), [Pages() for _ in range(3)]
    for seed, hold in enumerate(pages):
        submit_all(writer, [publication(store, prompt(seed, BLOCK))], [hold])
    release = threading.Timer(0.2, gate.open.set)
    release.start()
    assert not writer.close(0.01)
    release.join()
    assert writer.dropped == 2
    assert [one.num_released for one in pages] == [1, 1, 1]
    assert (writer.pending_bytes, len(writer.pending)) == (0, 0)


def test_damaged_node_is_removed_before_later_publications(store: Store, writer: Writer) -> None:
    pub = publication(store, prompt(1, 3 * BLOCK))
    store.publish(pub)
    writer.quarantine(pub.nodes[1].name, pub.nodes[1].parent)
    submit(writer, pub)
    assert writer.close(30)
    assert writer.housekeeping.quarantined == 3
    assert is_whole(store, pub)


def test_joined_uses_are_counted_and_keep_the_longest_time_to_live(store: Store, writer: Writer) -> None:
    pubs = [replace(publication(store, prompt(seed, BLOCK)), ttl_s=10.0) for seed in range(2)]
    pubs = [replace(pub, nodes=tuple(replace(node, ttl_s=10.0) for node in pub.nodes)) for pub in pubs]
    for pub in pubs:
        submit(writer, pub)
        assert writer.flush(30)
        assert pub.last_node is not None
        for when, ttl_s, hits in ((2000.0, 300.0, 0), (3000.0, 3600.0, 1), (2500.0, 60.0, 1)):
            writer.touch(pub.last_node, when, ttl_s, hits=hits)
    assert pubs[1].last_node is not None
    writer.touch(pubs[1].last_node, 2000.0)
    assert writer.close(30)
    with store.snapshot() as snapshot:
        usages = [snapshot.usage(node.name) for pub in pubs for node in pub.nodes]
    found = [(usage.ttl_s, usage.restores, usage.last_used) for usage in usages if usage is not None]
    assert found == [(3600, 2, 3000.0)] * 2 + [(-3600, 3, 3000.0)] * 2


def test_node_with_its_own_ttl_expires_without_a_daemon_ttl_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path / "kv", clock=clock)
    kept, going = (publication(store, prompt(seed, BLOCK)) for seed in range(2))
    store.publish(kept)
    store.publish(replace(going, ttl_s=5.0, nodes=tuple(replace(node, ttl_s=5.0) for node in going.nodes)))
    store.close()
    clock.now += 5
    store = open_store(tmp_path / "kv", clock=clock)
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(touch_interval_s=0.01))
    deadline = time.monotonic() + 30
    while not writer.housekeeping.expired and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer.housekeeping.expired == 2
    assert is_whole(store, kept)
    assert writer.close(30)


@pytest.mark.parametrize(("own", "looks_after_s"), [(False, [3600.0, 3600.0]), (True, [30.0, 3600.0])])
def test_store_without_own_ttls_is_searched_once_an_hour(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, own: bool, looks_after_s: list[float]
) -> None:
    """The first search, soon after the start, shows whether a record has its own time to live."""
    assert writer.close(30)
    now = [1000.0]
    looks: list[float] = []

    def expire(_ttl_s: float) -> int:
        # A record with its own time to live exists only at the first search.
        store.evictor.may_have_own_ttls = own and not looks
        looks.append(now[0])
        return 0

    monkeypatch.setattr(store.evictor, "expire", expire)
    monkeypatch.setattr("diskprefix.prefixstore.store.housekeeping.time.monotonic", lambda: now[0])
    for now[0] in range(1000, 9000, 10):
        writer.housekeeping._expire()
    assert [b - a for a, b in pairwise(looks)][:2] == looks_after_s


def order_of(store: Store) -> list[str]:
    """The changes to the store from now on, in order."""
    order: list[str] = []
    publish, quarantine = store.publish, store.quarantine

    def noting(publication: Publication) -> int:
        order.append("publication")
        return publish(publication)

    def noting_too(name: bytes, parent: bytes) -> int:
        order.append("quarantine")
        return quarantine(name, parent)

    store.publish, store.quarantine = noting, noting_too  # type: ignore[method-assign]
    return order


def test_paused_writer_does_everything_except_publish(store: Store, writer: Writer) -> None:
    order = order_of(store)
    pub = publication(store, prompt(1, BLOCK))
    writer.pause_writing()
    submit(writer, pub)
    writer.quarantine(b"n" * 16, b"p" * 16)
    wait_for(lambda: order)
    writer.resume_writing()
    wait_for(lambda: not writer.pending)
    assert order == ["quarantine", "publication"]


def test_what_must_be_on_the_disk_at_once_waits_for_no_pause_that_begins_meanwhile(store: Store) -> None:
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(pause_s=600.0, max_held_s=600.0))
    save, pubs = Save(store.epochs.of("")), chained(store, 3)
    writer.pause_writing()
    for pub in pubs[:2]:
        writer.queue_publication(save, pub)
    writer.write_at_once(save)
    writer.pause_writing()
    writer.queue_publication(save, pubs[2])
    wait_for(lambda: len(save.waiting) == 1)
    assert writer._next() is None
    writer.finish(save)
    assert writer.close(30)


@pytest.mark.cases(3)
@pytest.mark.parametrize("reason", ["flush", "close", "half of the buffer", "time"])
def test_pauses_end_within_their_limits(store: Store, reason: str) -> None:
    pub = publication(store, prompt(1, BLOCK))
    limits = WriterLimits(pause_s=600.0, max_held_s=0.1 if reason == "time" else 600.0)
    room = pub.payload_bytes if reason == "half of the buffer" else 1 << 30
    writer = Writer(store, buffer_bytes=room, limits=limits)
    writer.pause_writing()
    submit(writer, pub)
    if reason == "flush":
        assert writer.flush(30)
    elif reason != "close":
        wait_for(lambda: not writer.pending)
    assert writer.close(30)
    assert is_whole(store, pub)


def test_a_pause_holds_a_publication_for_its_own_time_beside_an_older_prompt_that_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(pause_s=600.0, max_held_s=600.0))
    older = Save(store.epochs.of(""))
    newest_of_older, waits_for_long = publication(store, prompt(1, BLOCK)), publication(store, prompt(2, BLOCK))
    writer.pause_writing()
    writer.queue_publication(older, newest_of_older)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_queued", lambda pub, holds: replace(pub, holds=holds, queued_at=-math.inf))
        submit(writer, waits_for_long)
    wait_for(lambda: is_whole(store, waits_for_long))
    assert older.waiting
    writer.finish(older)
    assert writer.close(30)


def test_served_models_are_recorded_once_and_again_in_a_new_file(store: Store) -> None:

    def models() -> list[ModelRecord]:
        with store.snapshot() as snapshot:
            return [model for _, model in snapshot.models()]

    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(touch_interval_s=0.01))
    served, draft = (ModelRecord(model=name, identity=f"numbers of {name}") for name in ("served", "draft"))
    for model in (served, draft, served):
        writer.set_model(model)
    wait_for(lambda: len(models()) == 2)
    assert {model.model for model in models()} == {"served", "draft"}
    assert verify_index(store).problems == ()
    store_id = store.store_id
    (store.path / "data.mdb").unlink()
    wait_for(lambda: store.store_id != store_id and store.problem is None and len(models()) == 2)
    assert writer.close(30)


def test_failing_model_record_fails_no_prompt(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_changes: Changes, _model: ModelRecord) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(Changes, "put_model", full)
    writer = Writer(store, buffer_bytes=1 << 30)
    writer.set_model(ModelRecord(model="served", identity="numbers"))
    wait_for(lambda: writer.error == "no room")
    pub = publication(store, prompt(1, 2 * BLOCK))
    submit(writer, pub)
    assert writer.close(30)
    assert is_whole(store, pub)
    assert writer.error is None


def test_temporary_failure_loses_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries must not drop a full queue at once."""
    gate = Gate(store, monkeypatch)
    gate.failure = FolderUnavailable(store.path, OSError(errno.ENOSPC, "full"))
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(retry_s=0.01))
    pubs = [publication(store, prompt(seed, BLOCK)) for seed in range(3)]
    for pub in pubs:
        submit(writer, pub)
    gate.open.set()
    wait_for(lambda: writer.error is not None)
    assert writer.num_pending == 3
    gate.failure = None
    wait_for(lambda: not writer.num_pending)
    assert all(is_whole(store, pub) for pub in pubs)
    assert (writer.dropped, writer.error) == (0, None)
    assert writer.close(30)


def test_publications_wait_for_a_reader_without_limit_and_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt waits for the reader; later attempts end at once."""
    monkeypatch.setattr(environment, "_READER_PATIENCE_S", 0.3)
    clock = Clock()
    store = open_store(tmp_path, budget_bytes=16 << 20, clock=clock)
    fill(store, clock, range(12))
    publish, took_s = store.publish, list[float]()

    def timed(pub: Publication) -> int:
        began_at = time.monotonic()
        try:
            return publish(pub)
        finally:
            took_s.append(time.monotonic() - began_at)

    monkeypatch.setattr(store, "publish", timed)
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(tries_s=0.1, retry_s=0.01, touch_interval_s=0.01))
    with store.snapshot() as snapshot:
        snapshot.counts()
        pubs = [publication(store, prompt(seed, 3 * BLOCK), payload_bytes=1_000_000) for seed in range(100, 103)]
        for pub in pubs:
            clock.now += 11
            submit(writer, pub)
        wait_for(lambda: writer.error is not None)
        num_tried = len(took_s)
        wait_for(lambda: len(took_s) > num_tried + 10)
        assert writer.dropped == 0
        assert writer.num_pending
        assert "an open reader of process" in str(writer.error)
        assert sorted(took_s)[len(took_s) // 2] < 0.3
    wait_for(lambda: not writer.num_pending)
    assert [is_whole(store, pub) for pub in pubs] == [True] * 3
    assert (writer.dropped, writer.error) == (0, None)
    assert len([record for record in caplog.records if "without saving" in record.message]) == 1
    assert writer.close(30)


@pytest.mark.parametrize("num_blocks", [1, 40])
def test_prompt_larger_than_the_store_is_refused_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_blocks: int
) -> None:
    """In one publication, or together with the nodes that it continues."""
    store = open_store(tmp_path, budget_bytes=16 << 20)
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(tries_s=600.0, retry_s=600.0))
    whole = publication(store, prompt(1, num_blocks * BLOCK), payload_bytes=(20 << 20) // num_blocks)
    save = submit_all(writer, [part_of(replace(whole, nodes=(node,))) for node in whole.nodes])
    submit(writer, small := publication(store, prompt(2, BLOCK)))
    wait_for(lambda: not writer.num_pending)
    assert is_whole(store, small)
    assert (writer.dropped, writer.error) == (1, None)
    [warning] = [record.message for record in caplog.records]
    assert "not saved" in warning
    assert "do not fit --kv-cache-budget 16.0 MiB; raise it" in warning
    assert save.lost
    assert save.lost in warning
    assert writer.close(30)


def test_flush_waits_until_damaged_records_are_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(publication(store, prompt(1, 4 * BLOCK)))
    may_remove = threading.Event()

    def late(*arguments: Any) -> Any:
        assert may_remove.wait(30)
        return remove_problems(*arguments)

    monkeypatch.setattr("diskprefix.prefixstore.store.housekeeping.remove_problems", late)
    with store.changes() as changes:
        for name in list(changes.keys("usage")):
            changes._put_record("usage", name, b"x")
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(touch_interval_s=0.01))
    more = publication(store, prompt(1, 6 * BLOCK))
    submit(writer, more)
    assert not writer.flush(0.3)
    may_remove.set()
    assert writer.flush(30)
    assert store.counts()["blocks"] == 0
    again = publication(store, prompt(1, 6 * BLOCK))
    submit(writer, again)
    assert writer.flush(30)
    assert is_whole(store, again)
    assert writer.close(30)


@pytest.mark.parametrize("why", ["time", "room", "pages that others need"])
def test_retries_end_within_their_limits(store: Store, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    gate = Gate(store, monkeypatch)
    gate.failure = StoreUnavailable("gone for good")
    gate.open.set()
    pub = publication(store, prompt(1, BLOCK))
    limits = WriterLimits(tries_s=0.05 if why == "time" else 600.0)
    writer = Writer(store, buffer_bytes=pub.payload_bytes if why == "room" else 1 << 30, limits=limits)
    if why == "pages that others need":
        submit_all(writer, [pub], [Pages()])
        assert writer.write_pages(30)
    else:
        submit(writer, pub)
    wait_for(lambda: not writer.num_pending)
    assert writer.dropped == 1
    assert writer.close(30)


def test_cancelled_prompt_leaves_the_writer_unpaused_for_the_next_pause(store: Store) -> None:
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(pause_s=0.05, max_held_s=3.0))
    writer.pause_writing()
    submit(writer, publication(store, prompt(1, BLOCK)))
    wait_for(lambda: not writer.num_pending)
    writer.limits = WriterLimits(pause_s=600.0)
    writer.pause_writing()
    submit(writer, publication(store, prompt(2, BLOCK)))
    assert writer._next() is None
    assert writer.close(30)


def test_saving_continues_while_a_damaged_file_is_checked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = threading.Event()

    def read(_: Environment) -> None:
        assert is_read.wait(30)
        raise StoreCorrupt("the file is damaged")

    monkeypatch.setattr(Environment, "require_survivable", read)
    # As after a start that needed no check of the file.
    store.environment.is_checked = False
    first, second = (publication(store, prompt(seed, 2 * BLOCK)) for seed in range(2))
    store.publish(first)
    writer = Writer(store, buffer_bytes=1 << 30, limits=WriterLimits(touch_interval_s=0.01))
    writer.quarantine(first.nodes[0].name, first.nodes[0].parent)
    submit(writer, second)
    wait_for(lambda: not writer.num_pending)
    assert is_whole(store, second)
    assert (writer.housekeeping.quarantined, writer.error) == (3, None)
    monkeypatch.setattr(store, "_on_corruption", "quarantine")
    is_read.set()
    wait_for((store.path / "damaged.mdb").exists)
    assert writer.close(30)


def test_quarantine_reads_only_the_index_of_the_descendants(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long, other = publication(store, prompt(1, 70 * BLOCK)), publication(store, prompt(2, 3 * BLOCK))
    bare = publication(store, prompt(1, 60 * BLOCK))
    for pub in (long, bare, other):
        store.publish(pub)

    def whole(_self: Snapshot, database: str) -> Iterator[Any]:
        yield pytest.fail(f"all of {database!r} is read")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "records", whole)
        patched.setattr(Snapshot, "keys", whole)
        assert store.quarantine(long.nodes[1].name, long.nodes[1].parent) == len(long.nodes)
    assert not verify_index(store).problems
    assert is_whole(store, other)


def test_a_search_for_damage_that_gets_no_thread_is_left_out_and_the_writer_goes_on(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, start = threading.Event(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kv-check":
            asked.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def damaged(*_: bytes) -> int:
        raise StoreCorrupt("a record is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(store, "quarantine", damaged)
        writer.quarantine(b"n" * 16, b"p" * 16)
        assert asked.wait(30)
        pub = publication(store, prompt(1, 2 * BLOCK))
        submit(writer, pub)
        assert writer.flush(30)
        assert not writer.housekeeping.is_reading
    assert is_whole(store, pub)
    assert writer.close(30)


@pytest.mark.parametrize("step", ["_next", "_write_all", "_end_writing"])
def test_a_writer_whose_own_step_fails_says_so_and_begins_again(
    step: str, store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody watches its thread."""
    monkeypatch.setattr(thread_pool, "_AGAIN_S", 0.0)
    own, failing = getattr(writer, step), [True]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "kv-writer" and failing:
            failing.clear()
            raise MemoryError
        return own(*args, **kwargs)

    monkeypatch.setattr(writer, step, fail_once)
    pub = publication(store, prompt(1, 2 * BLOCK))
    submit(writer, pub)
    assert writer.flush(30)
    assert "the thread kv-writer failed" in caplog.text
    assert is_whole(store, pub)
    assert writer.close(30)
    assert not writer.pending_bytes
