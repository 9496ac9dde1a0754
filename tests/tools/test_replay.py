"""The replay benchmark, over one small conversation."""

from __future__ import annotations

import json
from typing import Any

from diskprefix.chat.renderer import PromptRenderer
from tests.chat.families.conversations import SYSTEM, WEATHER, result, user
from tests.chat.families.families import POSITIONS, named, tokenizer_of
from tests.chat.turns import TaggedFormat
from tools.programs.replay import FORMS, Bench, Conversation


def called(city: str) -> dict[str, Any]:
    arguments = json.dumps({"day": "today", "city": city}, separators=(",", ":"))
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": city, "type": "function", "function": function}],
    }


def test_with_replay_every_form_restores_what_the_unchanged_one_does_and_without_each_loses() -> None:
    tokenizer = tokenizer_of(named("qwen2.5"))
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS)
    renderer.output_format = TaggedFormat()
    messages = [SYSTEM, user("Hello"), called("Oslo"), result("rain", "Oslo"), called("Rome"), result("sun", "Rome")]
    last = {"role": "assistant", "content": "Rain and sun."}
    rows = Bench(renderer).shares([Conversation([*messages, last], [WEATHER])])
    assert [(row["replay"], row["client"]) for row in rows] == [(on, form) for on in (False, True) for form in FORMS]
    without, with_replay = rows[: len(FORMS)], rows[len(FORMS) :]
    assert {(row["turns"], row["whole"]) for row in with_replay} == {(2, 2)}
    assert len({row["restored"] for row in with_replay}) == 1
    assert all(row["whole"] == 0 for row in without)
    assert all(row["restored"] < with_replay[0]["restored"] for row in without)
