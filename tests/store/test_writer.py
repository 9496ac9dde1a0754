from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.store.store import Publication, Store
from diskprefix.store.writer import Writer
from tests.store.building import BLOCK, is_whole, open_store, prompt, publication


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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


def submit(writer: Writer, pub: Publication) -> None:
    writer.reserve(pub.payload_bytes)
    writer.submit(pub, reserved_bytes=pub.payload_bytes)


def test_what_is_queued_is_visible_at_once_and_written_on_close(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(store, monkeypatch)
    writer = Writer(store, buffer_bytes=1 << 30)
    pub = publication(store, prompt(1, 2 * BLOCK))
    submit(writer, pub)
    assert set(writer.pending) == {node.name for node in pub.nodes}
    assert writer.pending_bytes == pub.payload_bytes
    assert not is_whole(store, pub)
    gate.open.set()
    assert writer.close(30)
    assert is_whole(store, pub)
    assert not writer.pending
    assert writer.pending_bytes == 0


def test_the_buffer_has_room_again_once_a_publication_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(store, monkeypatch)
    pub = publication(store, prompt(1, 2 * BLOCK))
    writer = Writer(store, buffer_bytes=pub.payload_bytes + 10)
    submit(writer, pub)
    assert writer.room_bytes == 10
    gate.open.set()
    assert writer.flush(30)
    assert writer.room_bytes == pub.payload_bytes + 10
    assert writer.close(30)
    assert writer.room_bytes == 0


def test_a_reservation_that_comes_to_nothing_is_given_back_and_counted(store: Store) -> None:
    writer = Writer(store, buffer_bytes=100)
    writer.reserve(60)
    writer.release(60)
    assert (writer.room_bytes, writer.dropped) == (100, 1)
    assert writer.close(30)


def test_a_failing_store_is_reported_once_and_so_is_its_recovery(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="diskprefix")
    gate = Gate(store, monkeypatch)
    gate.failure = StoreUnavailable("no space left")
    gate.open.set()
    writer = Writer(store, buffer_bytes=1 << 30)
    pubs = [publication(store, prompt(seed, BLOCK)) for seed in range(3)]
    for pub in pubs[:2]:
        submit(writer, pub)
        assert writer.flush(30)
    assert writer.error == "no space left"
    assert writer.dropped == 2
    assert len([r for r in caplog.records if "serving without saving" in r.message]) == 1
    gate.failure = None
    submit(writer, pubs[2])
    assert writer.flush(30)
    assert is_whole(store, pubs[2])
    assert writer.close(30)
    assert [r.message for r in caplog.records if r.message.endswith("saving again")]


def test_uses_are_written_together_with_their_counts(store: Store) -> None:
    pub = publication(store, prompt(1, BLOCK))
    store.publish(pub)
    writer = Writer(store, buffer_bytes=1 << 30)
    assert pub.tip is not None
    for when in (2000.0, 3000.0, 2500.0):
        writer.touch(pub.tip, when)
    assert writer.close(30)
    with store.snapshot() as snapshot:
        usage = snapshot.usage(pub.tip)
    assert usage is not None
    assert (usage.hits, usage.last_used) == (3, 3000.0)


def test_closing_gives_up_when_time_runs_out_and_counts_what_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(store, monkeypatch)
    writer = Writer(store, buffer_bytes=1 << 30)
    for seed in range(3):
        submit(writer, publication(store, prompt(seed, BLOCK)))
    release = threading.Timer(0.2, gate.open.set)
    release.start()
    assert not writer.close(0.01)
    release.join()
    assert writer.dropped == 2


def test_a_bug_in_the_store_degrades_the_cache_and_the_writer_lives_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(store, monkeypatch)
    gate.failure = MemoryError("none left")
    gate.open.set()
    writer = Writer(store, buffer_bytes=1 << 30)
    pubs = [publication(store, prompt(seed, BLOCK)) for seed in range(2)]
    submit(writer, pubs[0])
    assert writer.flush(30)
    assert writer.error is not None
    assert "none left" in writer.error
    assert (writer.dropped, writer.pending_bytes) == (1, 0)
    gate.failure = None
    submit(writer, pubs[1])
    assert writer.close(30)
    assert is_whole(store, pubs[1])
    assert "Traceback" in caplog.text


def test_a_damaged_node_goes_before_what_is_submitted_after_it(store: Store) -> None:
    pub = publication(store, prompt(1, 3 * BLOCK))
    store.publish(pub)
    writer = Writer(store, buffer_bytes=1 << 30)
    writer.quarantine(pub.nodes[1].name, pub.nodes[1].parent)
    submit(writer, pub)
    assert writer.close(30)
    assert writer.quarantined == 3
    assert is_whole(store, pub)
