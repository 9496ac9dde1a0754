"""The routes of llama.cpp's server for tokens and templates, over a real tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from diskprefix.chat.renderer import PromptRenderer
from tests.server.chat_model import VOCAB_SIZE
from tests.server.scripted import ScriptedEngine

TEXT = "<|im_start|>user\nName three rivers 🦀<|im_end|>"


def test_a_text_comes_back_from_its_tokens(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": TEXT}).json()["tokens"]
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": TEXT}
    assert client.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


def test_pieces_are_the_texts_of_the_tokens(client: httpx.Client) -> None:
    pieces = client.post("/tokenize", json={"content": "Name three", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "Name three"
    tokens = client.post("/tokenize", json={"content": "Name three"}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens


def test_a_template_is_applied_as_for_a_reply(client: httpx.Client, engine: ScriptedEngine) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    tokens = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.requests[-1].prompt.token_ids.tolist() == tokens


def test_a_prefilled_reply_ends_the_prompt(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The answer is "}]
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nThe answer is ")


def test_each_piece_is_made_once(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    detokenize = PromptRenderer.detokenize

    def counted(self: PromptRenderer, token_ids: list[int]) -> str:
        made.append(token_ids)
        return detokenize(self, token_ids)

    monkeypatch.setattr(PromptRenderer, "detokenize", counted)
    tokens = client.post("/tokenize", json={"content": "hello " * 50, "with_pieces": True}).json()["tokens"]
    assert "".join(token["piece"] for token in tokens) == "hello " * 50
    assert len(made) == len({token["id"] for token in tokens}) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "\u00e9" * ((1 << 19) + 1)}, "content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(client: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.text) < 500
