"""The reader of pictures of requests, for a multimodal model: an extra has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from diskprefix.values import NO_ASKER, Asker, Picture

Detail: TypeAlias = Literal["auto", "low", "high"]
"""How closely the model shall look at a picture, as OpenAI's clients say it."""


class PicturesModel(Struct, frozen=True):
    """A multimodal model, in a folder or a `.gguf` file `path`, and all of its files. `read_config` returns
    transformers' configuration, `make_processor` its processor of a `.gguf` model, which has no files of one. `problem`
    returns why the model takes text only, None if it takes pictures. `read_encoder` raises `ModelError` for faults of
    the encoder's files. These import transformers."""

    path: Path
    files: Sequence[Path]
    read_config: Callable[[], Any]
    problem: Callable[[], str | None]
    read_encoder: Callable[[], object]
    make_processor: Callable[[], Any] | None = None


class PictureProcessor(Protocol):
    """Reads the pictures of one model. Safe to call from several threads.

    `problem` says why the model takes none; None if it does. A text must not contain `placeholders`. The chat template
    writes `mark` for a picture, and `token_id` is the token that stands for a row of the encoder's output. The names of
    pictures have what `computed_by` returns: what runs the encoder, which it reads. It returns "" if the identity of
    the model says that.
    """

    problem: str | None
    placeholders: frozenset[str]
    mark: str
    token_id: int
    computed_by: Callable[[], str]

    def read_image(
        self, content: bytes, *, detail: Detail, param: str, beside: Sequence[Picture] = (), asker: Asker = NO_ASKER
    ) -> Picture:
        """Returns a picture after reading only its header. `param` is the path of its content in the request. Raises
        `InvalidRequest` if it is not a picture, too large together with the pictures `beside`, or if it could not be
        decoded for this tenant before."""

    def can_decode(self, picture: Picture, asker: Asker) -> bool:
        """Returns whether a picture can be decoded. Decodes it, unless that was done for this tenant before."""
