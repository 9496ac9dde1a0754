"""Gaps that a model fills, through `/infill` and `/v1/completions`, against the same prompt written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon.server.chat_model import write_chat_model, write_tokenizer
from tests.daemon.server.scripted import AppServer, real_app

TAGS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
BY_HAND = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>"
GAP = {"input_prefix": BEFORE, "input_suffix": BEHIND, "n_predict": 12, "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "coder")
    write_tokenizer(folder, more_special_tokens=TAGS)
    with real_app(folder, tmp_path_factory.mktemp("kv"), kv_cache_gate="off") as server:
        yield server


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    return client.post(path, json=body).raise_for_status().json()


def test_infill_and_suffix_equal_a_handwritten_prompt(client: httpx.Client) -> None:
    reference = post(client, "/v1/completions", prompt=BY_HAND, max_tokens=12, temperature=0)
    expected = reference["choices"][0]["text"]
    assert expected
    suffixed = post(client, "/v1/completions", prompt=BEFORE, suffix=BEHIND, max_tokens=12, temperature=0)
    assert suffixed["choices"][0]["text"] == expected
    filled = post(client, "/infill", **GAP)
    assert (filled["content"], filled["stop"], filled["stop_type"]) == (expected, True, "limit")
    assert filled["tokens_evaluated"] == reference["usage"]["prompt_tokens"]
    assert filled["tokens_cached"] > 0
    assert filled["timings"]["cache_n"] + filled["timings"]["prompt_n"] == filled["tokens_evaluated"]
    with client.stream("POST", "/infill", json=GAP | {"stream": True}) as stream:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data")]
    assert "".join(event["content"] for event in events) == expected
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_a_gap_may_be_at_the_beginning(client: httpx.Client) -> None:
    reply = post(client, "/v1/completions", prompt="", suffix=BEHIND, max_tokens=2, temperature=0)
    assert reply["choices"][0]["text"]


def test_a_pad_ends_the_reply(client: httpx.Client) -> None:
    [pad] = post(client, "/tokenize", content="<|fim_pad|>", add_special=False)["tokens"]
    filled = post(client, "/infill", **GAP, logit_bias={str(pad): 100})
    assert (filled["content"], filled["stop_type"], filled["stopping_word"]) == ("", "word", "<|fim_pad|>")


def test_context_may_be_computed_ahead(client: httpx.Client) -> None:
    gap = GAP | {"input_prefix": "# another file\n" * 8 + BEFORE}
    assert post(client, "/infill", **gap | {"n_predict": 0})["content"] == ""
    assert post(client, "/infill", **gap)["tokens_cached"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", GAP | {"n_predict": -2}, "n_predict"),
        ("/infill", GAP | {"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ("/infill", GAP | {"n": 2}, "n"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "x"}, "suffix"),
    ],
)
def test_bad_bodies_are_refused_with_the_path(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
