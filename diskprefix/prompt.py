"""A tokenised prompt and what is known of its structure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.tokens import TokenIds

MAX_MARKS = 32
"""Most marks of a request that count. In a chat each takes one or two renderings."""


class Mark(NamedTuple):
    """A position that the client wants kept, in tokens, and for how long after its last use, in seconds; None leaves
    that to the daemon."""

    position: int
    ttl_s: float | None = None


class Change(NamedTuple):
    """What a normaliser changed, and where in the client's body."""

    normaliser: str
    path: str


class LeftOut(NamedTuple):
    """How many aged messages were left out, and where the first and the last of them stood in the client's body."""

    messages: int
    first: str
    last: str


@dataclass(frozen=True)
class Rewriting:
    """In what a prompt differs from the conversation that the client sent.

    `would_change` are the normalisers that found something and were not on.
    """

    changes: tuple[Change, ...] = ()
    would_change: tuple[str, ...] = ()
    left_out: LeftOut | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """The text that a prompt was encoded from. `starts` says where each token begins in it, shape (num_tokens,)."""

    text: str
    starts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, text: str, offsets: npt.NDArray[np.int32]) -> Source:
        """`offsets` are the first and last character (exclusive) of each token, shape (num_tokens, 2)."""
        return cls(text, offsets[:, 0].copy())

    def line_at(self, token: int) -> str:
        """Returns the line in which a token stands. Of a token that begins with the end of a line, the next one."""
        start = int(self.starts[token])
        while start < len(self.text) - 1 and self.text[start] == "\n":
            start += 1
        end = self.text.find("\n", start)
        return self.text[self.text.rfind("\n", 0, start) + 1 : end if end >= 0 else None]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenised prompt and what is known of its structure.

    `boundaries` are the safe cut positions in ascending order (each one past a marker that the template wrote); empty
    for text without markers, where every position is as good as another. `system_end` is the boundary that ends the
    system message and the tools, 0 if there is none. `text` is what a person reads in `inspect`. `media` holds
    what the model is given beside the tokens, images for example: with it, equal tokens are not equal prompts. `marks`
    are the positions that the client marked, in ascending order. `source` is None if nobody asks what its lines are.
    `replayed` is the number of messages in whose place the tokens stand that were sampled for them.
    """

    token_ids: TokenIds
    boundaries: tuple[int, ...] = ()
    system_end: int = 0
    text: str = ""
    media: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    rewriting: Rewriting = field(default_factory=Rewriting)
    source: Source | None = None
    replayed: int = 0


def last_safe(prompt: Prompt, limit: int) -> int:
    """The last safe cut of `prompt` at or below `limit` (0 <= limit <= number of tokens); 0 if there is none."""
    if not prompt.boundaries:
        return limit
    index = bisect_right(prompt.boundaries, limit)
    return prompt.boundaries[index - 1] if index else 0


def raw_boundaries(token_ids: TokenIds | Sequence[int], marker_ids: Collection[int]) -> tuple[int, ...]:
    """The positions one past every marker, ascending, each at most len(token_ids).

    For a raw prompt all of them are safe: its author wrote it whole.
    """
    markers = np.isin(np.asarray(token_ids), list(marker_ids))
    return tuple((np.flatnonzero(markers) + 1).tolist())
