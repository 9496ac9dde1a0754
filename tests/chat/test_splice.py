"""A rendered conversation tells of its replies. `test_replay.py` has whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diskprefix.chat.output.format import PlainText
from diskprefix.chat.splice import readings
from diskprefix.chat.template import end_texts


def test_a_special_token_in_what_a_template_writes_may_be_one_that_the_engine_does_not_show() -> None:
    read = readings(PlainText(), [], ["<|channel|>", "<|end|>"], "Hi<|end|><|channel|>Rain.<|end|>", 9, 25)
    assert [turn.content for turn in read] == ["<|channel|>Rain.", "Rain."]


def test_what_ends_a_reply_is_a_token_wherever_it_stands() -> None:
    def write(messages: Sequence[dict[str, Any]], _add_generation_prompt: bool) -> str:
        return "".join(f"{one['content']}<end>\n" for one in messages)

    added = {"<end>": 5, "<eos>": 6, "<other>": 7}
    assert end_texts(added, {6}, write, lambda text: added[text.partition("\n")[0]]) == {"<end>", "<eos>"}
    # A tokenizer that joins it with what follows.
    assert end_texts(added, {6}, write, lambda text: 6 if text.startswith("<eos>") else 99) == {"<eos>"}
