"""Finds the positions at which a prompt may be cut safely: directly behind a marker that the chat template wrote.

`README.md` describes markers. A message may contain the text of one, so the conversation is rendered twice: as it is,
and without such texts (`neutralise`). Only markers at the same place in both were written by the template.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diskprefix.cache.policy.safe_cuts import raw_boundaries
from diskprefix.tokens import TokenIds

Offsets: TypeAlias = Sequence[tuple[int, int]] | npt.NDArray[np.int32]
"""Token index → (start, end) in characters of the rendered text; end is exclusive. (0, 0) is a token without text."""


def neutralise(value: Any, marker_texts: Collection[str]) -> tuple[Any, bool]:
    """Returns a copy of `value` without marker texts, and whether anything was replaced.

    Strings inside lists, tuples and dicts (keys too) are treated. A marker text is replaced by ASCII letters or digits
    of the same length, so that the template writes as many characters as before. Of overlapping texts the leftmost is
    replaced, then the longest, as tokenizers do. One that arises where the template joins two strings is not found.
    """
    texts = sorted({text for text in marker_texts if text}, key=len, reverse=True)
    if not texts:
        return value, False
    marker = re.compile("|".join(map(re.escape, texts)))
    # A character that occurs in no marker, so that the replacement cannot complete another marker.
    candidates = "x" + string.ascii_letters + string.digits
    filler = next((char for char in candidates if not any(char in text for text in texts)), "x")

    def visit(node: Any) -> Any:
        if isinstance(node, str):
            return marker.sub(lambda match: filler * len(match[0]), node)
        if isinstance(node, dict):
            return dict(zip(map(visit, node.keys()), map(visit, node.values()), strict=True))
        if isinstance(node, list | tuple):
            return type(node)(map(visit, node))
        return node

    neutral = visit(value)
    return neutral, bool(neutral != value)


Write: TypeAlias = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages with the chat template, with the beginning of a reply if the second argument is true.

Returns an empty text if the template refuses them."""


_TEXT = "diskprefix"
_USER = {"role": "user", "content": _TEXT}
_REPLY = {"role": "assistant", "content": _TEXT}
_CALL_ID = "diskprefx"
"""Nine letters, which Mistral's templates demand."""
_CALLED = {"id": _CALL_ID, "type": "function", "function": {"name": _TEXT, "arguments": {}}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "content": _TEXT}
_GROWING = (
    ((_USER, _REPLY, _USER), (_USER, _REPLY, _USER, _REPLY, _USER)),
    ((_USER, _CALL, _RESULT), (_USER, _CALL, _RESULT, _CALL, _RESULT)),
)
"""Pairs of a conversation and the same conversation after more turns."""


def template_markers(special_texts: Collection[str], other_texts: Collection[str], write: Write) -> frozenset[str]:
    """Returns the texts of the added tokens behind which a conversation of this template may be cut.

    `special_texts` are the tokenizer's special tokens, `other_texts` its other added tokens. Other added tokens count
    only if the special ones do not separate messages, if the template writes them around messages, and if they stay
    when the conversation continues. A token does not count if its text in a message changes what the template writes
    (templates move or drop reasoning): the result cannot be told from structure. Special tokens that separate messages
    count even so. Of a template that refuses plain conversations, all special tokens count.
    """
    special = frozenset(filter(None, special_texts))
    prompts = [[write(messages, True) for messages in pair] for pair in _GROWING]
    common = [now[: common_chars(now, later)] for now, later in prompts]
    if not (common[0] and write((_USER, _REPLY), False)):
        return special
    unseparated = [text for text in common if max(map(text.rfind, special), default=-1) < text.rfind(_TEXT)]
    others = {
        token for token in other_texts if _looks_like_a_marker(token) and any(token in text for text in unseparated)
    }
    separating = {token for token in special if any(token in text for text in common)}
    return special.union(others) - (_interpreted(sorted(special.union(others)), write) - separating)


def _looks_like_a_marker(text: str) -> bool:
    """Whether `text` is neither a word nor blanks. Words and blanks may be added tokens, but are no separators."""
    return any(map(str.isalpha, text)) and any(not (c.isalnum() or c.isspace() or c in "_▁") for c in text)


