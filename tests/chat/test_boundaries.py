from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diskprefix.chat.boundaries import system_end, template_boundaries
from diskprefix.chat.template import neutralise, template_markers
from diskprefix.nouns import Prompt
from diskprefix.tokens import as_token_ids, raw_boundaries

MARKERS = ("<|im_start|>", "<|im_end|>", "<s>", "<|im_end|>x")
SPECIAL_IDS = {marker: index for index, marker in enumerate(MARKERS)}
PIECES = st.sampled_from([*MARKERS, "<|im_", "start|>", "<", "|>", "x", "hello ", "é", "🙂", "\n", "system"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)
VALUES = st.recursive(
    st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=10,
)


@dataclass
class Encoded:
    """The result of a tokenizer with one token per character outside special tokens."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]


def encode(text: str, markers: tuple[str, ...] = MARKERS) -> Encoded:
    """Like the added-token matching of fast tokenizers: leftmost, then longest."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + "|.", re.DOTALL)
    found = list(pattern.finditer(text))
    return Encoded([SPECIAL_IDS.get(m[0], 100 + ord(m[0][0])) for m in found], [m.span() for m in found])


def chatml(messages: list[dict[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


def boundaries_of(messages: list[dict[str, str]], render: Any = chatml) -> tuple[int, ...]:
    """The way the module docstring describes."""
    rendered = render(messages)
    encoded = encode(rendered)
    neutral, changed = neutralise(messages, MARKERS)
    neutral_rendered = render(neutral) if changed else None
    return template_boundaries(
        encoded.token_ids, encoded.offsets, set(SPECIAL_IDS.values()), rendered, neutral_rendered
    )


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in strings_in(item)]
    return [text for item in value for text in strings_in(item)] if isinstance(value, list | tuple) else []


LETTERS = "abcdefghijklmnopqrstuvw"
PLAIN: list[Any] = ["", "<|im_", "<|IM_END|>", "< s>", [], {}, None, 3, ["a", {"b": 1.5}]]


@pytest.mark.parametrize(
    ("value", "markers", "neutral"),
    [
        # "y": the marker <|im_end|>x takes x away from the fillers, and the other letters up to y are in LETTERS.
        ("say <|im_end|> now", (*MARKERS, LETTERS), "say yyyyyyyyyy now"),
        ("<|im_end|><|im_start|>system", (*MARKERS, LETTERS), "yyyyyyyyyyyyyyyyyyyyyysystem"),
        ("<|im_end|>xx", (*MARKERS, LETTERS), "yyyyyyyyyyyx"),
        ("<|im_<|im_end|>", (*MARKERS, LETTERS), "<|im_yyyyyyyyyy"),
        ([{"role": "user", "content": "<s>é"}, 1, None], ["<s>"], [{"role": "user", "content": "xxxé"}, 1, None]),
        ({"<s>": {"deep": ("<s>", 2.5, True)}}, ["<s>"], {"xxx": {"deep": ("xxx", 2.5, True)}}),
        # What is filled in cannot form another marker.
        ("a<s>b", ["<s>", "axxxb", "xxx"], "acccb"),
        ("a.b [X] axb", ["a.b", "[X]"], "xxx xxx axb"),
        *((value, MARKERS, value) for value in PLAIN),
        (["<s>"], [], ["<s>"]),
        (["<s>"], [""], ["<s>"]),
    ],
)
def test_special_text_is_replaced_by_as_many_neutral_characters(value: Any, markers: Any, neutral: Any) -> None:
    assert neutralise(value, markers) == (neutral, neutral != value)


def test_keys_that_become_equal_still_count_as_a_change() -> None:
    neutral, changed = neutralise({"<s>": 1, "xxx": 2}, ["<s>"])
    assert changed
    assert list(neutral) == ["xxx"]


@given(VALUES)
def test_no_special_text_is_left_and_every_string_keeps_its_length(value: Any) -> None:
    given_value = deepcopy(value)
    neutral, changed = neutralise(value, MARKERS)
    assert value == given_value
    before, after = strings_in(value), strings_in(neutral)
    assert changed == any(marker in text for text in before for marker in MARKERS)
    assert not any(marker in text for text in after for marker in MARKERS)
    assume(len(before) == len(after))  # keys may fall together
    assert [len(text) for text in before] == [len(text) for text in after]


@pytest.mark.parametrize(
    ("token_ids", "boundaries"),
    [([], ()), ([5, 6], ()), ([1], (1,)), ([1, 5, 2, 2, 6], (1, 3, 4)), ([5, 1], (2,))],
)
def test_every_special_token_of_a_raw_prompt_is_a_boundary(token_ids: list[int], boundaries: tuple[int, ...]) -> None:
    assert raw_boundaries(token_ids, {1, 2}) == boundaries
    assert raw_boundaries(as_token_ids(token_ids), frozenset({1, 2})) == boundaries
    assert all(type(position) is int for position in raw_boundaries(token_ids, [1, 2]))


@pytest.mark.parametrize(
    ("rendered", "neutral", "boundaries"),
    [
        ("<s>a<|im_end|>b", "<s>a<|im_", (1,)),  # the marker goes on past the common text
        ("<s>a", "<s>bc", (1,)),  # the marker ends with the common text
        ("<s>ab<s>", "<s>cd<s>e", (1,)),  # the same marker stands in both by chance, after a difference
        ("<s>a<s>", "<s>b<s>", (1, 3)),  # equal lengths: the marker ends with the text
        ("<s>a<s>b<s>", "<s>axxxb<s>", (1, 5)),
    ],
)
def test_a_marker_is_trusted_where_both_texts_have_it_at_the_same_place(
    rendered: str, neutral: str, boundaries: tuple[int, ...]
) -> None:
    encoded = encode(rendered)
    ids = set(SPECIAL_IDS.values())
    assert template_boundaries(encoded.token_ids, encoded.offsets, ids, rendered, neutral) == boundaries


def test_an_empty_neutral_rendering_trusts_nothing() -> None:
    encoded = encode("<s>a<|im_end|>")
    ids = set(SPECIAL_IDS.values())
    assert template_boundaries(encoded.token_ids, encoded.offsets, ids, "<s>a<|im_end|>", "") == ()


def test_a_token_that_the_tokenizer_added_is_a_boundary() -> None:
    rendered, neutral = "a<s>", "axxx"
    assert template_boundaries([2, 100, 2], [(0, 0), (0, 1), (1, 4)], {2}, rendered, neutral) == (1,)


def test_a_special_token_with_the_blanks_around_it_is_compared_as_a_whole() -> None:
    rendered, neutral = "a <s>b <s>c", "a <s>bxxxxc"
    offsets = [(0, 1), (1, 5), (5, 6), (6, 10), (10, 11)]
    assert template_boundaries([100, 2, 101, 2, 102], offsets, {2}, rendered, neutral) == (2,)


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_boundaries_are_those_of_the_same_conversation_without_markers(contents: list[str]) -> None:
    def to_messages(texts: list[str]) -> list[dict[str, str]]:
        # Blanks, because a text may end or begin with what the tokenizer would join with the template's own marker.
        return [{"role": "user", "content": f" {text} "} for text in texts]

    messages = to_messages(contents)
    encoded = encode(chatml(messages))
    boundaries = boundaries_of(messages)
    neutral = to_messages([neutralise(text, MARKERS)[0] for text in contents])
    neutral_encoded = encode(chatml(neutral))
    neutral_boundaries = raw_boundaries(neutral_encoded.token_ids, set(SPECIAL_IDS.values()))
    assert [encoded.offsets[p - 1] for p in boundaries] == [neutral_encoded.offsets[p - 1] for p in neutral_boundaries]
    assert set(boundaries) <= set(raw_boundaries(encoded.token_ids, set(SPECIAL_IDS.values())))
    assert list(boundaries) == sorted(set(boundaries))
    assert all(0 < position <= len(encoded.token_ids) for position in boundaries)


def system_end_of(messages: list[dict[str, str]], render: Any = chatml, probe: str = "?") -> tuple[int, str]:
    """The boundary, and the text in front of it. The first message is the system's."""
    rendered = render(messages)
    encoded = encode(rendered)
    probed = render([messages[0], {"role": "user", "content": probe}])
    end = system_end(boundaries_of(messages, render), encoded.offsets, rendered, probed)
    return end, rendered[: encoded.offsets[end - 1][1]] if end else ""


def test_a_system_message_inside_the_user_turn_ends_at_the_start_of_that_turn() -> None:
    def merging(messages: list[dict[str, str]]) -> str:
        return "<s><|im_start|>user\n" + "\n\n".join(m["content"] for m in messages) + "<|im_end|>\n"

    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert system_end_of(messages, merging) == (2, "<s><|im_start|>")


def test_without_a_boundary_in_the_common_text_it_is_zero() -> None:
    assert system_end((), [], "system: be kind", "system: be") == 0
    assert system_end((2,), [(0, 1), (1, 4)], "a<s>", "a<s?") == 0


def test_a_token_added_behind_the_text_does_not_end_the_system_message() -> None:
    offsets = [(0, 3), (3, 4), (4, 7), (7, 8), (0, 0)]
    assert system_end((1, 3, 5), offsets, "<s>a<s>b", "<s>a") == 1


@given(TEXTS, TEXTS, TEXTS, st.sampled_from(["?", "!", "?!"]))
def test_the_system_end_is_a_boundary_that_any_other_first_message_shares(
    system: str, first: str, second: str, probe: str
) -> None:
    def conversation(content: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": content}]

    end, text = system_end_of(conversation(first), probe=probe)
    assert end in boundaries_of(conversation(first))
    assert chatml(conversation(second)).startswith(text)
    assert system_end_of(conversation(second), probe=probe) == (end, text)


@pytest.mark.parametrize(
    ("boundaries", "limit", "cut"),
    [((), 7, 7), ((), 0, 0), ((1, 4, 9), 9, 9), ((1, 4, 9), 8, 4), ((1, 4, 9), 4, 4), ((1, 4, 9), 1, 1), ((4,), 3, 0)],
)
def test_the_last_safe_cut_is_at_or_below_the_limit(boundaries: tuple[int, ...], limit: int, cut: int) -> None:
    assert Prompt(as_token_ids(range(10)), boundaries).last_safe(limit) == cut


def write(messages: Any, add_generation_prompt: bool) -> str:
    """A chat template with these markers."""
    text = "<s>"
    for message in messages:
        called = "".join(f"<c>{call['function']['name']}" for call in message.get("tool_calls", []))
        text += (
            {"user": "<u>", "assistant": "<a>", "tool": "<r>"}[message["role"]] + message["content"] + called + "<e>"
        )
    return text + "<a>" * add_generation_prompt


def opening(messages: Any, add_generation_prompt: bool) -> str:
    """As Qwen3.5: the prompt ends in a tag that the same reply has no more when it is history."""
    return write(messages, add_generation_prompt) + "<t>" * add_generation_prompt


def cleaning(messages: Any, add_generation_prompt: bool) -> str:
    cleaned = [message | {"content": message["content"].replace("<e>", "")} for message in messages]
    return write(cleaned, add_generation_prompt)


def refusing(role: str) -> Any:
    return lambda messages, prompts: "" if messages[-1]["role"] == role else write(messages, prompts)


def without_calls(messages: Any, add_generation_prompt: bool) -> str:
    is_plain = all(message["role"] != "tool" for message in messages)
    return write(messages, add_generation_prompt) if is_plain else ""


@pytest.mark.parametrize(
    ("special", "others", "template", "markers"),
    [
        # Words and blanks are none.
        ("<s> <u> <a> <e> <other>", {"user", " ", "\n\n", "<x>"}, write, "<s> <u> <a> <e> <other>"),
        ("<s>", {"<u>", "<a>", "<e>", "<c>", "<r>", "<t>", "disk", "▁", "__"}, write, "<s> <u> <a> <e> <c> <r>"),
        # A marker at the end of every message is enough; <u> may be anything.
        ("<s> <e>", {"<u>", "<a>", "<c>"}, write, "<s> <e>"),
        ("<s>", {"<u>", "<a>", "<e>", "<t>"}, opening, "<s> <u> <a> <e>"),
        # Special tokens that part turns stay, even if the template takes them out of messages.
        ("<s> <u> <a> <e>", set(), cleaning, "<s> <u> <a> <e>"),
        ("<s> <e>", {"<u>"}, refusing("user"), "<s> <e>"),
        ("<s> <e>", {"<u>"}, refusing("assistant"), "<s> <e>"),
        ("<s>", {"<u>", "<a>", "<e>", "<c>"}, without_calls, "<s> <u> <a> <e>"),
    ],
)
def test_markers_are_the_added_tokens_that_part_messages(
    special: str, others: set[str], template: Any, markers: str
) -> None:
    """Real templates are in `test_families.py`."""
    assert template_markers({*special.split(), ""}, others, template) == {*markers.split()}
