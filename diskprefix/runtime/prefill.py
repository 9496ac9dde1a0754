"""Computes a whole prompt, for callers without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import PictureRows, Rows, Runtime
from diskprefix.tokens import Logits, TokenIds, floor_to_grid


class PicturesOfPrompt(Protocol):
    """The pictures of a prompt: `engine.pictures.prompt_pictures.PromptPictures`."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The ids of the prompt, int64 [tokens], with the placeholder token in place of the ids of pictures."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The positions [begin, end) of pictures that are computed in one step."""

    def rows(self, start: int, end: int) -> PictureRows:
        """Returns the rows of pictures for the step from position `start` to `end`."""


def prefill(
    runtime: Runtime,
    sequence: KVSequence,
    token_ids: TokenIds,
    *,
    start: int,
    block_size: int,
    after_step: Callable[[KVSequence], None],
    stops: Sequence[int] = (),
    pictures: PicturesOfPrompt | None = None,
) -> Logits:
    """Computes a prompt from position `start` to its end. Returns the next-token logits, shape [vocab].

    Steps end at multiples of `block_size`, as in a cold run: other steps could change the last bits. They also end at
    `stops`. `start` and `stops` are grid points unless the model is exact at every token. `after_step` is called after
    each step. `pictures` has the rows of all pictures, if the prompt has any.
    """
    is_exact = sequence.layout.exact_at == "token"
    assert is_exact or not any(at % block_size for at in (start, *stops)), "state enters and leaves at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = token_ids.astype(np.int64) if pictures is None else pictures.token_ids
    first = floor_to_grid(start, block_size) + block_size
    ends = {*range(first, len(token_ids), block_size), *stops, len(token_ids)}
    for begin, stop in () if pictures is None else pictures.spans:
        ends -= {*range(begin + 1, stop)}
    for end in sorted(at for at in ends if start < at <= len(token_ids)):
        of_pictures = None if pictures is None else pictures.rows(sequence.num_tokens, end)
        step = Rows(sequence, ids[sequence.num_tokens : end], pictures=of_pictures)
        logits: Logits = runtime.run([step]).logits[0][-1]
        after_step(sequence)
    return logits
