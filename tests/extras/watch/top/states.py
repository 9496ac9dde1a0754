"""A daemon's state, and what it has saved, as its routes give them."""

from __future__ import annotations

from typing import Any

NOW = 1_800_000_000.0


def request(id_: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "state": "decoding",
        "scope": "full",
        "prompt_tokens": 1000,
        "restored_tokens": 900,
        "ready_tokens": 1000,
        "reply_tokens": 20,
        "elapsed_s": 2.5,
        "queue_s": 0.1,
        "ttft_s": 0.25,
        "tokens_per_s": 31.2,
    } | changes


def ended(number: int = 1, *, restored: int = 900, **changes: Any) -> dict[str, Any]:
    how = {"source": "disk"} if restored else {"miss_reason": "not_stored"}
    return {
        "number": number,
        "ended_at": NOW - 90,
        "elapsed_s": 1.0,
        "id": "chatcmpl-1",
        "route": "/v1/chat/completions",
        "caller": None,
        "status": 200,
        "error": None,
        "prompt_tokens": 1000,
        "reply_tokens": 20,
        "prefix_cache": {
            "restored": restored,
            "boundary": 990,
            "boundary_reason": "continues",
            "saved": "queued",
            **how,
        },
        "timings": {"ttft_ms": 200.0 if restored else 4000.0, "decode_tokens_per_s": 30.0},
        "outcome": "hit" if restored else "miss",
    } | changes


def state(**changes: Any) -> dict[str, Any]:
    return {
        "now": NOW,
        "version": "0.1.0",
        "status": "ok",
        "message": None,
        "started_at": NOW - 60,
        "model": {"name": "tiny-chat", "device": "cpu", "dtype": "float32", "max_positions": 2048, "exact_at": "token"},
        "scope": "auto:30",
        "arriving": 0,
        "requests": [],
        "ended": [],
        "memory": {
            "limit_bytes": 1 << 30,
            "used_bytes": 1 << 29,
            "running": 1,
            "max_running": 8,
            "entries": 2,
            "max_entries": 8,
            "entry_tokens": 10,
            "slots": [],
        },
        "cache": {
            "used_bytes": 3 << 20,
            "budget_bytes": 4 << 20,
            "pending_bytes": 0,
            "pending": 0,
            "buffer_bytes": 1 << 20,
            "dropped": 0,
            "unaffordable": 0,
            "disk_written_bytes": 9 << 30,
            "disk_written_last_day_bytes": 1 << 30,
            "write_budget_bytes": 0,
            "entries": 3,
            "evicted_blocks": 44,
            "saved_bytes": 7,
            "savings": {"today": {"saved_s": 90.0}, "total": {"saved_s": 7200.0}},
        },
        "problems": [],
        "recording": False,
        "may_delete": True,
    } | changes


def trunk(id_: str, start: int, end: int, *, parent: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "parent": parent,
        "start": start,
        "end": end,
        "num_blocks": 1,
        "stored_bytes": (end - start) * 1024,
        "hits": 0,
        "last_used_at": NOW - 60,
        "prefill_s": 0.0,
        "entries": [],
        "num_entries": 1,
    } | changes


def entry(id_: str, num_tokens: int, preview: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "model": "tiny-chat",
        "num_tokens": num_tokens,
        "raw_bytes": 4 << 20,
        "stored_bytes": 2 << 20,
        "shared_bytes": 1 << 20,
        "hits": 3,
        "created_at": NOW - 3600,
        "last_used_at": NOW - 60,
        "ttl_s": None,
        "scope": "full",
        "tenant": "",
        "preview": preview,
    } | changes


def saved() -> dict[str, Any]:
    """A trunk that two prompts share, and a prompt of its own."""
    alpha, beta, gamma = "aa" * 16, "bb" * 16, "cc" * 16
    nodes = [
        trunk("11" * 16, 0, 512, num_entries=2, hits=9),
        trunk(alpha, 512, 800, parent="11" * 16, entries=[alpha], hits=1, last_used_at=NOW - 10),
        trunk(beta, 512, 1200, parent="11" * 16, entries=[beta], hits=5),
        trunk(gamma, 0, 300, entries=[gamma], hits=7, last_used_at=NOW - 900),
    ]
    return {
        "total": 3,
        "entries": [
            entry(alpha, 800, "You are Harbor … where do I start?"),
            entry(beta, 1200, "You are Harbor … and then?"),
            entry(gamma, 300, "Translate … into German"),
        ],
        "trees": [
            {"root": "00" * 16, "model": "tiny-chat", "tenant": "", "stored_bytes": 9, "num_entries": 3, "nodes": nodes}
        ],
    }
