"""The application over a scripted engine: what happens around a request rather than in it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from msgspec.structs import replace
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from diskprefix.daemon.api.anthropic import Messages
from diskprefix.daemon.api.figures import figures_reply
from diskprefix.daemon.api.openai_chat import Chat, ChatWriter
from diskprefix.daemon.api.responses import Responses
from diskprefix.daemon.api.responses_writer import ResponseWriter
from diskprefix.daemon.chat.output.choose_format import PlainText
from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.engine.request import Constraint, GenerateRequest, SamplingParams, TextEvent
from diskprefix.daemon.server import limits as reading
from diskprefix.daemon.server import streaming
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.engine_request import MAX_LOGPROBS
from diskprefix.daemon.server.process import process
from diskprefix.daemon.server.share import SESSION_HEADERS, Share
from diskprefix.daemon.server.threads import _DEADLINE_S
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.memo import PREFILL_SPEEDS
from diskprefix.tenant_ids import group_of
from diskprefix.thread_work import CHAT_TEMPLATE, begin_step, in_step
from tests.daemon.server.daemon_process import open_raw, wait_until
from tests.daemon.server.scripted import (
    CHOSEN,
    AppServer,
    Emit,
    ScriptedEngine,
    done,
    events_of,
    read_all,
    say_hello,
    scripted_app,
    started_app,
    until_cancelled,
)
from tests.daemon.server.test_auth import ADMIN, ALICE

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(chat_model: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine) as running:
        yield running


class SlowLoad:
    """A load that goes on when it is told to, and may then fail."""

    def __init__(self, engine: ScriptedEngine, error: Exception | None = None) -> None:
        self.go_on = threading.Event()
        self._engine = engine
        self._error = error

    def __call__(self, settings: Any, progress: Callable[[str], None]) -> Any:
        progress("fetching the model")
        assert self.go_on.wait(30)
        if self._error is not None:
            raise self._error
        return self._engine.load(settings, progress)


ALIKE = ("id", "created_at", "store")
"""What all events of a response say alike, also those from before the model was loaded."""
OF_MODEL = ("model", "temperature", "top_p")
"""What is not known before."""


def test_health_is_503_while_loading_and_requests_wait(chat_model: Path, engine: ScriptedEngine) -> None:
    load, paths = SlowLoad(engine), ("/v1/models", "/props")
    with started_app(chat_model, load) as server, server.client() as client, ThreadPoolExecutor(4) as clients:
        wait_until(lambda: client.get("/health").json()["message"] == "fetching the model", "the load reports")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        waiting = [clients.submit(client.post, CHAT, json=HELLO), *(clients.submit(client.get, path) for path in paths)]
        wait_until(lambda: server.daemon.num_arriving, "a request waits")
        assert "diskprefix_ready 0.0" in client.get("/metrics").text
        assert client.post(CHAT, json=HELLO | {"n": 0}).status_code == 400, "what is wrong in itself is told at once"
        assert not any(request.done() for request in waiting)
        load.go_on.set()
        assert [request.result().status_code for request in waiting] == [200, 200, 200]


@pytest.mark.cases(2)
@pytest.mark.parametrize("error", [None, ModelError("no such model")], ids=["loads", "fails"])
@pytest.mark.parametrize(
    ("path", "stream", "sign"),
    [
        (CHAT, True, b'data: {"id":"chatcmpl-'),
        ("/v1/messages", True, b"event: ping"),
        ("/v1/responses", True, b"event: response.in_progress"),
        ("/api/chat", True, b"   "),
        (CHAT, False, b"\n\n\n"),
    ],
)
def test_a_waiting_request_gets_signs_of_life_and_its_result(
    chat_model: Path,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
    sign: bytes,
    error: Exception | None,
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    load = SlowLoad(engine, error)
    body = HELLO | {"stream": stream, "max_tokens": 5, "input": "hello", "model": "gpt-4o"}
    with (
        started_app(chat_model, load) as server,
        server.client() as client,
        client.stream("POST", path, json=body) as answer,
    ):
        parts = answer.iter_raw()
        signs = b"".join(next(parts) for _ in range(3))
        load.go_on.set()
        if error is not None and not stream:
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
        whole = b"".join([signs, *parts])
        outcome = f'outcome="{"completed" if error is None else "rejected"}"}} 1.0'
        wait_until(lambda: outcome in client.get("/metrics").text, "the request is counted")
    if error is not None and not stream:
        return
    assert answer.status_code == 200
    assert sign in signs
    failures = {"/v1/responses": b'"type":"response.failed"', "/api/chat": b'{"error":"the model could not be loaded'}
    failure = failures.get(path, b'code":"not_ready"')
    assert (b"Hello" if error is None else failure) in whole
    if path == "/v1/responses":
        events = events_of(whole.decode())
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        kinds = [event["type"] for event in events if event["type"] != "response.in_progress"]
        assert (kinds.count("response.created"), kinds[0]) == (1, "response.created")
        ends = [event["response"] for event in events if "response" in event]
        assert len({tuple(response[name] for name in ALIKE) for response in ends}) == 1
        told = [tuple(response[name] for name in OF_MODEL) for response in ends]
        assert told[:-1] == [("", None, None)] * (len(ends) - 1)
        assert told[-1] == (told[0] if error else ("scripted", 0.8, 0.95))
        for event in events:
            TypeAdapter[Any](ResponseStreamEvent).validate_json(json.dumps(event), strict=True)
    if not stream:
        assert json.loads(whole)["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_late_error_of_a_request_is_json_after_signs_of_life(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    body = {"model": "another", "stream": False}
    body |= {"input": "hello"} if path == "/v1/responses" else HELLO | {"prompt": "hello", "max_tokens": 5}
    load = SlowLoad(engine)
    with started_app(chat_model, load) as server, server.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(streaming, "KEEPALIVE_S", 0.01)
            with client.stream("POST", path, json=body) as answer:
                parts = answer.iter_raw()
                signs = next(parts)
                load.go_on.set()
                late = b"".join([signs, *parts])
        early = client.post(path, json=body)
    assert (answer.status_code, early.status_code) == (200, 404)
    told = [json.loads(text) for text in (late, early.content)]
    assert [each.pop("request_id", "") != "" for each in told] == [path == "/v1/messages"] * 2
    assert told[0] == told[1]
    assert "another" in str(told[0]["error"])


def test_a_client_that_leaves_while_the_model_loads_gives_its_place_back(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    load = SlowLoad(engine)
    with started_app(chat_model, load) as server, server.client() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            # Without a name it would be closed at once, and the connection with it.
            parts = answer.iter_raw()
            next(parts)
            wait_until(lambda: client.get("/health").json()["queue_depth"] == 1, "the request waits")
        wait_until(lambda: not server.daemon.num_arriving, "the place is free")
        load.go_on.set()


@pytest.mark.usefixtures("own_places")
def test_a_daemon_that_ends_notes_how_fast_prompts_were_computed(chat_model: Path, engine: ScriptedEngine) -> None:
    for seconds, noted in ((None, None), (40.0, 0.02)):
        with scripted_app(chat_model, engine) as server, server.client() as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            if seconds is not None:
                engine.cache.cost_model.record_prefill(2000, seconds)
        assert PREFILL_SPEEDS.get(name) == noted


class Panic(BaseException):
    """Of a library in another language: none of `Exception`."""


@pytest.mark.parametrize("kind", [ModelError, RuntimeError, Panic])
def test_a_failed_load_names_paths_only_to_the_admin(chat_model: Path, keys_file: Path, kind: type[Exception]) -> None:
    def fail(_settings: Any, _progress: Any) -> Any:
        raise kind("cannot read /srv/models/one")

    with started_app(chat_model, fail, api_keys=keys_file) as server, server.client() as client:
        wait_until(lambda: server.daemon.failure, "the load failed")
        assert "cannot read /srv/models/one" in str(server.daemon.failure)
        assert client.get("/health").json()["status"] == "failed"
        for key, sees_all in ((ADMIN, kind is ModelError), (ALICE, False)):
            said = client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {key}"})
            assert (said.status_code, "/srv/models" in said.text) == (503, sees_all)
            assert "the model could not be loaded: " in said.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["rendering", "large"])
def test_an_endless_rendering_shows_in_health_and_the_watchdog(
    kind: Any, server: AppServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, ended = list[dict[str, Any]](), threading.Event()
    monkeypatch.setattr(process, "notify", lambda **state: told.append(state))
    now = [0.0]
    daemon = server.daemon
    monkeypatch.setattr(daemon.threads, "_clock", lambda: now[0])
    signs = process.SignsOfLife(daemon, 120)

    def work() -> bool:
        begin_step("canonicalise")
        with in_step(CHAT_TEMPLATE):
            has_ended.append(ended.wait(30))
        return left.wait(30)

    has_ended, left = list[bool](), threading.Event()
    running, state = daemon.threads._submit(kind, work)
    wait_until(lambda: bool(daemon.threads._due) and state.step == CHAT_TEMPLATE, "the work begins")
    with server.client() as client:
        try:
            now[0] = _DEADLINE_S[kind]
            signs.give()
            assert client.get("/health").json()["status"] == "ok"
            assert {"WATCHDOG": 1} in told
            told.clear()
            now[0] += 1
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            problem = f"a prompt has been prepared for {now[0]:.0f} s; step: chat template"
            assert health.json()["message"] == problem
            signs.give()
            signs.give()
            assert [state for state in told if "WATCHDOG" in state] == []
            assert [problem in state["STATUS"] for state in told] == [True]
            assert sum(problem in record.getMessage() for record in caplog.records) == 1
            assert client.post(CHAT, json=HELLO).status_code == 200
            ended.set()
            wait_until(lambda: has_ended, "the template has ended")
            said = client.get("/health").json()["message"]
            assert said == f"a prompt has been prepared for {now[0]:.0f} s; step: canonicalise"
        finally:
            ended.set()
            left.set()
        assert running.result()
        signs.give()
        assert {"WATCHDOG": 1} in told
        assert client.get("/health").json()["status"] == "ok"


def test_a_lost_accelerator_is_not_healthy_and_refuses_requests(
    server: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_device(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("diskprefix.daemon.engine.device.probe_devices", lose_device)
    engine.script = lose_device
    with server.client() as client:
        assert client.post(CHAT, json=HELLO).json()["error"]["code"] == "device_lost"
        wait_until(lambda: client.get("/health").status_code == 503, "/health is not ok")
        assert client.get("/health").json()["status"] == "failed"
        answer = client.post(CHAT, json=HELLO)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"


def test_a_hung_disk_stops_no_request_and_no_shutdown(
    chat_model: Path,
) -> None:
    engine = ScriptedEngine()
    with scripted_app(chat_model, engine) as server, server.client() as client:
        engine.cache.is_readable.clear()
        try:
            assert [client.get(path, timeout=10).status_code for path in ("/props", "/props", "/metrics")] == [200] * 3
            assert engine.cache.is_waited_for.is_set()
            assert client.get("/health").json()["cache"] == {"state": "ok", "error": None}
            for stream in (True, False):
                assert client.post(CHAT, json=HELLO | {"stream": stream}).is_success
            server.stop()
            assert server.daemon.threads.are_busy
        finally:
            engine.cache.is_readable.set()


def test_a_body_that_does_not_come_is_a_408_and_its_place_is_free_again(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.2)
    with scripted_app(chat_model, engine, max_queue=1) as server, server.client() as client:
        silent = [open_raw(server.port, HELLO, announced_bytes=1000) for _ in range(2)]
        for connection in silent:
            head, _, answer = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            error = json.loads(answer)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
            connection.close()
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_body_that_trickles_is_a_408(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.2)
    with open_raw(server.port, HELLO, announced_bytes=1_000_000) as connection:
        connection.settimeout(0.01)
        for _ in range(3000):
            connection.sendall(b" ")
            try:
                answer = connection.recv(100)
            except TimeoutError:
                continue
            break
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_large_body_has_the_longer_to_arrive_the_more_of_it_has(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(reading, "_MIN_BYTES_PER_S", 1)
    payload = json.dumps(HELLO).encode()
    with open_raw(server.port, HELLO, announced_bytes=len(payload) + 1) as connection:
        threading.Event().wait(0.4)
        connection.sendall(b" ")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("stream", "has_begun"), [(False, False), (True, False), (True, True)])
def test_a_leaving_client_cancels_and_the_log_has_the_progress(
    server: AppServer, engine: ScriptedEngine, stream: bool, has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        figures: dict[str, Any] = {
            "prompt_tokens": 10,
            "restored_tokens": 4,
            "ready_tokens": 8,
            "reply_tokens": 0,
            "elapsed_s": 1.0,
            "tokens_per_s": 4.0,
            "seconds_left": 0.5,
        }
        activity = Activity(id=request.id, state="prefilling", scope=request.cache.scope, **figures)
        server.daemon.inbox.running_activities = lambda: [activity]
        if has_begun:
            emit(TextEvent(0, "first", (1,)))
        until_cancelled(request, emit, is_cancelled)

    engine.script = endless
    with caplog.at_level(logging.INFO), server.client() as client:
        with open_raw(server.port, HELLO | {"stream": stream}) as connection:
            assert engine.entered.wait(30)
            received = b""
            while has_begun and b"first" not in received:
                received += connection.recv(1000)
            [running] = client.get("/props").json()["running"]
            assert (running["state"], running["restored_tokens"]) == ("prefilling", 4)
            assert (running["computed_tokens"], running["prompt_tokens"]) == (8, 10)
            assert (running["tokens_per_s"], running["seconds_left"], running["since_s"]) == (4, 0.5, 1)
        assert engine.cancelled.wait(30)
        counted = 'diskprefix_http_requests_total{route="/v1/chat/completions",status="499"} 1.0'
        wait_until(lambda: counted in client.get("/metrics").text, "the request is counted as left")
        wait_until(
            lambda: "prompt 8 of 10 tokens · restored 4 · reply 0 tokens" in caplog.text, "the request is logged"
        )
        lines = [record.message for record in caplog.records if record.name == "diskprefix"]
        assert not any(line.startswith("GET ") for line in lines), "what is polled is not logged"
        [ended] = client.get("/dashboard/state").json()["ended"]
        assert (ended["status"], ended["prompt_tokens"], ended["ready_tokens"]) == (499, 10, 8)
        problems = [problem["what"] for problem in client.get("/dashboard/state").json()["problems"]]
        assert (ended["is_stopped"], [what for what in problems if CHAT in what]) == (True, [])
        engine.script = say_hello
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_client_that_leaves_while_it_waits_never_reaches_the_engine(
    server: AppServer, engine: ScriptedEngine
) -> None:
    release = threading.Event()

    def hold(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        assert release.wait(30)
        say_hello(request, emit, is_cancelled)

    engine.script = hold
    first = open_raw(server.port, HELLO)
    assert engine.entered.wait(30)
    with server.client() as client:
        second = open_raw(server.port, HELLO | {"seed": 2})
        wait_until(lambda: client.get("/health").json()["queue_depth"] == 1, "the second request waits")
        second.close()
        left = 'status="499"} 1.0'
        wait_until(lambda: left in client.get("/metrics").text, "the server saw it leave")
        release.set()
        assert b"200 OK" in first.recv(1000)
        assert client.post(CHAT, json=HELLO | {"seed": 3}).status_code == 200
    first.close()
    assert [request.sampling.seed for request in engine.requests] == [None, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_exception_in_the_engine_is_told_without_its_inside(
    server: AppServer, engine: ScriptedEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    engine.script = crash
    with caplog.at_level(logging.ERROR), server.client() as client:
        answer = client.post(CHAT, json=HELLO | {"stream": stream})
        assert client.get("/health").status_code == 200
    error = events_of(answer.text)[-1] if stream else answer.json()
    assert (answer.status_code, error["error"]["type"]) == (200 if stream else 500, "server_error")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert "secret detail" in caplog.text


def test_an_unexpected_exception_in_the_server_is_500_without_its_inside(
    server: AppServer, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.stats = {}
    with caplog.at_level(logging.ERROR), server.client() as client:
        answer = client.get("/props")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "KeyError" not in answer.text
        assert "GET /props failed unexpectedly" in caplog.text
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_stream_orders_choices_and_ends_with_the_figures(server: AppServer) -> None:
    with server.client() as client:
        text = client.post(CHAT, json=HELLO | {"stream": True, "n": 2}).text
    assert text.endswith("data: [DONE]\n\n")
    chunks = events_of(text)
    choices = [chunk["choices"][0] for chunk in chunks]
    # The text of a choice comes in one chunk or in two: what waits is joined.
    order = [key for key, _ in groupby((choice["index"], choice["finish_reason"]) for choice in choices)]
    assert order == [(0, None), (0, "stop"), (1, None), (1, "stop")]
    firsts = [next(choice for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert [choice for choice in choices if "role" in choice["delta"]] == firsts
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in firsts), "the role comes alone"
    assert [chunk for chunk in chunks if "prefix_cache" in chunk] == chunks[-1:]
    assert (chunks[-1]["timings"]["restore_ms"], "usage" in chunks[-1]) == (3.14, False)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"restored": 6, "source": "disk"}, {"restored": 6, "source": "disk"}),
        ({"miss_reason": "not_stored"}, {"restored": 0, "miss_reason": "not_stored"}),
        ({"miss_reason": "diverged"}, {"restored": 0, "miss_reason": "diverged", "diverged_at": 3}),
    ],
    ids=["hit", "miss", "diverged"],
)
def test_a_response_says_what_the_cache_did_in_this_order(report: dict[str, Any], said: dict[str, Any]) -> None:
    selection = replace(CHOSEN, reason="continues", selected=9, aligned=8)
    figures = figures_reply(done(selection=selection, saved="queued", **report), None)["prefix_cache"]
    kept = {"boundary": 8, "boundary_reason": "continues", "saved": "queued"}
    assert list(figures.items()) == list(({"scope": "auto:30"} | said | kept).items())


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
ASKED = {"prompt_cache_key": "agent", "prompt_cache_retention": "24h", "prefix_cache": {"save": False}}


def test_the_request_reaches_the_engine_with_what_the_body_said(server: AppServer, engine: ScriptedEngine) -> None:
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    marked = HELLO["messages"][0] | {
        "content": [{"type": "text", "text": "hello"} | breakpoint_, {"type": "text", "text": "you"}],
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
    }
    body = ASKED | {
        "messages": [marked],
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": 11,
        "stop": "END",
        "logit_bias": {"5": -100},
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 1,
        "n": 2,
        "user": "me",
        "some_other_field": {"ignored": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "return_progress": True,
    }
    with server.client() as client:
        assert client.post(CHAT, json=body).status_code == 200
        assert client.post(CHAT, json=HELLO | {"return_progress": True, "stream": True}).status_code == 200
        text = {"prompt": "x", "structured_outputs": {"choice": ["a"]}}
        assert client.post("/v1/completions", json=text | ASKED).status_code == 200
        for is_strict in (True, False):
            tool = {"type": "function", "function": {"name": "f", "strict": is_strict}}
            assert client.post(CHAT, json=HELLO | {"tools": [tool]}).is_success
    chat, streamed, continued, strict, free = engine.requests
    # What is strict is compiled before the reply begins.
    assert [request.constraint and bool(request.constraint.source) for request in (strict, free)] == [True, False]
    assert chat.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        seed=11,
        stop=("END",),
        logit_bias={5: -100.0},
        logprobs=3,
        presence_penalty=1.0,
        n=2,
    )
    assert chat.constraint == Constraint(kind="json_schema", source=json.dumps(SCHEMA), asker=chat.cache.asker)
    choice = Constraint(kind="choice", source='["a"]', asker=continued.cache.asker)
    assert (streamed.constraint, continued.constraint) == (None, choice)
    assert (chat.reports_progress, streamed.reports_progress) == (False, True), "in streams only"
    for cache in (chat.cache, continued.cache):
        assert (cache.group, cache.ttl_s, cache.save) == (group_of("agent"), 86400.0, False)
    assert [[mark.ttl_s for mark in request.prompt.marks] for request in (chat, continued)] == [[1800.0, 300.0], []]


@pytest.mark.cases(3)
@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_header_that_names_a_session_groups_its_prompts(
    server: AppServer, engine: ScriptedEngine, header: str
) -> None:
    with server.client() as client:
        for name in ("agent", "x" * 513):
            assert client.post(CHAT, json=HELLO, headers={header: name}).is_success
    assert [request.cache.group for request in engine.requests[-2:]] == [group_of("agent"), b""]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"n": 2, "max_tokens": 9, "logprobs": True}),
        ("/v1/responses", {"input": "hello", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_prompt_is_computed_ahead_without_a_reply(
    server: AppServer, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    options = {"prompt_cache_options": {"prewarm": True, "ttl": "30m"}}
    with server.client() as client:
        assert client.post(path, json=body | options).is_success
    request = engine.requests[-1]
    assert (request.sampling.max_tokens, request.sampling.n, request.constraint) == (0, 1, None)
    assert (str(request.cache.scope), request.cache.ttl_s) == ("full", 1800.0)


def test_the_engine_shows_the_special_tokens_that_the_parser_reads(server: AppServer, engine: ScriptedEngine) -> None:
    class Tagged(PlainText):
        special_tokens = frozenset({"<|im_start|>"})

    assert server.daemon.serving is not None
    server.daemon.serving.renderer.output_format = Tagged()
    with server.client() as client:
        assert client.post(CHAT, json=HELLO).is_success
        assert client.post("/v1/completions", json={"prompt": "x"}).is_success
    assert [request.shown_special_tokens for request in engine.requests] == [{"<|im_start|>"}, frozenset()]


def test_every_response_has_the_id_of_its_request(server: AppServer) -> None:
    with server.client() as client:
        answers = [client.post(CHAT, json=HELLO), client.post(CHAT, json={}), client.get("/v1/nothing")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    assert ids == [answer.headers["request-id"] for answer in answers]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("owner", "name", "path", "body"),
    [
        (ChatWriter, "whole", CHAT, HELLO),
        (ResponseWriter, "whole", "/v1/responses", {"input": "hello"}),
        (ResponseWriter, "_complete", "/v1/responses", {"input": "hello", "stream": True}),
        (Chat, "read", CHAT, HELLO),
        (Messages, "read", "/v1/messages", HELLO | {"max_tokens": 8}),
        (Responses, "read", "/v1/responses", {"input": "hello"}),
        (Responses, "conversation", "/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
def test_large_bodies_and_replies_do_not_block_the_event_loop(
    server: AppServer, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, path: str, body: dict[str, Any]
) -> None:
    on_the_loop: list[bool] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(*values: Any, **named: Any) -> Any:
        on_the_loop.append(asyncio._get_running_loop() is not None)
        return method(*values, **named)

    monkeypatch.setattr(owner, name, call)
    with server.client() as client:
        assert client.post(path, json=body).status_code == 200
    assert on_the_loop == [False]


OF_RESPONSES = {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 20}


@pytest.mark.parametrize(
    ("route", "field", "body"),
    [
        (CHAT, "max_tokens", HELLO | {"logprobs": True, "top_logprobs": 20}),
        (CHAT, "max_completion_tokens", HELLO | {"logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", "max_tokens", {"prompt": "hello", "logprobs": 20}),
        ("/v1/responses", "max_output_tokens", OF_RESPONSES),
    ],
)
def test_a_reply_has_a_largest_number_of_log_probabilities(
    chat_model: Path, engine: ScriptedEngine, route: str, field: str, body: dict[str, Any]
) -> None:
    engine.max_positions, most = 131_072, MAX_LOGPROBS // 21
    with scripted_app(chat_model, engine) as server, server.client() as client:
        refused = client.post(route, json=body | {field: most + 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert f"{most} tokens" in refused.json()["error"]["message"]
        for fields, limit in (({field: most}, most), ({}, 16 if route == "/v1/completions" else most)):
            assert client.post(route, json=body | fields).status_code == 200
            assert engine.requests[-1].sampling.max_tokens == limit


def test_tokens_beyond_the_context_count_no_log_probabilities(server: AppServer) -> None:
    body = HELLO | {"logprobs": True, "top_logprobs": 20, "max_tokens": 2**30}
    with server.client() as client:
        assert client.post(CHAT, json=body).status_code == 200


def test_a_body_waiting_at_a_stop_is_refused_without_traceback(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.0)
    monkeypatch.setattr(process, "_SLOW_CLIENT_S", 0)
    answers: list[httpx.Response] = []
    large = {"messages": [{"role": "user", "content": "x" * 2_000_000}]}
    with scripted_app(chat_model, engine) as server:
        turns, loop = server.daemon.bodies._turns, server.daemon._loop
        # The turn of another share lasts: it leaves its place to nobody.
        monkeypatch.setattr(turns, "_max_beside", 0)
        asyncio.run_coroutine_threadsafe(turns.take(Share("address", "192.0.2.1"), ""), loop).result(30)
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=large)))
        waiting.start()
        wait_until(lambda: turns._waiting, "the body waits for its turn")
        asyncio.run_coroutine_threadsafe(server.daemon.drain(0), loop).result(30)
    waiting.join(30)
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["message"] == "the daemon is stopping"
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_stop_ends_each_stream_with_an_error_of_its_api(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, is_loading: bool
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    engine.script = until_cancelled
    texts: dict[str, str] = {}
    load = SlowLoad(engine)
    paths = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses")

    def ask(url: str, path: str) -> None:
        asked = HELLO | {"stream": True, "max_tokens": 5, "input": "hello"}
        asked |= {"prompt": "hello"} if path == "/v1/completions" else {}
        with httpx.stream("POST", url + path, json=asked, timeout=30) as answer:
            for part in answer.iter_text():
                texts[path] = texts.get(path, "") + part

    with started_app(chat_model, load) as server:
        if not is_loading:
            load.go_on.set()
            server.wait_ready()
        asking = [threading.Thread(target=ask, args=(server.url, path)) for path in paths]
        for thread in asking:
            thread.start()
        wait_until(lambda: len(texts) == len(paths), "all streams have begun")
        asyncio.run_coroutine_threadsafe(server.daemon.drain(0), server.daemon._loop).result(30)
        for thread in asking:
            thread.join(30)
        load.go_on.set()
    stopping = "the daemon is stopping"
    ends = {path: events_of(text)[-1] for path, text in texts.items()}
    for path in paths[:2]:
        assert (ends[path]["error"]["message"], ends[path]["error"]["code"]) == (stopping, "not_ready")
    assert (ends["/v1/messages"]["type"], ends["/v1/messages"]["error"]["message"]) == ("error", stopping)
    assert ends["/v1/messages"]["error"]["type"] == "overloaded_error"
    failed = ends["/v1/responses"]
    assert (failed["type"], failed["response"]["error"]["message"]) == ("response.failed", stopping)


class Settling:
    """A daemon whose model is loaded, with `in_flight` requests at each look. It ends after `ends_after` looks."""

    def __init__(self, in_flight: list[int], ends_after: int = 1000) -> None:
        self._in_flight, self._ends_after, self.looks, self.done_after = in_flight, ends_after, 0, list[int]()
        self.daemon = Daemon(Settings(), ScriptedEngine().load)
        self.daemon._is_ending, self.daemon.in_flight = self, self  # type: ignore[assignment]
        self.engine, self.tokenizer, self.renderer, self.template_source = self, self, self, ""

    def wait(self, _seconds: float) -> bool:
        self.looks += 1
        return self.looks > self._ends_after

    @property
    def num(self) -> int:
        return self._in_flight.pop(0)

    def make_whole(self) -> None:
        self.done_after.append(self.looks)


@pytest.mark.parametrize(("in_flight", "looks"), [([0], 1), ([2, 1, 0], 3), ([1] * 60, 60)])
def test_a_daemon_settles_once_no_request_runs(in_flight: list[int], looks: int) -> None:
    settling = Settling(in_flight)
    settling.daemon._settle(settling)  # type: ignore[arg-type]
    assert settling.done_after == [looks]


def test_a_daemon_serves_on_when_what_the_first_requests_do_not_need_fails(caplog: pytest.LogCaptureFixture) -> None:
    settling = Settling([0])
    settling.make_whole = Mock(side_effect=MemoryError("no memory"))  # type: ignore[method-assign]
    settling.daemon._settle(settling)  # type: ignore[arg-type]
    assert "the whole vocabulary could not be made" in caplog.text
    assert settling.daemon.failure is None


def test_a_daemon_that_ends_does_not_settle() -> None:
    settling = Settling([1, 1], ends_after=2)
    settling.daemon._settle(settling)  # type: ignore[arg-type]
    assert (settling.looks, settling.done_after) == (3, [])
