"""Prompts that are warmed ahead of time."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import diskprefix.desk.warm.warm_command
from diskprefix.daemon.api.openai import CompletionRequest
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.desk.warm.warm_prompts import CHAT, COMPLETION, NOT_OF_PROMPTS, WarmItem, read_items
from diskprefix.errors import InvalidRequest
from tests.daemon.server.daemon_process import DaemonProcess
from tests.daemon.server.scripted import ScriptedEngine, scripted_app
from tests.desk.conftest import Ended, Run
from tests.desk.small_daemon import Reply, health, models, small_daemon

WORDS = "Name three rivers and tell me where each of them begins and where it ends. "
KEY, ADMIN_KEY = "key-of-somebody-else", "key-of-the-administrator"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue is tried again at once, and no variable says where a daemon is."""
    monkeypatch.setattr(diskprefix.desk.warm.warm_command, "_PAUSE_S", 0.0)
    for name in ("URL", "PORT", "API_KEY", "MODEL", "POLICY"):
        monkeypatch.delenv(f"DISKPREFIX_{name}", raising=False)


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{name}: {WORDS * 4}"}]


def rows(ended: Ended) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ended.json["prompts"]
    return found


def request_of(value: object, scope: str = "full") -> tuple[str, dict[str, Any]]:
    return WarmItem("here", json.dumps(value), is_json=True).request(scope)


def items_of(path: Path, content: str | bytes) -> list[WarmItem]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_items(str(path)))


