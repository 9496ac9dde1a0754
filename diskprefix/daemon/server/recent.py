"""Records for operators: the last requests that ended, the tokens that they computed again, and the lines that broke
the prefixes of prompts.

A request costs one small record when it ends. The record has no text, except a line that broke a prefix, for callers
who may see texts.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict, deque
from functools import partial
from typing import Any

from msgspec import Struct

from diskprefix.daemon.api.figures import broken_by, figures_reply
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens, hour_of
from diskprefix.printable import shown
from diskprefix.values import CacheOutcome, CacheReport

MAX_REPLIES = 300
MAX_FAILURES = 100


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that ended. `number` counts requests from 1. `ended_at` is in seconds since 1970, `elapsed_s` runs from
    the first byte of the request to the last byte of the answer.

    `prefix_cache` and `timings` are as in the response, and `outcome` as in a `DoneEvent`. Without an answer they are
    None, and `error` has the reason, or the client stopped the request (`is_stopped`), which is no failure. A stopped
    request has the numbers of tokens at that time; `ready_tokens` of its prompt were restored or computed.
    """

    number: int
    ended_at: float
    elapsed_s: float
    id: str
    route: str
    caller: str | None
    status: int
    error: str | None
    is_stopped: bool = False
    prompt_tokens: int = 0
    ready_tokens: int = 0
    reply_tokens: int = 0
    prefix_cache: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    outcome: CacheOutcome | None = None


class RecentRequests:
    """The last requests that generated or were stopped, and the last ones that failed. For the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._replies: deque[EndedRequest] = deque(maxlen=MAX_REPLIES)
        self._failures: deque[EndedRequest] = deque(maxlen=MAX_FAILURES)

    def note(self, context: LogContext, method: str, route: str, elapsed_s: float) -> None:
        """Adds a request that ended, if it generated something or failed to."""
        has_failed = context.status >= 400 or context.error is not None
        if context.done is None and (method != "POST" or not has_failed):
            return
        self.count += 1
        figures: dict[str, Any] = {}
        if (done := context.done) is not None:
            figures = figures_reply(done, None)
            figures |= {"prompt_tokens": done.usage.prompt_tokens, "reply_tokens": done.usage.completion_tokens}
            figures["outcome"] = done.outcome
        elif (progress := context.cancelled_at) is not None:
            figures = {name: getattr(progress, name) for name in ("prompt_tokens", "ready_tokens", "reply_tokens")}
        ended = EndedRequest(
            number=self.count,
            ended_at=round(time.time(), 3),
            elapsed_s=round(elapsed_s, 3),
            id=context.generation_id or context.request_id,
            route=route,
            caller=context.caller.name,
            status=context.status,
            error=context.error,
            is_stopped=context.is_stopped,
            **figures,
        )
        has_failed = ended.prefix_cache is None and not ended.is_stopped
        (self._failures if has_failed else self._replies).append(ended)

    @property
    def failures(self) -> list[EndedRequest]:
        """The requests that failed, oldest first."""
        return list(self._failures)

    def since(self, number: int) -> list[EndedRequest]:
        """Returns the requests after the one with this number, oldest first."""
        newer = [ended for ended in (*self._replies, *self._failures) if ended.number > number]
        return sorted(newer, key=lambda ended: ended.number)


log = logging.getLogger("diskprefix")

_MAX_LINES, _TEXT_CHARS, _NAME_CHARS = 32, 200, 64
_PROGRAM = re.compile(r"[\w.-]{1,40}", re.ASCII)


def program_of(user_agent: str) -> str:
    """Returns the name of the program in a header `User-Agent`, without its version."""
    match = _PROGRAM.match(user_agent)
    return match[0] if match else ""


def lost_tokens(report: CacheReport, client: str, now: float) -> list[LostTokens]:
    """Returns the tokens that a request computed again. `now` is in seconds since 1970."""
    row = partial(LostTokens, hour=hour_of(now), client=client)
    place: dict[str, Any] = {}
    if report.broken is not None:
        broken, tool = broken_by(report), shown(report.broken_tool, _NAME_CHARS)
        place = {"line": broken["line"], "canonicalisers": tuple(broken["canonicalisers"]), "tool": tool}
    stored_with = {"options": options_text(report.stored_with)}
    further = {"diverged": place, "other_settings": stored_with}
    return [row(cause=cause, tokens=num, **further.get(cause, {})) for cause, num in report.recomputed]


class BrokenLines:
    """The texts of the lines that broke prefixes, by their shapes: the first text of each shape. Logs each shape once.
    Forgets the least recently seen shapes."""

    def __init__(self) -> None:
        self.texts: OrderedDict[str, str] = OrderedDict()

    def note(self, report: CacheReport) -> None:
        """Remembers the line that broke the prefix of a prompt, if one did."""
        if report.broken is None:
            return
        broken = broken_by(report)
        line = broken["line"]
        if line not in self.texts:
            names = ",".join(f"{name}=on" for name in broken["canonicalisers"])
            advice = f"; --canonicalise {names} may help" if names else ""
            if broken["template_date"]:
                advice = "; the chat template writes the date there, which --template-date YYYY-MM-DD fixes"
            log.info(
                "[disk-cache] a prompt differs from an earlier one at token %d, in the line %r (letters are masked as "
                "x, digits as #; `diskprefix inspect --lost` shows the text), so about %d equal tokens after it are "
                "computed again%s (logged once for each such line)",
                broken["at"],
                line,
                broken["tokens"],
                advice,
            )
        text = " ".join(report.broken_line[:_TEXT_CHARS].split())
        self.texts[line] = self.texts.pop(line, text)
        if len(self.texts) > _MAX_LINES:
            self.texts.popitem(last=False)
