"""A process that is killed in the middle of a long prompt: the next one goes on from what was written meanwhile."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.prefixstore.cache import saving
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.prefixstore.store.writer import Writer, WriterLimits
from tests import forked
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import (
    CHAT,
    DaemonProcess,
    cache_states,
    clean_environment,
    reply_to,
    running_daemon,
    serve_flags,
    wait_until,
)
from tests.faults.kills import BLOCK, KINDS, MOST_S, Task, compute
from tests.waiting import wait_for

TOKENS, HALT_AT, INTERIM = 7 * BLOCK + 9, 5 * BLOCK, 2 * BLOCK


def has_written(writer: Writer) -> bool:
    """Pauses the writer, as a step does."""
    writer.pause_writing()
    return not writer.num_pending


def halt(task: Task) -> None:
    """Computes a prompt up to a position, and goes on pausing the writer there, as steps do. Says so when nothing waits
    to be written."""
    saving._INTERIM_S, saving._INTERIM_TOKENS = 0.0, INTERIM

    def after_step(cached: CachedRequest, sequence: KVSequence) -> None:
        if sequence.num_tokens >= HALT_AT:
            wait_for(partial(has_written, cached.cache.writer))
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


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["by a client", "by warm"])
@pytest.mark.parametrize("runtime", ["plan", "grid", "llama"])
def test_a_daemon_that_is_killed_in_the_middle_of_a_prompt_has_saved_what_it_computed(
    runtime: str, asked: str, tmp_path: Path
) -> None:
    if runtime == "llama":
        pytest.importorskip("llama_cpp")
    model, cache = write_chat_model(tmp_path / "tiny-chat", runtime=runtime), tmp_path / "kv"
    flags = serve_flags(model, cache, runtime=runtime, disk_prefix_cache="auto")
    environment = clean_environment(HALT_AT="512")
    content = " ".join(f"{number} rivers" for number in range(400))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    warming = {"messages": body["messages"], "prompt_cache_options": {"prewarm": True}}

    def ask() -> None:
        with suppress(httpx.HTTPError), daemon.client() as client:
            client.post(CHAT, json=warming if asked == "by warm" else body)

    with DaemonProcess(*flags, environment=environment, module="tests.faults.halting_daemon") as daemon:
        daemon.wait_ready()
        asking = threading.Thread(target=ask)
        with daemon.client() as client:
            asking.start()
            wait_until(lambda: cache_states(client)[0]["saved_tokens"] >= 512, "what was computed is on the disk")
        daemon.stop(signal.SIGKILL)
        asking.join()
    with (
        running_daemon(model, cache, runtime=runtime, disk_prefix_cache="auto") as restarted,
        restarted.client() as client,
    ):
        report = reply_to(client, body)
    assert 512 <= report["prefix_cache"]["restored"] < report["usage"]["prompt_tokens"] / 2
    assert (report["prefix_cache"]["source"], report["prefix_cache"]["miss_reason"]) == ("disk", "partial")


def test_pauses_hold_no_publication_for_as_long_as_a_kill_may_lose() -> None:
    """The rest of the time is for the write."""
    assert WriterLimits().max_held_s <= MOST_S - 2
    assert saving._INTERIM_S < MOST_S
