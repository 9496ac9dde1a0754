"""Two turns of a chat over HTTP, with the state of the reply kept between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.daemon_process import reply_to
from tests.server.scripted import AppServer, real_app

REPLY = 60
QUESTION = "Name three rivers and tell me where each of them begins and where it ends. "


@pytest.fixture
def server(chat_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AppServer]:
    """The real engine; the parameter is the daemon's own setting."""
    with real_app(chat_model, tmp_path / "kv", kv_memory_entries=0, reuse_generated=request.param) as server:
        yield server


def say(server: AppServer, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """A greedy reply of digits: their text is tokenised again as it was generated."""
    digits = server.engine.tokenizer.convert_tokens_to_ids(["3", "5", "7", "9"])
    bias = {str(digit): 100 for digit in digits}
    body = {"messages": messages, "max_tokens": REPLY, "temperature": 0, "logit_bias": bias}
    with server.client() as client:
        return reply_to(client, body, **{"scope": "full"} | options)


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
