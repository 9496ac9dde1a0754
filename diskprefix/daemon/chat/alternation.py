"""Orders messages for chat templates that want user and assistant to alternate.

Templates of Mistral and Gemma refuse two messages of the user in a row, or a user's message after the result of a call.
Made-up messages show once which messages such a template counts as turns. The place of each message then depends only
on the messages before it: a conversation that the template accepts is unchanged, and so is the beginning of a
conversation that grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import ContentPart, JsonObject, Message, TextPart
from diskprefix.daemon.chat.template import SOME_CALL, SOME_REPLY, SOME_RESULT, SOME_USER, ChatTemplate, Write

Speaker: TypeAlias = Literal["user", "assistant"]

_BLANK_LINE = "\n\n"
_UNSAID = "", "OK."
"""Texts of messages without words. A template gets the first text that it accepts."""


class Alternation(Struct, frozen=True):
    """The messages that a template counts as turns, which must alternate between user and assistant, the user first.

    `reply` and `question` are the texts of messages between two turns of one speaker, and of messages without words
    (`takes_thoughts`: unless they have thoughts).
    """

    counts_calls: bool
    counts_results: bool
    reply: str
    question: str
    takes_thoughts: bool

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with alternating turns. A conversation that the template accepts is unchanged.

        Neighbouring messages of the user become one message. A message without words separates other turns of one
        speaker. Results of calls that count as turns are given to the user. Messages without words get a text that the
        template accepts.
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
                runs += [[Message(role=wanted, path=message.path)], [message]]
            wanted = "assistant" if speaker == "user" else "user"
        return [self._with_words(merged(run)) for run in runs]

    def _counts(self, message: Message) -> bool:
        if message.tool_calls:
            return self.counts_calls
        return message.role in ("user", "assistant") or (self.counts_results and not message.is_system)

    def _with_words(self, message: Message) -> Message:
        text = {"user": self.question, "assistant": self.reply}.get(message.role, "")
        says_something = message.tool_calls or message.pictures or any(part.text for part in message.texts)
        if not text or says_something or (self.takes_thoughts and message.reasoning is not None):
            return message
        mark = next((part.mark for part in message.texts[::-1] if part.mark), None)
        return replace(message, content=(TextPart(text, message.path, mark),))


def alternate(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Lets user and assistant alternate, if the template refuses other conversations."""
    conversation = draft.conversation
    alternation = template.learned(alternation_of, conversation.tools) if template.exists else None
    if alternation is None:
        return draft
    return replace(draft, conversation=replace(conversation, messages=alternation.arranged(conversation.messages)))


def alternation_of(write: Write) -> Alternation | None:
    """Returns the messages that a template counts as turns; None if turns need not alternate."""

    def takes(*messages: JsonObject) -> bool:
        return bool(write(messages, True))

    turns = [SOME_USER, SOME_REPLY, SOME_USER]
    if takes(SOME_USER, SOME_USER) or not takes(*turns):
        return None
    reply, question = (
        next((text for text in _UNSAID if takes(*turns[:at], {**turns[at], "content": text}, *turns[at + 1 :])), None)
        for at in (1, 0)
    )
    if reply is None or question is None:
        return None
    thought = {"role": "assistant", "content": "", "reasoning_content": "A thought."}
    counts_calls = not takes(SOME_USER, SOME_CALL, SOME_REPLY, SOME_USER)
    after_result = [SOME_USER] if counts_calls else [SOME_REPLY, SOME_USER]
    counts_results = not takes(SOME_USER, SOME_CALL, SOME_RESULT, *after_result)
    return Alternation(counts_calls, counts_results, reply, question, takes(SOME_USER, thought, SOME_USER))


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
    """Separates two adjacent texts. In messages with pictures, templates write parts without a line between them, and
    many strip each part."""
    last, first = before[-1], after[0]
    if not (isinstance(last, TextPart) and isinstance(first, TextPart)):
        return
    if not has_pictures:
        before.append(TextPart("", first.path))
    elif last.mark is None and not (last.offers_tools or first.offers_tools):
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
