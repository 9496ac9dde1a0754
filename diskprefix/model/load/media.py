"""The images and sounds of a request, as a multimodal model takes them. An extra reads and prepares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from diskprefix.tokens import TokenIds

MediaKind: TypeAlias = Literal["image", "audio"]


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """`token_ids` have placeholders for the media; `tensors` are on the CPU, by the name of the model's argument."""

    token_ids: TokenIds
    tensors: dict[str, Any]


class MediaProcessor(Protocol):
    """Prepares the media of one model. Safe to call from several threads. `kinds` are those of the media that the
    model takes; `problem` says why it takes none. A text must not contain `placeholders`."""

    problem: str | None
    kinds: frozenset[MediaKind]
    placeholders: frozenset[str]

    def read_image(self, content: bytes, *, param: str, beside: Sequence[Any] = ()) -> Any:
        """Returns an image file, read. Raises `InvalidRequest` if it is none, or too large with the images `beside`."""

    def read_audio(self, content: bytes, *, param: str, beside: Sequence[Any] = ()) -> Any:
        """Returns a sound file, read. Raises `InvalidRequest` if it is none, or too long with the sounds `beside`."""

    def prepare(self, text: str, images: Sequence[Any], audio: Sequence[Any]) -> MediaPrompt:
        """Returns the input for a rendered conversation and its media, in their order. Raises `InvalidRequest`."""


def prepared_bytes(tensors: Mapping[str, Any]) -> int:
    """Returns the size of the tensors of a `MediaPrompt` in bytes. They may be in lists."""

    def num_bytes(value: Any) -> int:
        return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else int(getattr(value, "nbytes", 0))

    return sum(map(num_bytes, tensors.values()))
