"""A daemon's state, as its route gives it."""

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
        "may_delete": True,
    } | changes
