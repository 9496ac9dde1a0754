"""The official `ollama` client, unchanged: against the real daemon, over prepared calls, and behind a router."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from ollama import Client, ResponseError

from diskprefix.daemon.ollama.ollama_dialect import Ollama, OllamaChatRequest, OllamaGenerateRequest, ReplyBody
from diskprefix.daemon.ollama.ollama_models import INSTEAD, facts_of
from diskprefix.daemon.server import streaming
from diskprefix.daemon.server.body import parse_json
from tests.daemon.server.agent_model import call, saying, thought
from tests.daemon.server.chat_model import POSITIONS, weights_of, write_chat_model, write_tokenizer
from tests.daemon.server.daemon_process import DaemonProcess, wait_until
from tests.daemon.server.scripted import AppServer, ScriptedEngine, real_app
from tests.runtimes import not_by_llama

MODEL = "tiny-chat"
RIVERS: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name three rivers and tell me where each of them begins."},
]
NO_END = {"2": -100}
"""Keeps the end-of-reply token away, so that a random model speaks as long as it may."""
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 12, "logit_bias": NO_END, "num_gpu": 1, "mirostat": 2}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def real(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.url) as client:
        yield client


@pytest.fixture
def client(agent: AppServer) -> Iterator[Client]:
    with Client(agent.url) as client:
        yield client


def test_a_chat_is_that_of_openais_api_with_durations_and_what_the_cache_did(
    real: Client, daemon: DaemonProcess
) -> None:
    fields = {"temperature": 0, "max_tokens": 12, "logit_bias": NO_END}
    reference = httpx.post(f"{daemon.url}/v1/chat/completions", json={"messages": RIVERS} | fields).json()
    whole = real.chat(MODEL, RIVERS, options=OPTIONS)
    assert whole.message.content == reference["choices"][0]["message"]["content"]
    assert (whole.model, whole.message.role, whole.done, whole.done_reason) == (MODEL, "assistant", True, "length")
    assert (whole.prompt_eval_count, whole.eval_count) == (reference["usage"]["prompt_tokens"], 12)
    assert all(getattr(whole, name) >= 1 for name in DURATIONS)
    lines = list(real.chat(MODEL, RIVERS, options=OPTIONS, stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].eval_count, lines[-1].done_reason) == (12, "length")
    sent = {"model": MODEL, "messages": RIVERS, "options": OPTIONS, "prefix_cache": {"scope": "full"}}
    with httpx.stream("POST", f"{daemon.url}/api/chat", json=sent) as stream:
        assert stream.headers["content-type"] == "application/x-ndjson"
        last = json.loads([*stream.iter_lines()][-1])
    assert last["prefix_cache"]["scope"] == "full"
    assert last["prefix_cache"]["restored"] == last["prompt_eval_count"]
    assert last["total_duration"] == sum(last[name] for name in DURATIONS[1:])


def test_a_text_is_one_message_and_raw_text_is_continued_as_it_is(real: Client, daemon: DaemonProcess) -> None:
    system, user = (message["content"] for message in RIVERS)
    chat = real.chat(MODEL, RIVERS, options=OPTIONS)
    generated = real.generate(MODEL, user, system=system, options=OPTIONS)
    assert (generated.response, generated.prompt_eval_count) == (chat.message.content, chat.prompt_eval_count)
    lines = list(real.generate(MODEL, user, system=system, options=OPTIONS, stream=True))
    assert "".join(line.response or "" for line in lines) == generated.response
    prompt = httpx.post(f"{daemon.url}/apply-template", json={"messages": RIVERS}).json()["prompt"]
    assert real.generate(MODEL, prompt, raw=True, options=OPTIONS).response == generated.response


def test_a_context_continues_the_tokens_of_an_earlier_reply(real: Client, daemon: DaemonProcess) -> None:
    system, user = (message["content"] for message in RIVERS)
    first = real.generate(MODEL, user, system=system, options=OPTIONS)
    assert first.context is not None
    assert len(first.context) == (first.prompt_eval_count or 0) + 12
    sent = {"model": MODEL, "prompt": "And three cities?", "context": [*first.context], "options": OPTIONS}
    second = httpx.post(f"{daemon.url}/api/generate", json=sent | {"stream": False}).json()
    # As a chat, whose reply is replayed.
    history = [*RIVERS, {"role": "assistant", "content": first.response}, {"role": "user", "content": sent["prompt"]}]
    chat = real.chat(MODEL, history, options=OPTIONS)
    assert (second["response"], second["prompt_eval_count"]) == (chat.message.content, chat.prompt_eval_count)
    # The last sampled token has no state.
    assert second["prefix_cache"]["restored"] >= len(first.context) - 1
    with httpx.stream("POST", f"{daemon.url}/api/generate", json=sent) as stream:
        lines = [json.loads(line) for line in stream.iter_lines() if line.strip()]
    assert [line.get("context") for line in lines] == [None] * (len(lines) - 1) + [second["context"]]
    third = real.generate(MODEL, "And then?", context=second["context"], options=OPTIONS)
    assert third.context is not None
    assert [*third.context[: len(second["context"])]] == second["context"]
    assert real.generate(MODEL, user, raw=True, options=OPTIONS).context is None


def test_a_context_may_end_with_the_end_of_a_reply_or_without(real: Client) -> None:
    ended = real.generate(MODEL, "hello", options={"temperature": 0, "num_predict": 5, "logit_bias": {"2": 100}})
    assert ended.done_reason == "stop"
    assert ended.context is not None
    [*context, end] = ended.context
    assert end == 2
    counts = {
        real.generate(MODEL, "x", context=each, options=OPTIONS).prompt_eval_count for each in ([*context, 2], context)
    }
    assert len(counts) == 1


def test_log_probabilities_and_a_format_are_those_of_openais_api(real: Client) -> None:
    whole = real.chat(MODEL, RIVERS, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert [len(token.top_logprobs or ()) for token in whole.logprobs] == [2] * 12
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    said = real.chat(MODEL, RIVERS, format=schema, options={"seed": 1, "num_predict": 200}).message.content
    assert json.loads(said or "")["a"] in (1, 2)
    assert (real.generate(MODEL, "JSON:", format="json", options={"num_predict": 9}).response or "").strip()[0] == "{"


CALLS = [("read", {"path": "a.py"}), ("write", {"path": "b"})]
SAID = thought("I must look.") + "I look." + "\n".join(call(name, **arguments) for name, arguments in CALLS)


def read(path: str) -> str:
    """Read a file.

    Args:
      path: The file.
    """
    return path


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_are_in_the_message_and_come_back_in_the_next_prompt(
    client: Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = saying(SAID)
    tools: list[Any] = [read, {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
    ask: Any = client.chat
    answer = ask("scripted", RIVERS, tools=tools, think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "I must look."
    assert "".join(part.message.content or "" for part in parts) == "I look."
    calls = [one.function for part in parts for one in part.message.tool_calls or ()]
    assert [(one.name, one.arguments) for one in calls] == CALLS
    assert parts[-1].done_reason == "stop"
    assert '"name": "read"' in engine.last_prompt
    engine.script = saying("Done.")
    said = {
        "role": "assistant",
        "content": "I look.",
        "thinking": "I must look.",
        "tool_calls": [{"function": dict(one)} for one in calls],
    }
    client.chat("scripted", [*RIVERS, said, {"role": "tool", "tool_name": "read", "content": "print(2)"}], think=False)
    assert SAID.split("<tool_call>")[0].strip() in engine.last_prompt
    assert "<tool_response>\nprint(2)\n</tool_response>" in engine.last_prompt
    assert engine.last_prompt.endswith("<think>\n\n</think>\n\n")


def asked(path: str = "chat", **fields: Any) -> Any:
    body: type[ReplyBody] = OllamaChatRequest if path == "chat" else OllamaGenerateRequest
    own = {"messages": RIVERS} if path == "chat" else {"prompt": "x"}
    dialect = Ollama(body)
    return dialect.read(parse_json(json.dumps(own | fields).encode(), body), 100, lambda: pytest.fail("unread"))


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({"top_k": 20, "top_p": 0.5, "min_p": 0.1, "seed": 3}, {"top_k": 20, "top_p": 0.5, "min_p": 0.1, "seed": 3}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1}, {"repetition_penalty": 1.5, "presence_penalty": 1.0}),
        ({"stop": ["a", "b"], "num_predict": 3.0}, {"stop": ("a", "b"), "max_tokens": 3}),
        ({"seed": -1, "num_predict": -2, "temperature": None}, {"seed": None, "max_tokens": None, "temperature": 1.0}),
    ],
)
def test_options_are_ollamas_and_sampling_fields_beside_them_are_ignored(
    options: dict[str, Any], means: dict[str, Any]
) -> None:
    sampling = asked(options=options, temperature="hot", top_k=5, num_predict=7).sampling
    assert {name: getattr(sampling, name) for name in means} == means
    assert asked(top_k=5, options=None).sampling == asked().sampling


@pytest.mark.parametrize(("said", "reason"), [(0, "unload"), ("0h", "unload"), ("-0s", "load"), ("5m", "load")])
def test_keep_alive_is_read_as_the_router_reads_it(said: str | int, reason: str) -> None:
    body = OllamaGenerateRequest(keep_alive=said)
    answer = Ollama(OllamaGenerateRequest).without_prompt(body, "m", may_unload=True)
    assert answer is not None
    assert answer["done_reason"] == reason


PNG = base64.b64encode(b"picture").decode()


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_images_go_before_the_text_and_empty_fields_of_ollamas_own_client_ask_for_nothing(path: str) -> None:
    empty: dict[str, Any] = {"system": "", "template": "", "suffix": "", "context": None, "format": ""}
    own: dict[str, Any] = (
        {"images": [PNG]} if path == "generate" else {"messages": [{"role": "user", "content": "x", "images": [PNG]}]}
    )
    found = asked(path, **empty, **own, think="high", stream=None)
    [message] = found.prompt.messages
    assert [type(part).__name__ for part in message.content] == ["ImagePart", "TextPart"]
    assert message.pictures[0].uri.endswith(PNG)
    assert (found.prompt.reasoning_effort, found.prompt.thinking, found.text_format) == ("high", True, None)


@pytest.mark.parametrize(
    ("path", "fields", "start", "status"),
    [
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be", 400),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature: must be a valid number", 400),
        ("chat", {"options": {"num_ctx": 5}}, "options.num_ctx: is 5, and the prompt has ", 400),
        ("chat", {"format": {"type": "weird"}}, "format: ", 400),
        ("chat", {"format": "yaml"}, "format: must be '' or 'json'", 400),
        ("chat", {"think": "much"}, "think: must be", 400),
        ("chat", {"keep_alive": "soon"}, "keep_alive: ", 400),
        ("chat", {"keep_alive": []}, "keep_alive: must be a duration or a number of seconds", 400),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": [PNG]}]}, "messages.0.images.0: ", 400),
        ("chat", {"prefix_cache": {"scope": "none"}}, "prefix_cache.scope: ", 400),
        ("chat", {"model": "other"}, "model 'other' is not served here", 404),
        ("generate", {"template": "{{ .Prompt }}"}, "template: is not supported", 400),
        ("generate", {"context": [1, 512]}, "context.1: 512 is not a token id of this model", 400),
        ("generate", {"context": [1, -1]}, "context.1: -1 is not a token id of this model", 400),
        ("generate", {"context": [1, 10**30]}, "context.1: ", 400),
        ("generate", {"context": [True]}, "context.0: must be", 400),
        ("generate", {"context": [5] * POSITIONS}, "context: the prompt is too long: ", 400),
        ("generate", {"context": [5] * (POSITIONS - 2)}, "context: the prompt is too long: ", 400),
        ("generate", {"context": [5], "raw": True}, "context: is not allowed beside raw", 400),
        ("generate", {"raw": True, "system": "x"}, "system: is not allowed beside raw", 400),
        ("generate", {"suffix": "x"}, "suffix: ", 400),
        ("embed", {"input": [[]]}, "input.0: ", 400),
        ("show", {"model": "other"}, "model 'other' is not served here", 404),
    ],
)
def test_an_error_is_one_text_that_begins_with_the_path_of_the_field(
    daemon: DaemonProcess, path: str, fields: dict[str, Any], start: str, status: int
) -> None:
    bodies: dict[str, Any] = {"chat": {"messages": RIVERS}, "generate": {"prompt": "x"}}
    answer = httpx.post(f"{daemon.url}/api/{path}", json=bodies.get(path, {}) | fields)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"])
    assert answer.json()["error"].startswith(start)


@pytest.mark.parametrize("what", INSTEAD)
def test_model_management_routes_of_ollama_are_refused_with_advice(real: Client, what: str) -> None:
    calls: dict[str, Any] = {
        "create": lambda: real.create(MODEL, from_="x"),
        "copy": lambda: real.copy(MODEL, "x"),
        "blobs": lambda: real.create_blob(__file__),
        "embeddings": lambda: real.embeddings(MODEL, "x"),
    }
    with pytest.raises(ResponseError, match=f"/api/{what} is not served here; ") as refused:
        calls.get(what, lambda: getattr(real, what)(MODEL))()
    assert refused.value.status_code == 400
    assert INSTEAD[what] in refused.value.error


def test_a_context_limits_prompt_and_reply_and_one_that_is_larger_than_the_models_is_told(
    real: Client, daemon: DaemonProcess
) -> None:
    whole = real.chat(MODEL, RIVERS, options=OPTIONS)
    num_ctx = (whole.prompt_eval_count or 0) + 5
    short = real.chat(MODEL, RIVERS, options=OPTIONS | {"num_ctx": num_ctx})
    assert (short.eval_count, short.done_reason) == (5, "length")
    sent = {"messages": RIVERS, "options": OPTIONS | {"num_ctx": 1 << 20}, "stream": False}
    timings = httpx.post(f"{daemon.url}/api/chat", json=sent).json()["timings"]
    assert timings["num_ctx_clamped"] == POSITIONS


def test_a_request_without_a_prompt_has_the_model_loaded(real: Client) -> None:
    loaded = real.chat(MODEL, keep_alive=-1)
    assert (loaded.message.content, loaded.done, loaded.done_reason) == ("", True, "load")
    assert real.generate(f"{MODEL}:latest").done_reason == "load"
    # The only model stays loaded, whatever a client says.
    assert [line.done_reason for line in real.generate(MODEL, keep_alive=0, stream=True)] == ["load"]


def test_models_are_listed_as_ollamas_clients_read_them(real: Client, daemon: DaemonProcess, chat_model: Path) -> None:
    [listed] = real.list().models
    assert listed.model == MODEL
    assert (listed.size or 0) >= weights_of(chat_model).stat().st_size
    assert (listed.details and listed.details.family) == "llama"
    shown = real.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == POSITIONS
    assert {"completion", "tools"} <= {*(shown.capabilities or ())}
    [running] = real.ps().models
    with daemon.client() as client:
        own, [card] = client.get("/props").json()["model"], client.get("/v1/models").json()["data"]
    assert running.size == own["needs_bytes"] == card["needs_bytes"] == sum(own["needs"].values())
    assert own["needs"] == card["needs"]
    assert (running.name, running.context_length, running.digest) == (MODEL, POSITIONS, listed.digest)
    assert (running.size or 0) > 0
    version = httpx.get(f"{daemon.url}/api/version").json()["version"]
    assert [*map(int, version.split("."))] >= [0, 6, 4], "the oldest one that editors take"
    for method in ("GET", "HEAD"):
        assert httpx.request(method, daemon.url).status_code == 200


def test_facts_of_files_that_cannot_be_read_are_empty(tmp_path: Path) -> None:
    (tmp_path / "tiny-Q4_K_M.gguf").write_bytes(b"GGUF no more")
    for path in (tmp_path, tmp_path / "tiny-Q4_K_M.gguf", tmp_path / "gone"):
        facts = facts_of(path)
        assert (facts["size"], facts["details"]["family"]) == (0, "")


@not_by_llama("it gives no hidden states")
def test_a_text_with_a_suffix_fills_the_gap_and_embeddings_are_those_of_openais_api(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "coder")
    write_tokenizer(folder, more_special_tokens=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    kv = tmp_path_factory.mktemp("kv")
    with real_app(folder, kv) as server, server.client() as plain, Client(server.url) as client:
        gap = {"prompt": "def add(a, b):", "suffix": "\n\n", "temperature": 0, "max_tokens": 9}
        reference = plain.post("/v1/completions", json=gap).json()["choices"][0]["text"]
        options = {"temperature": 0, "num_predict": 9}
        assert client.generate("coder", "def add(a, b):", suffix="\n\n", options=options).response == reference
        wanted = plain.post("/v1/embeddings", json={"input": ["rivers", "cities"], "dimensions": 8}).json()
        found = client.embed("coder", ["rivers", "cities"], dimensions=8)
        assert [list(one) for one in found.embeddings] == [one["embedding"] for one in wanted["data"]]
        assert found.prompt_eval_count == wanted["usage"]["prompt_tokens"]
        assert len(client.embed("coder", "rivers").embeddings) == 1


@not_by_llama("it gives no hidden states")
def test_a_text_to_embed_above_the_positions_is_cut_and_said_unless_the_request_forbids_it(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    long = "Name three rivers. " * POSITIONS
    with (
        real_app(folder, tmp_path_factory.mktemp("kv")) as server,
        server.client() as plain,
        Client(server.url) as client,
    ):
        for fields in ({}, {"truncate": True}, {"truncate": None}):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                found = client.embed("tiny", ["short", long, "rivers"], **fields)
            assert f"1 of 3 texts to embed were cut at {POSITIONS - 1} tokens" in caplog.text
        sent = {"input": ["short", long, "rivers"], "encoding_format": "float"}
        assert plain.post("/api/embed", json=sent).json()["truncated"] == [1]
        assert "truncated" not in plain.post("/api/embed", json={"input": "short"}).json()
        token_ids = plain.post("/tokenize", json={"content": long, "add_special": False}).json()["tokens"]
        wanted = plain.post("/v1/embeddings", json={"input": ["short", token_ids[: POSITIONS - 1], "rivers"]}).json()
        assert [list(one) for one in found.embeddings] == [one["embedding"] for one in wanted["data"]]
        with pytest.raises(ResponseError, match=r"input\.1: the prompt is too long"):
            client.embed("tiny", ["short", long], truncate=False)
        assert plain.post("/v1/embeddings", json={"input": long}).status_code == 400
        assert plain.post("/v1/embeddings", json={"input": long, "truncate": True}).status_code == 400


def test_characters_at_which_the_client_ends_lines_arrive_in_a_stream(client: Client, engine: ScriptedEngine) -> None:
    said = "a\u2028b\u2029c\u0085d\u000b\u000ce\u001cf\u201cg"
    engine.script = saying(said)
    for part in (client.chat("scripted", RIVERS, stream=True), client.generate("scripted", "Say it.", stream=True)):
        lines = list(part)
        texts = [line["message"]["content"] if "message" in line else line["response"] for line in lines]
        assert "".join(text or "" for text in texts) == said
        assert lines[-1].done


@pytest.mark.parametrize("fails", [False, True])
def test_while_nothing_is_there_a_stream_has_blanks_which_the_client_reads_over(
    client: Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    real_script = saying("Done.")

    def script(request: Any, emit: Any, is_cancelled: Any) -> None:
        wait_until(lambda: engine.entered.is_set(), "the request runs")
        if fails:
            raise ollama.RequestError("no")
        real_script(request, emit, is_cancelled)

    engine.script = script
    if fails:
        with pytest.raises(ResponseError):
            list(client.chat("scripted", RIVERS, stream=True))
    else:
        assert "".join(part.message.content or "" for part in client.chat("scripted", RIVERS, stream=True)) == "Done."
