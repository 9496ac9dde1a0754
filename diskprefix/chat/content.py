"""Reads the images and sounds of a conversation, and puts them into its prompt. Errors name the content part."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.chat.draft import PromptDraft
from diskprefix.chat.messages import AudioPart, ImagePart, Message, OtherPart, TextPart, joined
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import Medium
from diskprefix.printable import shown
from diskprefix.tokens import TokenIds, media_ids

if TYPE_CHECKING:
    from diskprefix.chat.template import ChatTemplate
    from diskprefix.model.load.media import MediaProcessor

UNSUPPORTED = "unsupported_content"
_MOST_PARTS = 64
"""The most images and sounds in one request."""
_WORDS = {"image": "images", "audio": "audio", "video_url": "videos", "file": "files"}
_SHOWN_CHARS = 40


def place_media(template: ChatTemplate, processor: MediaProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Gives the images and sounds in results of calls to the user, behind those, unless the template writes them."""
    messages, marks = draft.conversation.messages, {} if processor is None else processor.marks
    in_results = any(message.media for message in messages if message.role == "tool")
    if not in_results or all(template.writes_in_result(kind, mark) for kind, mark in marks.items()):
        return draft
    runs: list[list[Message]] = []
    """Each run becomes one message."""
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        listed = list(group)
        if are_results:
            runs += [[replace(one, content=one.texts)] for one in listed]
            moved = [replace(one, role="user", content=one.media, tool_call_id=None) for one in listed if one.media]
            runs += [moved] if moved else []
        else:
            # Many templates want user and assistant to alternate.
            if runs and runs[-1][0].role == listed[0].role == "user":
                runs[-1].append(listed.pop(0))
            runs += [[one] for one in listed]
    return replace(draft, conversation=replace(draft.conversation, messages=[joined(run) for run in runs]))


def read_media(processor: MediaProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Reads the images and sounds of the conversation. `processor` is None for a model that takes text only. Raises
    `InvalidRequest` for a part that the model does not take or that cannot be read."""
    if not draft.conversation.has_media:
        return draft
    media: list[Medium] = []
    for part in (part for message in draft.conversation.messages for part in message.content):
        if isinstance(part, TextPart):
            _refuse_placeholders(part, processor)
            continue
        if len(media) == _MOST_PARTS:
            raise InvalidRequest.at(part.path, f"a request may hold at most {_MOST_PARTS} images and sounds")
        taking = _require_taken(part, processor)
        beside = [medium for medium in media if (medium.kind == "image") == isinstance(part, ImagePart)]
        if isinstance(part, ImagePart):
            content = _data_uri(part.uri, part.uri_path)
            media.append(taking.read_image(content, detail=part.detail, param=part.uri_path, beside=beside))
        elif isinstance(part, AudioPart):
            content = _from_base64(part.data, part.data_path)
            media.append(taking.read_audio(content, param=part.data_path, beside=beside))
    return replace(draft, media=media)


class Expanded(NamedTuple):
    """A part of a rendered text with the texts of its media in the place of their marks. `begins` and `ends` have the
    place of each character in the rendered text (all of a mark for a medium's); they are empty if they are the same."""

    text: str
    begins: npt.NDArray[np.int32] = np.zeros(0, np.int32)
    ends: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def rendered(self, offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the first and last characters (exclusive) of tokens as those of the rendered text."""
        if not len(self.ends):
            return offsets
        begins, ends = self.begins[offsets[:, 0]], self.ends[offsets[:, 1] - 1]
        # A token without text, (0, 0), stays one.
        return np.stack([begins, np.maximum(begins, ends)], axis=1) * (offsets[:, 1:] > 0)


class MediaPlaces:
    """The places of a prompt's media: marks in the rendered text, placeholders among its tokens. Raises
    `InvalidRequest` if they are not as many as the media."""

    def __init__(self, processor: MediaProcessor | None, draft: PromptDraft) -> None:
        self._param = draft.conversation.path
        self._left, self._placed = list(draft.media), list[Medium]()
        kinds = {medium.kind for medium in draft.media}
        self._marks = {processor.marks[kind]: kind for kind in kinds} if processor is not None else {}
        self._token_ids = processor.token_ids if processor is not None else {}
        self._pattern = re.compile(f"({'|'.join(map(re.escape, self._marks))})")

    def expanded(self, text: str) -> Expanded:
        """Returns the next part of the rendered text with its media."""
        if not self._marks:
            return Expanded(text)
        written, places, end = list[str](), list[npt.NDArray[np.int32]](), 0
        for piece in self._pattern.split(text):
            begin, end = end, end + len(piece)
            if piece in self._marks:
                written.append(self._next(piece).text)
                places.append(np.tile(np.array([[begin], [end]], np.int32), len(written[-1])))
            else:
                written.append(piece)
                places.append(np.arange(begin, end, dtype=np.int32) + np.array([[0], [1]], np.int32))
        begins, ends = np.concatenate(places, axis=1)
        return Expanded("".join(written), np.append(begins, np.int32(end)), ends)

    def _next(self, mark: str) -> Medium:
        medium = next((medium for medium in self._left if medium.kind == self._marks[mark]), None)
        if medium is None:
            problem = "stands for an image or a sound here; no thought, call or tool may contain it beside them"
            raise InvalidRequest.at(self._param, f"{mark} {problem}", UNSUPPORTED)
        self._left.remove(medium)
        self._placed.append(medium)
        return medium

    def name(self, token_ids: TokenIds, written_ids: TokenIds) -> tuple[Medium, ...]:
        """Puts the ids of the media in the place of their placeholders, when the whole text is expanded. Those in
        `written_ids` become -1, except the last of each, so no boundary is inside a medium. Returns the media in the
        order of their tokens."""
        if self._left:
            problem = "the chat template leaves images and sounds out; use another one with --chat-template"
            raise InvalidRequest.at(self._param, problem, UNSUPPORTED)
        for kind in self._marks.values():
            media = [medium for medium in self._placed if medium.kind == kind]
            places = np.flatnonzero(written_ids == self._token_ids[kind])
            ends = np.cumsum([medium.num_tokens for medium in media])
            if len(places) != ends[-1]:
                problem = f"the prompt has {len(places)} tokens for its {_WORDS[kind]}, which take {ends[-1]}"
                raise InvalidRequest.at(self._param, problem, UNSUPPORTED)
            token_ids[places] = np.concatenate([media_ids(medium.name, medium.num_tokens) for medium in media])
            written_ids[np.delete(places, ends - 1)] = -1
        return tuple(self._placed)


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
