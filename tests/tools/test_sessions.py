"""`tools/agents --session`: its questions, its tools, what another server has written, and what it calls wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.real_agents import many_tools
from tools.real_agents.many_tools import FIELDS, answer_of, tool_of
from tools.real_agents.replies import Reply
from tools.real_agents.session_report import Findings
from tools.real_agents.sessions import OF_ANTHROPIC, OF_OPENAI, SESSIONS, Session, answer_of_call, tasks
from tools.real_agents.tap import Exchange

sessions = pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.name)


def test_the_server_of_tools_lists_thirty_and_answers_calls() -> None:
    asked: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list"},
        {"id": 3, "method": "tools/call", "params": {"name": tool_of("rivers"), "arguments": {"town": "Graz"}}},
        {"id": 4, "method": "resources/list"},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in asked)
    command = [sys.executable, "-P", many_tools.__file__, "towns"]
    said = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    first, listed, called, unknown = map(json.loads, said.stdout.splitlines())
    assert first["result"]["serverInfo"]["name"] == "towns"
    assert len({tool["name"] for tool in listed["result"]["tools"]}) == 30
    assert called["result"]["content"] == [{"type": "text", "text": answer_of("rivers", "Graz")}]
    assert unknown["error"]["code"] == -32601


@sessions
def test_each_question_differs_and_its_tools_are_searched_before_they_are_called(
    session: Session, tmp_path: Path
) -> None:
    made = tasks(session, tmp_path / "sums.py")
    assert [task.number for task in made] == [*range(1, 11)]
    found: set[str] = set()
    for task in made:
        assert sum(task.question in other.question + other.last for other in made) == 1
        assert sum(task.last in other.last for other in made) == 1
        for name, arguments in task.calls:
            if "query" in arguments:
                # Codex searches for the words of a name, Claude Code for the name.
                found.add(arguments["query"].removeprefix("select:").replace(" ", "_"))
            elif name.startswith("mcp__"):
                answer_of_call((name, arguments))
                assert session.search is None or any(each.endswith(name.split("__")[-1]) for each in found)
    assert answer_of_call(("mcp__towns__look_up_twin_towns", {"town": "Graz"})) == answer_of("twin towns", "Graz")
    assert len({answer_of(item, town) for item in FIELDS for town in ("Graz", "Porto")}) == 60


def test_what_another_server_has_written_stands_before_the_reply(tmp_path: Path) -> None:
    transcript = tmp_path / "projects" / "repository" / "a.jsonl"
    rollout = tmp_path / "sessions" / "rollout-1.jsonl"
    reply: dict[str, Any] = {"type": "text", "text": "It prints 5."}
    item = {"type": "message", "role": "assistant", "content": []}
    for path, lines in (
        (transcript, [{"type": "user"}, {"type": "assistant", "message": {"content": [reply]}}, {"type": "last"}]),
        (rollout, [{"payload": {"type": "session_meta"}}, {"payload": item}, {"payload": {"type": "token_count"}}]),
    ):
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for session in SESSIONS:
        if session.search is not None:
            session.add(tmp_path)
    _, said, _ = map(json.loads, transcript.read_text("utf-8").splitlines())
    assert said["message"]["content"] == [*OF_ANTHROPIC, reply]
    payloads = [json.loads(line)["payload"] for line in rollout.read_text("utf-8").splitlines()]
    assert payloads[1:-1] == [*OF_OPENAI, item]


def test_what_may_not_be_wrong_in_a_session_is_found() -> None:
    def turn(restored: int, body: bytes = b"Question 01: a? There are 5.", **fields: Any) -> Exchange:
        reply = Reply(prompt_tokens=1000, restored=restored)
        return Exchange("POST", "/v1/messages", body, True, fields.pop("is_repeated", False), reply=reply, **fields)

    unnamed = turn(995, b'Question 01: a? There are 5. "advisor"', status=200)

    def wrong(*exchanges: Exchange, unanswered: tuple[str, ...] = (), num_tracebacks: int = 0) -> set[str]:
        findings = Findings(
            agent="a",
            questions=["Question 01: a?"],
            exchanges=exchanges,
            unanswered=unanswered,
            results=["There are 5."],
            added=["thinking", "advisor"],
            num_tracebacks=num_tracebacks,
            hosts_refused=(),
        )
        return {each["what"] for each in findings.report()["verdicts"] if not each["holds"]}

    good = [turn(0, status=200), turn(995, status=200)]
    assert wrong(*good) == set()
    assert wrong(*good, unanswered=("a?",)) == {"questions without an answer"}
    assert wrong(*good, unnamed) == {"types of another server that nothing names"}
    unnamed.reply.cache["left_out"] = [{"type": "advisor", "count": 1}]
    assert wrong(*good, unnamed) == set()
    assert wrong(*good, num_tracebacks=1) == {"tracebacks in the log"}
    assert wrong(*good, turn(995, status=400, refusal="no")) == {"requests refused"}
    assert wrong(*good, turn(995, status=200, is_repeated=True)) == {"requests repeated or cut off"}
    assert wrong(*good, turn(995, status=200, is_cut_off=True)) == {"requests repeated or cut off"}
    assert wrong(*good, turn(980, status=200)) == {"the least share of the prompt before that was restored"}
    assert wrong(*good, turn(995, b"Question 01: a?", status=200)) == {
        "called tools without their answer in the conversation"
    }
