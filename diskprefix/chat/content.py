"""The steps for conversations with images and sounds. Errors name the content part."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diskprefix.chat.draft import PromptDraft, Rendering
from diskprefix.chat.encoder import Encoder
from diskprefix.chat.messages import AudioPart, ContentPart, ImagePart, JsonObject, Message, OtherPart, TextPart
from diskprefix.chat.template import ChatTemplate
from diskprefix.chat.template_input import text_for_template, without_media
from diskprefix.errors import InvalidRequest
from diskprefix.printable import shown

if TYPE_CHECKING:
    from diskprefix.model.load.media import MediaProcessor

UNSUPPORTED = "unsupported_content"
_MOST_PARTS = 64
"""The most images and sounds in one request."""
_WORDS = {"image": "images", "audio": "audio", "video_url": "videos", "file": "files"}
_SHOWN_CHARS = 40


def read_media(processor: MediaProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Reads the images and sounds of the conversation, each kind in its order. `processor` is None for a model that
    takes text only. Raises `InvalidRequest` for a part that the model does not take or that cannot be read."""
    images: list[Any] = []
    audio: list[Any] = []
    for part in (part for message in draft.conversation.messages for part in message.content):
        if isinstance(part, TextPart):
            _refuse_placeholders(part, processor)
            continue
        if len(images) + len(audio) == _MOST_PARTS:
            raise InvalidRequest.at(part.path, f"a request may hold at most {_MOST_PARTS} images and sounds")
        taking = _require_taken(part, processor)
        if isinstance(part, ImagePart):
            content = _data_uri(part.uri, part.uri_path)
            images.append(taking.read_image(content, param=part.uri_path, beside=images))
        elif isinstance(part, AudioPart):
            content = _from_base64(part.data, part.data_path)
            audio.append(taking.read_audio(content, param=part.data_path, beside=audio))
    return replace(draft, images=images, audio=audio)


def render_media(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Renders the conversation with a placeholder for each image and sound."""
    template_input = template.input_of(draft.conversation)
    for message, sent in zip(template_input.messages, draft.conversation.messages, strict=True):
        message["content"] = [_part_for_template(part) for part in sent.content] or text_for_template("")
    text = template.render(template_input, draft.ending)
    if text == template.try_render(without_media(template_input), draft.ending):
        problem = "the chat template leaves images and sounds out; use another one with --chat-template"
        raise InvalidRequest.at(draft.conversation.path, problem, UNSUPPORTED)
    return replace(draft, rendering=Rendering(template_input, text))


def prepare_media(processor: MediaProcessor | None, encoder: Encoder, draft: PromptDraft) -> PromptDraft:
    """Encodes the prompt and prepares its images and sounds. It has no boundaries: the cache is not used for it."""
    assert processor is not None, "a model without media has refused them"
    text, path = draft.rendering.text, draft.conversation.path
    # The text alone may be too long; that is cheaper to find than to prepare the images.
    encoder.encode(text, param=path)
    prepared = processor.prepare(text, list(draft.images), list(draft.audio))
    encoder.check_positions(len(prepared.token_ids), path)
    return draft.with_prompt(token_ids=prepared.token_ids, media=prepared.tensors)


def holds_media(messages: Sequence[Message]) -> bool:
    """Returns whether a message has a content part other than text."""
    return any(not isinstance(part, TextPart) for message in messages for part in message.content)


def _part_for_template(part: ContentPart) -> JsonObject:
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
    raise InvalidRequest.at(part.path, f"{reason} (got {wanted})", UNSUPPORTED)


def _refuse_placeholders(part: TextPart, processor: MediaProcessor | None) -> None:
    """Raises `InvalidRequest` for a placeholder in a text: the processor would take it for an image or a sound."""
    for placeholder in sorted(processor.placeholders) if processor is not None else ():
        if placeholder in part.text:
            problem = "stands for an image or a sound here, so a request with images or sounds must not contain it"
            raise InvalidRequest.at(part.path, f"{placeholder} {problem}", UNSUPPORTED)


def _data_uri(uri: str, param: str) -> bytes:
    """Returns the content of a data: URI. Other URLs are never fetched: clients could read what the server can."""
    scheme, _, rest = uri.partition(":")
    if scheme.lower() != "data":
        problem = "URLs are not fetched; send the image itself, as data:image/png;base64,…"
        raise InvalidRequest.at(param, f"{problem} (got {shown(uri, _SHOWN_CHARS)})")
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest.at(param, "must be a data: URI in base64 (data:image/png;base64,…)")
    return _from_base64(data, param)


def _from_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest.at(param, f"is not valid base64: {error}") from error