def _interpreted(tokens: list[str], write: Write) -> set[str]:
    """Returns those of `tokens` whose text in a message changes what the template writes."""

    def differ(tokens: list[str], suffix: str) -> list[str]:
        if not tokens or not _makes_a_difference(tokens, suffix, write):
            return []
        half = len(tokens) // 2
        return differ(tokens[:half], suffix) + differ(tokens[half:], suffix) if half else tokens

    found = set(differ(tokens, ""))
    # A template may react to an opening tag only if the closing tag follows.
    for closing in sorted(found):
        found |= set(differ([token for token in tokens if token not in found], closing))
    return found


def _makes_a_difference(tokens: list[str], suffix: str, write: Write) -> bool:
    content = f"a{'a'.join(tokens)}a"
    neutral, _ = neutralise(content, tokens)
    messages = [
        [{**message, "content": f"{text}{suffix}a"} for message in (_USER, _REPLY) * 2] for text in (content, neutral)
    ]
    rendered, neutral_rendered = (write(listed, False) for listed in messages)
    return bool(neutralise(rendered, tokens)[0] != neutralise(neutral_rendered, tokens)[0])


def template_boundaries(
    token_ids: TokenIds | Sequence[int],
    offsets: Offsets | None,
    marker_ids: Collection[int],
    rendered: str,
    neutral_rendered: str | None,
) -> tuple[int, ...]:
    """Returns the positions behind the markers that the chat template wrote, ascending, each at most len(token_ids).

    `token_ids` and `offsets` belong to `rendered`. `neutral_rendered` is None if `neutralise` changed nothing: then
    every marker is the template's, and `offsets` may be None. A template that trims or escapes text may write two
    texts of different lengths; then only markers before the first difference are trusted. Tokens without text (offsets
    (0, 0)), which the tokenizer adds, count as the template's.
    """
    positions = raw_boundaries(token_ids, marker_ids)
    if neutral_rendered is None:
        return positions
    assert offsets is not None, "a neutral rendering can only be compared by character offsets"
    same_length = len(rendered) == len(neutral_rendered)
    trusted_chars = len(rendered) if same_length else common_chars(rendered, neutral_rendered)
    boundaries = []
    for position in positions:
        start, end = offsets[position - 1]
        if end <= trusted_chars and rendered[start:end] == neutral_rendered[start:end]:
            boundaries.append(position)
    return tuple(boundaries)


def text_boundaries(
    token_ids: TokenIds, num_added: tuple[int, int], marker_ids: Collection[int], bos_id: int | None
) -> tuple[int, ...]:
    """Returns the positions behind special tokens and markers in a text that the client wrote without a template.

    A token that the tokenizer adds (BOS) is not one of them. It would be the only boundary of a plain text, and then
    nothing but that token could be saved. `num_added` are those before and behind the text; none if the client sent
    tokens.
    """
    begin, end = num_added[0], len(token_ids) - num_added[1]
    boundaries = tuple(position for position in raw_boundaries(token_ids, marker_ids) if begin < position <= end)
    first = next((i for i, token_id in enumerate(token_ids.tolist()) if token_id != bos_id), len(token_ids))
    return boundaries if any(position > first for position in boundaries) else ()


def system_end(boundaries: Sequence[int], offsets: Offsets, rendered: str, probe_rendered: str) -> int:
    """Returns the last of `boundaries` before the first message that is not a system message; 0 if there is none.

    `boundaries` and `offsets` belong to `rendered`. `probe_rendered` is the template's output for the same tools and
    leading system and developer messages, followed by one user message of plain text that begins with another character
    than the real one. The text up to the first difference does not depend on the later messages. A template that writes
    the system message inside the first user turn has no boundary behind it: the result is then the start of that turn.
    """
    agreed_chars = common_chars(rendered, probe_rendered)
    return max(takewhile(lambda end: offsets[end - 1][1] <= agreed_chars, boundaries), default=0)


def common_chars(a: str, b: str) -> int:
    """Returns how many leading characters `a` and `b` share. Compares slices of halved length: faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
