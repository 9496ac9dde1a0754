"""The requests that are remembered for people who look, and their figures."""

from __future__ import annotations

import json
from dataclasses import asdict

from diskprefix.server.keys import Caller
from diskprefix.server.log_context import LogContext
from diskprefix.server.recent import MOST_FAILURES, MOST_REPLIES, RecentRequests
from tests.server.scripted import done

CHAT = "/v1/chat/completions"


def answered(id_: str = "chatcmpl-1") -> LogContext:
    return LogContext(status=200, done=done(cached_tokens=8), generation_id=id_, caller=Caller("alice"))


def test_a_reply_is_remembered_with_the_figures_of_its_response() -> None:
    recent = RecentRequests()
    recent.note(answered(), "POST", CHAT, 1.5)
    [ended] = recent.since(0)
    assert (ended.number, ended.id, ended.route, ended.caller, ended.elapsed_s) == (1, "chatcmpl-1", CHAT, "alice", 1.5)
    assert (ended.status, ended.error, ended.prompt_tokens, ended.reply_tokens) == (200, None, 10, 2)
    assert ended.prefix_cache is not None
    assert ended.timings is not None
    assert (ended.prefix_cache["restored"], ended.timings["ttft_ms"]) == (8, 5)
    assert json.loads(json.dumps(asdict(ended)))["prefix_cache"]["boundary_reason"] == "no_match"


def test_failures_are_remembered_and_questions_about_the_daemon_are_not() -> None:
    recent = RecentRequests()
    recent.note(LogContext(status=400, error="top_p: too large"), "POST", CHAT, 0.1)
    recent.note(LogContext(status=404, error="no such route"), "GET", "other", 0.1)
    recent.note(LogContext(status=200), "POST", "/tokenize", 0.1)
    recent.note(LogContext(status=200, error="the client reads too slowly"), "POST", CHAT, 0.1)
    assert [ended.error for ended in recent.since(0)] == ["top_p: too large", "the client reads too slowly"]


def test_many_failures_push_no_reply_out_and_the_oldest_go_first() -> None:
    recent = RecentRequests()
    recent.note(answered("first"), "POST", CHAT, 0.1)
    for _ in range(MOST_FAILURES + 5):
        recent.note(LogContext(status=429, error="full"), "POST", CHAT, 0.1)
    found = recent.since(0)
    assert (len(found), found[0].id) == (MOST_FAILURES + 1, "first")
    assert [ended.number for ended in recent.since(recent.count - 2)] == [recent.count - 1, recent.count]
    for _ in range(MOST_REPLIES):
        recent.note(answered("later"), "POST", CHAT, 0.1)
    assert "first" not in {ended.id for ended in recent.since(0)}
