"""The application over a scripted engine: what happens around a request rather than in it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix import hooks
from diskprefix.chat.output.format import PlainText
from diskprefix.engine.gauges import Activity
from diskprefix.engine.request import Constraint, FinishEvent, GenerateRequest, TextEvent
from diskprefix.errors import ModelError
from diskprefix.server import limits as reading
from diskprefix.server import streaming
from diskprefix.server.process import process
from diskprefix.server.status import WELCOME
from diskprefix.tenant_ids import group_of
from tests.server.daemon_process import wait_until
from tests.server.scripted import (
    CHOSEN,
    AppServer,
    Emit,
    ScriptedEngine,
    done,
    say_hello,
    scripted_app,
    started_app,
    until_cancelled,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(chat_model: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine) as running:
        yield running


def open_raw(
    server: AppServer, body: dict[str, Any], *, announced_bytes: int | None = None, expect: bool = False
) -> socket.socket:
    """A chat request on a bare socket that the test can close when it likes.

    With `announced_bytes` the body never ends; with `expect` none of it is sent before the server asks for it.
    """
    payload = b"" if expect else json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {announced_bytes or len(payload)}\r\n{'Expect: 100-continue' if expect else 'X: y'}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


def events_of(text: str) -> list[str]:
    """The data of the events, without comments."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


