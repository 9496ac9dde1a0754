"""A process that is killed in the middle of a long prompt: the next one goes on from what was written meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diskprefix.cache import saving
from diskprefix.cache.cached_request import CachedRequest
from diskprefix.kv.sequence import KVSequence
from diskprefix.store import writer
from diskprefix.store.store import Store
from diskprefix.store.verify import verify_index
from tests import forked
from tests.faults.kills import BLOCK, KINDS, MOST_S, Task, compute
from tests.waiting import wait_for

TOKENS, HALT_AT, INTERIM = 7 * BLOCK + 9, 5 * BLOCK, 2 * BLOCK


def halt(task: Task) -> None:
    """Computes a prompt up to a position, and goes on pausing the writer there, as steps do. Says so when nothing waits
    to be written."""
    saving._INTERIM_S, saving._INTERIM_TOKENS = 0.0, INTERIM

    def after_step(cached: CachedRequest, sequence: KVSequence) -> None:
        if sequence.num_tokens >= HALT_AT:
            wait_for(lambda: cached.cache.writer.pause_writing() or not cached.cache.writer.num_pending)
            task.progress.add(sequence.num_tokens)
            threading.Event().wait()

    compute(task, after_step)


def kill_in_the_middle(task: Task) -> None:
    process = forked.start(halt, task)
    wait_for(lambda: task.progress.read() or process.exitcode is not None)
    assert task.progress.read()
    process.kill()
    process.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_process_goes_on_where_the_killed_one_was_with_the_bits_of_a_cold_run(
    kind: str, tmp_path: Path
) -> None:
    """Of hybrids, from the last interim checkpoint."""
    task, cold = Task(KINDS[kind], tmp_path / "kv", TOKENS), Task(KINDS[kind], tmp_path / "cold", TOKENS)
    for each in (task, cold):
        each.folder.mkdir()
    kill_in_the_middle(task)
    for each in (task, cold):
        assert forked.run(compute, each) == 0
    has_states = "hybrid" in kind or kind == "convolutions"
    assert task.said()["restored"] == (HALT_AT - HALT_AT % INTERIM if has_states else HALT_AT)
    assert task.said()["logits"] == cold.said()["logits"]
    store = Store(task.folder, read_only=True)
    with store.snapshot() as snapshot:
        assert {entry.kind for _, entry in snapshot.entries()} == {"saved"}
    assert verify_index(store).problems == ()
    store.close()


@pytest.mark.slow
def test_a_retry_says_that_it_found_a_part(tmp_path: Path) -> None:
    """If that is less than half; otherwise it is no miss."""
    task = Task(KINDS["dense"], tmp_path, 3 * TOKENS)
    kill_in_the_middle(task)
    assert forked.run(compute, task) == 0
    assert (task.said()["restored"], task.said()["reason"]) == (HALT_AT, "partial")


def test_pauses_hold_no_publication_for_as_long_as_a_kill_may_lose() -> None:
    """The rest of the time is for the write."""
    assert writer._MAX_HELD_S <= MOST_S - 2
    assert saving._INTERIM_S < MOST_S
