"""`tools/agents` without agents: what it reads of replies, what counts as a turn, what its proxy lets through, and
which rows a run leaves."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diskprefix.extras.clients.recipe import names
from tools.measuring.live_server import LiveServerError
from tools.models import real
from tools.peers.results import UnreadableResults
from tools.real_agents import run
from tools.real_agents.agents import AGENTS, LAST_REPLY, TASK, Agent
from tools.real_agents.outcomes import Outcome, Outcomes
from tools.real_agents.replies import Reply
from tools.real_agents.run import turn_finder
from tools.real_agents.scripted_daemon import SIDE_REPLY, prepared_reply
from tools.real_agents.tap import Tap

CHAT: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "read", "arguments": ""}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
    {"choices": [], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 90}}},
]
MESSAGES: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 1, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "name": "read"}},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"input_tokens": 8, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 2},
    },
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"usage": None, "error": None}},
    {"type": "response.output_item.added", "item": {"type": "function_call", "name": "read"}},
    {"type": "response.output_item.done", "item": {"type": "function_call", "name": "read"}},
    {
        "type": "response.completed",
        "response": {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 90}}},
    },
]
SCRIPT = {"task": TASK, "calls": [["read", {"path": "a"}], ["run", {"command": "b"}]], "last": LAST_REPLY}
RESULT = "<tool_response>\nx\n</tool_response>"


def stream(events: list[dict[str, Any]]) -> bytes:
    return b"".join(f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


@pytest.mark.parametrize("events", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_a_reply_of_each_api_tells_its_calls_and_what_was_restored(events: list[dict[str, Any]], cut: int) -> None:
    reply, data = Reply(), stream(events)
    for start in range(0, len(data), cut):
        reply.feed(data[start : start + cut])
    reply.finish()
    assert (reply.calls, reply.prompt_tokens, reply.restored, reply.errors) == (["read"], 100, 90, [])


@pytest.mark.parametrize("events", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_the_first_token_is_not_the_first_event(events: list[dict[str, Any]]) -> None:
    reply = Reply()
    reply.feed(stream(events[:1]))
    assert not reply.has_token
    reply.feed(stream(events[1:2]))
    assert reply.has_token


def test_an_error_within_a_stream_is_noted() -> None:
    reply = Reply()
    reply.feed(stream([{"type": "error", "error": {"message": "no room"}}]))
    assert reply.errors == ['{"message": "no room"}']


def test_prepared_calls_come_one_after_the_other_and_side_requests_get_a_title() -> None:
    task = f"<tools>\n</tools><|im_start|>user\n{TASK}<|im_end|>"
    assert '"name": "read"' in prepared_reply(task, SCRIPT)
    assert '"name": "run"' in prepared_reply(task + RESULT, SCRIPT)
    assert prepared_reply(task + RESULT * 2, SCRIPT) == LAST_REPLY
    assert prepared_reply(f"{RESULT}{task}", SCRIPT) == prepared_reply(task, SCRIPT)
    assert prepared_reply(f"Give this a title: {TASK}", SCRIPT) == SIDE_REPLY
    assert prepared_reply("<tools>\n</tools>hello", SCRIPT) == SIDE_REPLY


def test_a_turn_has_the_task_and_the_tools_of_the_first_one() -> None:
    is_turn = turn_finder()
    read, search = {"function": {"name": "read"}}, {"type": "web_search"}

    def body(*tools: Any, text: str = TASK, stream: bool = True) -> dict[str, Any]:
        return {"stream": stream, "tools": list(tools), "messages": [{"content": text}]}

    assert not is_turn(body())
    assert not is_turn(body(read, text="hello"))
    assert not is_turn(body(read, search, stream=False))
    assert is_turn(body(read, search))
    assert not is_turn(body(read))
    assert is_turn(body(read, search, text=f"{TASK} and more"))


def test_each_agent_has_a_recipe() -> None:
    assert set(AGENTS) <= set(names())


def outcome(name: str, **other: Any) -> Outcome:
    known: dict[str, Any] = {field.name: [] for field in fields(Outcome)}
    known |= {"agent": name, "version": AGENTS[name].version, "is_done": True, "retries": 0, "cut_off": 0}
    return Outcome(**(known | {"restored_share": 1.0} | other))


@pytest.mark.parametrize(
    ("other", "is_run_again"),
    [
        ({}, False),
        ({"restored_share": None}, False),
        ({"version": "0.0.1"}, True),
        ({"is_done": False}, True),
        ({"changed": [".bashrc"]}, True),
        ({"retries": 1}, True),
        ({"restored_share": 0.89}, True),
    ],
)
def test_agents_with_a_good_row_of_their_version_are_not_run_again(
    other: dict[str, Any], is_run_again: bool, tmp_path: Path
) -> None:
    path = tmp_path / "agents.json"
    Outcomes(path, "tiny").add(outcome("pi", **other))
    again = Outcomes(path, "tiny")
    assert again.missing([AGENTS["pi"]]) == [AGENTS["pi"]] * is_run_again
    again.add(outcome("pi"))
    assert [each.agent for each in Outcomes(path, "tiny")] == ["pi"]


def test_a_file_of_other_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    Outcomes(path, "tiny").add(outcome("pi"))
    with pytest.raises(UnreadableResults, match="of other runs: tiny"):
        Outcomes(path, "real")
    for text in ('{"agents": []}', '{"title": "tiny", "agents": [{"agent": "pi"}]}', "[]"):
        path.write_text(text)
        with pytest.raises(UnreadableResults, match="is not a file of results"):
            Outcomes(path, "tiny")


def test_an_agent_that_fails_keeps_none_of_the_others_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: run.Run, agent: Agent, limit_s: float) -> Outcome:
        del limit_s
        if agent.name == "pi":
            raise LiveServerError("no port")
        return outcome(agent.name)

    monkeypatch.setattr(run.Run, "agent", work)
    monkeypatch.setattr(run, "installed", lambda _: tmp_path)
    monkeypatch.setattr(real, "fetched", lambda *_: tmp_path)
    monkeypatch.setattr(run, "write_tiny", lambda *_: tmp_path)
    path = tmp_path / "agents.json"
    ended = CliRunner().invoke(run.main, ["pi", "goose", "--json", "--results", str(path)])
    assert ended.exit_code == 1
    assert "error: pi: no port" in ended.stderr
    assert [each.agent for each in Outcomes(path, run.title_of(is_real=False))] == ["goose"]


class _Daemon(BaseHTTPRequestHandler):
    """Answers with the stream of a chat, and refuses a body with `bad`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400 if b"bad" in body else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "bad"}}' if b"bad" in body else stream(CHAT))

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def tap() -> Iterator[tuple[Tap, list[int]]]:
    """A proxy before a daemon, and what had been sent whenever `between_turns` was called."""
    calls: list[int] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Daemon) as daemon:
        thread = threading.Thread(target=daemon.serve_forever)
        thread.start()
        is_turn = turn_finder()
        made = Tap(daemon.server_address[1], is_turn, lambda: calls.append(len(made.exchanges)))
        with made:
            yield made, calls
        daemon.shutdown()
        thread.join()


