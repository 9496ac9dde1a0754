"""Brings messages into an order that a chat template takes which wants user and assistant to alternate.

Templates of Mistral and Gemma refuse two messages of the user in a row, or one behind the result of a call. What such a
template counts is found once, with made-up messages. Each message is then placed by the messages before it alone: so a
conversation that the template takes is unchanged, and the beginning of one that grows stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.chat.draft import PromptDraft
from diskprefix.chat.messages import ContentPart, JsonObject, Message, TextPart
from diskprefix.chat.template import SOME_CALL, SOME_REPLY, SOME_RESULT, SOME_USER, ChatTemplate, Write

Speaker: TypeAlias = Literal["user", "assistant"]

_BLANK_LINE = "\n\n"
_UNSAID = "", "OK."
"""Texts of messages that nobody wrote. A template gets the first that it takes."""


class Alternation(Struct, frozen=True):
    """The messages that a template counts as turns, which must alternate between user and assistant, the user first.

    `reply` and `question` are the texts of messages between two turns of one speaker.
    """

    counts_calls: bool
    counts_results: bool
    reply: str
    question: str

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages so that their turns alternate; those that the template takes as they are.

        Neighbours of the user become one message. Between other turns of one speaker stands a message without words.
        Results of calls that would be turns are the user's.
        """
        runs: list[list[Message]] = []
        wanted: Speaker = "user"
        is_users_result = False
        for message in messages:
            is_result = self.counts_results and message.role in ("tool", "function")
            is_users_result = is_result and (wanted == "user" or is_users_result)
            if is_users_result:
                message = replace(message, role="user", name=None, tool_call_id=None)
            elif not self._counts(message):
                runs.append([message])
                continue
            speaker: Speaker = "user" if message.role == "user" else "assistant"
            if speaker == wanted:
                runs.append([message])
            elif speaker == "user" and runs and runs[-1][-1].role == "user":
                runs[-1].append(message)
                continue
            else:
                runs += [[self._between(wanted, message.path)], [message]]
            wanted = "assistant" if speaker == "user" else "user"
        return [merged(run) for run in runs]

    def _counts(self, message: Message) -> bool:
        if message.tool_calls:
            return self.counts_calls
        return message.role in ("user", "assistant") or (self.counts_results and not message.is_system)

    def _between(self, speaker: Speaker, path: str) -> Message:
        text = self.question if speaker == "user" else self.reply
        return Message(role=speaker, content=(TextPart(text, path),) if text else (), path=path)


def alternate(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Lets user and assistant alternate, if the template refuses other conversations."""
    conversation = draft.conversation
    alternation = template.learned(alternation_of, conversation.tools) if template.exists else None
    if alternation is None:
        return draft
    return replace(draft, conversation=replace(conversation, messages=alternation.arranged(conversation.messages)))


def alternation_of(write: Write) -> Alternation | None:
    """Returns what a template counts as a turn; None if it does not demand that turns alternate."""

    def takes(*messages: JsonObject) -> bool:
        return bool(write(messages, True))

    if takes(SOME_USER, SOME_USER) or not takes(SOME_USER, SOME_REPLY, SOME_USER):
        return None
    reply, question = (
        next((text for text in _UNSAID if takes(*turns[:at], {**turns[at], "content": text}, *turns[at + 1 :])), None)
        for at, turns in ((1, [SOME_USER, SOME_REPLY, SOME_USER]), (0, [SOME_USER, SOME_REPLY, SOME_USER]))
    )
    if reply is None or question is None:
        return None
    counts_calls = not takes(SOME_USER, SOME_CALL, SOME_REPLY, SOME_USER)
    after_result = [SOME_USER] if counts_calls else [SOME_REPLY, SOME_USER]
    return Alternation(counts_calls, not takes(SOME_USER, SOME_CALL, SOME_RESULT, *after_result), reply, question)


def merged(messages: Sequence[Message]) -> Message:
    """Returns messages of one role as one, with a blank line between their texts. Marks keep their places."""
    if len(messages) == 1:
        return messages[0]
    has_pictures = any(message.pictures for message in messages)
    parts: list[ContentPart] = []
    for message in messages:
        content = list(_with_mark_inside(message) if message is not messages[-1] else message.content)
        if parts and content:
            _put_blank_line(parts, content, has_pictures)
        parts += content
    return replace(messages[-1], content=tuple(parts), path=messages[0].path)


def _put_blank_line(before: list[ContentPart], after: list[ContentPart], has_pictures: bool) -> None:
    """Separates two texts that follow each other. Where pictures are, templates write parts without a line between, and
    many strip each of them."""
    last, first = before[-1], after[0]
    if not (isinstance(last, TextPart) and isinstance(first, TextPart)):
        return
    if not has_pictures:
        before.append(TextPart("", first.path))
    elif last.mark is None:
        before[-1:], after[:1] = [], [replace(first, text=f"{last.text}{_BLANK_LINE}{first.text}", path=last.path)]
    else:
        before.append(TextPart(_BLANK_LINE, first.path))


def _with_mark_inside(message: Message) -> Iterable[ContentPart]:
    """Returns the content of a message, with its mark on the last text."""
    if message.mark is None:
        return message.content
    *others, last = message.content or (TextPart("", message.path),)
    if isinstance(last, TextPart):
        return *others, replace(last, mark=last.mark or message.mark)
    return *message.content, TextPart("", message.path, message.mark)
