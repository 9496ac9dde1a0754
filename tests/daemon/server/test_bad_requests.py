"""Whatever is sent to a route that takes a body, the answer is an error of the API that was called, and never a 500.
And the routes of llama.cpp's server for tokens and templates."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import ANY

import httpx
import ollama
import pytest
from anthropic.types import message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from diskprefix.daemon.api import parsed_request
from diskprefix.daemon.api.anthropic import MessagesRequest
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.api.responses import ResponseRequest
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.ollama.ollama_dialect import OllamaOptions
from diskprefix.daemon.server import body as server_body
from diskprefix.daemon.server import limits, model_routes
from tests.daemon.server.chat_model import POSITIONS, VOCAB_SIZE
from tests.daemon.server.daemon_process import wait_until
from tests.daemon.server.scripted import ScriptedEngine, scripted_app

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"model": None, "input": "hello"},
    "/v1/messages": {"max_tokens": 8, "messages": [USER]},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "hello"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
    "/api/embed": {"input": "hello"},
    "/api/show": {},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [USER]},
}
"""Every POST route, and a body that it takes."""
DIALECTS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"]
BODIES = [*DIALECTS, "/v1/completions", "/api/generate", "/tokenize", "/detokenize"]
"""The routes whose bodies differ."""
JSON = {"content-type": "application/json"}
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def client(agent_model: Path, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch, scripted_app(agent_model, engine) as server, server.client() as client:
        patch.setattr(limits, "MAX_BODY_BYTES", MAX_BYTES)
        yield client


def error_of(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose body has the form of the API that the route belongs to."""
    body: dict[str, Any] = answer.json()
    if path.startswith("/api/"):
        assert body.keys() == {"error"}
        assert "\n" not in body["error"]
        match = re.match(r"[\w.]+(?=: )|model(?= ')", body["error"])
        return {"param": match and match[0], "code": ANY, "message": body["error"]}
    error: dict[str, Any] = body["error"]
    assert "\n" not in error["message"]
    if not path.startswith("/v1/messages"):
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        return error
    assert body.keys() == {"type", "error", "request_id"}
    assert error.keys() == {"type", "message", "details"}
    return {"param": error["details"]["param"], "code": error["details"]["error_code"], "message": error["message"]}


def test_the_table_has_every_route_that_takes_a_body(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    routes = {path for path, methods in paths.items() if "post" in methods}
    # The first needs a tokenizer with tags: tests of `infill` have its bodies. The second takes no body.
    assert routes - {"/infill", "/page-token"} == ROUTES.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_the_body_of_the_table_is_taken(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=ROUTES[path]).status_code == 200


def in_objects(path: str, value: str) -> bytes:
    return (json.dumps(ROUTES[path])[:-1] + f', "unknown": {{"a": [{value}]}}}}').encode()


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    "content",
    ["", " \n", "{", "[]", "null", "5", '"text"', "[" * 50_000, "{}}", "{'a': 1}", '{"a": "\\ud8"}', '{"a": 1,}'],
    ids=lambda content: content[:12],
)
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, path: str, content: str) -> None:
    answer = client.post(path, content=content.encode(), headers=JSON)
    assert (answer.status_code, error_of(path, answer)["code"]) == (400, "invalid_json")


