"""Reads the images and sounds of a conversation, or refuses them with an error that names the content part."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diskprefix.chat.messages import AudioPart, ContentPart, ImagePart, JsonObject, Message, OtherPart, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

if TYPE_CHECKING:
    from diskprefix.model.load.media import MediaProcessor

UNSUPPORTED = "unsupported_content"
_MOST_PARTS = 64
"""Most images and sounds in one request."""
_WORDS = {"image": "images", "audio": "audio", "video_url": "videos", "file": "files"}
_SHOWN_CHARS = 40


@dataclass
class Media:
    """The decoded images and sounds of a conversation, each kind in the order of the conversation."""

    images: list[Any] = field(default_factory=list)
    audio: list[Any] = field(default_factory=list)


def read_media(messages: Sequence[Message], processor: MediaProcessor | None) -> Media | None:
    """Returns the images and sounds of a conversation; None if it is all text.

    `processor` is None for a model that takes text only. Raises `InvalidRequest`, which names the content part, for a
    part that the model does not take or that cannot be read.
    """
    if not holds_media(messages):
        return None
    media, num_parts = Media(), 0
    for part in (part for message in messages for part in message.content):
        if isinstance(part, TextPart):
            _refuse_placeholders(part, processor)
            continue
        num_parts += 1
        if num_parts > _MOST_PARTS:
            raise InvalidRequest(
                f"{part.path}: a request may hold at most {_MOST_PARTS} images and sounds", param=part.path
            )
        _read_part(part, _require_taken(part, processor), media)
    return media


def holds_media(messages: Sequence[Message]) -> bool:
    """Whether a message has a content part other than text."""
    return any(not isinstance(part, TextPart) for message in messages for part in message.content)


def parts_for_template(content: Sequence[ContentPart]) -> list[JsonObject]:
    """Returns content as templates of multimodal models expect it: a list of parts without data."""
    return [_for_template(part) for part in content]


def text_for_template(text: str) -> list[JsonObject]:
    """Returns a text as templates expect it that take lists of parts only."""
    return [{"type": "text", "text": text}]


def _for_template(part: ContentPart) -> JsonObject:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "audio"}


def _require_taken(part: ImagePart | AudioPart | OtherPart, processor: MediaProcessor | None) -> MediaProcessor:
    """Returns `processor`. Raises `InvalidRequest` if the model does not take this kind of content."""
    kinds = processor.kinds if processor is not None else frozenset()
    wanted = "image" if isinstance(part, ImagePart) else "audio" if isinstance(part, AudioPart) else part.kind
    if processor is not None and wanted in kinds:
        return processor
    taken = " and ".join(["text", *(word for kind, word in (("image", "images"), ("audio", "audio")) if kind in kinds)])
    word = _WORDS.get(wanted, wanted)
    reason = "this model takes text only" if taken == "text" else f"this model takes {taken}, no {word}"
    if processor is not None and processor.problem is not None:
        reason = f"this model is served for text only ({processor.problem})"
    elif isinstance(part, OtherPart) and "image" in kinds:
        reason += "; send its pages or frames as images"
    raise InvalidRequest(f"{part.path}: {reason} (got {wanted})", param=part.path, code=UNSUPPORTED)


def _refuse_placeholders(part: TextPart, processor: MediaProcessor | None) -> None:
    """Raises `InvalidRequest` for a placeholder in the text: the processor would take it for one of the media."""
    for placeholder in sorted(processor.placeholders) if processor is not None else ():
        if placeholder in part.text:
            raise InvalidRequest(
                f"{part.path}: {placeholder} stands for an image or a sound in this model's prompts; a request with "
                "images or sounds must not contain it",
                param=part.path,
                code=UNSUPPORTED,
            )


def _read_part(part: ContentPart, processor: MediaProcessor, media: Media) -> None:
    if isinstance(part, ImagePart):
        content = _data_uri(part.uri, part.uri_path)
        media.images.append(processor.read_image(content, param=part.uri_path, beside=media.images))
    elif isinstance(part, AudioPart):
        content = _from_base64(part.data, part.data_path)
        media.audio.append(processor.read_audio(content, param=part.data_path, beside=media.audio))


def _data_uri(uri: str, param: str) -> bytes:
    """Returns the content of a data: URI. Other URLs are never fetched: clients could read what the server can."""
    scheme, _, rest = uri.partition(":")
    if scheme.lower() != "data":
        raise InvalidRequest(
            f"{param}: URLs are not fetched; send the image itself, as data:image/png;base64,… "
            f"(got {shown(uri, _SHOWN_CHARS)})",
            param=param,
        )
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest(f"{param}: must be a data: URI in base64 (data:image/png;base64,…)", param=param)
    return _from_base64(data, param)


def _from_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: is not valid base64: {error}", param=param) from error
