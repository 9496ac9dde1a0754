"""A daemon over the library itself: clients, schemas, calls, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

pytest.importorskip("llama_cpp")

from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from diskprefix.daemon.engine.idle import ahead_jobs
from tests.daemon.server.agent_model import TEMPLATE
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import CHAT, DaemonProcess, clean_environment, reply_to, serve_flags, wait_until
from tests.daemon.server.scripted import events_of, real_app

MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers and tell me where each of them begins."}]
FIELDS: dict[str, Any] = {"model": "agent", "messages": MESSAGES, "seed": 5}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "day": {"type": "boolean"}},
    "required": ["city", "day"],
    "additionalProperties": False,
}


class City(BaseModel):
    city: Literal["Oslo", "Rome"]
    day: bool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes calls."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "agent", chat_template=TEMPLATE, runtime="llama")


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    flags = serve_flags(model, tmp_path_factory.mktemp("daemon") / "kv", runtime="llama")
    with DaemonProcess(*flags) as process:
        yield process.wait_ready()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def openai(daemon: DaemonProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(daemon: DaemonProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
def test_a_reply_keeps_its_schema_streamed_or_not(client: httpx.Client, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    body = FIELDS | {"seed": seed, "response_format": wanted, "reasoning_effort": "none", "temperature": 1.5}
    whole = reply_to(client, body)["choices"][0]["message"]["content"]
    chunks = events_of(client.post(CHAT, json=body | {"stream": True}).raise_for_status().text)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    City.model_validate_json(whole)


def test_a_schema_keeps_its_reply_after_a_restore(client: httpx.Client) -> None:
    body = FIELDS | {"structured_outputs": {"json": SCHEMA}, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    cold = reply_to(client, body, scope="off")
    warm = [reply_to(client, body, scope="full") for _ in range(2)]
    assert warm[-1]["prefix_cache"]["restored"] > 0
    assert [reply["choices"] for reply in warm] == [cold["choices"]] * 2


def test_the_official_openai_client_gets_calls_streamed_or_not(openai: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    asked: dict[str, Any] = FIELDS | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    asked["reasoning_effort"] = "none"
    reply = openai.chat.completions.create(**asked)
    [call] = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    City.model_validate_json(call.function.arguments)
    assert reply.choices[0].finish_reason == "tool_calls"
    del asked["tool_choice"]
    with openai.chat.completions.stream(**asked, tool_choice="required") as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == (
        "weather",
        json.loads(call.function.arguments),
    )


def test_the_official_anthropic_client_gets_calls_streamed_or_not(anthropic: Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {
        "model": "agent",
        "max_tokens": 200,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    asked |= {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = anthropic.messages.create(**asked)
    [block] = [block for block in message.content if block.type == "tool_use"]
    assert block.name == "weather"
    City.model_validate(block.input)
    assert message.stop_reason == "tool_use"
    with anthropic.messages.stream(**asked) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == block.input


def test_choices_seeds_stops_and_echo_are_those_of_the_same_engine_without_the_cache(client: httpx.Client) -> None:
    prompt = "Name three rivers and tell me where each of them begins. " * 3
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "seed": 3, "n": 3, "logprobs": 2}
    cold, warm, again = (reply_to(client, body, "/v1/completions", scope=scope) for scope in ("off", "full", "full"))
    assert again["prefix_cache"]["restored"] > 0
    assert cold["choices"] == warm["choices"] == again["choices"]
    assert len({choice["text"] for choice in cold["choices"]}) > 1
    echoed = reply_to(client, body | {"n": 1, "echo": True, "temperature": 0}, "/v1/completions")["choices"][0]
    plain = reply_to(client, body | {"n": 1, "temperature": 0}, "/v1/completions")["choices"][0]
    assert echoed["text"] == prompt + plain["text"]
    stop = plain["text"][2:4]
    stopped = reply_to(client, body | {"n": 1, "temperature": 0, "stop": [stop]}, "/v1/completions")["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"].partition(stop)[0], "stop")


def picture() -> str:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (32, 32)).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


SENT = f"data:image/png;base64,{picture()}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": picture()}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SENT}}]}]}),
    "messages": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": SENT}]}]},
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "What is it?", "images": [picture()]}]}),
    "embeddings": ("/v1/embeddings", {"input": "rivers"}),
    "ollama's embeddings": ("/api/embed", {"input": "rivers"}),
}


@pytest.mark.parametrize(("path", "body"), REFUSED.values(), ids=REFUSED)
def test_pictures_and_embeddings_are_refused_in_one_line_of_the_dialect(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json={"model": "agent"} | body)
    error = answer.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert answer.status_code == 400, answer.text
    assert re.search(r"\bmodel\b.*\b(images?|pictures?|embeddings)\b", message), message
    assert "\n" not in message
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    elif path.startswith("/v1"):
        assert (error["type"], "param" in error, "code" in error) == ("invalid_request_error", True, True)


def test_the_daemon_says_what_computes_and_what_is_exact(client: httpx.Client) -> None:
    reply_to(client, FIELDS | {"max_tokens": 2})
    props = client.get("/props").json()
    assert props["full_cache"]["state"]["state"] == "ok"
    assert client.get("/v1/models").json()["data"][0]["capabilities"] == ["completion", "chat", "tool_use", "reasoning"]
    assert "grid" in json.dumps(props)
    metrics = client.get("/metrics").text
    assert re.search(r'^diskprefix_requests_total\{outcome="completed"\} [1-9]', metrics, re.MULTILINE)
    assert re.search(r'^diskprefix_requests_total\{outcome="failed"\} 0', metrics, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "begin"),
    [
        (("--draft-model", "MODEL"), "--draft-model"),
        (("--speculative", "ngram"), "--speculative"),
        (("--dtype", "float32"), "--dtype"),
        (("--weights", "native"), "--weights"),
        (("--kernels", "torch"), "--kernels"),
        (("--gpu-layers", "2"), "--gpu-layers"),
    ],
)
def test_a_setting_that_the_library_lacks_ends_the_start_in_one_line(
    model: Path, tmp_path: Path, flags: tuple[str, str], begin: str
) -> None:
    given = [str(model) if part == "MODEL" else part for part in flags]
    served = [*serve_flags(model, tmp_path / "kv", runtime="llama"), *given]
    with DaemonProcess(*served, environment=clean_environment()) as refused:
        assert refused.process.wait(120) == 2
        refused.stop()
    errors = [line for line in refused.lines if line.startswith("error: ")]
    assert errors == refused.lines[-1:], refused.log
    assert errors[0].startswith(f"error: {begin}: ")


def test_a_reply_is_computed_again_in_idle_time_and_restored_in_the_next_turn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    monkeypatch.setattr(ahead_jobs, "runs_on_battery", lambda: False)
    body: dict[str, Any] = {"max_tokens": 64, "temperature": 0, "logit_bias": {"0": -100, "2": -100}, "logprobs": True}

    def turns(ahead: str) -> list[dict[str, Any]]:
        settings: dict[str, Any] = {"runtime": "llama", "ahead": ahead, "kv_cache_gate": "off"}
        with real_app(model, tmp_path / ahead, **settings) as server, server.client() as client:
            first = reply_to(client, body | {"messages": MESSAGES}, scope="full")
            wait_until(lambda: server.engine.ahead.wait_s is None, "nothing is left to compute")
            said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            asked = body | {"messages": [*MESSAGES, said, {"role": "user", "content": "And lakes?"}]}
            return [first, reply_to(client, asked, scope="full")]

    (first, warm), (_, computed) = turns("auto"), turns("off")
    restored = [reply["prefix_cache"]["restored"] for reply in (warm, computed)]
    num_tokens = first["usage"]["total_tokens"] - 1
    assert num_tokens - 16 < restored[0] <= num_tokens
    assert restored[1] <= first["usage"]["prompt_tokens"]
    assert warm["choices"] == computed["choices"]
