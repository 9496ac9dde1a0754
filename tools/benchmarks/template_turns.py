"""Counts the tokens of a turn's prompt, and of the reply to it, with which the next turn's prompt begins."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.replay import Replayed, ReplyMemory, Turn
from diskprefix.errors import InvalidRequest
from diskprefix.tokens import as_token_ids, common_prefix_length
from tests.daemon.chat.turns import Turns
from tools.benchmarks.template_conversations import (
    GREETING,
    LOOP,
    NUDGE,
    QUESTION,
    SYSTEM,
    Case,
    Message,
    call,
    reply,
    result,
    user,
)
from tools.benchmarks.template_engines import Engine, Given
from tools.benchmarks.template_forms import with_empty_text, with_objects

Ids: TypeAlias = list[int]


class Growth(msgspec.Struct, frozen=True):
    """A conversation that grows: the model's `reply`, what the client sends back for it, and the messages after."""

    messages: list[Message]
    reply: Message
    after: list[Message]
    has_tools: bool = True
    sent_back: Message | None = None

    @property
    def cases(self) -> tuple[Case, Case, Case]:
        """The conversation, the same with the reply, and the one of the next turn."""
        back = self.sent_back or self.reply
        longer: tuple[list[Message], ...] = ([], [self.reply], [back, *self.after])
        first, replied, following = (Case([*self.messages, *more], self.has_tools) for more in longer)
        return first, replied, following


_LOOP = [SYSTEM, QUESTION, call("Oslo", thoughts="Oslo first."), result("Oslo", "rain")]
_ANSWER = reply("Rain and sun.", "Both are known.")
_THANKS = user("Thanks, and tomorrow?")
GROWTHS = {
    "chat": Growth([*GREETING, QUESTION], reply("Rain and sun."), [_THANKS], has_tools=False),
    "chat with thoughts": Growth([*GREETING, QUESTION], _ANSWER, [_THANKS], has_tools=False),
    "chat, thoughts not sent back": Growth(
        [*GREETING, QUESTION], _ANSWER, [_THANKS], has_tools=False, sent_back=reply("Rain and sun.")
    ),
    "late system message": Growth([*GREETING, QUESTION], reply("Rain and sun."), [NUDGE, _THANKS], has_tools=False),
    "call": Growth(LOOP[:4], call("Oslo"), LOOP[5:]),
    "next call, with thoughts": Growth(_LOOP, call("Rome", thoughts="Now Rome."), [result("Rome", "sun")]),
    "question after the calls": Growth(LOOP, reply("Rain."), [_THANKS]),
    "question after thoughts and calls": Growth(_LOOP, _ANSWER, [_THANKS]),
}


class Kept(NamedTuple):
    """Tokens of the earlier prompt, of prompt and reply together, and how many of both the next prompt begins with."""

    prompt: int
    state: int
    kept: int

    @property
    def whole_prompt(self) -> bool:
        return self.kept >= self.prompt

    @property
    def whole_state(self) -> bool:
        return self.kept >= self.state


class Measured(NamedTuple):
    """Of one template: transformers' prompts, ours, and ours with recorded replies."""

    theirs: Kept
    ours: Kept
    replayed: Kept


def measured(renderer: PromptRenderer, transformers: Engine, growth: Growth) -> Measured | None:
    """Returns None if one of the two refuses the conversation, or if a reply does not stand where its prompt ends."""
    first, replied, following = growth.cases
    texts = [_written(renderer, transformers, case) for case in (first, following)]
    try:
        turns = Turns()
        begun = renderer.replay(first.conversation, turns)
        whole = _text(renderer.replay(replace(replied.conversation, ending="none"), None))
        later = renderer.replay(following.conversation, None)
        sampled = _reply_in(renderer, first.conversation, _text(begun), whole)
        if sampled is None or None in texts:
            return None
        reply_ids = renderer.tokenize(sampled, add_special_tokens=False)
        calls = [each["id"] for each in growth.reply.get("tool_calls", ())]
        _remember(renderer, turns, begun, first.conversation, sampled, reply_ids, calls)
        again = renderer.replay(following.conversation, turns)
    except InvalidRequest:
        return None
    ids = [renderer.tokenize(text or "", add_special_tokens=False) for text in texts]
    before = begun.prompt.token_ids.tolist()
    return Measured(
        _kept(ids[0], reply_ids, ids[1]),
        *(_kept(before, reply_ids, now.prompt.token_ids.tolist()) for now in (later, again)),
    )


def _kept(prompt: Ids, sampled: Ids, following: Ids) -> Kept:
    state = [*prompt, *sampled]
    return Kept(len(prompt), len(state), common_prefix_length(as_token_ids(state), as_token_ids(following)))


def _written(renderer: PromptRenderer, transformers: Engine, case: Case) -> str | None:
    """Returns transformers' text, with the arguments of calls as objects if the template wants them."""
    given = Given(case.messages, case.tools, renderer.special_tokens)
    objects = with_objects(given)
    tries = (given, objects, with_empty_text(objects))
    texts = (transformers.write(renderer.template_source, changed).text for changed in tries)
    return next((text for text in texts if text is not None), None)


def _text(replayed: Replayed) -> str:
    assert replayed.prompt.source is not None
    return replayed.prompt.source.text


def _reply_in(renderer: PromptRenderer, conversation: Conversation, prompt: str, whole: str) -> str | None:
    """Returns the reply in the template's own words, without the token that ends it; None if it is not after the
    prompt."""
    if not whole.startswith(prompt):
        return None
    ends = renderer._template.reply_ends_of(conversation.tools)
    text = re.split("|".join(map(re.escape, ends)) or "(?!)", whole[len(prompt) :], maxsplit=1)[0]
    return text or None


def _remember(
    renderer: PromptRenderer,
    turns: Turns,
    begun: Replayed,
    conversation: Conversation,
    text: str,
    ids: Ids,
    calls: list[str],
) -> None:
    """Records a reply as the server does."""
    parser = renderer.output_format.parser(conversation.tools or (), renderer.end_of(begun.prompt))
    turn = Turn.of_deltas([*parser.feed(text), *parser.finish()])
    if begun.origin is not None and len(turn.calls) == len(calls):
        ReplyMemory(turns, begun.origin, renderer.end_ids).remember(turn, calls, ids)