def test_what_was_warmed_is_a_hit(run: Run, daemon: DaemonProcess, tmp_path: Path) -> None:
    path = tmp_path / "question.json"
    path.write_text(json.dumps(question("hit")))
    ended = run("warm", path, "--url", daemon.url, "--json")
    assert (ended.exit_code, ended.stderr) == (0, "")
    (row,) = rows(ended)
    assert (row["where"], row["restored"], row["saved"]) == (str(path), 0, "queued")
    with daemon.client() as client:
        body = {"messages": question("hit"), "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == row["prompt_tokens"]
    assert answer["prefix_cache"]["restored"] == row["prompt_tokens"], "all of it, with the next-token logits"
    assert answer["prefix_cache"]["source"] == "memory"


def test_every_form_of_prompt_is_taken(run: Run, daemon: DaemonProcess, tmp_path: Path) -> None:
    text, body, lines = tmp_path / "a.txt", tmp_path / "b.json", tmp_path / "c.jsonl"
    text.write_text(f"text: {WORDS * 4}")
    body.write_text(json.dumps({"prompt": f"body: {WORDS * 4}", "stream": True, "max_tokens": 900}))
    batch = {"custom_id": "1", "method": "POST", "url": CHAT, "body": {"messages": question("batch")}}
    lines.write_text(f"{json.dumps(question('line'))}\n\n{json.dumps(batch)}\n")
    ended = run("warm", text, body, lines, "--url", f"{daemon.url}/v1", "--json")
    assert ended.exit_code == 0, ended.stderr
    assert [row["where"] for row in rows(ended)] == [str(text), str(body), f"{lines}:1", f"{lines}:3"]
    assert {row["saved"] for row in rows(ended)} == {"queued"}
    total = ended.json["total"]
    assert (total["prompts"], total["failed"], total["not_saved"], total["on_disk"]) == (4, 0, 0, True)
    assert total["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows(ended))


def test_a_prompt_that_fails_is_named_and_the_others_go_on(run: Run, daemon: DaemonProcess, tmp_path: Path) -> None:
    broken, lines = tmp_path / "broken.json", tmp_path / "lines.jsonl"
    broken.write_text("[1, 2")
    wrong = {"messages": [{"role": "nobody", "content": "x"}]}
    too_long = {"prompt": WORDS * 200}
    lines.write_text("\n".join(map(json.dumps, [wrong, {"temperature": 1}, too_long, question("after errors")])))
    ended = run("warm", broken, lines, "--url", daemon.url)
    assert ended.exit_code == 1
    errors = ended.stderr.splitlines()
    expected = [
        "broken.json: it is not valid JSON",
        "lines.jsonl:1: messages.0.role: ",
        "lines.jsonl:2: it has neither",
    ]
    expected.append("lines.jsonl:3: prompt: the prompt is too long: ")
    assert len(errors) == len(expected)
    for error, words in zip(errors, expected, strict=True):
        assert error.startswith(f"error: {tmp_path}/{words}")
    line, summary = ended.stdout.splitlines()
    assert line.startswith(f"{lines}:4: ")
    assert ", 0 restored, saved, " in line
    assert summary.startswith("1 prompt of ")
    assert summary.endswith(", 4 failed")


def test_warm_only_reads_known_prompts_and_reports_too_short_ones(
    run: Run, daemon: DaemonProcess, tmp_path: Path
) -> None:
    path = tmp_path / "again.json"
    path.write_text(json.dumps(question("again")))
    (first,) = rows(run("warm", path, "--url", daemon.url, "--json"))
    ended = run("warm", path, "--url", daemon.url)
    tokens = first["prompt_tokens"]
    assert f"{tokens} tokens, {tokens} restored, saved before, " in ended.stdout
    assert f"1 prompt of {tokens} tokens, {tokens} restored and 0 computed in " in ended.stdout
    path = tmp_path / "short.txt"
    path.write_text("Hi")
    ended = run("warm", path, "--url", daemon.url)
    assert (ended.exit_code, "not saved: " in ended.stdout.splitlines()[0]) == (0, True)
    assert ended.stdout.splitlines()[1].endswith(", 1 not saved")


@pytest.mark.parametrize(
    ("content", "wheres"),
    [
        (json.dumps(question("x"), indent=1), ["standard input"]),
        ("\n".join([json.dumps(question("x"))] * 2), ["standard input:1", "standard input:2"]),
        ("{curly} prose\nof two lines", ["standard input"]),
        ("plain prose", ["standard input"]),
    ],
)
def test_standard_input_is_told_by_what_is_there(
    monkeypatch: pytest.MonkeyPatch, content: str, wheres: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    items = list(read_items("-"))
    assert [item.where for item in items] == wheres
    assert items[0].is_json == ("role" in content)


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
def test_a_file_without_a_prompt_is_an_error(tmp_path: Path, name: str) -> None:
    for content, words in ((b" \n", "empty"), (b"caf\xe9", r"UTF-8 \(byte 3\)")):
        with pytest.raises(InvalidRequest, match=words):
            items_of(tmp_path / name, content)


def test_a_text_is_taken_as_it_stands_and_a_line_ends_where_json_says_so(tmp_path: Path) -> None:
    (item,) = items_of(tmp_path / "notes.md", "\ufeff{not json}\r\n  \n")
    path, body = item.request("auto:8")
    assert (path, body["prompt"], body["prefix_cache"]) == (COMPLETION, "{not json}\r\n  \n", {"scope": "auto:8"})
    line = json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False)
    items = items_of(tmp_path / "a.jsonl", f"{line}\r\n{line}\n")
    assert [item.request("full")[1]["prompt"] for item in items] == ["one\u2028two\x85three"] * 2


def test_a_body_keeps_what_has_a_say_in_the_prompt() -> None:
    kept = {"messages": question("x"), "tools": [], "chat_template_kwargs": {"a": 1}, "cache_salt": "s", "new": "field"}
    replies = {"stream": True, "stream_options": {}, "n": 4, "max_completion_tokens": 9, "max_tokens": 5, "stop": "x"}
    replies |= {"model": "of-another-server", "response_format": {"type": "json_object"}, "logit_bias": {"999999": 1}}
    path, body = request_of(kept | replies | {"prefix_cache": {"salt": "s", "window": 3}})
    cache = {"salt": "s", "scope": "full"}
    assert path == CHAT
    assert body == kept | {"prompt_cache_options": {"prewarm": True}, "prefix_cache": cache}
    wrong = request_of({"prompt": "x", "prefix_cache": "full"})[1]
    assert wrong["prefix_cache"] == "full", "it is left to the daemon to refuse"


def test_each_field_of_a_request_either_has_a_say_in_the_prompt_or_is_dropped() -> None:
    of_prompts = {"messages", "prompt", "tools", "tool_choice", "functions", "function_call", "chat_template_kwargs"}
    of_prompts |= {"add_generation_prompt", "continue_final_message", "reasoning", "reasoning_effort"}
    of_prompts |= {"prefix_cache", "cache_salt", "cache_control"}
    of_prompts |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "special_tokens_in_text"}
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert fields - of_prompts == set(NOT_OF_PROMPTS)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "neither a request body nor"),
        ("text", "neither a request body nor"),
        ([{"messages": []}], "neither a request body nor"),
        ({"messages": [], "prompt": ""}, "both of"),
        ({"body": {}}, "neither of"),
    ],
)
def test_json_of_another_kind_is_refused(value: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        request_of(value)


def test_json_that_is_nested_too_deeply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "[" * 200_000
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        WarmItem("here", deep, is_json=True).request("full")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(deep.encode())))
    assert [item.is_json for item in read_items("-")] == [True]


def props(**changes: Any) -> Reply:
    state = {"pending_bytes": 0, "saved_bytes": 0, "dropped": 0, "evicted_blocks": 0, "error": None} | changes
    return 200, {"full_cache": {"state": state}}


def refusal(status: int, message: str = "no") -> Reply:
    return status, {"error": {"message": message}}


