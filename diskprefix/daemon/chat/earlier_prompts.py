"""Reads from the recorded replies of a conversation what the earlier prompts were like: which tools these had, and that
their pictures could be decoded.

A client says nothing of it: it sends all of a conversation again, with the tools of today.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, dropwhile
from typing import TYPE_CHECKING

from msgspec.structs import replace

from diskprefix.daemon.chat.content import lost_results
from diskprefix.daemon.chat.draft import DraftStep, PromptDraft, run_steps
from diskprefix.daemon.chat.messages import Conversation, NewTool
from diskprefix.daemon.chat.replay import NewTools, SampledTurn
from diskprefix.daemon.chat.splice import recall
from diskprefix.daemon.chat.tool_order import digests_of

if TYPE_CHECKING:
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor


def heed_records(processor: PictureProcessor | None, arrange: Sequence[DraftStep], draft: PromptDraft) -> PromptDraft:
    """Runs the steps that `arrange` the messages, and finds the recorded replies. If these show that tools came in the
    middle of the conversation, or if a picture of the history that none of them saw cannot be decoded, runs the steps
    again: with these tools in their places, and with the picture known as unreadable."""
    numbered = [replace(message, number=number) for number, message in enumerate(draft.conversation.messages)]
    draft = replace(draft, conversation=replace(draft.conversation, messages=numbered))
    recalled = recall(run_steps(arrange, draft))
    messages = recalled.conversation.messages
    had = _tools_of(((messages[index].number, sampled) for index, sampled in recalled.remembered.items()))
    conversation = with_late_tools(draft.conversation, had)
    if conversation is not draft.conversation or not all(_decode_unseen(processor, recalled)):
        recalled = recall(run_steps(arrange, replace(draft, conversation=conversation)))
    return replace(recalled, known_tools={*chain(*had.values())} if had else None)


def _tools_of(replies: Iterable[tuple[int | None, SampledTurn]]) -> dict[int | None, tuple[str, ...]]:
    """Returns the tools that were new in the prompts of these replies, from the first prompt on whose tools are all
    known. Each reply comes with the number of its message."""
    known = dropwhile(lambda reply: not reply[1].tools.are_all, replies)
    return {number: sampled.tools.digests for number, sampled in known}


def new_tools(conversation: Conversation, known: Collection[str] | None) -> NewTools:
    """Returns the tools that a conversation offers beside the `known` ones of its earlier prompts."""
    digests = digests_of(conversation.tool_names)
    return NewTools(tuple(digest for digest in digests if digest not in (known or ())), are_all=known is None)


def _decode_unseen(processor: PictureProcessor | None, recalled: PromptDraft) -> list[bool]:
    """Decodes the pictures of the history that no recorded reply follows. Returns for each whether it can be decoded.

    The others were decoded for these replies. Without this, each later request of the client would fail.
    """
    last, left = max(recalled.remembered, default=-1), iter(recalled.pictures)
    unseen = [
        picture
        for index, message in enumerate(recalled.conversation.messages)
        for part, picture in zip(message.pictures, left, strict=False)
        if index > last and part.in_history
    ]
    return [] if processor is None else [processor.can_decode(picture, recalled.asker) for picture in unseen]


def with_late_tools(conversation: Conversation, had: Mapping[int | None, Sequence[str]]) -> Conversation:
    """Returns the conversation with the tools late that came in the middle of it; `conversation` itself if none did.

    `had` has the digests of the names of the tools that were new in earlier prompts, by the index of the assistant's
    message that replied. Those of all but the first prompt came with the last message before the reply, and tools that
    none had came with the newest message; results that are left out do not count. If a tool of the first prompt is
    gone, the prompt is new from its beginning, and has all tools there.
    """
    names = conversation.tool_names
    of_digests = dict(zip(digests_of(names), names, strict=True)) if had else {}
    first = next(iter(had.values()), ())
    if not had or not of_digests.keys() >= {*first}:
        return conversation
    left = {
        digest: name for digest, name in of_digests.items() if name not in conversation.late and digest not in first
    }
    coming: dict[int, list[str]] = {}
    asked_at, lost = -1, lost_results(conversation)
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            asked_at = asked_at if message.role == "tool" and message.tool_call_id in lost else index
        elif new := [left.pop(digest) for digest in had.get(index, ()) if digest in left]:
            coming.setdefault(asked_at, []).extend(new)
    if left:
        coming.setdefault(asked_at, []).extend(left.values())
    return _placed(conversation, coming) if coming and asked_at >= 0 else conversation


def _placed(conversation: Conversation, coming: Mapping[int, Sequence[str]]) -> Conversation:
    """Returns the conversation with the tools that come with the messages of these indices. A mark on such a tool moves
    to the last one before it that is there from the beginning."""
    late = conversation.late.union(*coming.values())
    names, tools, paths = conversation.tool_names, conversation.tools or [], conversation.tool_paths
    ranks = {name: rank for rank, name in enumerate(chain(*coming.values()), start=1)}
    is_late = [name in late for name in names]
    order = sorted(range(len(tools)), key=lambda index: (is_late[index], ranks.get(names[index], 0)))
    marks = ((index - sum(is_late[: index + 1]), mark) for index, mark in conversation.tool_marks)
    return replace(
        conversation,
        messages=[
            replace(message, new_tools=(*message.new_tools, *map(NewTool, coming[index])))
            if index in coming
            else message
            for index, message in enumerate(conversation.messages)
        ],
        tools=[tools[index] for index in order],
        tool_marks=tuple((index, mark) for index, mark in marks if index >= 0),
        tool_paths=[paths[index] for index in order] if len(paths) == len(tools) else paths,
        late=late,
    )
