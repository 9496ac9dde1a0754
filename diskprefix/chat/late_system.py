"""Gives late system messages to the user, and joins leading ones, for templates that do not write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diskprefix.chat.draft import PromptDraft
from diskprefix.chat.messages import Conversation, Message, joined
from diskprefix.chat.template import ChatTemplate


def place(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Joins the system messages before others, and gives those behind others to the user, unless the template writes
    them as they are."""
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
    runs: list[list[Message]] = []
    """Each run becomes one message."""
    can_join, is_leading = False, True
    for message in conversation.messages:
        is_leading = is_leading and message.is_system
        is_late = message.is_system and not is_leading
        said = replace(message, role="user") if is_late else message
        if runs and said.role == runs[-1][0].role == "user" and (is_late or can_join):
            runs[-1].append(said)
        else:
            runs.append([said])
        can_join = is_late
    return replace(conversation, messages=[joined(run) for run in runs])
