"""Large replies and stored responses are written beside the event loop, and what is read of them is bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import pytest

from diskprefix.api.anthropic import Messages
from diskprefix.api.dialect import json_text
from diskprefix.api.openai_chat import Chat, ChatWriter
from diskprefix.api.responses import Responses
from diskprefix.api.responses_items import MAX_CONVERSATION_BYTES, ReferenceItem, ResponseStore
from diskprefix.api.responses_writer import ResponseWriter
from diskprefix.errors import InvalidRequest
from diskprefix.server.answer import MAX_LOGPROBS
from diskprefix.store.note_record import NoteKind
from tests.server.scripted import AppServer, ScriptedEngine, scripted_app

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def recorded(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[bool]:
    """Records of each call of a method whether it is made on the event loop."""
    calls: list[bool] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(*values: Any, **named: Any) -> Any:
        calls.append(asyncio._get_running_loop() is not None)
        return method(*values, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_whole_reply_is_not_written_on_the_event_loop(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    of_chat, of_responses = (recorded(monkeypatch, writer, "whole") for writer in (ChatWriter, ResponseWriter))
    with server.client() as client:
        assert client.post(CHAT, json=HELLO).json()["choices"][0]["message"]["content"] == "Hello world"
        assert client.post(RESPONSES, json={"input": "hello"}).json()["status"] == "completed"
    assert of_chat == of_responses == [False]


@pytest.mark.parametrize(
    ("reader", "path", "body"),
    [
        (Chat, CHAT, HELLO),
        (Messages, "/v1/messages", HELLO | {"max_tokens": 8}),
        (Responses, RESPONSES, {"input": "hello"}),
        (Responses, "/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
def test_what_a_body_asks_for_is_not_made_out_on_the_event_loop(
    server: AppServer, monkeypatch: pytest.MonkeyPatch, reader: type, path: str, body: dict[str, Any]
) -> None:
    reads = recorded(monkeypatch, reader, "conversation" if path.endswith("_tokens") else "read")
    with server.client() as client:
        assert client.post(path, json=body).status_code == 200
    assert reads == [False]


def test_the_end_of_a_stream_is_not_written_on_the_event_loop(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = recorded(monkeypatch, ResponseWriter, "_complete")
    with server.client() as client:
        assert "response.completed" in client.post(RESPONSES, json={"input": "hello", "stream": True}).text
    assert ends == [False]


def test_a_stored_response_is_read_within_the_bounds_of_the_queue(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving: list[int] = []
    get = ResponseStore.get

    def counted(store: ResponseStore, id_: str) -> Any:
        arriving.append(server.daemon.in_flight.num)
        return get(store, id_)

    with server.client() as client:
        made = client.post(RESPONSES, json={"input": "hello"}).json()
        monkeypatch.setattr(ResponseStore, "get", counted)
        assert client.get(f"{RESPONSES}/{made['id']}").json() == made
        assert len(client.get(f"{RESPONSES}/{made['id']}/input_items").json()["data"]) == 1
    assert arriving == [1, 1]


class Chain:
    """Responses of a megabyte, each of which continues the one before. Counts how often one is read."""

    def __init__(self) -> None:
        self.num_read = 0

    def get(self, _kind: NoteKind, id_: str) -> bytes:
        self.num_read += 1
        item = {"type": "message", "role": "user", "content": "x" * (1 << 20), "id": id_.replace("resp", "msg") + "_1"}
        response = {"id": id_, "output": []}
        return json.dumps({"response": response, "input": [item], "previous": f"{id_}x"}).encode()


def test_a_conversation_of_stored_responses_is_read_up_to_a_bound() -> None:
    chain = Chain()
    with pytest.raises(InvalidRequest, match=r"^previous_response_id: .* have more than 16\.0 MiB"):
        ResponseStore(cast(Any, chain)).items_of("resp_1")
    assert chain.num_read <= (MAX_CONVERSATION_BYTES >> 20) + 2


def test_a_response_is_read_once_for_all_references_to_it_and_each_reference_counts() -> None:
    chain = Chain()
    store, reference = ResponseStore(cast(Any, chain)), ReferenceItem(type="item_reference", id="msg_1_1")
    with pytest.raises(InvalidRequest, match=r"^input\.0\.id: .* have more than 16\.0 MiB"):
        list(map(store.referred, repeat(reference, MAX_CONVERSATION_BYTES >> 20), repeat("input.0")))
    assert chain.num_read == 1


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "é\n"]}, {"a": 10**400}, {"a": -(2**64)}, {}])
def test_json_text_holds_what_it_was_made_from(value: Any) -> None:
    assert json.loads(json_text(value)) == value


LIMITS: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "max_tokens", HELLO | {"logprobs": True, "top_logprobs": 20}),
    (CHAT, "max_completion_tokens", HELLO | {"logprobs": True, "top_logprobs": 20}),
    ("/v1/completions", "max_tokens", {"prompt": "hello", "logprobs": 20}),
    (
        RESPONSES,
        "max_output_tokens",
        {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
    ),
]


@pytest.fixture
def long_engine(chat_model: Path) -> Iterator[tuple[AppServer, ScriptedEngine]]:
    engine = ScriptedEngine()
    engine.max_positions = 131_072
    with scripted_app(chat_model, engine) as running:
        yield running, engine


@pytest.mark.parametrize(("route", "field", "body"), LIMITS)
def test_a_reply_has_a_largest_number_of_log_probabilities(
    long_engine: tuple[AppServer, ScriptedEngine], route: str, field: str, body: dict[str, Any]
) -> None:
    server, engine = long_engine
    most = MAX_LOGPROBS // 21
    with server.client() as client:
        refused = client.post(route, json=body | {field: most + 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert f"{most} tokens" in refused.json()["error"]["message"]
        for fields, limit in (({field: most}, most), ({}, 16 if route == "/v1/completions" else most)):
            assert client.post(route, json=body | fields).status_code == 200
            assert engine.requests[-1].sampling.max_tokens == limit


def test_what_does_not_fit_the_model_is_not_counted_as_log_probabilities(server: AppServer) -> None:
    with server.client() as client:
        body = HELLO | {"logprobs": True, "top_logprobs": 20, "max_tokens": 2**30}
        assert client.post(CHAT, json=body).status_code == 200
