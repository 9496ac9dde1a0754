"""What a reply, the log and `/props` say of a prompt that was not found, changed by canonicalisers, or shortened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.app import load_engine
from diskprefix.daemon.server.recent import BrokenLines, lost_tokens, program_of
from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.cache.tiered_store import open_store
from diskprefix.values import Break, CacheReport, Lost, Rewriting, Scope, Selection, SourceText
from tests.agent_bodies import billing_header, tool, words
from tests.daemon.server.daemon_process import reply_to, wait_until
from tests.daemon.server.scripted import AppServer, real_app, started_app

SYSTEM = words(1, 300)


@pytest.fixture
def server(chat_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AppServer]:
    """The real engine; the parameter is `--canonicalise`."""
    with real_app(chat_model, tmp_path / "kv", canonicalise=request.param, prefill_compression="auto") as server:
        yield server


def say(server: AppServer, number: int) -> dict[str, Any]:
    system = f"{billing_header(number)}\n{SYSTEM}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    with server.client() as client:
        report: dict[str, Any] = reply_to(client, {"messages": messages, "max_tokens": 1})["prefix_cache"]
    return report


@pytest.mark.parametrize("server", ["report"], indirect=True)
def test_the_reply_the_log_and_props_name_the_line_that_broke_the_prefix(
    server: AppServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "diskprefix"):
        first, second, third = (say(server, number) for number in (1, 2, 3))
    assert "broken_by" not in first
    broken = second["broken_by"]
    assert broken["line"].startswith("x-xxxxxxxxx-xxxxxxx-xxxxxx: cc_version=#.#.##.")
    assert broken["canonicalisers"] == ["billing-header"]
    assert 5 < broken["at"] < 60
    assert broken["tokens"] > 400
    assert "broken_by" in third
    assert "changed" not in third
    with server.client() as client:
        seen = client.get("/props").json()["full_cache"]["state"]["lost"]
        scraped = client.get("/metrics").text
    assert {(row["cause"], row["client"]) for row in seen} == {("diverged", "python-httpx")}
    assert sum(row["requests"] for row in seen) == 2
    lost_tokens = sum(row["tokens"] for row in seen)
    assert 800 < lost_tokens <= second["broken_by"]["tokens"] + third["broken_by"]["tokens"]
    assert f'diskprefix_recomputed_tokens_total{{cause="diverged"}} {float(lost_tokens)}\n' in scraped
    told = [
        record.message for record in caplog.records if "--canonicalise billing-header=on may help" in record.message
    ]
    assert len(told) == len(seen)
    assert all("letters are masked as x, digits as #" in line for line in told)
    assert billing_header(2) not in caplog.text


@pytest.mark.parametrize("server", ["billing-header=on"], indirect=True)
def test_claude_codes_messages_hit_and_are_counted_as_sent(server: AppServer) -> None:
    replies, counts = [], []
    with server.client() as client:
        for number in (1, 2):
            system = [{"type": "text", "text": text} for text in (billing_header(number), "You are a CLI.", SYSTEM)]
            body = {"model": "tiny-chat", "system": system, "messages": [{"role": "user", "content": "hello"}]}
            counts.append(reply_to(client, body, "/v1/messages/count_tokens")["input_tokens"])
            replies.append(reply_to(client, body | {"max_tokens": 1}, "/v1/messages"))
    first, second = replies
    changed = second["prefix_cache"]["changed"]
    assert [change["canonicaliser"] for change in changed] == ["billing-header"]
    assert changed[0]["path"].startswith("system.0")
    assert first["prefix_cache"]["changed"] == changed
    assert "broken_by" not in second["prefix_cache"]
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 400
    assert counts[1] == sum(usage[name] for name in usage if name.endswith("input_tokens"))
    assert first["usage"]["cache_read_input_tokens"] == 0


@pytest.mark.parametrize("server", ["off"], indirect=True)
def test_a_session_goes_on_beyond_the_models_positions_and_its_turns_hit(server: AppServer) -> None:
    messages = [{"role": "system", "content": words(0, 20)}]
    for turn in range(12):
        messages += [{"role": "user", "content": words(turn, 40)}, {"role": "assistant", "content": words(turn, 30)}]
    with server.client() as client:
        bodies = [{"messages": messages[:length], "max_tokens": 2, "temperature": 0} for length in (22, 24)]
        replies = [reply_to(client, body) for body in bodies]
    first, second = (reply["prefix_cache"] for reply in replies)
    assert first["left_out"] == second["left_out"]
    assert first["left_out"][0]["count"] > 4
    assert first["left_out"][0]["first"] == "messages.2"
    assert (first["boundary"], first["boundary_reason"], first["saved"]) == (0, "left_out", "none")
    assert second["restored"] >= replies[0]["usage"]["prompt_tokens"] - 8
    assert second["source"] == "memory"


@pytest.mark.parametrize(
    "setting", [{"canonicalise": "clocks=on"}, {"prefill_compression": "2048"}, {"prefill_compression": "5000"}]
)
def test_wrong_settings_end_the_start_and_close_the_store(
    chat_model: Path, tmp_path: Path, setting: dict[str, str]
) -> None:
    folder = tmp_path / "kv"
    with started_app(chat_model, load_engine, kv_cache_dir=folder, **setting) as server:
        wait_until(lambda: server.daemon.failure, "the start failed")
        assert isinstance(server.daemon.failure, SettingsError)
    open_store(Settings(kv_cache_dir=folder)).close()


def with_tools(server: AppServer, *names: str, **fields: Any) -> tuple[int, int]:
    """Returns the tokens of the prompt, and how many were restored."""
    tools = [tool(name, sum(map(ord, name))) for name in names]
    messages = [{"role": "system", "content": words(2, 20)}, {"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": tools, "max_tokens": 1, "temperature": 0}
    with server.client() as client:
        reply = reply_to(client, body | fields)
    return reply["usage"]["prompt_tokens"], reply["prefix_cache"]["restored"]


def test_a_new_tool_follows_those_of_its_tenant_after_a_restart_too(chat_model: Path, tmp_path: Path) -> None:
    with real_app(chat_model, tmp_path / "kv", canonicalise="tool-order=on") as server:
        least, _ = with_tools(server, "Write", "Read")
        # The messages follow the tools.
        one_more, restored = with_tools(server, "Bash", "Read", "Write")
        assert restored > 0.85 * least
    with real_app(chat_model, tmp_path / "kv", canonicalise="tool-order=on") as server:
        num_tokens, restored = with_tools(server, "Write", "Bash", "Read")
        assert (num_tokens, restored) in ((one_more, one_more), (one_more, one_more - 1))
        _, without = with_tools(server, "Write", "Read")
        assert without >= least - 1
        for other in ({"cache_salt": "bob"}, {"prefix_cache": {"replay": False}}):
            with_tools(server, "Write", "Bash", "Read", **other)
            tools = [tool(name, sum(map(ord, name))) for name in ("Bash", "Read", "Write")]
            with server.client() as client:
                sent = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "max_tokens": 1} | other
                assert "changed" not in reply_to(client, sent)["prefix_cache"], "by name, as nothing is known"


def test_work_ahead_has_the_tenants_order_of_tools(chat_model: Path, tmp_path: Path) -> None:
    with real_app(chat_model, tmp_path / "kv", canonicalise="tool-order=on") as server:
        with_tools(server, "Write")
        with_tools(server, "Bash", "Write")
        system, tools = words(3, 60), [tool(name, 5) for name in ("Bash", "Write")]
        body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "x"}], "tools": tools}
        with server.client() as client:
            ahead = reply_to(client, body | {"prefix_cache": {"ahead": "mine"}})
            asked = reply_to(client, body | {"max_tokens": 1})
            again = reply_to(client, body | {"prefix_cache": {"ahead": "mine"}})
    assert ahead["prompt_tokens"] <= asked["usage"]["prompt_tokens"]
    assert again["ready_tokens"] == again["prompt_tokens"]


def report(line: str, *lost: Lost) -> CacheReport:
    return CacheReport(
        selection=Selection(scope=Scope("off"), prompt_tokens=1, reason="off"),
        broken=Break(3, 1000),
        broken_line=line,
        broken_tool="date\x1b",
        recomputed=lost,
        rewriting=Rewriting(would_change=("clock",)),
    )


def test_a_lines_shape_has_its_first_text_and_the_oldest_are_forgotten() -> None:
    lines = BrokenLines()
    for number in range(40):
        lines.note(report(f"{'+' * number} {number}"))
    lines.note(report("time: 05:04"))
    lines.note(report("time: 23:59"))
    lines.note(CacheReport(selection=Selection(scope=Scope("off"), prompt_tokens=1, reason="off")))
    assert [*lines.texts.items()][-1] == ("time: ##:##", "time: 05:04")
    assert len(lines.texts) == 32
    assert next(iter(lines.texts)).startswith("+" * 9)


def test_only_tokens_behind_a_line_are_counted_with_it() -> None:
    rows = lost_tokens(report("time: 05:04", Lost("not_stored", 20), Lost("diverged", 900)), "key curl", 7200.0)
    assert [(row.hour, row.cause, row.client, row.tokens) for row in rows] == [
        (2, "not_stored", "key curl", 20),
        (2, "diverged", "key curl", 900),
    ]
    assert [(row.line, row.tool, row.canonicalisers) for row in rows] == [
        ("", "", ()),
        ("time: ##:##", "date\\x1b", ("clock",)),
    ]


def test_a_programs_name_is_short_and_without_version() -> None:
    agents = ("opencode/1.18 ai-sdk/2", "claude-cli/2.1 (external, cli)", "", "\x1b[2J", "a" * 999)
    assert [program_of(agent) for agent in agents] == ["opencode", "claude-cli", "", "", "a" * 40]


@pytest.mark.parametrize(
    ("at", "tool"),
    [("when", "clock"), ("It is", "clock"), ("other", ""), ('"read"', "clock"), ("Reads", "read"), ("user", "")],
)
def test_a_lines_tool_is_found_by_result_or_definition(at: str, tool: str) -> None:
    text = '{"name": "clock", "does": "says when"} {"name": "read", "does": "Reads"}\nuser\n It is 05:04\nother\n'
    source = SourceText(text, np.arange(len(text), dtype=np.int32), ["clock", "read"], [("clock", "Hi\nIt is 05:04")])
    assert source.tool_at(text.index(at)) == tool
