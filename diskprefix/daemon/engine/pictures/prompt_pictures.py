"""The pictures of a prompt that is being computed, with the rows of their tokens.

If all tokens of a picture are in memory or restored, its rows are not needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskprefix.daemon.engine.scheduler import NO_LIMIT
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.runtime.contract import PictureRows
from diskprefix.tokens import TokenIds
from diskprefix.values import Picture, Prompt

if TYPE_CHECKING:
    from diskprefix.runtime.pictures.vision_encoder import VisionEncoder


@dataclass(eq=False)
class PromptPictures:
    """The pictures of a prompt that is being computed, and those rows of their tokens that have arrived.

    `token_ids`, int64 [tokens], have the placeholder token in place of the ids of pictures. `ends` are the numbers of
    rows up to the end of each picture. `spans` are the positions of the pictures, each [begin, end), if all tokens of a
    picture attend to each other.
    """

    encoder: VisionEncoder
    pictures: tuple[Picture, ...]
    token_ids: npt.NDArray[np.int64]
    is_picture: npt.NDArray[np.bool_]
    places: TokenIds
    """The positions of the rows, ascending."""
    positions: npt.NDArray[np.int64] | None
    spans: tuple[tuple[int, int], ...]
    encoded: list[Array | None]
    encode_s: float = 0.0
    num_encoded: int = 0
    num_restored: int = 0
    is_over: bool = False
    """The request has ended."""
    patience: Patience = field(default_factory=Patience)
    """The time that the request may wait for the disk."""

    @classmethod
    def of(cls, prompt: Prompt, encoder: VisionEncoder, patience: Patience | None = None) -> PromptPictures:
        """Returns the pictures of `prompt`, which must have at least one."""
        places = np.flatnonzero(prompt.token_ids < 0).astype(np.int32)
        assert len(places) == sum(picture.num_tokens for picture in prompt.pictures), "each row has its token"
        is_picture = prompt.token_ids < 0
        token_ids = np.where(is_picture, encoder.token_id, prompt.token_ids).astype(np.int64)
        return cls(
            encoder=encoder,
            pictures=prompt.pictures,
            token_ids=token_ids,
            is_picture=is_picture,
            places=places,
            positions=encoder.positions(token_ids, is_picture, prompt.pictures),
            spans=tuple(_runs(places)) if encoder.sees_whole else (),
            encoded=[None] * len(prompt.pictures),
            patience=patience or Patience(),
        )

    def __post_init__(self) -> None:
        self.ends = [*accumulate(picture.num_tokens for picture in self.pictures)]
        self.next_position = 0 if self.positions is None else int(self.positions.max()) + 1

    def missing(self, start: int) -> int | None:
        """Returns the number of the first picture without rows that has tokens at or after position `start`; None if
        there is none."""
        row = int(np.searchsorted(self.places, start))
        first = bisect_right(self.ends, row)
        return next((number for number in range(first, len(self.pictures)) if self.encoded[number] is None), None)

    def limit(self, start: int) -> int:
        """Returns the position up to which a prompt can be computed from `start` on: the first position with missing
        rows or, if that is within a span, the beginning of the span. `NO_LIMIT` if no rows are missing."""
        if (number := self.missing(start)) is None:
            return NO_LIMIT
        at = max(start, int(self.places[self.ends[number] - self.pictures[number].num_tokens]))
        return next((max(start, begin) for begin, end in self.spans if begin < at < end), at)

    def are_needed(self, start: int) -> bool:
        """Returns whether steps from position `start` on need more input than token ids."""
        return start < len(self.is_picture) or self.positions is not None

    def rows(self, start: int, end: int) -> PictureRows:
        """Returns the input of the step from position `start` to `end`, without the token ids. After the prompt,
        positions count up by 1."""
        first, last = (int(np.searchsorted(self.places, at)) for at in (start, end))
        parts = [self.encoder.nothing]
        for number in range(bisect_right(self.ends, first), len(self.pictures)):
            begin = self.ends[number] - self.pictures[number].num_tokens
            if begin >= last:
                break
            encoded = self.encoded[number]
            assert encoded is not None, "a step ends before what is missing"
            parts.append(encoded[:, max(0, first - begin) : last - begin])
        is_picture = np.zeros(end - start, bool)
        is_picture[: max(0, len(self.is_picture) - start)] = self.is_picture[start:end]
        spans = tuple((begin, stop) for begin, stop in self.spans if begin < end and stop > start)
        return PictureRows(self.encoder, is_picture, np.concatenate(parts, axis=1), self._positions(start, end), spans)

    def release_rows(self, end: int) -> None:
        """Releases the rows of pictures that end before position `end`."""
        for number in range(bisect_right(self.ends, int(np.searchsorted(self.places, end)))):
            self.encoded[number] = None

    def _positions(self, start: int, end: int) -> npt.NDArray[np.int64] | None:
        if self.positions is None:
            return None
        first, last = (max(0, at - len(self.is_picture)) for at in (start, end))
        behind = np.tile(self.next_position + np.arange(first, last), (len(self.positions), 1))
        return np.concatenate([self.positions[:, start:end], behind], axis=1)

    def timings(self) -> dict[str, Any]:
        """Returns the fields of `Timings` about pictures."""
        return {
            "encode_ms": self.encode_s * 1e3,
            "image_tokens": len(self.places),
            "images_encoded": self.num_encoded,
            "images_restored": self.num_restored,
        }


def _runs(places: TokenIds) -> Iterable[tuple[int, int]]:
    """Yields the runs of consecutive positions, each [begin, end)."""
    for part in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        yield int(part[0]), int(part[-1]) + 1
