"""A request that says nothing of sampling gets the model's values, in each API. The server says which, and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from diskprefix.daemon.api.responses import ResponseRequest, Responses
from diskprefix.daemon.engine.request import SamplingParams
from diskprefix.daemon.server import answer
from diskprefix.runtime.runtime_options import SAMPLING_BOUNDS
from tests.daemon.server.scripted import AppServer, ScriptedEngine, events_of, scripted_app
from tests.desk.conftest import Run
from tests.desk.conftest import run as run

USER = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "min_p": -3}
USED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
SOURCES = dict.fromkeys(USED, "generation_config.json") | {"top_p": "default", "min_p": "default"}
NEUTRAL = {name: getattr(SamplingParams(), name) for name in USED}


@pytest.fixture
def model(chat_model: Path, tmp_path: Path) -> Path:
    """A folder whose files recommend something."""
    folder = tmp_path / "recommending"
    shutil.copytree(chat_model, folder)
    file = folder / "generation_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(said | RECOMMENDED), encoding="utf-8")
    return folder


@pytest.fixture
def recommending(model: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(model, engine) as running:
        yield running


def sampling_of(server: AppServer, engine: ScriptedEngine, path: str, **fields: Any) -> dict[str, Any]:
    with server.client() as client:
        answer = client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    return {name: getattr(engine.requests[-1].sampling, name) for name in USED}


OF_MODEL = ("</s>", "User:")


def stop_of(server: AppServer, engine: ScriptedEngine, path: str, **fields: Any) -> tuple[str, ...]:
    """Returns the stop strings of a request to a model that has its own."""
    server.daemon.sampling = replace(server.daemon.sampling, stop=OF_MODEL)
    sampling_of(server, engine, path, **fields)
    return engine.requests[-1].sampling.stop or ()


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_says_nothing_is_sampled_as_the_model_recommends(
    recommending: AppServer, engine: ScriptedEngine, path: str
) -> None:
    assert sampling_of(recommending, engine, path) == USED


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_above_the_model(recommending: AppServer, engine: ScriptedEngine, path: str) -> None:
    own: dict[str, Any] = {"temperature": 1, "top_k": 3, "top_p": 1}
    fields = {"options": own} if path.startswith("/api") else own
    assert sampling_of(recommending, engine, path, **fields) == USED | own


def test_the_owner_can_have_the_models_own_probabilities(model: Path, engine: ScriptedEngine) -> None:
    for path in BODIES:
        with scripted_app(model, engine, sampling="neutral") as server:
            assert sampling_of(server, engine, path) == NEUTRAL


def test_a_model_has_stop_strings_for_requests_without_any(recommending: AppServer, engine: ScriptedEngine) -> None:
    for path in BODIES:
        assert stop_of(recommending, engine, path) == OF_MODEL, path


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/responses"])
def test_only_a_request_without_stop_gets_the_models(
    recommending: AppServer, engine: ScriptedEngine, path: str
) -> None:
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    found = []
    for value in (None, [], [""], ["END"]):
        fields: dict[str, Any] = {name: value}
        own = {"options": fields} if path.startswith("/api") else fields
        found.append(stop_of(recommending, engine, path, **own))
    assert found == [OF_MODEL, (), (), ("END",)]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "read", "description": "x", "parameters": SCHEMA}
OFFERED = {"tools": [{"type": "function", "function": FUNCTION}]}
STRUCTURED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", OFFERED),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]}),
    ("/v1/chat/completions", OFFERED | {"tool_choice": "required"}),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/completions", {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/messages", {"tools": [{"name": "read", "input_schema": SCHEMA}]}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}]}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("/api/chat", OFFERED),
    ("/api/chat", {"format": "json"}),
    ("/api/generate", {"format": SCHEMA}),
]


@pytest.mark.parametrize(("path", "fields"), STRUCTURED)
def test_a_models_stop_strings_never_cut_a_call_or_a_constrained_text(
    recommending: AppServer, engine: ScriptedEngine, path: str, fields: dict[str, Any]
) -> None:
    assert stop_of(recommending, engine, path, **fields) == ()


def test_a_response_repeats_the_sampling_that_was_used(recommending: AppServer) -> None:
    with recommending.client() as client:
        whole = client.post("/v1/responses", json={"input": "hello"}).json()
        own = client.post("/v1/responses", json={"input": "hello", "top_p": 0.5, "stream": True}).text
    assert (whole["temperature"], whole["top_p"]) == (0.6, 0.95)
    responses = [event["response"] for event in events_of(own) if "response" in event]
    assert {(response["temperature"], response["top_p"]) for response in responses} == {(0.6, 0.5)}


def test_events_before_the_reply_have_the_values_of_the_model_or_none(recommending: AppServer) -> None:
    """The prompt of a loaded model may take long, too."""

    def created() -> tuple[Any, ...]:
        body = ResponseRequest(input="hello", model="gpt-4o")
        writer = answer._early(recommending.daemon, Responses(), body, "resp_1")
        assert writer is not None
        [response, _] = [
            event["response"] for event in events_of(b"".join(e.encode() for e in writer.begin()).decode())
        ]
        return response["model"], response["temperature"], response["top_p"]

    serving = recommending.daemon.serving
    assert serving is not None
    assert created() == (serving.model_name, 0.6, 0.95)
    recommending.daemon.serving = None
    assert created() == ("", None, None)
    recommending.daemon.serving = serving


def test_the_server_says_what_is_used_and_where_it_is_from(recommending: AppServer) -> None:
    with recommending.client() as client:
        props, [card] = client.get("/props").json()["sampling"], client.get("/v1/models").json()["data"]
        shown = client.post("/api/show", json={"model": card["id"]}).json()["parameters"]
        document, page = client.get("/openapi.json").json(), client.get("/docs").text
    assert props["values"] == {name: {"value": value, "source": SOURCES[name]} for name, value in USED.items()}
    assert props["ignored"] == ["min_p of generation_config.json: -3 is out of range (0 to 1)"]
    assert card["default_parameters"] == USED
    lines = dict(line.split() for line in shown.splitlines())
    assert lines == {"temperature": "0.6", "top_p": "0.95", "top_k": "20", "min_p": "0.05", "repeat_penalty": "1.05"}
    for body in ("ChatRequest", "MessagesRequest", "ResponseRequest", "CompletionRequest"):
        fields = document["components"]["schemas"][body]["properties"]
        assert {name: fields[name]["default"] for name in USED} == USED, body
        assert "Absent: 0.6 (generation_config.json)." in fields["temperature"]["description"]
    assert "Absent: 0.95 (default)." in page


@pytest.mark.parametrize("extreme", [0, 1], ids=["least", "most"])
def test_each_default_in_the_document_is_valid_under_every_name(recommending: AppServer, extreme: int) -> None:
    values = {name: bounds[extreme] for name, bounds in SAMPLING_BOUNDS.items()}
    sampling = replace(
        recommending.daemon.sampling, values=values, sources=dict.fromkeys((*values, "stop"), "x"), stop=("END",)
    )
    recommending.daemon.sampling = sampling
    with recommending.client() as client:
        document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for body, schema in schemas.items():
        for name, field in schema.get("properties", {}).items():
            if field.get("default") is not None:
                whole = field | {"components": document["components"]}
                assert Draft202012Validator(whole).is_valid(field["default"]), (body, name, field)
    fields = {body: schemas[body]["properties"] for body in ("MessagesRequest", "ChatRequest", "OllamaOptions")}
    assert "default" not in fields["MessagesRequest"]["temperature"] or not extreme
    assert f"Absent: {values['temperature']} (x)." in fields["MessagesRequest"]["temperature"]["description"]
    assert fields["MessagesRequest"]["stop_sequences"]["default"] == ["END"]
    assert fields["ChatRequest"]["stop"]["default"] == fields["OllamaOptions"]["stop"]["default"] == ["END"]
    penalties = [fields["OllamaOptions"][name]["default"] for name in ("repetition_penalty", "repeat_penalty")]
    assert penalties == [values["repetition_penalty"]] * 2
    assert not values.keys() & schemas["CountTokensRequest"]["properties"].keys()


def test_ps_and_show_say_what_is_used_and_where_it_is_from(recommending: AppServer, model: Path, run: Run) -> None:
    own = "temperature 0.6, top_k 20, repetition_penalty 1.05 (generation_config.json)"
    line = f"{own}; top_p 0.95, min_p 0.05 (default)"
    with recommending.client() as client:
        token = client.headers["Authorization"].removeprefix("Bearer ")
    assert f" {line}\n" in run("ps", "--url", recommending.url, "--api-key", token).stdout
    shown = run("show", str(model)).stdout
    assert f"sampling  {line}\n" in shown
    assert "not used  min_p of generation_config.json: -3 is out of range (0 to 1)\n" in shown


def test_the_document_made_while_the_model_loads_is_made_again(model: Path, engine: ScriptedEngine) -> None:
    with scripted_app(model, engine) as server, server.client() as client:
        serving, server.daemon.serving = server.daemon.serving, None
        client.get("/openapi.json")
        assert server.app.state.documents is None
        server.daemon.serving = serving
        client.get("/openapi.json")
        assert server.app.state.documents is not None
