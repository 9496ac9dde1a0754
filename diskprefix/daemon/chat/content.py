"""Reads the images of a conversation, and puts them into its prompt. Errors name the content part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from diskprefix.daemon.chat.data_uri import content_of
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import (
    ContentPart,
    Conversation,
    ImagePart,
    Message,
    OtherPart,
    TextPart,
    join_neighbours,
)
from diskprefix.errors import InvalidRequest
from diskprefix.tokens import TokenIds, picture_ids
from diskprefix.values import Picture, left_out_of

if TYPE_CHECKING:
    from diskprefix.daemon.chat.template import ChatTemplate
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor

UNSUPPORTED = "unsupported_content"
_MAX_IMAGES = 256
"""The most images in one request."""
_WORDS = {"video_url": "videos", "file": "files"}


def note_unread(processor: PictureProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Replaces each part that is not supported or cannot be read, except in the user's newest message, where
    `read_pictures` refuses it. Clients send the older messages again in each request, so an error would never end.
    Results of calls that are left out are left out, too: templates refuse results without a call.

    A part of a new type is its text, if it has one. Otherwise a note replaces what the user or a tool has sent, and the
    rest is left out, with messages in which nothing else is.
    """
    conversation = draft.conversation
    takes_pictures = processor is not None and processor.problem is None
    left_out = [(part.kind, part.path) for part in conversation.left_out]
    what = "text and pictures" if takes_pictures else "text"

    def read(message: Message, part: ContentPart) -> Iterator[ContentPart]:
        if isinstance(part, TextPart) or not part.in_history or (takes_pictures and isinstance(part, ImagePart)):
            yield part
            return
        kind, text = (part.kind, part.text) if isinstance(part, OtherPart) else ("image", None)
        if text is not None and not message.is_system:
            yield TextPart(text, part.path)
            return
        left_out.append((kind, part.path))
        is_read = not isinstance(part, OtherPart) or part.problem is None
        if is_read or not (message.is_system or message.role == "assistant"):
            word = "picture" if isinstance(part, ImagePart) else kind.removesuffix("_url")
            yield TextPart(f"[{word} left out: this model reads {what}]", part.path)

    noted: list[Message] = []
    lost = lost_results(conversation)
    for message in conversation.messages:
        if message.role == "tool" and message.tool_call_id in lost:
            left_out.append(("tool_result", message.path))
            continue
        content = [new for part in message.content for new in read(message, part)]
        if content or not message.content or message.tool_calls or message.reasoning:
            noted.append(replace(message, content=tuple(content)))
    if conversation.messages and not noted:
        others = (part for message in conversation.messages for part in message.content if isinstance(part, OtherPart))
        raise next(filter(None, (part.refusal for part in others)))
    conversation = replace(conversation, messages=noted, left_out=())
    rewriting = replace(draft.prompt.rewriting, left_out=left_out_of(left_out))
    return replace(draft, conversation=conversation).with_prompt(rewriting=rewriting)


def lost_results(conversation: Conversation) -> set[str]:
    """Returns the ids of calls that are not part of the prompt, so that their results are not either."""
    parts = (part for message in conversation.messages for part in message.content)
    others = [part for part in (*conversation.left_out, *parts) if isinstance(part, OtherPart)]
    lost = {id_ for part in others for id_ in part.call_ids}
    # Without this test, every request would pay for the ids of its calls.
    return lost and lost - {call.id for message in conversation.messages for call in message.tool_calls}