NOT_FINITE = ["NaN", "-Infinity", "Infinity", "1e400", "-1E+999", "9" * 400 + ".5"]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    ("value", "status", "param"),
    [
        *((value, 400, "unknown.a.0") for value in NOT_FINITE),
        ("9" * 5000, 400, None),
        *((value, 200, None) for value in ("1e30", "123456789" * 30, '"NaN is e999"', '{"a":' * 100 + "1" + "}" * 100)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_number_too_large_or_not_finite_is_refused_anywhere(
    client: httpx.Client, path: str, value: str, status: int, param: str | None
) -> None:
    answer = client.post(path, content=in_objects(path, value), headers=JSON)
    assert answer.status_code == status
    if status == 400:
        error = error_of(path, answer)
        assert (error["param"], error["code"]) == (param, "invalid_value" if param else "invalid_json")


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("value", ['{"a":' * 250 + "1" + "}" * 250, "[" * 50_000], ids=["objects", "lists"])
def test_a_value_nested_too_deeply_is_refused_by_its_path(client: httpx.Client, path: str, value: str) -> None:
    answer = client.post(path, content=in_objects(path, value), headers=JSON)
    assert answer.status_code == 400
    message = error_of(path, answer)["message"]
    assert message.startswith("unknown.a.0.")
    assert message.endswith("has more than 200 objects and lists inside each other")


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "application/x-www-form-urlencoded"])
def test_json_is_read_from_curl_and_after_a_byte_order_mark(client: httpx.Client, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    for mark in ("", "\ufeff"):
        content = mark + json.dumps(ROUTES["/v1/messages"])
        assert client.post("/v1/messages", content=content.encode(), headers=headers).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b'{"a": "\xff"}', JSON, 400, "invalid_utf8"),
        (b"\xff\xfe{\x00}\x00", JSON, 400, "invalid_utf8"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain", "accept": "text/html,*/*"}, 415, "unsupported_media_type"),
        (b"{}", {"content-type": "text/plain", "upgrade-insecure-requests": "1"}, 415, "unsupported_media_type"),
        (b"{}", {"content-type": "text/plain", "sec-fetch-mode": "navigate"}, 415, "unsupported_media_type"),
        (b"{}", {"content-type": "text/plain", "origin": "null"}, 403, "forbidden"),
        (b"{}", {"content-type": "text/plain", "sec-fetch-site": "cross-site"}, 403, "forbidden"),
        (b"{}", {"content-type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
        (b"{}", JSON | {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b'{"a": "' + b"x" * MAX_BYTES + b'"}', JSON, 413, "body_too_large"),
        (b"{}", JSON | {"origin": "http://elsewhere"}, 403, "forbidden"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(
    client: httpx.Client, path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    answer = client.post(path, content=content, headers=headers)
    assert (answer.status_code, error_of(path, answer)["code"]) == (status, code)


FETCH = {"content-type": "text/plain;charset=UTF-8", "accept": "*/*", "sec-fetch-mode": "cors"}
"""What `fetch` of Node.js sends for a text."""


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("is_own_page", [False, True])
def test_json_as_plain_text_is_read_from_programs_and_own_pages(
    client: httpx.Client, path: str, is_own_page: bool
) -> None:
    own = {"origin": str(client.base_url).rstrip("/"), "sec-fetch-site": "same-origin"} if is_own_page else {}
    content = json.dumps(ROUTES[path]).encode()
    assert client.post(path, content=content, headers=FETCH | own).status_code == 200


NEARLY_RIGHT = [
    ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
    ("POST", "//v1/chat/completions", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
    ("POST", "/v1//messages/", "/v1/messages"),
    ("POST", "/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
    ("POST", "/chat/completions", "/v1/chat/completions"),
    ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
    ("POST", "/V1/Chat/Completions", "/v1/chat/completions"),
    ("POST", "/v2/responses", "/v1/responses"),
    ("POST", "/v1/api/chat", "/api/chat"),
    ("POST", "/api/chat/", "/api/chat"),
    ("GET", "/v1/models/", "/v1/models"),
    ("GET", "/v1/", "/v1/models"),
    ("POST", "/completion", "/v1/completions"),
    ("GET", "/health/", "/health"),
]


@pytest.mark.parametrize(("method", "path", "meant"), NEARLY_RIGHT)
def test_an_address_that_is_nearly_right_names_the_right_one(
    client: httpx.Client, method: str, path: str, meant: str
) -> None:
    # A client would take two slashes at the beginning for a name of a host.
    answer = client.request(method, str(client.base_url).rstrip("/") + path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    assert f"no such route: {method} {path}; did you mean {meant}?" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "door"),
    [
        ("/v1/completions", {"messages": [USER]}, "a body with messages is for /v1/chat/completions"),
        ("/v1/chat/completions", {"prompt": "hello"}, "a body with prompt is for /v1/completions"),
        ("/v1/chat/completions", {"input": "hello"}, "a body with input is for /v1/responses"),
        ("/v1/messages", {"prompt": "hello", "max_tokens": 5}, "a body with prompt is for /v1/completions"),
        ("/v1/embeddings", {"messages": [USER]}, "a body with messages is for /v1/chat/completions"),
    ],
)
def test_a_body_of_another_api_is_shown_its_door(
    client: httpx.Client, path: str, body: dict[str, Any], door: str
) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, door in answer.text) == (400, True)


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing/at/all", "/v1/chat/completion"])
def test_an_address_that_is_like_no_other_names_the_page_of_all(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404,
        f"no such route: POST {path}; /docs lists all routes",
    )


LONG = {"role": "user", "content": "Name three rivers. " * 4_000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [LONG]}),
        ("/v1/responses/input_tokens", {"input": [LONG]}),
    ],
)
def test_the_tokens_of_a_prompt_above_the_positions_are_counted(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    messages = [body["messages" if "messages" in body else "input"][0]]
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    tokens = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
    assert answer.json()["input_tokens"] == len(tokens) > POSITIONS
    refused = client.post("/v1/chat/completions", json={"messages": messages})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


EMPTY = [
    ("/v1/chat/completions", {"messages": [USER]}, {"stop": ""}),
    ("/v1/chat/completions", {"messages": [USER]}, {"stop": ["", "x"]}),
    ("/v1/completions", {"prompt": "hello"}, {"stop": [""]}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5}, {"stop_sequences": [""]}),
    ("/api/chat", {"messages": [USER], "stream": False}, {"options": {"stop": ""}}),
    ("/api/chat", {"messages": [USER], "stream": False}, {"keep_alive": ""}),
    ("/api/generate", {"prompt": "hello", "stream": False}, {"keep_alive": "", "options": {"stop": [""]}}),
    ("/v1/chat/completions", {"messages": [USER]}, {"reasoning_effort": ""}),
    ("/v1/chat/completions", {"messages": [USER]}, {"reasoning_effort": "ultra"}),
    ("/v1/chat/completions", {"messages": [USER]}, {"reasoning": {"effort": "ultra"}}),
    ("/v1/responses", {"input": "hello"}, {"reasoning": {"effort": "ultra"}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5}, {"output_config": {"effort": "ultra"}}),
]


