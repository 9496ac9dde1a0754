"""Records for operators: the last requests that ended, the tokens that they computed again, and the lines that broke
the prefixes of prompts.

A request costs one small record when it ends. Of its text, only a line that broke a prefix is kept, for callers who may
see texts.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict, deque
from functools import partial
from typing import Any

from msgspec import Struct

from diskprefix.api.figures import broken_by, figures_reply
from diskprefix.printable import shown
from diskprefix.server.log_context import LogContext
from diskprefix.store.lost_tokens import LostTokens, hour_of
from diskprefix.values import CacheOutcome, CacheReport

MAX_REPLIES = 300
MAX_FAILURES = 100


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that ended. `number` counts them, from 1. `ended_at` is in seconds since 1970, `elapsed_s` runs from
    the first byte of the request to the last one of the answer.

    If the request was answered, `prefix_cache` and `timings` are those of the response. Otherwise they are None, and
    `error` has the reason, unless the client left. A cancelled request has the numbers of tokens at that time.
    `outcome` is that of a `DoneEvent`.
    """

    number: int
    ended_at: float
    elapsed_s: float
    id: str
    route: str
    caller: str | None
    status: int
    error: str | None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    prefix_cache: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    outcome: CacheOutcome | None = None


class RecentRequests:
    """The last requests that generated, and the last ones that failed. For the event loop."""

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
        elif (came := context.cancelled_at) is not None:
            figures = {"prompt_tokens": came.prompt_tokens, "reply_tokens": came.reply_tokens}
        ended = EndedRequest(
            number=self.count,
            ended_at=round(time.time(), 3),
            elapsed_s=round(elapsed_s, 3),
            id=context.generation_id or context.request_id,
            route=route,
            caller=context.caller.name,
            status=context.status,
            error=context.error,
            **figures,
        )
        (self._replies if ended.prefix_cache is not None else self._failures).append(ended)

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
        place = {"line": broken["line"], "normalisers": tuple(broken["normalisers"]), "tool": tool}
    return [row(cause=cause, tokens=num, **(place if cause == "diverged" else {})) for cause, num in report.recomputed]


class BrokenLines:
    """The texts of the lines that broke prefixes, by their shapes, each as it was first. Logs each shape once. The
    lines not seen for longest are forgotten."""

    def __init__(self) -> None:
        self.texts: OrderedDict[str, str] = OrderedDict()

    def note(self, report: CacheReport) -> None:
        """Remembers what broke the prompt of a request, if something did."""
        if report.broken is None:
            return
        broken = broken_by(report)
        line = broken["line"]
        if line not in self.texts:
            names = ",".join(f"{name}=on" for name in broken["normalisers"])
            log.info(
                "[disk-cache] a prompt differs from an earlier one at token %d, in the line %r (letters are masked as "
                "x, digits as #; the dashboard shows the text), so about %d equal tokens after it are computed again%s "
                "(logged once for each such line)",
                broken["at"],
                line,
                broken["tokens"],
                f"; --normalise {names} may help" if names else "",
            )
        text = " ".join(report.broken_line[:_TEXT_CHARS].split())
        self.texts[line] = self.texts.pop(line, text)
        if len(self.texts) > _MAX_LINES:
            self.texts.popitem(last=False)
