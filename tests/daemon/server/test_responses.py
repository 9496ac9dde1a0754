"""`/v1/responses` over the real application: the official `openai` client, stored responses, what agents send."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from openai import OpenAI

from diskprefix.daemon.api import response_store as stored_module
from diskprefix.daemon.api.response_store import MAX_CONVERSATION_BYTES, ResponseStore
from diskprefix.daemon.api.responses_items import ReferenceItem
from diskprefix.daemon.engine.request import FinishEvent, GenerateRequest, TextEvent
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.store import Store
from tests.daemon.server.agent_model import call, thought
from tests.daemon.server.daemon_process import DaemonProcess, running_daemon
from tests.daemon.server.scripted import AppServer, Emit, ScriptedEngine, ScriptedNotes, done, scripted_app
from tests.daemon.server.test_auth import ALICE, BOB
from tests.runtimes import restorable

ROUTE = "/v1/responses"
MODEL = "scripted"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = call("get_weather", city="Oslo")


def saying(*texts: str) -> Callable[..., None]:
    def script(_request: GenerateRequest, emit: Emit, _is_cancelled: object) -> None:
        for text in texts:
            emit(TextEvent(0, text, (1,)))
        emit(FinishEvent(0, "stop"))
        emit(done(completion_tokens=len(texts), cached_tokens=7))

    return script


@pytest.fixture(scope="module")
def server(agent_model: Path, engine: ScriptedEngine, keys_file: Path) -> Iterator[AppServer]:
    with scripted_app(agent_model, engine, api_keys=keys_file) as server:
        yield server


@pytest.fixture(autouse=True)
def _afresh(engine: ScriptedEngine) -> None:
    engine.script = saying("Hello", " world")
    engine.requests.clear()
    engine.cache.noted.clear()


def client_of(server: AppServer | DaemonProcess, key: str = ALICE) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: AppServer) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def ask(client: OpenAI, said: Any = None, **fields: Any) -> Any:
    create: Any = client.responses.create
    return create(**{"model": MODEL, "input": said} | fields)


@pytest.fixture
def http(server: AppServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {ALICE}"}, timeout=30) as client:
        yield client


def test_a_text_is_answered(client: OpenAI, engine: ScriptedEngine) -> None:
    response = ask(client, "Name three rivers.", instructions="Be brief.")
    assert response.output_text == "Hello world"
    assert response.status == "completed"
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (10, 2, 12)
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert {"prefix_cache", "timings"} <= response.model_extra.keys()
    wanted = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName three rivers.<|im_end|>\n"
    assert engine.last_prompt == f"{wanted}<|im_start|>assistant\n"


def test_the_stream_helper_assembles_what_the_whole_response_says(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(thought("hm"), "It ", "rains.\n", CALL[:20], CALL[20:])
    fields: dict[str, Any] = {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        assembled = stream.get_final_response()
    whole = client.responses.create(**fields)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in assembled.output] == ["reasoning", "message", "function_call"]
    assert assembled.output_text == whole.output_text == "It rains."
    call, other = cast("Any", assembled.output[2]), whole.output[2]
    assert (call.name, call.arguments) == (other.name, other.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert call.parsed_arguments == {"city": "Oslo"}


def test_the_result_of_a_call_comes_back_as_items(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(CALL[:20], CALL[20:])
    first = ask(client, "Weather?", tools=[WEATHER])
    call = first.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    engine.script = saying("It rains.")
    history: Any = [{"role": "user", "content": "Weather?"}, *first.output, output]
    for fields in ({"input": history}, {"input": [output], "previous_response_id": first.id}):
        second = ask(client, tools=[WEATHER], **fields)
        assert second.output_text == "It rains."
        prompt = engine.last_prompt
        assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n" in prompt
        assert prompt.count("Weather?") == 1


def test_a_conversation_goes_on_from_a_stored_response(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("One.")
    first = ask(client, "Count.", instructions="Be brief.")
    engine.script = saying("Two.")
    second = ask(client, "On.", previous_response_id=first.id)
    events = list(ask(client, "On!", previous_response_id=second.id, stream=True))
    said = [line for line in engine.last_prompt.splitlines() if not line.startswith("<|im_start|>")]
    # Instructions apply to one request only.
    assert said == ["Count.<|im_end|>", "One.<|im_end|>", "On.<|im_end|>", "Two.<|im_end|>", "On!<|im_end|>"]
    last = events[-1].response
    assert last.previous_response_id == second.id
    assert client.responses.retrieve(last.id).output_text == "Two."


def test_a_response_that_is_still_on_the_disk_is_not_said_to_be_deleted(
    client: OpenAI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = ask(client, "Hello")
    for is_settled, said in ((False, (500, "store_unavailable")), (True, (404, "response_not_found"))):
        monkeypatch.setattr(ScriptedNotes, "settle", lambda *_, is_settled=is_settled: is_settled)
        answer = http.delete(f"{ROUTE}/{response.id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == said


def test_the_items_of_the_input_are_listed_page_by_page(client: OpenAI) -> None:
    first = ask(client, "Count.")
    second = ask(client, [{"role": "user", "content": "On."}], previous_response_id=first.id)
    items: list[Any] = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in items] == ["Count.", "Hello world", "On."]
    newest: Any = client.responses.input_items.list(second.id, limit=1)
    assert [newest.data[0].id, newest.has_more] == [items[2].id, True]
    assert newest.first_id == newest.last_id == items[2].id
    rest = client.responses.input_items.list(second.id, after=items[1].id)
    assert [[item.id for item in rest.data], rest.has_more] == [[items[0].id], False]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(second.id, after="msg_1")
    assert caught.value.param == "after"


def test_an_item_of_a_stored_response_can_be_referred_to(client: OpenAI, engine: ScriptedEngine) -> None:
    first = ask(client, "Count.")
    ids = [client.responses.input_items.list(first.id).data[0].id, first.output[0].id]
    items: Any = [*({"type": "item_reference", "id": id_} for id_ in ids), {"role": "user", "content": "On."}]
    ask(client, items)
    assert "Count.<|im_end|>\n<|im_start|>assistant\nHello world<|im_end|>" in engine.last_prompt
    for unknown in (f"{ids[1]}9", "msg_1", "x", "_", f"rs{ids[1][3:]}"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, [{"type": "item_reference", "id": unknown}])
        assert caught.value.param == "input.0.id"


def test_responses_with_store_false_are_not_stored(client: OpenAI, engine: ScriptedEngine) -> None:
    response = ask(client, "Count.", store=False)
    assert response.store is False
    assert engine.cache.noted == {}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "On.", previous_response_id=response.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_an_input_that_is_too_large_is_answered_and_not_stored(
    client: OpenAI, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskprefix.daemon.api.responses.MAX_STORED_BYTES", 300)
    response = ask(client, "Count. " * 50)
    assert (response.output_text, response.store) == ("Hello world", False)
    monkeypatch.setattr(stored_module, "MAX_STORED_BYTES", 300)
    assert ask(client, "Count.").output_text == "Hello world"
    assert engine.cache.noted == {}


def test_a_request_that_fails_or_is_refused_stores_nothing(client: OpenAI, engine: ScriptedEngine) -> None:
    def fail(_request: GenerateRequest, emit: Emit, _is_cancelled: object) -> None:
        emit(TextEvent(0, "It ", (1,)))
        raise DiskPrefixError("the model fails")

    engine.script = fail
    events = list(ask(client, "Count.", stream=True))
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.message) == (
        "response.failed",
        "failed",
        "the model fails",
    )
    with pytest.raises(openai.InternalServerError):
        ask(client, "Count.")
    assert engine.cache.noted == {}


def test_continuing_a_deleted_response_is_a_clear_error(client: OpenAI) -> None:
    first = ask(client, "Count.")
    second = ask(client, "On.", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not stored here any more, and") as caught:
        ask(client, "On!", previous_response_id=second.id)
    assert caught.value.param == "previous_response_id"
    assert client.responses.retrieve(second.id).output_text == "Hello world"


def test_a_response_of_another_key_or_salt_is_not_found(client: OpenAI, server: AppServer, http: httpx.Client) -> None:
    mine = ask(client, "Count.")
    salted = ask(client, "Count.", extra_body={"cache_salt": "s"})
    output = mine.output[0].id
    with client_of(server, BOB) as bob:
        for request in (
            lambda: bob.responses.retrieve(mine.id),
            lambda: bob.responses.delete(mine.id),
            lambda: bob.responses.input_items.list(mine.id),
            lambda: client.responses.retrieve(salted.id),
            lambda: bob.responses.retrieve(salted.id, extra_headers={"x-cache-salt": "s"}),
        ):
            with pytest.raises(openai.NotFoundError):
                request()
        for fields in (
            {"previous_response_id": mine.id},
            {"input": [{"type": "item_reference", "id": output}]},
        ):
            with pytest.raises(openai.BadRequestError):
                bob.responses.create(**{"model": MODEL, "input": "On."} | cast("Any", fields))
    assert http.get(f"{ROUTE}/{salted.id}", headers={"x-cache-salt": "s"}).status_code == 200
    on = {"input": "On.", "previous_response_id": salted.id}
    assert http.post(ROUTE, json=on).status_code == 400
    assert http.post(ROUTE, json=on | {"cache_salt": "s"}).status_code == 200


def test_the_tokens_of_an_input_are_counted_as_the_request_then_has_them(
    client: OpenAI, engine: ScriptedEngine, http: httpx.Client
) -> None:
    first = ask(client, "Count.")
    fields: Any = {
        "model": MODEL,
        "input": [{"role": "user", "content": "On."}],
        "instructions": "Be brief.",
        "previous_response_id": first.id,
        "tools": [WEATHER],
    }
    engine.requests.clear()
    counted = client.responses.input_tokens.count(**fields)
    assert engine.requests == []
    client.responses.create(**fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(engine.requests[-1].prompt.token_ids)
    refused = http.post(f"{ROUTE}/input_tokens", json={"input": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


TURNS: list[Any] = [
    {"role": "developer", "content": "Rules."},
    {"role": "user", "content": "Mend a.py."},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Now b.py."},
]


def test_a_conversation_is_compacted_and_goes_on_from_there(
    server: AppServer, client: OpenAI, http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = saying(thought("What was it?"), "a.py is mended. ", "b.py remains.", CALL)
    fields: Any = {"model": MODEL, "instructions": "Be brief."}
    short = http.post(f"{ROUTE}/compact", json={"input": TURNS, "tools": [WEATHER], **fields}).json()
    assert (short["object"], short["usage"]["output_tokens"]) == ("response.compaction", 4)
    first, second, summary = short["output"]
    assert [item["content"][0]["text"] for item in (first, second)] == ["Mend a.py.", "Now b.py."]
    assert summary["type"] == "compaction"
    assert client.responses.compact(input=TURNS, **fields).object == "response.compaction"
    engine.requests.pop()

    client.responses.create(input=TURNS, tools=[WEATHER], store=False, **fields)
    client.responses.create(input=short["output"], **fields)
    assert server.daemon.serving is not None
    decode = server.daemon.serving.engine.tokenizer.decode
    asked, plain, later = (decode(request.prompt.token_ids) for request in engine.requests)
    shared = plain[: plain.rindex("Now b.py.")]
    assert asked.startswith(shared), "the prompt of the conversation, which may be cached, and a question after it"
    assert engine.requests[0].sampling.max_tokens == 4096
    assert later.index("Now b.py.") < later.index("a.py is mended. b.py remains.")
    assert "Done." not in later


def test_a_trigger_at_the_end_of_the_input_has_the_conversation_compacted(
    client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = saying("All ", "in short.")
    trigger: Any = {"type": "compaction_trigger"}
    events = list(ask(client, [*TURNS, trigger], stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    completed: Any = events[-1]
    assert [item.type for item in completed.response.output] == ["compaction"]
    assert completed.response.store is False


def test_a_model_that_sums_up_nothing_is_an_error(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.script = saying(thought("Hm."))
    answer = http.post(f"{ROUTE}/compact", json={"model": None, "input": TURNS})
    assert answer.status_code == 500
    assert "wrote no summary" in answer.json()["error"]["message"]
    answer = http.post(f"{ROUTE}/compact", json={"input": TURNS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


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


def test_references_read_a_response_once_and_all_count() -> None:
    chain = Chain()
    store, reference = ResponseStore(cast(Any, chain)), ReferenceItem(type="item_reference", id="msg_1_1")
    with pytest.raises(InvalidRequest, match=r"^input\.0\.id: .* have more than 16\.0 MiB"):
        list(map(store.referred, repeat(reference, MAX_CONVERSATION_BYTES >> 20), repeat("input.0")))
    assert chain.num_read == 1


TINY: dict[str, Any] = {"model": "tiny-chat", "max_output_tokens": 8, "temperature": 0}
INPUT = "Name three rivers and tell me where each of them begins. " * 3


def test_a_conversation_goes_on_after_a_kill_and_ends_with_a_purge(chat_model: Path, tmp_path: Path) -> None:
    """A real daemon, whose store another process purges in the end."""
    cache = tmp_path / "kv"
    with running_daemon(chat_model, cache) as daemon, client_of(daemon, "none") as client:
        first = client.responses.create(input=INPUT, **TINY)
        second = client.responses.create(input="And lakes?", previous_response_id=first.id, **TINY)
        deleted = client.responses.create(input="x", **TINY)
        daemon.wait_saved()
        client.responses.delete(deleted.id)
        daemon.stop(signal.SIGKILL)
    with running_daemon(chat_model, cache) as daemon, client_of(daemon, "none") as client:
        again = client.responses.retrieve(second.id)
        assert again.to_dict() == second.to_dict()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted.id)
        third = client.responses.create(input="And seas?", previous_response_id=second.id, **TINY)
        items = list(client.responses.input_items.list(third.id, order="asc"))
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2 + ["user"]
        assert third.usage is not None
        assert second.usage is not None
        # What was stored is said again word for word, so the turns before are restored, with their replies.
        assert third.usage.input_tokens_details.cached_tokens >= restorable(second.usage.input_tokens + 1)
        daemon.wait_saved()
        with closing(Store(cache)) as store:
            assert purge(store, PurgeFilter(model="tiny-chat"), time.time(), lambda _: None).notes >= 3
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