@pytest.mark.parametrize(("path", "body", "more"), EMPTY)
def test_empty_values_and_unknown_efforts_are_accepted(
    client: httpx.Client, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    plain, answer = client.post(path, json=body), client.post(path, json=body | more)
    assert plain.status_code == answer.status_code == 200, answer.text


def test_a_content_type_that_is_empty_is_said_to_be_so(client: httpx.Client) -> None:
    answer = client.post("/tokenize", content=b"{}", headers={"content-type": ""})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        415,
        "the content-type is empty; send application/json",
    )


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_client_that_only_sends_still_gets_the_refusal(client: httpx.Client, connection: str) -> None:
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: {connection}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=30) as sending:
        sending.sendall(head.encode())
        for _ in range(60):
            sending.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        sending.sendall(b"0\r\n\r\n")
        assert sending.recv(100).startswith(b"HTTP/1.1 413 ")


BOTH = "Content-Length: 5", "Transfer-Encoding: chunked"
FRAMINGS = [
    ("1.1", BOTH),
    ("1.1", BOTH[::-1]),
    ("1.1", ("content-length: 0", "TRANSFER-ENCODING: Chunked")),
    ("1.0", BOTH),
    ("1.0", BOTH[1:]),
    ("1.1", ("Content-Length: 5", "Content-Length: 6")),
    ("1.1", ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked")),
]
"""The version and headers of requests whose end two servers may see at different places."""
REFUSED = b"Invalid HTTP request received."


def refusals_of(port: int, version: str, headers: Sequence[str]) -> bytes:
    """Returns the answers to such a request and to the next one on the connection."""
    own = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = "\r\n".join((f"POST /tokenize HTTP/{version}", "Host: localhost", *headers, "", ""))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode() + b"0\r\n\r\n" + own)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(("version", "headers"), FRAMINGS)
