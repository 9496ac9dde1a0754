from __future__ import annotations

import pytest

from diskprefix.chat.fill_in import FillIn, fill_in_tags
from diskprefix.errors import InvalidRequest

GAP = FillIn("def f(", "):", "suffix", files=(("a.py", "x = 1"),), begun="a")


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>a",
        ),
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"],
            "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>a",
        ),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>def f(<｜fim▁hole｜>):<｜fim▁end｜>a"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]):[PREFIX]def f(a"),
    ],
)
def test_a_gap_is_written_with_the_tags_of_the_tokenizer(added: list[str], text: str) -> None:
    assert fill_in_tags(added, GAP).text_of(GAP) == text


def test_only_what_the_tokenizer_has_ends_a_reply() -> None:
    added = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    assert fill_in_tags(added, GAP).ends == ("<|fim_pad|>",)


def test_a_model_that_was_not_trained_for_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="names no tokens for filling in") as caught:
        fill_in_tags(["<|fim_prefix|>", "<|fim_suffix|>", "<|im_end|>"], GAP)
    assert caught.value.param == "suffix"
