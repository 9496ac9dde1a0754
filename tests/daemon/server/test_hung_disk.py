"""A disk that stops answering, under the whole server: no request waits for it for long, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import lmdb
import pytest

from diskprefix.daemon.server import import_checks, openings
from diskprefix.daemon.server.import_checks import ImportChecks
from diskprefix.daemon.server.openings import compute_openings
from diskprefix.daemon.server.threads import _NUM_THREADS, Threads
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.thread_pool import ThreadPool
from tests.daemon.server.daemon_process import reply_to
from tests.daemon.server.scripted import AppServer, real_app
from tests.waiting import wait_for

RESPONSES = "/v1/responses"


class HungDisk:
    """Read transactions that begin wait while it hangs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers, self.by = threading.Event(), set[str]()
        self.answers.set()
        transaction = Environment.transaction

        def waiting(env: Environment, *, write: bool = False) -> AbstractContextManager[lmdb.Transaction[Any]]:
            if not write:
                self.by.add(threading.current_thread().name.partition("_")[0])
                assert self.answers.wait(60)
            return transaction(env, write=write)

        patch.setattr(Environment, "transaction", waiting)


@pytest.fixture
def server(chat_model: Path, tmp_path: Path) -> Iterator[AppServer]:
    with real_app(chat_model, tmp_path, kv_memory_keeps=False, kv_cache_gate="off") as server:
        yield server


@pytest.fixture
def disk(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:  # noqa: ARG001 (loaded first)
    monkeypatch.setattr(reads, "STALL_S", 0.5)
    monkeypatch.setattr(reads.Patience.__init__, "__defaults__", (0.5,))
    disk = HungDisk(monkeypatch)
    yield disk
    disk.answers.set()


def conversation(client: httpx.Client, topic: str, num_turns: int) -> list[dict[str, Any]]:
    """Returns the messages of a conversation whose next question is the last one."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Tell me of {topic}."}]
    for turn in range(num_turns):
        content = said(client, messages)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And {turn}?"}]
    return messages


def said(client: httpx.Client, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return reply_to(client, {"messages": messages, "max_tokens": 4, "seed": 5}, scope="full")


def forget(server: AppServer) -> None:
    """Takes the turns out of memory."""
    notes = server.engine.cache.writer.notes
    assert server.engine.cache.writer.flush(30)
    wait_for(lambda: not notes._waiting)
    notes._recent.clear()


def test_conversations_and_pages_are_answered_while_the_disk_hangs(server: AppServer, disk: HungDisk) -> None:
    with server.client() as client:
        talks = [conversation(client, f"lake {number}", 3) for number in range(3 * _NUM_THREADS["rendering"])]
        first = client.post(RESPONSES, json={"input": "Hello!", "max_output_tokens": 4}).json()
        forget(server)
        disk.by.clear()
        disk.answers.clear()
        with ThreadPoolExecutor(len(talks)) as pool:
            replies = list(pool.map(lambda messages: said(client, messages), talks))
        assert all("replayed" not in reply["prefix_cache"] for reply in replies), "their turns are on the disk"
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert "has not answered" in health["cache"]["error"]
        assert "has not answered" in client.get("/props").json()["full_cache"]["state"]["error"]
        assert client.get("/metrics").status_code == 200
        continued = client.post(RESPONSES, json={"input": "On.", "previous_response_id": first["id"]})
        read = client.get(f"{RESPONSES}/{first['id']}")
        for refused in (continued, read, client.get("/dashboard/entries")):
            assert refused.status_code == 503, refused.text
            assert refused.headers["retry-after"]
        assert continued.json()["error"]["code"] == "disk_stalled"
        assert disk.by.isdisjoint({"rendering", "counting", "reading", "inspecting", "engine", "MainThread"})

        disk.answers.set()
        wait_for(lambda: client.get("/health").json()["status"] == "ok")
        assert [said(client, messages)["prefix_cache"]["replayed"] for messages in talks] == [3] * len(talks)
        again = {"input": "On.", "previous_response_id": first["id"], "max_output_tokens": 4}
        assert client.post(RESPONSES, json=again).status_code == 200


def test_reads_for_no_request_hold_up_no_request(server: AppServer, disk: HungDisk) -> None:
    serving, threads = server.daemon.serving, Threads()
    assert serving is not None
    # The system refuses all others.
    threads._of["reading"] = ThreadPool(1, "reading")

    async def scenario() -> None:
        disk.answers.clear()
        loops = [compute_openings(serving, threads), ImportChecks(serving).run(threads)]
        reading = [asyncio.create_task(loop) for loop in loops]
        await asyncio.to_thread(wait_for, lambda: disk.by)
        assert await asyncio.wait_for(threads.run("reading", lambda: 1), 30) == 1
        disk.answers.set()
        for task in reading:
            task.cancel()

    disk.by.clear()
    asyncio.run(scenario())
    threads.close()


@pytest.mark.parametrize("module", [openings, import_checks])
def test_after_a_refused_thread_openings_and_imported_prompts_are_read(
    server: AppServer, disk: HungDisk, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    serving, threads, start, refused = server.daemon.serving, Threads(), threading.Thread.start, list[str]()
    assert serving is not None

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "ahead_0" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    async def scenario() -> None:
        loop = compute_openings(serving, threads) if module is openings else ImportChecks(serving).run(threads)
        reading = asyncio.create_task(loop)
        await asyncio.to_thread(wait_for, lambda: "ahead" in disk.by)
        reading.cancel()

    disk.by.clear()
    monkeypatch.setattr(module, "_CHECK_S", 0.01)
    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    asyncio.run(scenario())
    assert refused
    threads.close()


def test_turns_in_memory_are_replayed_without_the_disk(server: AppServer, disk: HungDisk) -> None:
    with server.client() as client:
        messages = conversation(client, "memory", 3)
        disk.by.clear()
        assert said(client, messages)["prefix_cache"]["replayed"] == 3
        assert "disk-reader" not in disk.by


def test_a_purge_takes_turns_out_of_memory(server: AppServer) -> None:
    with server.client() as client:
        messages = conversation(client, "purge", 2)
        assert server.engine.cache.writer.flush(30)
        for entry in client.get("/dashboard/entries").json()["entries"]:
            client.delete(f"/dashboard/entries/{entry['id']}")
        assert "replayed" not in said(client, messages)["prefix_cache"]
