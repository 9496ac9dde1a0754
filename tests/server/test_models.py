"""The served model in `/v1/models`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.chat_model import POSITIONS, VOCAB_SIZE
from tests.server.scripted import ScriptedEngine, scripted_app


def card_of(chat_model: Path, **changes: Any) -> dict[str, Any]:
    engine = ScriptedEngine()
    with scripted_app(chat_model, engine) as server, server.client() as client:
        for name, value in changes.items():
            setattr(engine, name, value)
        [card] = client.get("/v1/models").json()["data"]
        assert client.get(f"/v1/models/{card['id']}").json() == card
        return dict(card)


def test_the_context_length_has_the_names_that_clients_look_for(chat_model: Path) -> None:
    card = card_of(chat_model, model_positions=4 * POSITIONS)
    names = ("max_model_len", "context_length", "context_window", "max_context_length")
    assert {card[name] for name in names} == {POSITIONS}
    assert card["meta"] == {"n_ctx_train": 4 * POSITIONS, "n_ctx": POSITIONS, "n_vocab": VOCAB_SIZE}


@pytest.mark.parametrize(
    ("changes", "capabilities", "modalities"),
    [
        ({}, {"completion", "chat", "tool_use"}, ["text"]),
        ({"tokenizer": SimpleNamespace(chat_template=None)}, {"completion"}, ["text"]),
        ({"tokenizer": SimpleNamespace(chat_template="{{ messages }}")}, {"completion", "chat"}, ["text"]),
        (
            {"media": SimpleNamespace(kinds={"image", "audio"})},
            {"completion", "chat", "tool_use", "vision", "audio"},
            ["text", "image", "audio"],
        ),
    ],
)
def test_capabilities_are_those_of_the_template_and_the_processor(
    chat_model: Path, changes: dict[str, Any], capabilities: set[str], modalities: list[str]
) -> None:
    card = card_of(chat_model, **changes)
    assert set(card["capabilities"]) == capabilities
    assert card["architecture"]["input_modalities"] == modalities
    assert ("tools" in card["supported_parameters"]) is ("tool_use" in capabilities)


def test_a_name_that_no_model_can_have_is_refused_and_not_repeated(chat_model: Path) -> None:
    with scripted_app(chat_model, ScriptedEngine()) as server, server.client() as client:
        asked = {"model": "x" * 10_000_000, "messages": [{"role": "user", "content": "Hi"}]}
        for answer in (client.post("/v1/chat/completions", json=asked), client.get(f"/v1/models/{'x' * 201}")):
            assert answer.status_code == 404
            assert "characters; 200 are the most" in answer.json()["error"]["message"]
            assert "xxx" not in answer.text