def test_a_request_with_an_ambiguous_end_is_refused_with_the_rest(
    client: httpx.Client, version: str, headers: Sequence[str]
) -> None:
    answer = refusals_of(client.base_url.port or 0, version, headers)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (answer.count(b"HTTP/1.1"), REFUSED in answer) == (1, True)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_wrong_method_is_told_in_the_form_of_the_api(client: httpx.Client, path: str, method: str) -> None:
    answer = client.request(method, path)
    # `GET /v1/responses/ID` is a route, and these may be ids.
    is_id = path.endswith(("/input_tokens", "/compact"))
    assert answer.status_code == (404 if is_id and method != "PUT" else 405)
    error_of(path, answer)


SCHEMA = {"type": "weird"}
MEDIA = [{"type": "input_file", "file_data": "x"}, {"type": "input_image", "image_url": "http://x"}]
LATE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
    ),
    ("/v1/chat/completions", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "river " * 3000}]}, "messages"),
    ("/v1/completions", {"prompt": [5] * 2048}, "prompt"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.schema"),
    *(("/v1/responses", {"input": [{"role": "user", "content": [part]}]}, "input.0.content.0") for part in MEDIA),
    ("/v1/responses/compact", {"stream": True}, "stream"),
    ("/v1/responses/compact", {"input": []}, "input"),
    ("/v1/responses/input_tokens", {"input": []}, "input"),
    ("/api/chat", {"format": SCHEMA}, "format"),
    ("/api/chat", {"options": {"num_ctx": 2}}, "options.num_ctx"),
    ("/api/generate", {"prompt": "river " * 3000}, "prompt"),
    ("/api/generate", {"suffix": "x"}, "suffix"),
    ("/api/embed", {"input": ""}, "input"),
    ("/tokenize", {"content": None}, "content"),
    ("/tokenize", {"content": 5}, "content"),
    ("/tokenize", {"parse_special": False}, "parse_special"),
    ("/detokenize", {"tokens": None}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens.1"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ("/apply-template", {"messages": []}, "messages"),
]
"""What is found out when the prompt is rendered and the constraint compiled."""


@pytest.mark.cases(28)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param"), LATE)
def test_a_missing_ability_is_a_400_before_anything_is_queued(
    client: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    before = len(engine.requests)
    is_stream = {"stream": True} if stream and path in BODIES else {}
    answer = client.post(path, json=ROUTES[path] | is_stream | fields)
    assert (answer.status_code, error_of(path, answer)["param"]) == (400, param)
    assert len(answer.text) < 500
    assert len(engine.requests) == before


WRONG: list[Any] = [-1, 1.5, True, "\0", "9" * 50, [], [{}], {"a": {}}, 2**64]


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", BODIES)
def test_every_field_takes_a_value_or_refuses_it_by_its_name(client: httpx.Client, path: str) -> None:
    document = client.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    refused = set()
    for field in fields:
        for value in WRONG:
            answer = client.post(path, json=ROUTES[path] | {field: value})
            if answer.status_code == 200:
                continue
            assert answer.status_code in (400, 404), (field, value, answer.text)
            error = error_of(path, answer)
            # A field may be right and not go together with another one.
            assert error["param"], (field, value, error)
            if error["param"].partition(".")[0] == field:
                refused.add(field)
    assert fields.keys() - refused <= {"context_management", "metadata", "thread", "chat_template_kwargs"}


@pytest.mark.parametrize("depth", [201, 500, 900, 100_000])
@pytest.mark.parametrize("begin", ["[", '{"a":'])
def test_arguments_that_are_nested_deeply_are_no_failure_of_the_daemon(
    client: httpx.Client, depth: int, begin: str
) -> None:
    arguments = (begin * depth)[:60_000]
    if len(arguments) == depth * len(begin):
        arguments += "1" + {"[": "]", '{"a":': "}"}[begin] * depth
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = client.post("/v1/chat/completions", json={"messages": messages, "tools": [function]})
    assert answer.status_code in (200, 400), answer.text


def test_the_log_does_not_repeat_wrong_values(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "diskprefix"):
        answer = client.post("/v1/chat/completions", json={"messages": [USER], "temperature": "my secret words"})
        # The line is written when the answer has been sent.
        wait_until(lambda: "temperature: must be a valid number" in caplog.text, "the line of the request")
    assert "my secret words" in answer.json()["error"]["message"]
    assert "secret" not in caplog.text


def test_the_log_names_few_of_the_tools_that_are_left_out(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed_request, "_logged", defaultdict(set))
    for start in (0, 500):
        tools = [{"type": f"made_up_{index}"} for index in range(start, start + 500)]
        with caplog.at_level(logging.INFO, "diskprefix"):
            assert client.post("/v1/responses", json={"input": "hello", "tools": tools}).status_code == 200
    assert caplog.text.count("made_up_") == 32


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/chat/completions", {"max_tokns": 5}, "max_tokns (meant: max_tokens?)"),
        ("/v1/messages", {"temprature": 0, "thinking": {"type": "disabled", "budget_token": 1}}, None),
        ("/v1/responses", {"reasoning": {"efort": "low"}}, "reasoning.efort (meant: reasoning.effort?)"),
        ("/api/chat", {"options": {"num_predct": 5}}, "options.num_predct (meant: options.num_predict?)"),
        ("/api/chat", {"options": {"num_ctx": 1 << 20}}, f"more than this model takes here: {1 << 20} of {POSITIONS}"),
    ],
)
def test_a_misspelt_field_and_a_large_context_are_named_once_in_the_log(
    client: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    said: str | None,
) -> None:
    monkeypatch.setattr(parsed_request, "_logged", defaultdict(set))
    with caplog.at_level(logging.INFO, "diskprefix"):
        for _ in range(2):
            assert client.post(path, json=ROUTES[path] | {"stream": False} | fields).status_code == 200
    of_two = "temprature (meant: temperature?), thinking.budget_token (meant: thinking.budget_tokens?)"
    assert caplog.text.count(said or of_two) == 1


