"""Whatever is sent to a route that takes a body, the answer is an error of the API that was called, and never a 500."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.api import asked
from diskprefix.server import limits
from tests.server.daemon_process import wait_until
from tests.server.scripted import scripted_app

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"input": "hello"},
    "/v1/messages": {"max_tokens": 8, "messages": [USER]},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "hello"},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [USER]},
}
"""Every POST route, and a body that it takes."""
DIALECTS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
BODIES = [*DIALECTS, "/v1/completions", "/tokenize", "/detokenize"]
"""The routes whose bodies differ."""
JSON = {"content-type": "application/json"}
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def client(agent_model: Path) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch, scripted_app(agent_model) as server, server.client() as client:
        patch.setattr(limits, "MAX_BODY_BYTES", MAX_BYTES)
        yield client


def error_of(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose body has the form of the API that the route belongs to."""
    body: dict[str, Any] = answer.json()
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
    found = {path for path, methods in paths.items() if "post" in methods}
    # It needs a tokenizer with tags: tests of `infill` have its bodies.
    assert found - {"/infill"} == ROUTES.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_the_body_of_the_table_is_taken(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=ROUTES[path]).status_code == 200


def in_objects(path: str, value: str) -> bytes:
    """A body with a field that is not known, in which objects hold `value`."""
    return (json.dumps(ROUTES[path])[:-1] + f', "unknown": {{"a": [{value}]}}}}').encode()


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    "content",
    ["", " \n", "{", "[]", "null", "5", '"text"', "[" * 50_000, "{}}", "{'a': 1}", '{"a": "\\ud800"}', '{"a": 1,}'],
    ids=lambda content: content[:12],
)
def test_what_is_no_json_object_is_refused(client: httpx.Client, path: str, content: str) -> None:
    answer = client.post(path, content=content.encode(), headers=JSON)
    assert answer.status_code == 400
    assert error_of(path, answer)["code"] == "invalid_json"


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity", "1e400", "-1E+999", "9" * 400 + ".5"])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(client: httpx.Client, path: str, value: str) -> None:
    answer = client.post(path, content=in_objects(path, value), headers=JSON)
    assert answer.status_code == 400
    assert error_of(path, answer)["param"] == "unknown.a.0"


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("value", ["9" * 5000, '{"a":' * 250 + "1" + "}" * 250], ids=["long", "deep"])
def test_what_is_too_long_or_too_deep_to_read_is_refused(client: httpx.Client, path: str, value: str) -> None:
    answer = client.post(path, content=in_objects(path, value), headers=JSON)
    assert answer.status_code == 400
    assert error_of(path, answer)["code"] == "invalid_json"


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("value", ["1e30", "123456789" * 30, '"NaN is e999"', '{"a":' * 100 + "1" + "}" * 100])
def test_what_only_looks_like_it_is_taken(client: httpx.Client, path: str, value: str) -> None:
    assert client.post(path, content=in_objects(path, value), headers=JSON).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b'{"a": "\xff"}', JSON, 400, "invalid_utf8"),
        (b"\xff\xfe{\x00}\x00", JSON, 400, "invalid_utf8"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
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
    assert answer.status_code == status
    assert error_of(path, answer)["code"] == code


def test_a_body_in_chunks_of_unknown_length_has_the_same_bound(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=iter([b"x" * (MAX_BYTES // 4)] * 5), headers=JSON)
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_wrong_method_is_told_in_the_form_of_the_api(client: httpx.Client, path: str, method: str) -> None:
    answer = client.request(method, path)
    # `GET /v1/responses/ID` is a route, and these may be ids.
    is_id = path.endswith(("/input_tokens", "/compact"))
    assert answer.status_code == (404 if is_id and method != "PUT" else 405)
    error_of(path, answer)


WRONG: list[Any] = [-1, 1.5, True, "\0", "9" * 50, [], [{}], {"a": {}}, 2**64]


@pytest.mark.parametrize("path", BODIES)
def test_every_field_takes_a_value_or_refuses_it_by_its_name(client: httpx.Client, path: str) -> None:
    """Each value for each field of the document, beside what the route needs."""
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


@pytest.mark.parametrize("route", DIALECTS)
def test_names_of_tools_have_a_largest_length(client: httpx.Client, route: str) -> None:
    for length, status in ((128, 200), (129, 400)):
        name = "f" * length
        tool: dict[str, Any] = {"type": "function", "function": {"name": name}}
        if route == "/v1/responses":
            tool = {"type": "function", "name": name}
        elif route == "/v1/messages":
            tool = {"name": name, "input_schema": {"type": "object"}}
        answer = client.post(route, json=ROUTES[route] | {"tools": [tool]})
        assert answer.status_code == status, answer.text
    error = error_of(route, answer)
    assert error["param"] == ("tools.0.function.name" if route == DIALECTS[0] else "tools.0.name")
    assert "128" in error["message"]


def test_the_log_names_few_of_the_tools_that_are_left_out(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "_told", set())
    for start in (0, 500):
        tools = [{"type": f"made_up_{index}"} for index in range(start, start + 500)]
        with caplog.at_level(logging.INFO, "diskprefix"):
            assert client.post("/v1/responses", json={"input": "hello", "tools": tools}).status_code == 200
    assert caplog.text.count("made_up_") == 32
