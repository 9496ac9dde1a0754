"""The reader of pictures and sounds of requests, for a multimodal model: an extra has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from diskprefix.nouns import MediaKind, Medium

Detail: TypeAlias = Literal["auto", "low", "high"]
"""How closely the model shall look at a picture, as OpenAI's clients say it."""


class MediaProcessor(Protocol):
    """Reads the media of one model. Safe to call from several threads.

    `kinds` are those of the media that the model takes; `problem` says why it takes none. A text must not contain
    `placeholders`. By kind, `marks` has the text that the chat template writes for a medium, and `token_ids` the token
    that stands for a row of the encoder's output.
    """

    problem: str | None
    kinds: frozenset[MediaKind]
    placeholders: frozenset[str]
    marks: Mapping[MediaKind, str]
    token_ids: Mapping[MediaKind, int]

    def read_image(self, content: bytes, *, detail: Detail, param: str, beside: Sequence[Medium] = ()) -> Medium:
        """Returns a picture, of which only the header is read. `param` is the path of its content. Raises
        `InvalidRequest` if it is none, or too large with the pictures `beside`."""

    def read_audio(self, content: bytes, *, param: str, beside: Sequence[Medium] = ()) -> Medium:
        """Returns a sound. Raises `InvalidRequest` if it is none, or too long with the sounds `beside`."""
