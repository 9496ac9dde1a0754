"""Reads the images and sounds of a conversation, or refuses them with an error that names the content part."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diskprefix.chat.messages import AudioPart, ImagePart, JsonObject, Message, OtherPart, TextPart
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

if TYPE_CHECKING:
    from diskprefix.model.media import MediaProcessor

UNSUPPORTED = "unsupported_content"
_MOST_PARTS = 64
"""Most images and sounds in one request."""
_WORDS = {"image_url": "images", "input_audio": "audio", "video_url": "videos", "file": "files"}
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
    for i, message in enumerate(messages):
        if isinstance(message.content, str):
            _refuse_placeholders(message.content, processor, f"messages.{i}.content")
            continue
        for j, part in enumerate(message.content or ()):
            param = f"messages.{i}.content.{j}"
            if isinstance(part, TextPart):
                _refuse_placeholders(part.text, processor, f"{param}.text")
                continue
            num_parts += 1
            if num_parts > _MOST_PARTS:
                raise InvalidRequest(
                    f"{param}: a request may hold at most {_MOST_PARTS} images and sounds", param=param
                )
            _read_part(part, _require_taken(part, processor, param), param, media)
    return media


def holds_media(messages: Sequence[Message]) -> bool:
    """Whether a message has a content part other than text."""
    contents = (message.content for message in messages if isinstance(message.content, list))
    return any(not isinstance(part, TextPart) for content in contents for part in content)


def parts_for_template(content: str | list[Any]) -> list[JsonObject]:
    """Returns content as templates of multimodal models expect it: a list of parts without data, which may be given."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part if isinstance(part, dict) else _for_template(part) for part in content]


def _for_template(part: TextPart | ImagePart | AudioPart) -> JsonObject:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "audio"}


def _require_taken(
    part: ImagePart | AudioPart | OtherPart, processor: MediaProcessor | None, param: str
) -> MediaProcessor:
    """Returns `processor`. Raises `InvalidRequest` if the model does not take this kind of content."""
    kinds = processor.kinds if processor is not None else frozenset()
    wanted = "image" if isinstance(part, ImagePart) else "audio" if isinstance(part, AudioPart) else ""
    if processor is not None and wanted in kinds:
        return processor
    taken = " and ".join(["text", *(word for kind, word in (("image", "images"), ("audio", "audio")) if kind in kinds)])
    reason = "this model takes text only" if taken == "text" else f"this model takes {taken}, no {_WORDS[part.type]}"
    if processor is not None and processor.problem is not None:
        reason = f"this model is served for text only ({processor.problem})"
    elif isinstance(part, OtherPart) and "image" in kinds:
        reason += "; send its pages or frames as image_url parts"
    raise InvalidRequest(f"{param}: {reason} (got {part.type})", param=param, code=UNSUPPORTED)


def _refuse_placeholders(text: str, processor: MediaProcessor | None, param: str) -> None:
    """Raises `InvalidRequest` for a placeholder in the text: the processor would take it for one of the media."""
    for placeholder in sorted(processor.placeholders) if processor is not None else ():
        if placeholder in text:
            raise InvalidRequest(
                f"{param}: {placeholder} stands for an image or a sound in this model's prompts; a request with images "
                "or sounds must not contain it",
                param=param,
                code=UNSUPPORTED,
            )


def _read_part(part: ImagePart | AudioPart | OtherPart, processor: MediaProcessor, param: str, media: Media) -> None:
    if isinstance(part, ImagePart):
        param = f"{param}.image_url.url"
        content = _data_uri(part.image_url.url, param)
        media.images.append(processor.read_image(content, param=param, beside=media.images))
    elif isinstance(part, AudioPart):
        param = f"{param}.input_audio.data"
        content = _from_base64(part.input_audio.data, param)
        media.audio.append(processor.read_audio(content, param=param, beside=media.audio))


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