SMALL = models({"id": "small"})
SAVED = (
    200,
    {
        "usage": {"prompt_tokens": 1234},
        "prefix_cache": {"restored": 0, "saved": "queued", "boundary_reason": "full"},
    },
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(WORDS)
    return path


def test_a_daemon_that_loads_is_waited_for_and_so_is_a_full_queue_and_the_disk(run: Run, text: Path) -> None:
    with small_daemon(
        models=[SMALL],
        health=[health("loading"), health("loading"), health("ok")],
        props=[props(), props(), props(pending_bytes=9), props(pending_bytes=9), props()],
        completions=[refusal(503), refusal(429), SAVED],
    ) as server:
        ended = run("warm", text, "--url", server.url)
    assert (ended.exit_code, ended.stderr) == (0, "")
    props_of = "props?model=small"
    assert server.asked == ["health"] * 3 + ["models", props_of, props_of] + ["completions"] * 3 + [props_of] * 3
    assert "1,234 tokens, 0 restored, saved, " in ended.stdout


def test_of_several_models_the_named_one_is_asked(run: Run, text: Path) -> None:
    both = models(*({"id": name, "loaded": False} for name in ("a/b", "birch")))
    states = [refusal(404), refusal(404), props(evicted_blocks=2)]
    with small_daemon(models=[both], props=states, completions=[SAVED]) as server:
        wrong = run("warm", text, "--url", server.url, "--model", "ash")
        wrong.assert_refused(2, "serves a/b, birch, and not ash")
        ended = run("warm", text, "--url", server.url, "--model", "a/b")
    assert (ended.exit_code, "2 blocks had to be evicted" in ended.stderr) == (0, True)
    assert server.asked[-2:] == ["completions", "props?model=a%2Fb"]
    assert server.bodies[-2]["model"] == "a/b"


PENDING = {"pending_bytes": 9}


@pytest.mark.parametrize(
    ("states", "completion", "exit_code", "words"),
    [
        ([props(dropped=1)], SAVED, 1, "1 prompt did not fit into the cache meanwhile"),
        ([props(evicted_blocks=7)], SAVED, 0, "7 blocks had to be evicted meanwhile"),
        ([props(error="no space")], SAVED, 0, "nothing is kept on disk: no space"),
        ([props(**PENDING)], SAVED, 1, "did not write its pending state"),
        ([props()], refusal(503, "the queue is full"), 1, "prompt.txt: the queue is full\n"),
    ],
)
def test_what_was_not_kept_after_all_is_told(
    run: Run,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: list[Reply],
    completion: Reply,
    exit_code: int,
    words: str,
) -> None:
    monkeypatch.setattr(diskprefix.desk.warm.warm_command, "_PATIENCE_S", 0.0)
    with small_daemon(models=[SMALL], props=[props(), props(), *states], completions=[completion]) as server:
        ended = run("warm", text, "--url", server.url)
    assert (ended.exit_code, ended.stderr.count("\n")) == (exit_code, 1)
    assert words in ended.stderr


def test_what_others_have_written_is_not_waited_for(run: Run, text: Path) -> None:
    written = [props(saved_bytes=done, **PENDING) for done in (50, 58, 59)]
    with small_daemon(models=[SMALL], props=[props(), props(), *written], completions=[SAVED]) as server:
        ended = run("warm", text, "--url", server.url)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert server.asked.count("props?model=small") == 5


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (health("failed"), "its status is failed"),
        (health("stopping"), "its status is stopping"),
        ((200, {"hello": "world"}), "is no diskprefix daemon"),
        ((404, None), "is no diskprefix daemon"),
    ],
)
def test_what_does_not_serve_is_one_line(run: Run, text: Path, answer: Reply, words: str) -> None:
    with small_daemon(health=[answer]) as server:
        run("warm", text, "--url", server.url).assert_refused(1, words)


def test_a_key_is_sent_where_one_is_asked_for(
    run: Run, text: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"somebody {KEY}\nadmin {ADMIN_KEY}\n")
    keys.chmod(0o600)
    engine = ScriptedEngine()
    engine.stats["pending_bytes"] = 0
    with scripted_app(chat_model, engine, api_keys=keys) as server:
        refused = run("warm", text, "--url", server.url)
        refused.assert_refused(2, "error: --api-key: an API key is needed")
        ended = run("warm", text, "--url", server.url, "--api-key", KEY)
        warning = "only the key named admin may ask whether everything is on disk; the daemon writes within seconds"
        assert (ended.exit_code, ended.stderr) == (0, f"warning: {warning}\n")
        monkeypatch.setenv("DISKPREFIX_API_KEY", ADMIN_KEY)
        ended = run("warm", text, "--url", server.url)
        assert (ended.exit_code, ended.stderr) == (0, "")
