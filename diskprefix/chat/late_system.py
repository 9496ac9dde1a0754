"""System messages behind others, which agents send and many chat templates refuse or leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diskprefix.chat.messages import Conversation, Message, joined


def has_late_system(messages: Sequence[Message]) -> bool:
    """Whether a system message stands behind a message of another role."""
    are_system = [message.role in ("system", "developer") for message in messages]
    return not all(are_system[: sum(are_system)])


def late_system_as_user(conversation: Conversation) -> Conversation:
    """Returns the conversation with each late system message as the user's, in its place.

    It is joined with the messages of the user beside it, because many templates want user and assistant to take turns.
    """
    runs: list[list[Message]] = []
    """Those of a run become one."""
    can_join = False
    is_leading = True
    for message in conversation.messages:
        is_system = message.role in ("system", "developer")
        is_leading = is_leading and is_system
        is_late = is_system and not is_leading
        said = replace(message, role="user") if is_late else message
        if runs and said.role == runs[-1][0].role == "user" and (is_late or can_join):
            runs[-1].append(said)
        else:
            runs.append([said])
        can_join = is_late
    return replace(conversation, messages=[joined(run) for run in runs])