@pytest.mark.parametrize(
    ("body", "known"),
    [
        (ChatRequest, completion_create_params.CompletionCreateParamsStreaming),
        (ResponseRequest, response_create_params.ResponseCreateParamsStreaming),
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (OllamaOptions, ollama.Options),
    ],
)
def test_no_field_of_an_api_is_taken_for_a_misspelt_one(body: type[BaseModel], known: type) -> None:
    names = get_type_hints(known) if body is not OllamaOptions else ollama.Options.model_fields
    assert len(names) > 15
    assert [(name, meant) for name in names if (meant := server_body._meant(body, name)) not in (None, name)] == []


TEXT = "<|im_start|>user\nName three rivers 🦀<|im_end|>"


def tokens_of(client: httpx.Client, content: str, **fields: Any) -> Any:
    return client.post("/tokenize", json={"content": content} | fields).json()["tokens"]


def test_a_text_comes_back_from_its_tokens(client: httpx.Client) -> None:
    tokens = tokens_of(client, TEXT)
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": TEXT}
    assert tokens_of(client, "") == []


def test_a_text_to_tokenize_has_a_largest_size_in_bytes(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "_MAX_BYTES", 10)
    assert tokens_of(client, "\u00e9" * 5)
    refused = client.post("/tokenize", json={"content": "\u00e9" * 6})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content")


def test_pieces_are_the_texts_of_the_tokens_and_each_is_made_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    detokenize = PromptRenderer.detokenize

    def counted(self: PromptRenderer, token_ids: list[int]) -> str:
        made.append(token_ids)
        return detokenize(self, token_ids)

    monkeypatch.setattr(PromptRenderer, "detokenize", counted)
    tokens = tokens_of(client, "hello " * 50, with_pieces=True)
    assert "".join(token["piece"] for token in tokens) == "hello " * 50
    assert [token["id"] for token in tokens] == tokens_of(client, "hello " * 50)
    assert len(made) == len({token["id"] for token in tokens}) < len(tokens)


@pytest.mark.parametrize("said", [[], [{"role": "assistant", "content": "The answer is "}]])
def test_a_template_is_applied_as_for_a_reply(client: httpx.Client, engine: ScriptedEngine, said: list[Any]) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, USER, *said]}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert prompt.endswith("<|im_start|>assistant\n" + "".join(message["content"] for message in said))
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[-1].prompt.token_ids.tolist() == tokens_of(client, prompt)