def place_pictures(template: ChatTemplate, processor: PictureProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Moves the images in results of calls into a message of the user after the results, unless the template writes
    images in results."""
    messages = draft.conversation.messages
    in_results = any(message.pictures for message in messages if message.role == "tool")
    if processor is None or not in_results or template.writes_in_result(processor.mark):
        return draft
    placed: list[tuple[Message, bool]] = []
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        if not are_results:
            placed += [(message, False) for message in group]
            continue
        results = list(group)
        placed += [(replace(result, content=result.texts), False) for result in results]
        # Joined with the user's next message, because many templates want user and assistant to alternate.
        placed += [
            (replace(result, role="user", content=result.pictures, tool_call_id=None), True)
            for result in results
            if result.pictures
        ]
    return replace(draft, conversation=replace(draft.conversation, messages=join_neighbours(placed)))


def read_pictures(processor: PictureProcessor | None, draft: PromptDraft) -> PromptDraft:
    """Reads the images of the conversation. One in the history that cannot be read becomes a note, and so do the oldest
    if there are too many. Raises `InvalidRequest` for another part that the model cannot read."""
    messages = draft.conversation.messages
    parts = [part for message in messages for part in message.pictures]
    if not parts:
        return draft
    new, old = ([at for at, part in enumerate(parts) if part.in_history is is_old] for is_old in (False, True))
    pictures: dict[int, Picture] = {}
    for at in (*new, *reversed(old[_num_too_many(len(parts)) :])):
        try:
            pictures[at] = _picture(processor, parts[at], [*pictures.values()], draft)
        except InvalidRequest:
            if not parts[at].in_history:
                raise
    if len(pictures) == len(parts):
        return replace(draft, pictures=[pictures[at] for at in range(len(parts))])
    left_out: list[tuple[str, str]] = []
    counted = count()

    def noted(part: ContentPart) -> ContentPart:
        if isinstance(part, TextPart) or next(counted) in pictures:
            return part
        left_out.append(("image", part.path))
        return TextPart("[picture left out: it cannot be read, or there are too many]", part.path)

    messages = [
        message if not message.pictures else replace(message, content=tuple(map(noted, message.content)))
        for message in messages
    ]
    rewriting = draft.prompt.rewriting
    rewriting = replace(rewriting, left_out=left_out_of(left_out, rewriting.left_out))
    conversation = replace(draft.conversation, messages=messages)
    draft = replace(draft, conversation=conversation, pictures=[pictures[at] for at in sorted(pictures)])
    return draft.with_prompt(rewriting=rewriting)


def _num_too_many(num_images: int) -> int:
    """Returns how many of the oldest images are left out. It grows in steps: with each change, the prompt after the
    image is computed anew."""
    step = max(1, _MAX_IMAGES // 4)
    return max(0, -((_MAX_IMAGES - num_images) // step) * step)


def _picture(
    processor: PictureProcessor | None, part: ImagePart | OtherPart, beside: Sequence[Picture], draft: PromptDraft
) -> Picture:
    if len(beside) == _MAX_IMAGES:
        raise InvalidRequest.at(part.path, f"a request may hold at most {_MAX_IMAGES} images")
    if isinstance(part, OtherPart) or processor is None or processor.problem is not None:
        raise _refusal(part, processor)
    content = content_of(part.uri, part.uri_path)
    return processor.read_image(content, detail=part.detail, param=part.uri_path, beside=beside, asker=draft.asker)


class Expanded(NamedTuple):
    """A part of a rendered text in which the texts of pictures replace their marks. `for_tokens` is `text` with
    stand-ins. `begins` and `ends` map each character to characters of the rendered text (a picture's characters to its
    whole mark). They are empty if no mark was replaced."""

    text: str
    for_tokens: str
    begins: npt.NDArray[np.int32] = np.zeros(0, np.int32)
    ends: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def rendered(self, offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Converts the offsets of tokens, shape (num_tokens, 2), to offsets in the rendered text."""
        if not len(self.ends):
            return offsets
        begins, ends = self.begins[offsets[:, 0]], self.ends[offsets[:, 1] - 1]
        # (0, 0) stays: a token without text.
        return np.stack([begins, np.maximum(begins, ends)], axis=1) * (offsets[:, 1:] > 0)


class PicturePlaces:
    """The places of pictures: marks in the text, placeholder tokens. Raises `InvalidRequest` if their numbers
    differ."""

    def __init__(self, processor: PictureProcessor | None, draft: PromptDraft) -> None:
        self._param = draft.conversation.path
        self._left, self._placed = list(draft.pictures), list[Picture]()
        self._mark = processor.mark if processor is not None and draft.pictures else None
        self._token_id = None if processor is None else processor.token_id

    def expanded(self, text: str, for_tokens: str) -> Expanded:
        """Returns the next part of the text with its pictures. `for_tokens` has stand-ins for marks in texts."""
        if self._mark is None:
            return Expanded(text, for_tokens)
        written, places, end = list[tuple[str, str]](), list[npt.NDArray[np.int32]](), 0
        for piece in re.split(f"({re.escape(self._mark)})", for_tokens):
            begin, end = end, end + len(piece)
            if piece == self._mark:
                written.append((self._next().text,) * 2)
                places.append(np.tile(np.array([[begin], [end]], np.int32), len(written[-1][0])))
            else:
                written.append((text[begin:end], piece))
                places.append(np.arange(begin, end, dtype=np.int32) + np.array([[0], [1]], np.int32))
        begins, ends = np.concatenate(places, axis=1)
        whole, shown = map("".join, zip(*written, strict=True))
        return Expanded(whole, shown, np.append(begins, np.int32(end)), ends)

    def _next(self) -> Picture:
        if not self._left:
            problem = "the chat template writes more images than there are; use another one with --chat-template"
            raise InvalidRequest.at(self._param, problem, UNSUPPORTED)
        self._placed.append(self._left.pop(0))
        return self._placed[-1]

    def name(self, token_ids: TokenIds, written_ids: TokenIds) -> tuple[Picture, ...]:
        """Replaces the placeholders in `token_ids` by the pictures' ids, and returns the pictures in order. In
        `written_ids` they become -1, except the last of each picture, so no boundary is inside a picture."""
        if self._left:
            problem = "the chat template leaves images out; use another one with --chat-template"
            raise InvalidRequest.at(self._param, problem, UNSUPPORTED)
        if self._placed:
            places = np.flatnonzero(written_ids == self._token_id)
            ends = np.cumsum([picture.num_tokens for picture in self._placed])
            if len(places) != ends[-1]:
                problem = f"the prompt has {len(places)} tokens for its images, which take {ends[-1]}"
                raise InvalidRequest.at(self._param, problem, UNSUPPORTED)
            token_ids[places] = np.concatenate(
                [picture_ids(picture.name, picture.num_tokens) for picture in self._placed]
            )
            written_ids[np.delete(places, ends - 1)] = -1
        return tuple(self._placed)


def _refusal(part: ImagePart | OtherPart, processor: PictureProcessor | None) -> InvalidRequest:
    """Returns the error for content of a kind that the model does not accept."""
    if isinstance(part, OtherPart) and (refusal := part.refusal) is not None:
        return refusal
    got = "image" if isinstance(part, ImagePart) else part.kind
    if processor is None:
        reason = "this model takes text only"
    elif processor.problem is not None:
        reason = f"this model is served for text only ({processor.problem})"
    else:
        reason = f"this model takes text and images, no {_WORDS.get(got, got)}"
        reason += "" if got == "audio" else "; send its pages or frames as images"
    return InvalidRequest.at(part.path, f"{reason} (got {got})", UNSUPPORTED)