class SlowLoad:
    """A load that goes on when it is told to."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.go_on = threading.Event()
        self._engine = engine

    def __call__(self, settings: Any, progress: Callable[[str], None]) -> Any:
        progress("fetching the model")
        assert self.go_on.wait(30)
        return self._engine.load(settings, progress)


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


def test_no_more_requests_wait_for_the_model_than_the_queue_takes(chat_model: Path, engine: ScriptedEngine) -> None:
    load, most = SlowLoad(engine), 3
    with started_app(chat_model, load, max_queue=2) as server, server.client() as client:
        with ThreadPoolExecutor(most) as clients:
            waiting = [clients.submit(client.post, CHAT, json=HELLO) for _ in range(most)]
            wait_until(lambda: server.daemon.num_arriving == most, "they wait")
            refused = client.post(CHAT, json=HELLO)
            load.go_on.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert {request.result().status_code for request in waiting} <= {200, 503}


@pytest.mark.parametrize(("path", "sign"), [(CHAT, ": keepalive"), ("/v1/messages", "event: ping")])
def test_a_stream_that_waits_for_the_model_gets_signs_of_life(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, path: str, sign: str
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    engine.script = say_hello
    load = SlowLoad(engine)
    body = HELLO | {"stream": True, "max_tokens": 5}
    with (
        started_app(chat_model, load) as server,
        server.client() as client,
        client.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        signs = [next(line for line in lines if line) for _ in range(3)]
        load.go_on.set()
        rest = list(lines)
    assert sign in signs
    assert any("Hello" in line for line in rest)


def test_a_reply_that_waits_for_the_model_is_whole_json_in_the_end(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    engine.script = say_hello
    load = SlowLoad(engine)
    with (
        started_app(chat_model, load) as server,
        server.client() as client,
        client.stream("POST", CHAT, json=HELLO) as answer,
    ):
        parts = answer.iter_raw()
        beginning = next(parts)
        load.go_on.set()
        whole = b"".join([beginning, *parts])
    assert beginning.startswith(b"\n")
    assert json.loads(whole)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waited_for_a_load_that_fails_is_told(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.01)
    load = SlowLoad(engine)

    def fail(*arguments: Any) -> Any:
        load(*arguments)
        raise ModelError("no such model")

    with (
        started_app(chat_model, fail) as server,
        server.client() as client,
        client.stream("POST", CHAT, json=HELLO | {"stream": stream}) as answer,
    ):
        parts = answer.iter_raw()
        next(parts)
        load.go_on.set()
        if stream:
            assert b'"code":"not_ready"' in b"".join(parts)
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)


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


@pytest.mark.parametrize("error", [ModelError("no such model"), RuntimeError("secret detail")])
def test_a_failed_load_is_kept_for_the_exit_and_requests_are_refused(chat_model: Path, error: Exception) -> None:
    def fail(_settings: Any, _progress: Any) -> Any:
        raise error

    with started_app(chat_model, fail) as server, server.client() as client:
        wait_until(lambda: server.daemon.failure, "the load failed")
        assert str(error) in str(server.daemon.failure)
        answer = client.post(CHAT, json=HELLO)
        assert answer.status_code == 503
        assert "secret" not in answer.text
        assert client.get("/health").json()["status"] == "failed"


def test_where_files_are_is_told_to_the_admin_alone_when_a_load_has_failed(chat_model: Path, tmp_path: Path) -> None:
    admin, other = "a" * 24, "o" * 24
    keys = tmp_path / "keys"
    keys.write_text(f"admin {admin}\nother {other}\n")
    keys.chmod(0o600)

    def fail(_settings: Any, _progress: Any) -> Any:
        raise ModelError("cannot read /srv/models/one")

    with started_app(chat_model, fail, api_keys=keys) as server, server.client() as client:
        wait_until(lambda: server.daemon.failure, "the load failed")
        for key, sees_all in ((admin, True), (other, False)):
            said = client.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {key}"})
            assert (said.status_code, "/srv/models" in said.text) == (503, sees_all)
            assert "the model could not be loaded: " in said.json()["error"]["message"]


def test_a_degraded_cache_is_named_by_health_and_does_not_stop_requests(
    server: AppServer, engine: ScriptedEngine
) -> None:
    engine.stats |= {"state": "degraded", "error": "disk full"}
    with server.client() as client:
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "degraded"
        assert health.json()["cache"] == {"state": "degraded", "error": "disk full"}
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_lost_accelerator_is_not_healthy_and_refuses_requests(
    server: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_device(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("diskprefix.engine.device.probe_devices", lose_device)
    engine.script = lose_device
    with server.client() as client:
        assert client.post(CHAT, json=HELLO).json()["error"]["code"] == "device_lost"
        wait_until(lambda: client.get("/health").status_code == 503, "/health is not ok")
        assert client.get("/health").json()["status"] == "failed"
        answer = client.post(CHAT, json=HELLO)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"


@pytest.mark.parametrize("path", ["/props", "/metrics"])
def test_a_disk_that_does_not_answer_stops_neither_health_nor_requests(
    server: AppServer, engine: ScriptedEngine, path: str
) -> None:
    engine.cache.is_readable.clear()
    with server.client() as client, ThreadPoolExecutor(2) as readers:
        try:
            waiting = [readers.submit(client.get, path, timeout=30) for _ in range(2)]
            assert engine.cache.is_waited_for.wait(30)
            assert client.get("/health", timeout=5).json()["cache"] == {"state": "ok", "error": None}
            assert client.post(CHAT, json=HELLO, timeout=5).status_code == 200
        finally:
            engine.cache.is_readable.set()
        assert [answer.result().status_code for answer in waiting] == [200, 200]


def test_a_full_queue_is_503_with_retry_after(chat_model: Path, engine: ScriptedEngine) -> None:
    engine.script = until_cancelled
    with scripted_app(chat_model, engine, max_queue=1) as server, server.client() as client:
        running = open_raw(server, HELLO)
        assert engine.entered.wait(30)
        waiting = open_raw(server, HELLO)
        wait_until(lambda: client.get("/health").json()["queue_depth"] == 1, "the second request waits")
        answer = client.post(CHAT, json=HELLO)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "server_error",
            "param": None,
            "code": "queue_full",
        }
        with open_raw(server, HELLO, announced_bytes=20_000_000) as refused:
            assert refused.recv(1000).startswith(b"HTTP/1.1 503 "), "before the body is sent"
        running.close()
        waiting.close()
        wait_until(lambda: not client.get("/health").json()["running"], "the engine is free again")
        engine.script = say_hello
        assert client.post(CHAT, json=HELLO).status_code == 200


def read_to_the_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(4096):
        received += part
    return received


def test_a_body_that_does_not_come_is_a_408_and_its_place_is_free_again(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.2)
    with scripted_app(chat_model, engine, max_queue=1) as server, server.client() as client:
        silent = [open_raw(server, HELLO, announced_bytes=1000) for _ in range(2)]
        for connection in silent:
            head, _, answer = read_to_the_end(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            error = json.loads(answer)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
            connection.close()
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_body_that_trickles_is_a_408(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.2)
    with open_raw(server, HELLO, announced_bytes=1_000_000) as connection:
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
    monkeypatch.setattr(reading, "_LEAST_BYTES_PER_S", 1)
    payload = json.dumps(HELLO).encode()
    with open_raw(server, HELLO, announced_bytes=len(payload) + 1) as connection:
        threading.Event().wait(0.4)
        connection.sendall(b" ")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_cancels_its_request(
    server: AppServer, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = until_cancelled
    connection = open_raw(server, HELLO | {"stream": stream})
    assert engine.entered.wait(30)
    connection.close()
    assert engine.cancelled.wait(30)
    engine.script = say_hello
    with server.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_its_request(
    server: AppServer, engine: ScriptedEngine
) -> None:
    def endless(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        emit(TextEvent(0, "first", (1,)))
        until_cancelled(request, emit, is_cancelled)

    engine.script = endless
    with server.client() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            assert any("first" in line for line in answer.iter_lines())
        assert engine.cancelled.wait(30)
        counted = 'diskprefix_http_requests_total{route="/v1/chat/completions",status="499"} 1.0'
        wait_until(lambda: counted in client.get("/metrics").text, "the request is counted as left")


def test_the_log_line_of_a_cancelled_request_says_how_far_it_came(
    server: AppServer, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        figures: dict[str, Any] = {
            "prompt_tokens": 10,
            "restored_tokens": 4,
            "ready_tokens": 8,
            "reply_tokens": 0,
            "elapsed_s": 1.0,
        }
        activity = Activity(id=request.id, state="prefilling", scope=request.cache.scope, **figures)
        server.daemon.inbox.running_activities = lambda: [activity]
        emit(TextEvent(0, "first", (1,)))
        until_cancelled(request, emit, is_cancelled)

    engine.script = endless
    with caplog.at_level(logging.INFO), server.client() as client:
        with client.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            assert any("first" in line for line in answer.iter_lines())
        wait_until(lambda: "prompt 8 of 10 · restored 4 · reply 0" in caplog.text, "the request is logged")
        [ended] = client.get("/dashboard/state").json()["ended"]
        assert (ended["status"], ended["prompt_tokens"]) == (499, 10)


def test_a_client_that_leaves_while_it_waits_never_reaches_the_engine(
    server: AppServer, engine: ScriptedEngine
) -> None:
    release = threading.Event()

    def hold(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        assert release.wait(30)
        say_hello(request, emit, is_cancelled)

    engine.script = hold
    first = open_raw(server, HELLO)
    assert engine.entered.wait(30)
    with server.client() as client:
        second = open_raw(server, HELLO | {"seed": 2})
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
    assert answer.status_code == (200 if stream else 500)
    error = json.loads(events_of(answer.text)[-1]) if stream else answer.json()
    assert error["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert "secret detail" in caplog.text


def test_an_unexpected_exception_in_the_server_is_500_without_its_inside(
    server: AppServer, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.stats = {}
    with caplog.at_level(logging.ERROR), server.client() as client:
        answer = client.get("/metrics")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "KeyError" not in answer.text
        assert "GET /metrics failed unexpectedly" in caplog.text
        assert client.post(CHAT, json=HELLO).status_code == 200


def test_the_last_chunk_carries_cache_and_timings(server: AppServer) -> None:
    with server.client() as client:
        events = events_of(client.post(CHAT, json=HELLO | {"stream": True, "n": 2}).text)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    # The text of a choice comes in one chunk or in two: what waits is joined.
    order = [key for key, _ in groupby((choice["index"], choice["finish_reason"]) for choice in choices)]
    assert order == [(0, None), (0, "stop"), (1, None), (1, "stop")]
    firsts = [next(choice for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert [choice for choice in choices if "role" in choice["delta"]] == firsts
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in firsts), "the role comes alone"
    assert [chunk for chunk in chunks if "prefix_cache" in chunk] == chunks[-1:]
    assert chunks[-1]["timings"]["restore_ms"] == 3.14
    assert "usage" not in chunks[-1]


KEEPS = {"boundary": 8, "boundary_reason": "continues", "saved": "queued"}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            {"restored": 6, "source": "disk", "saved": "queued"},
            {"scope": "auto:30", "restored": 6, "source": "disk"} | KEEPS,
        ),
        (
            {"miss_reason": "not_stored", "saved": "queued"},
            {"scope": "auto:30", "restored": 0, "miss_reason": "not_stored"} | KEEPS,
        ),
        (
            {"miss_reason": "diverged", "saved": "queued"},
            {"scope": "auto:30", "restored": 0, "miss_reason": "diverged", "diverged_at": 3} | KEEPS,
        ),
    ],
    ids=["hit", "miss", "diverged"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_what_the_cache_did_on_one_line(
    report: dict[str, Any], said: dict[str, Any], stream: bool, server: AppServer, engine: ScriptedEngine
) -> None:
    selection = replace(CHOSEN, reason="continues", selected=9, aligned=8)

    def script(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        emit(FinishEvent(0, "length"))
        emit(done(**{"selection": selection, **report}))

    engine.script = script
    with server.client() as client:
        text = client.post(CHAT, json=HELLO | {"stream": stream}).text
    answer = json.loads(events_of(text)[-2]) if stream else json.loads(text)
    assert list(answer["prefix_cache"].items()) == list(said.items()), "in this order"


def test_the_request_reaches_the_engine_with_what_the_body_said(server: AppServer, engine: ScriptedEngine) -> None:
    body = HELLO | {
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
        "prefix_cache": {"scope": "AUTO", "window": 8},
        "user": "me",
        "some_other_field": {"ignored": True},
    }
    with server.client() as client:
        assert client.post(CHAT, json=body).status_code == 200
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.n) == (0.1, 11, ("END",), 2)
    assert (sampling.logit_bias, sampling.logprobs, sampling.presence_penalty) == ({5: -100.0}, 3, 1.0)
    assert str(request.cache.scope) == "auto:8"


def test_what_the_reply_must_be_reaches_the_engine(server: AppServer, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "return_progress": True}
    with server.client() as client:
        assert client.post(CHAT, json=HELLO | fields | {"stream": True}).status_code == 200
        assert client.post(CHAT, json=HELLO | fields).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"choice": ["a"]}}).is_success
    constraints = [request.constraint for request in engine.requests]
    of_schema = Constraint(kind="json_schema", source=json.dumps(schema))
    assert constraints == [of_schema, of_schema, Constraint(kind="choice", source='["a"]')]
    assert [request.reports_progress for request in engine.requests] == [True, False, False], "in streams only"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "weird"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": {"type": "weird"}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_cannot_do_is_a_400_before_anything_is_queued(
    server: AppServer, engine: ScriptedEngine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with server.client() as client:
        answer = client.post(CHAT, json=HELLO | fields | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        (CHAT, HELLO, {"type": "function", "function": {"name": "f", "strict": True}}),
        ("/v1/responses", {"input": "hello"}, {"type": "function", "name": "f", "strict": True}),
        ("/v1/messages", HELLO | {"max_tokens": 9}, {"name": "f", "input_schema": {}, "strict": True}),
    ],
)
def test_a_strict_tool_reaches_the_engine_as_a_constraint_of_each_api(
    server: AppServer, engine: ScriptedEngine, path: str, body: dict[str, Any], tool: dict[str, Any]
) -> None:
    lax = {"type": "function", "function": {"name": "f", "strict": False}} if path == CHAT else tool | {"strict": False}
    with server.client() as client:
        for offered in (tool, lax):
            assert client.post(path, json=body | {"tools": [offered]}).is_success
    strict, free = (request.constraint for request in engine.requests)
    assert strict is not None
    assert strict.kind == "lark"
    assert free is None


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


def test_what_a_request_asks_of_the_cache_reaches_the_engine(server: AppServer, engine: ScriptedEngine) -> None:
    message = {"role": "user", "content": "hello", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    asked = {"prompt_cache_key": "agent", "prompt_cache_retention": "24h", "prefix_cache": {"save": False}}
    with server.client() as client:
        assert client.post(CHAT, json={"messages": [message]} | asked).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "hello"} | asked).status_code == 200
        refused = client.post(CHAT, json={"messages": [message | {"cache_control": {"type": "eternal"}}]})
    for request in engine.requests:
        cache = request.cache
        assert (cache.group, cache.ttl_s, cache.save) == (group_of("agent"), 86400.0, False)
    marks = [request.prompt.marks for request in engine.requests]
    assert [mark.ttl_s for mark in marks[0]] == [300.0]
    assert marks[1] == ()
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.0.cache_control.type"


def test_without_extras_every_client_gets_the_daemons_own_welcome(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "extras", lambda: ())
    with scripted_app(chat_model, engine) as server, server.client() as client:
        answer = client.get("/", headers={"Accept": "text/html"})
        assert (answer.status_code, answer.json()) == (
            200,
            WELCOME,
        )
        assert client.head("/").status_code == 200


def test_a_body_that_waits_until_the_end_of_a_stop_is_refused_and_leaves_no_traceback(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.0)
    monkeypatch.setattr(process, "_SLOW_CLIENT_S", 0)
    answers: list[httpx.Response] = []
    large = {"messages": [{"role": "user", "content": "x" * 2_000_000}]}
    with scripted_app(chat_model, engine) as server:
        turns = server.daemon.bodies._turns
        monkeypatch.setattr(turns, "_most", 0)
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=large)))
        waiting.start()
        wait_until(lambda: turns._waiting, "the body waits for its turn")
        asyncio.run_coroutine_threadsafe(server.daemon.drain(0), server.daemon._loop).result(30)
    waiting.join(30)
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["message"] == "the daemon is stopping"
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_stopping_daemon_refuses_what_waits_and_cancels_what_runs(chat_model: Path, engine: ScriptedEngine) -> None:
    engine.script = until_cancelled
    answers: list[httpx.Response] = []
    with scripted_app(chat_model, engine) as server:
        with server.client() as client:
            running = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=HELLO)))
            waiting = threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=HELLO)))
            running.start()
            assert engine.entered.wait(30)
            waiting.start()
            wait_until(lambda: client.get("/health").json()["queue_depth"] == 1, "the second request waits")
        serving = server.daemon.serving
        assert serving is not None
        serving.inbox.stop(0)
        running.join(30)
        waiting.join(30)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert {answer.json()["error"]["message"] for answer in answers} == {"the daemon is stopping"}
    assert engine.closed.is_set()
