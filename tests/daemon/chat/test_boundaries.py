from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.daemon.chat.boundaries import last_agreed, template_boundaries
from diskprefix.daemon.chat.client_text import StandIns, TextRules, TokenTexts, with_stand_ins
from diskprefix.daemon.chat.template import template_markers
from diskprefix.daemon.chat.template_input import changed_texts
from diskprefix.tokens import as_token_ids, raw_boundaries
from diskprefix.values import Prompt

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
    token_ids: list[int]
    offsets: list[tuple[int, int]]


def encode(text: str, markers: tuple[str, ...] = MARKERS) -> Encoded:
    """Like the added-token matching of fast tokenizers: leftmost, then longest."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + "|.", re.DOTALL)
    matches = list(pattern.finditer(text))
    return Encoded([SPECIAL_IDS.get(m[0], 100 + ord(m[0][0])) for m in matches], [m.span() for m in matches])


RULES = TextRules(TokenTexts(MARKERS), (), lambda _: MARKERS)


def standing_in(value: Any, rules: TextRules = RULES) -> tuple[Any, StandIns | None]:
    return with_stand_ins(value, rules, lambda value, change: changed_texts(value, partial(change, "client")))


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in strings_in(item)]
    return [text for item in value for text in strings_in(item)] if isinstance(value, list | tuple) else []


@given(VALUES)
def test_no_text_of_a_token_is_left_and_every_text_comes_back(value: Any) -> None:
    given_value = deepcopy(value)
    changed, stand_ins = standing_in(value)
    assert value == given_value
    before, after = strings_in(value), strings_in(changed)
    assert [len(text) for text in before] == [len(text) for text in after]
    assert not any(marker in text for text in after for marker in MARKERS)
    assert (stand_ins is None) == (before == after)
    if stand_ins is not None:
        assert [*map(stand_ins.text, after)] == before
        kept = [stand_ins.read(text)[1] for text in after]
        assert not any(marker in text for text in kept for marker in MARKERS)
        plain = [text for text in before if not any(marker in text for marker in MARKERS)]
        assert set(plain) <= set(kept)


def spelling(**texts: Any) -> TextRules:
    never, doubtful = (texts.get(name, ()) for name in ("never", "doubtful"))
    return TextRules(TokenTexts([*never, *doubtful]), doubtful, lambda _: never, joins=not never)


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        (spelling(never=["<e>", "<e>x"]), "a<e>xb <e>", []),
        (spelling(never=["<a>", "a>b<"]), "<a>b<a>b<", []),
        (spelling(never=["<a>"], doubtful=["<b>"]), "<a><b>", ["<b>"]),
        (spelling(never=["<a>"], doubtful=["<b>"]), "<<b>a>", ["<b>"]),
        (spelling(doubtful=["<b>"]), "<b><", ["<b>"]),
    ],
)
def test_a_token_that_is_doubtful_stays_one_but_no_boundary(rules: TextRules, text: str, expected: list[str]) -> None:
    changed, stand_ins = standing_in([text], rules)
    assert stand_ins is not None
    tokens = re.compile("|".join(map(re.escape, rules.tokens.texts)))
    assert tokens.findall(stand_ins.read(changed[0])[1]) == expected
    assert tokens.findall(changed[0]) == []
    assert stand_ins.text(changed[0]) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<u12>x<U3>", ["<u12>", "<U3>"]),
        ("t1 t12 t2 ", ["t1", "t12"]),
        ("12> <u1", ["12>", "<u1"]),
        ("<u> <u1 2> t3", []),
    ],
)
def test_numbers_in_texts_of_tokens_are_found_whole(text: str, expected: list[str]) -> None:
    tokens = TokenTexts(["<u12>", "<u3>", "t1", "t12"])
    assert [*filter(None, tokens.split(text)[1::2])] == expected
    assert "".join(tokens.split(text)) == text


@pytest.mark.parametrize("cut", ["x", "<x>", None])
def test_ends_that_are_parts_of_a_token_are_text_wherever_a_template_cuts(cut: str | None) -> None:
    tokens = TokenTexts(MARKERS, cuts=[cut] if cut else [])
    pieces = tokens.split(f"start|> a<|im_{cut or ''}start|> b \n")[1::2]
    assert [*filter(None, pieces)] == (["start|>", "<|im_", cut, "start|>"] if cut else ["start|>", "<|im_start|>"])


@pytest.mark.parametrize(
    ("token_ids", "boundaries"),
    [([], ()), ([5, 6], ()), ([1], (1,)), ([1, 5, 2, 2, 6], (1, 3, 4)), ([5, 1], (2,))],
)
def test_every_special_token_of_a_raw_prompt_is_a_boundary(token_ids: list[int], boundaries: tuple[int, ...]) -> None:
    assert raw_boundaries(token_ids, {1, 2}) == boundaries
    assert raw_boundaries(as_token_ids(token_ids), frozenset({1, 2})) == boundaries
    assert all(type(position) is int for position in raw_boundaries(token_ids, [1, 2]))


@pytest.mark.parametrize(
    ("text", "written", "boundaries"),
    [("<s>a<s>", "<s>a<s>", (1, 3)), ("<s>a<s>", "<s>a<_>", (1,)), ("<s>a<s>", "<_>a<s>", (3,))],
)
def test_a_marker_with_a_stand_in_is_no_boundary(text: str, written: str, boundaries: tuple[int, ...]) -> None:
    encoded = encode(text)
    ids = set(SPECIAL_IDS.values())
    assert template_boundaries(encoded.token_ids, encoded.offsets, ids, text, written) == boundaries


def test_a_token_that_the_tokenizer_added_is_a_boundary() -> None:
    assert template_boundaries([2, 100, 2], [(0, 0), (0, 1), (1, 4)], {2}, "a<s>", "a<_>") == (1,)


def test_without_a_boundary_in_the_common_text_it_is_zero() -> None:
    assert last_agreed((), [], "system: be kind", "system: be") == 0
    assert last_agreed((2,), [(0, 1), (1, 4)], "a<s>", "a<s?") == 0


def test_a_token_added_behind_the_text_does_not_end_the_system_message() -> None:
    offsets = [(0, 3), (3, 4), (4, 7), (7, 8), (0, 0)]
    assert last_agreed((1, 3, 5), offsets, "<s>a<s>b", "<s>a") == 1


@pytest.mark.parametrize(
    ("boundaries", "limit", "cut"),
    [((), 7, 7), ((), 0, 0), ((1, 4, 9), 9, 9), ((1, 4, 9), 8, 4), ((1, 4, 9), 4, 4), ((1, 4, 9), 1, 1), ((4,), 3, 0)],
)
def test_the_last_safe_cut_is_at_or_below_the_limit(boundaries: tuple[int, ...], limit: int, cut: int) -> None:
    assert Prompt(as_token_ids(range(10)), boundaries).last_safe(limit) == cut


def write(messages: Any, add_generation_prompt: bool) -> str:
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
