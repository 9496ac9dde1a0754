"""The text of stored token ids, for the owner of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from diskprefix.errors import DiskPrefixError
from diskprefix.tokens import TokenIds
from diskprefix.values import SourceText

_TOKENS = 1024
Decode: TypeAlias = Callable[[TokenIds], str]


def decoder_of(origin: str) -> Decode | None:
    """Returns the function that turns token ids into text, special tokens included and `[image]` for an image. `origin`
    is the folder or the `.gguf` file of the tokenizer, as a `RootRecord` has it. Returns None if it was removed or
    cannot be read."""
    if not origin or not Path(origin).exists():
        return None
    from diskprefix.runtime.files.read_tokenizer import read_tokenizer

    try:
        backend = read_tokenizer(Path(origin), None).backend_tokenizer
    except (DiskPrefixError, OSError):
        return None

    def decode(token_ids: TokenIds) -> str:
        return "".join(
            "[image]" if ids[0] < 0 else str(backend.decode(ids.tolist(), skip_special_tokens=False))
            for _, ids in runs(token_ids)
        )

    return decode


def runs(token_ids: TokenIds) -> Iterator[tuple[int, TokenIds]]:
    """Yields the runs of text tokens and of image tokens, with their positions. Yields nothing for no tokens."""
    if len(token_ids):
        cuts = (np.flatnonzero(np.diff(token_ids < 0)) + 1).tolist()
        yield from zip([0, *cuts], np.split(token_ids, cuts), strict=True)


def line_at(decode: Decode, token_ids: TokenIds, token: int) -> str:
    """Returns the line of a token, as `SourceText.line_at` does, up to some 1,000 tokens after it. A character whose
    bytes are in several tokens belongs to the first of them."""
    num_before, end = _TOKENS, token + _TOKENS
    # Bound: the tokens before it are read in steps that double.
    while num_before < token and "\n" not in decode(token_ids[token - num_before : token]):
        num_before *= 2
    near = token_ids[max(0, token - num_before) : end]
    text, before = decode(near), decode(near[: min(token, num_before)])
    differing = (place for place, (char, expected) in enumerate(zip(text, before, strict=False)) if char != expected)
    start = min(next(differing, len(before)), max(0, len(text) - 1))
    return SourceText(text, np.array([start], np.int32)).line_at(0) if text else ""
