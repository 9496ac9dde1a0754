"""Where a prompt may be cut.

A cut is safe one past a marker that the chat template wrote: no tokenizer merges text across it, and the same
conversation with more turns has it at the same position. Markers are the tokenizer's special tokens, and other added
tokens where a template parts messages with them: some tokenizers call theirs ordinary. Tokens that the template looks
for inside messages (think tags) are none. See `template_markers`.

Marker text inside a message becomes the same token, but it is no part of the conversation's structure, and whoever
wrote the message must not steer the cache. The two are told apart by rendering twice:

    rendered = render(messages, tools)
    (messages, tools), changed = neutralise([messages, tools], marker_texts)
    neutral_rendered = render(messages, tools) if changed else None
    boundaries = template_boundaries(token_ids, offsets, marker_ids, rendered, neutral_rendered)

What stands in both renderings at the same place, the template wrote. A caller whose template fails on the neutral
conversation passes an empty `neutral_rendered`: then no boundary is trusted.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from diskprefix.prompt import raw_boundaries
from diskprefix.tokens import TokenIds


class Offsets(Protocol):
    """Token index → (start, end) in characters of the rendered text; end is exclusive.

    The list that fast tokenizers give. Only markers are looked up, so a view that computes them will do.
    """

    def __getitem__(self, index: int, /) -> tuple[int, int]: ...


def neutralise(value: Any, marker_texts: Collection[str]) -> tuple[Any, bool]:
    """A copy of `value` without marker text, and whether anything had to be replaced.

    `value` is made of strings, lists, tuples, dicts (keys are treated too) and other values, which stay. Each
    occurrence becomes ASCII letters or digits of the same length, so that the template writes as much as before. Among
    overlapping texts the leftmost wins, then the longest, as in the tokenizers themselves. A marker that forms only
    where the template joins two strings is not seen.
    """
    texts = sorted({text for text in marker_texts if text}, key=len, reverse=True)
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
    """A character of no marker, so that what is filled in cannot complete another one; x where it is free."""
    candidates = "x" + string.ascii_letters + string.digits
    return next((char for char in candidates if not any(char in text for text in texts)), "x")


class Write(Protocol):
    """Renders messages as the chat template does; empty where it refuses them."""

    def __call__(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str: ...


_SAID = "diskprefix"
_USER = {"role": "user", "content": _SAID}
_REPLY = {"role": "assistant", "content": _SAID}
_CALL_ID = "diskprefx"
"""Of nine letters, as Mistral's templates want it."""
_CALLED = {"id": _CALL_ID, "type": "function", "function": {"name": _SAID, "arguments": {}}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "content": _SAID}
_GROWING = (
    ((_USER, _REPLY, _USER), (_USER, _REPLY, _USER, _REPLY, _USER)),
    ((_USER, _CALL, _RESULT), (_USER, _CALL, _RESULT, _CALL, _RESULT)),
)
"""Conversations, and the same ones later."""


def template_markers(special_texts: Collection[str], other_texts: Collection[str], write: Write) -> frozenset[str]:
    """The texts of the added tokens one past which a conversation of this template may be cut.

    `special_texts` are the tokenizer's special tokens. Where they leave messages unparted, those of `other_texts`, its
    other added tokens, count too that the template writes around messages and that stay when the conversation goes on.
    Tokens whose text the template does not pass on as it stands in a message (it moves or drops what was thought) do
    not count, unless they are special and part messages: what such a text made the template write cannot be told from
    structure. Of a template that refuses plain conversations only the special tokens are known.
    """
    special = frozenset(filter(None, special_texts))
    lasting = [_lasting(shorter, longer, write) for shorter, longer in _GROWING]
    if not (lasting[0] and write((_USER, _REPLY), add_generation_prompt=False)):
        return special
    unparted = [text for text in lasting if _last(special, text) < text.rfind(_SAID)]
    others = {token for token in other_texts if _looks_like_a_marker(token) and any(token in text for text in unparted)}
    parting = {token for token in special if any(token in text for text in lasting)}
    return special.union(others) - (_interpreted(sorted(special.union(others)), write) - parting)


def _lasting(shorter: Sequence[dict[str, Any]], longer: Sequence[dict[str, Any]], write: Write) -> str:
    """What of the shorter conversation's prompt the longer one has too."""
    now, later = (write(messages, add_generation_prompt=True) for messages in (shorter, longer))
    return now[: common_chars(now, later)]


def _last(tokens: Collection[str], text: str) -> int:
    """Where the last of `tokens` in `text` begins; -1 if there is none."""
    return max(map(text.rfind, tokens), default=-1)


def _looks_like_a_marker(text: str) -> bool:
    """No word and no run of blanks: those are added tokens too, and what stands beside them changes them."""
    return any(map(str.isalpha, text)) and any(not (c.isalnum() or c.isspace() or c in "_▁") for c in text)


def _interpreted(tokens: list[str], write: Write) -> set[str]:
    """Those of `tokens` that make a difference to the template where they stand in a message."""

    def differ(tokens: list[str], suffix: str) -> list[str]:
        if not tokens or not _makes_a_difference(tokens, suffix, write):
            return []
        half = len(tokens) // 2
        return differ(tokens[:half], suffix) + differ(tokens[half:], suffix) if half else tokens

    found = set(differ(tokens, ""))
    # An opening tag may count only with the closing one behind it.
    for closing in sorted(found):
        found |= set(differ([token for token in tokens if token not in found], closing))
    return found


def _makes_a_difference(tokens: list[str], suffix: str, write: Write) -> bool:
    content = f"a{'a'.join(tokens)}a"
    neutral, _ = neutralise(content, tokens)
    messages = [
        [{**message, "content": f"{text}{suffix}a"} for message in (_USER, _REPLY) * 2] for text in (content, neutral)
    ]
    rendered, neutral_rendered = (write(listed, add_generation_prompt=False) for listed in messages)
    return bool(neutralise(rendered, tokens)[0] != neutralise(neutral_rendered, tokens)[0])


def template_boundaries(
    token_ids: TokenIds | Sequence[int],
    offsets: Offsets | None,
    marker_ids: Collection[int],
    rendered: str,
    neutral_rendered: str | None,
) -> tuple[int, ...]:
    """The positions one past every marker that the chat template wrote, ascending, each at most len(token_ids).

    `token_ids` and `offsets` belong to `rendered`. `neutral_rendered` is None where `neutralise` changed nothing: then
    all markers are the template's and `offsets` may be None. Where a template trims or escapes, the two texts
    may differ in length; then only what stands before their first difference is trusted. Tokens without text of their
    own (offsets (0, 0): the tokenizer put them there) count as the template's.
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


def system_end(boundaries: Sequence[int], offsets: Offsets, rendered: str, probe_rendered: str) -> int:
    """The last of `boundaries` before the conversation proper: what clients keep when everything else is new.

    `boundaries` and `offsets` belong to `rendered`. `probe_rendered` is the same template over the same tools and
    leading system and developer messages, followed by one user message of plain text that begins with another character
    than the real one. Up to where the two texts part, the messages after the system part had no say. 0 if no boundary
    lies there. A template that puts the system message inside the first user turn has none behind it: the answer is
    then the start of that turn.
    """
    agreed_chars = common_chars(rendered, probe_rendered)
    end = 0
    for position in boundaries:
        if offsets[position - 1][1] > agreed_chars:
            break
        end = position
    return end


def common_chars(a: str, b: str) -> int:
    """How many leading characters `a` and `b` share. Halving compares slices, which is far faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
