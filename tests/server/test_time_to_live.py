"""The time for which a request asks its state to be kept, from the body of the request to the record in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.cache.cache import PrefixCache
from tests.server.daemon_process import reply_to, wait_until
from tests.server.scripted import AppServer, real_app

TTL_S = 300
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers and tell me where each of them begins. " * 2}],
    "max_tokens": 1,
    "temperature": 0,
    "prefix_cache": {"scope": "full", "ttl": "5m"},
}


@pytest.fixture
def server(chat_model: Path, tmp_path: Path) -> Iterator[AppServer]:
    """A daemon that keeps what asks for no other time for ever."""
    with real_app(chat_model, tmp_path / "kv", kv_memory_entries=0, kv_cache_gate="off") as server:
        yield server


def ask(server: AppServer) -> dict[str, Any]:
    with server.client() as client:
        report: dict[str, Any] = reply_to(client, BODY)["prefix_cache"]
    return report


def records(cache: PrefixCache) -> Any:
    with cache.store.snapshot() as snapshot:
        return snapshot.usages().records


def test_an_entry_with_a_time_to_live_expires_although_it_was_reused(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = server.engine.cache
    assert ask(server)["saved"] == "queued"
    wait_until(lambda: len(records(cache)) and not cache.writer.pending, "the prompt is stored")
    num_nodes = len(records(cache))
    assert ask(server)["restored"] > 0
    wait_until(lambda: (records(cache)["restores"] == 1).all(), "the reuse is recorded")
    assert (records(cache)["ttl_s"] == TTL_S).all(), "every node of it, still"
    assert cache.settle(30)
    assert cache.writer.flush(30)
    later = time.time() + TTL_S - 60
    monkeypatch.setattr(cache.store, "clock", lambda: later)
    assert cache.store.evictor.expire(0) == 0, "not before its time"
    monkeypatch.setattr(cache.store, "clock", lambda: later + 120)
    assert cache.store.evictor.expire(0) == num_nodes
    assert cache.store.counts()["prompts"] == 0, "nor is the prompt remembered"
    # As the writer does after it has removed what has expired.
    cache.namespaces.forget_deleted()
    assert ask(server)["miss_reason"] == "new"
