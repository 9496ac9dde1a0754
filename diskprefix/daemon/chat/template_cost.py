"""Measures the cost of a chat template: how many tokens of a prompt stay equal after usual changes of a conversation.

The state of the tokens up to the first change is reused; all later tokens are computed again. Made-up conversations are
rendered before and after each change.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message, Role, TextPart, ToolCall
from diskprefix.daemon.chat.template_date import CLOCK
from diskprefix.errors import InvalidRequest
from diskprefix.tokens import common_prefix_length

if TYPE_CHECKING:
    from diskprefix.daemon.chat.renderer import PromptRenderer

_LIMIT_S = 3.0
"""The time limit of all renderings, in seconds: a template may be slow, or never end."""
_ENOUGH = 0.8
"""The least share of a prompt that should stay. Below it, the line gives advice."""
_LATER = timedelta(hours=1, minutes=1, seconds=1)
_WORDS = "Water that falls on the mountains finds its way to the sea, by one river or by another. "


class CommonPrefix(Struct, frozen=True):
    """The first `num_tokens` of a prompt of `total` tokens stay equal."""

    num_tokens: int
    total: int

    @property
    def percent(self) -> int:
        """The share, rounded down."""
        return 100 * self.num_tokens // self.total

    @property
    def is_short(self) -> bool:
        return self.num_tokens < self.total * _ENOUGH


class TemplateCost(Struct, frozen=True):
    """The tokens of a prompt that stay equal after each change; None if the template refuses a conversation."""

    turn: CommonPrefix | None = None
    """A reply and a question are added."""
    day: CommonPrefix | None = None
    """The conversation is rendered on the next day."""
    hour: CommonPrefix | None = None
    """The conversation is rendered an hour, a minute and a second later."""
    thoughts: CommonPrefix | None = None
    """A question follows a call with thoughts, which many templates then drop."""
    tool: CommonPrefix | None = None
    """The client offers one more tool."""
    advice: str = ""

    @property
    def line(self) -> str:
        """The parts of a saved prompt that later ones find, in one line, without the advice."""
        changes = {
            "after a further turn": self.turn,
            "on the next day": self.day,
            "an hour later": self.hour,
            "without its thoughts": self.thoughts,
            "with a further tool": self.tool,
        }
        known = {change: prefix for change, prefix in changes.items() if prefix is not None}
        if not known:
            return "no conversation could be rendered"
        whole = [change for change, prefix in known.items() if prefix.num_tokens == prefix.total]
        parts = [f"all {', '.join(whole)}"] if whole else []
        parts += [f"{prefix.percent} % {change}" for change, prefix in known.items() if change not in whole]
        return f"restored of a saved prompt: {'; '.join(parts)}"

    @property
    def record(self) -> JsonObject:
        """The figures and the advice, for JSON."""
        prefixes = {
            "turn": self.turn,
            "day": self.day,
            "hour": self.hour,
            "thoughts": self.thoughts,
            "tool": self.tool,
        }
        figures = {
            name: None if prefix is None else {"kept": prefix.num_tokens, "of": prefix.total}
            for name, prefix in prefixes.items()
        }
        return {**figures, "advice": self.advice}


def template_cost(renderer: PromptRenderer) -> TemplateCost:
    """Renders the conversations. Takes 10 to 80 ms, and seconds if the template is slow."""
    from diskprefix.runtime.files.template_sandbox import renders_end_after  # Here, as it imports Jinja2.

    with renders_end_after(_LIMIT_S):
        return _Trial(renderer.for_trial()).cost()


class _Trial:
    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer

    def cost(self) -> TemplateCost:
        plain = _conversation([_said("system", 3), *_turns(2), _said("user", 1)])
        grown = replace(plain, messages=[*plain.messages, _said("assistant", 1), _said("user", 1)])
        calls = _conversation([_said("system", 3), *_turns(1), _said("user", 1), *_call()], tools=[_tool("look")])
        asked = replace(calls, messages=[*calls.messages, _said("assistant", 1), _said("user", 1)])
        more_tools = replace(calls, tools=[_tool("look"), _tool("write")])
        turn, day, hour = self._common_prefix(plain, grown), self._over_a_day(plain), self._over_an_hour(plain)
        thoughts, tool = self._common_prefix(calls, asked), self._common_prefix(calls, more_tools)
        advice = self._advice(turn, hour)
        return TemplateCost(turn, day, hour, thoughts, tool, advice)

    def _over_a_day(self, plain: Conversation) -> CommonPrefix | None:
        now = datetime.now()
        # Every part of the time that a template may write differs.
        return self._over(plain, now, now + timedelta(days=1) + _LATER)

    def _over_an_hour(self, plain: Conversation) -> CommonPrefix | None:
        morning = datetime.combine(datetime.now(), time(10))
        return self._over(plain, morning, morning + _LATER)

    def _over(self, plain: Conversation, now: datetime, later: datetime) -> CommonPrefix | None:
        if not self._renderer.writes_today:
            return self._common_prefix(plain, plain)
        first, second = (replace(plain, template_variables={CLOCK: moment.strftime}) for moment in (now, later))
        return self._common_prefix(first, second)

    def _common_prefix(self, before: Conversation, after: Conversation) -> CommonPrefix | None:
        prompts = []
        for conversation in (before, after):
            try:
                prompts.append(self._renderer.replay(conversation, None).prompt.token_ids)
            except InvalidRequest:
                return None
        return CommonPrefix(common_prefix_length(*prompts), len(prompts[0]))

    @staticmethod
    def _advice(turn: CommonPrefix | None, hour: CommonPrefix | None) -> str:
        advice = []
        if turn is not None and turn.is_short:
            advice.append("each question changes earlier text; another template (--chat-template FILE) may not")
        if hour is not None and hour.is_short:
            advice.append(
                "the time of day at the beginning is another one in each conversation, so they share little; "
                "--template-date YYYY-MM-DD fixes it at midnight"
            )
        return "; ".join(advice)


def _said(role: Role, num_sentences: int, **fields: Any) -> Message:
    content = (TextPart(_WORDS * num_sentences, ""),) if num_sentences else ()
    return Message(role=role, content=content, path="messages", **fields)


def _turns(count: int) -> list[Message]:
    return [_said(role, 1) for role in ("user", "assistant")] * count


def _call() -> Sequence[Message]:
    call = ToolCall("diskprefx", "look", {"what": "the sea"})
    return _said("assistant", 0, reasoning=_WORDS, tool_calls=(call,)), _said("tool", 1, tool_call_id=call.id)


def _tool(name: str) -> JsonObject:
    what = {"type": "string", "description": _WORDS}
    parameters = {"type": "object", "properties": {"what": what}, "required": ["what"]}
    return {"type": "function", "function": {"name": name, "description": _WORDS, "parameters": parameters}}


def _conversation(messages: list[Message], tools: list[JsonObject] | None = None) -> Conversation:
    return Conversation(messages=messages, tools=tools)
