"""Where a prompt may be cut.

A cut is safe one past a special token that the chat template wrote: no tokenizer merges text across it, and the same
conversation with more turns has it at the same position. Special-token text inside a message becomes the same token,
but it is no part of the conversation's structure, and whoever wrote the message must not steer the cache. The two are
told apart by rendering twice:

    rendered = render(messages, tools)
    (messages, tools), changed = neutralise([messages, tools], special_texts)
    neutral_rendered = render(messages, tools) if changed else None
    boundaries = template_boundaries(token_ids, offsets, special_ids, rendered, neutral_rendered)

What stands in both renderings at the same place, the template wrote. A caller whose template fails on the neutral
conversation passes an empty `neutral_rendered`: then no boundary is trusted.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from diskprefix.tokens import TokenIds


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenised prompt and what is known of its structure.

    `boundaries` are the safe cut positions in ascending order (each one past a special token that the template wrote);
    empty for text without special tokens, where every position is as good as another. `system_end` is the boundary
    that ends the system message and the tools, 0 if there is none. `text` is what a person reads in `inspect`.
    """

    token_ids: TokenIds
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    text: str = ""


class Offsets(Protocol):
    """Token index → (start, end) in characters of the rendered text; end is exclusive.

    The list that fast tokenizers give. Only special tokens are looked up, so a view that computes them will do.
    """

    def __getitem__(self, index: int, /) -> tuple[int, int]: ...


def neutralise(value: Any, special_texts: Collection[str]) -> tuple[Any, bool]:
    """A copy of `value` without special-token text, and whether anything had to be replaced.

    `value` is made of strings, lists, tuples, dicts (keys are treated too) and other values, which stay. Each
    occurrence becomes ASCII letters or digits of the same length, so that the template writes as much as before. Among
    overlapping texts the leftmost wins, then the longest, as in the tokenizers themselves. A marker that forms only
    where the template joins two strings is not seen.
    """
    texts = sorted({text for text in special_texts if text}, key=len, reverse=True)
    if not texts:
        return value, False
    marker = re.compile("|".join(map(re.escape, texts)))
    filler = _filler(texts)

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


def _filler(texts: list[str]) -> str:
    """A character of no special text, so that what is filled in cannot complete another one; x where it is free."""
    candidates = "x" + string.ascii_letters + string.digits
    return next((char for char in candidates if not any(char in text for text in texts)), "x")


def raw_boundaries(token_ids: TokenIds | Sequence[int], special_ids: Collection[int]) -> tuple[int, ...]:
    """The positions one past every special token, ascending, each at most len(token_ids).

    For a raw prompt all of them are safe: its author wrote it whole.
    """
    special = np.isin(np.asarray(token_ids), list(special_ids))
    return tuple((np.flatnonzero(special) + 1).tolist())


def template_boundaries(
    token_ids: TokenIds | Sequence[int],
    offsets: Offsets | None,
    special_ids: Collection[int],
    rendered: str,
    neutral_rendered: str | None,
) -> tuple[int, ...]:
    """The positions one past every special token that the chat template wrote, ascending, each at most len(token_ids).

    `token_ids` and `offsets` belong to `rendered`. `neutral_rendered` is None where `neutralise` changed nothing: then
    all special tokens are the template's and `offsets` may be None. Where a template trims or escapes, the two texts
    may differ in length; then only what stands before their first difference is trusted. Tokens without text of their
    own (offsets (0, 0): the tokenizer put them there) count as the template's.
    """
    positions = raw_boundaries(token_ids, special_ids)
    if neutral_rendered is None:
        return positions
    assert offsets is not None, "a neutral rendering can only be compared by character offsets"
    same_length = len(rendered) == len(neutral_rendered)
    trusted_chars = len(rendered) if same_length else _common_chars(rendered, neutral_rendered)
    boundaries = []
    for position in positions:
        start, end = offsets[position - 1]
        if end <= trusted_chars and rendered[start:end] == neutral_rendered[start:end]:
            boundaries.append(position)
    return tuple(boundaries)


def system_end(boundaries: Sequence[int], offsets: Offsets, rendered: str, probe_rendered: str) -> int:
    """The last of `boundaries` before the conversation proper: what clients keep when everything else is new.

    `boundaries` and `offsets` belong to `rendered`. `probe_rendered` is the same template over the same tools and
    leading system and developer messages, followed by one user message of plain text that begins with another character
    than the real one. Up to where the two texts part, the messages after the system part had no say. 0 if no boundary
    lies there. A template that puts the system message inside the first user turn has none behind it: the answer is
    then the start of that turn.
    """
    common_chars = _common_chars(rendered, probe_rendered)
    end = 0
    for position in boundaries:
        if offsets[position - 1][1] > common_chars:
            break
        end = position
    return end


def last_safe(prompt: Prompt, limit: int) -> int:
    """The last safe cut of `prompt` at or below `limit` (0 <= limit <= number of tokens); 0 if there is none."""
    if not prompt.boundaries:
        return limit
    index = bisect_right(prompt.boundaries, limit)
    return prompt.boundaries[index - 1] if index else 0


def _common_chars(a: str, b: str) -> int:
    """How many leading characters `a` and `b` share. Halving compares slices, which is far faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
