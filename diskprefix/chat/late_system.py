"""Gives late system messages to the user, and joins leading ones, for templates that do not write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diskprefix.chat.draft import PromptDraft
from diskprefix.chat.messages import Conversation, Message, join_neighbours, joined
from diskprefix.chat.template import ChatTemplate


def place(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Joins leading system messages, and gives later ones to the user, unless the template writes them as they are."""
    conversation, leading = draft.conversation, draft.conversation.num_leading
    if leading > 1 and not template.writes_second_system:
        first = joined(conversation.messages[:leading])
        conversation = replace(conversation, messages=[first, *conversation.messages[leading:]])
    if has_late_system(conversation.messages) and not template.writes_late_system:
        conversation = late_system_as_user(conversation)
    return replace(draft, conversation=conversation)


def has_late_system(messages: Sequence[Message]) -> bool:
    """Returns whether a system message stands behind a message of another role."""
    are_system = [message.is_system for message in messages]
    return not all(are_system[: sum(are_system)])


def late_system_as_user(conversation: Conversation) -> Conversation:
    """Returns the conversation with each late system message given to the user, in its place. It is joined with
    adjacent messages of the user, because many templates want user and assistant to alternate."""
    leading = conversation.num_leading
    messages = (
        (replace(message, role="user"), True) if message.is_system and index >= leading else (message, False)
        for index, message in enumerate(conversation.messages)
    )
    return replace(conversation, messages=join_neighbours(messages))
