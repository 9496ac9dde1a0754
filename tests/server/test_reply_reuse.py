"""Two turns of a chat over HTTP, with the state of the reply kept between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.app import load_engine
from tests.server.scripted import AppServer, started_app

CHAT = "/v1/chat/completions"
BLOCK = 16
REPLY = 60
QUESTION = "Name three rivers and tell me where each of them begins and where it ends. "


@pytest.fixture
def server(chat_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AppServer]:
    """The real engine; the parameter is the daemon's own setting."""
    settings: dict[str, Any] = {
        "kv_cache_dir": tmp_path / "kv",
        "block_size": BLOCK,
        "kv_cache_min_tokens": BLOCK,
        "kv_cache_budget": 64 << 20,
        "kv_memory_entries": 0,
        "reuse_generated": request.param,
    }
    with started_app(chat_model, load_engine, **settings) as server:
        server.wait_ready()
        yield server


def say(server: AppServer, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """A greedy reply of digits: their text is tokenised again as it was generated."""
    assert server.daemon.serving is not None
    tokenizer = server.daemon.serving.engine.tokenizer
    digits = tokenizer.convert_tokens_to_ids(["3", "5", "7", "9"])
    body = {
        "messages": messages,
        "max_tokens": REPLY,
        "temperature": 0,
        "logit_bias": {str(digit): 100 for digit in digits},
        "prefix_cache": {"scope": "full"} | options,
    }
    with server.client() as client:
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def two_turns(server: AppServer, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    messages = [{"role": "user", "content": QUESTION}]
    first = say(server, messages, **options)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And lakes?"}]
    return first, say(server, [{"role": m["role"], "content": m["content"]} for m in messages], **options)


@pytest.mark.parametrize(
    ("server", "options"),
    [(True, {}), (False, {}), (False, {"scope": "auto:8"}), (False, {"reuse_generated": True, "scope": "auto:8"})],
    indirect=["server"],
)
def test_the_second_turn_is_restored_into_the_reply(server: AppServer, options: dict[str, Any]) -> None:
    """All but the reply's last token, which nobody had to compute."""
    first, second = two_turns(server, **options)
    cache, reached = second["prefix_cache"], first["usage"]["prompt_tokens"] + REPLY - 1
    assert (cache["restored"], cache["source"]) == (reached, "disk")
    assert "exact" not in cache, "the model is exact at every token"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == reached
    assert two_turns(server, scope="off")[1]["choices"] == second["choices"]


@pytest.mark.parametrize("server", [True], indirect=True)
def test_props_and_openapi_tell_of_it(server: AppServer) -> None:
    with server.client() as client:
        assert client.get("/props").json()["settings"]["reuse_generated"] is True
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["PrefixCacheOptions"]["properties"]["reuse_generated"]["type"] == "boolean"
    assert schemas["CacheReply"]["properties"]["exact"]["type"] == "boolean"