def connection_to(tap: Tap) -> http.client.HTTPConnection:
    host, _, port = tap.host.partition(":")
    return http.client.HTTPConnection(host, int(port), timeout=30)


def post(tap: Tap, body: dict[str, Any], *, by_proxy: bool = False) -> tuple[int, bytes]:
    with closing(connection_to(tap)) as connection:
        if by_proxy:
            connection.set_tunnel(connection.host, connection.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()


def test_the_proxy_measures_what_passes_and_restarts_between_turns(tap: tuple[Tap, list[int]]) -> None:
    proxy, calls = tap
    turn = {"stream": True, "tools": [{"type": "x"}], "messages": [TASK]}
    assert post(proxy, turn) == (200, stream(CHAT))
    assert post(proxy, {"messages": ["a title"]})[0] == 200
    assert post(proxy, turn, by_proxy=True) == (200, stream(CHAT))
    assert post(proxy, {"messages": ["bad"]})[0] == 400
    assert calls == [2]
    assert [each.is_turn for each in proxy.exchanges] == [True, False, True, False]
    assert [each.is_repeated for each in proxy.exchanges] == [False, False, True, False]
    assert [each.status for each in proxy.turns] == [200, 200]
    assert proxy.turns[0].reply.restored == 90
    assert proxy.turns[0].first_token_s is not None
    assert proxy.exchanges[-1].refusal == '{"error": {"message": "bad"}}'


def test_the_proxy_refuses_other_hosts(tap: tuple[Tap, list[int]]) -> None:
    proxy, _ = tap
    with closing(connection_to(proxy)) as connection:
        connection.request("GET", "http://example.com/a")
        assert connection.getresponse().status == 403
    with closing(connection_to(proxy)) as connection:
        connection.set_tunnel("example.com", 443)
        with pytest.raises(OSError, match="403"):
            connection.request("GET", "/")
    assert proxy.refused_hosts == ["example.com", "example.com:443"]
    assert proxy.exchanges == []
