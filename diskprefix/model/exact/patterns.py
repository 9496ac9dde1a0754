"""The tokens that a token sees: the patterns that our own attention supports."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "diskprefix"
"""The attention of ours, as transformers knows it."""

_OWN_ATTENTION = "attention that computes with its mask"
_patterns: dict[Hashable, Pattern] = {}
"""The patterns of known masks, by their functions and sizes: comparing one takes 130 pairs of tokens."""
_MAX_PATTERNS = 64


class NotInvariant(Exception):
    """The model computes something that cannot be made batch-invariant here. The argument names it."""


@dataclass(frozen=True)
class Pattern:
    """The tokens that a token sees: all up to itself, or the last `window`, or those of its chunk. A model passes it to
    its layers instead of a mask. With `last`, the rows are only the last so many of the step. With `whole_pictures`, a
    token of a picture (`Run.spans`) sees the rest of the picture too."""

    window: int | None = None
    chunk: int | None = None
    last: int | None = None
    whole_pictures: bool = False

    def __radd__(self, _scores: Any) -> Any:
        raise NotInvariant(_OWN_ATTENTION)

    def __getattr__(self, name: str) -> Any:
        """Raises `NotInvariant` for what only a tensor has."""
        raise AttributeError(name) if name.startswith("_") else NotInvariant(_OWN_ATTENTION)

    def __getitem__(self, rows: tuple[slice, ...]) -> Pattern:
        """Returns the pattern of the last rows, `mask[:, :, -n:, :]`. Raises `NotInvariant` for other parts."""
        everything = slice(None)
        if len(rows) == 4 and (rows[0], rows[1], rows[3]) == (everything,) * 3:
            start, stop, step = rows[2].start, rows[2].stop, rows[2].step
            if isinstance(start, int) and start < 0 and stop is None and step is None:
                return replace(self, last=-start)
        raise NotInvariant("a part of a mask")

    def first_visible(self, position: int) -> int:
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk is not None else 0


def sees_pictures_whole(config: PreTrainedConfig) -> Literal["", "all", "windowed", "otherwise"]:
    """Returns the layers in which the tokens of a picture see each other: none, all, or those with a window. Pictures
    with no other token between them count as one. "otherwise": not as a `Pattern` can say. PaliGemma sees the whole
    prompt so, and Molmo 2 all pictures as one. For Gemma 4 Unified, transformers makes two different masks."""
    text = config.get_text_config(decoder=True)
    does = getattr(text, "use_bidirectional_attention", None) == "vision"
    if config.model_type in ("paligemma", "molmo2") or (does and text.model_type != "gemma4_text"):
        return "otherwise"
    return "windowed" if does else "all" if text.model_type == "gemma3_text" else ""


def pattern_of(
    mask_function: Any = None, local_size: int | None = None, config: PreTrainedConfig | None = None, **_: Any
) -> Pattern:
    """Returns the pattern of a mask, as transformers' mask interface describes it. Raises `NotInvariant` for others."""
    whole = sees_pictures_whole(config) if config is not None else ""
    whole_pictures = whole == "all" or (whole == "windowed" and local_size is not None)
    key = _form_of(mask_function), local_size
    pattern = _patterns.get(key)
    if pattern is None:
        candidates = [Pattern()] if local_size is None else [Pattern(window=local_size), Pattern(chunk=local_size)]
        agreeing = (one for one in candidates if mask_function is None or _agrees(one, mask_function, local_size or 1))
        pattern = next(agreeing, None)
        if pattern is None:
            raise NotInvariant("a mask of its own")
        if len(_patterns) == _MAX_PATTERNS:
            _patterns.clear()
        _patterns[key] = pattern
    return replace(pattern, whole_pictures=whole_pictures)


def _form_of(value: Any) -> Hashable:
    """Returns what a mask function depends on: its code and what it encloses. transformers makes a new one for each
    step. The result is equal to no other if that is more than functions and numbers."""
    if isinstance(value, FunctionType):
        return value.__code__, *(_form_of(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, tuple):
        return tuple(map(_form_of, value))
    return value if value is None or isinstance(value, int) else object()


def _agrees(pattern: Pattern, mask_function: Any, size: int) -> bool:
    """Returns whether the mask is that of `pattern` around every edge that it may have."""
    near = [0, 1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size + 3]
    pairs = [(q, k) for q in near for k in {*near, q - size, q - size + 1, q + 1} if k >= 0]
    queries, keys = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = [pattern.first_visible(q) <= k <= q for q, k in pairs]
    found = mask_function(0, 0, queries, keys)
    return bool(torch.equal(found.expand(len(pairs)), torch.tensor(expected)))


ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, pattern_of)
