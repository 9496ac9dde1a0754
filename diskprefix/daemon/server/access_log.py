"""The outermost middleware: one log line for each request, the request counter, and the answer to unexpected errors."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.error_replies import error_response, logged
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.errors import DiskPrefixError, NotReady
from diskprefix.printable import shown

log = logging.getLogger("diskprefix")

_QUIET_ROUTES = frozenset({"/health", "/metrics", "/props", "/dashboard/state", "/dashboard/entries"})
"""Logged at debug level when they succeed, because programs poll them every few seconds."""

_LOGGED_PATH_CHARS = 200


class AccessLog:
    """ASGI middleware. Not Starlette's BaseHTTPMiddleware, which hides the client's disconnect from the response."""

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = LogContext()
        scope.setdefault("state", {})["record"] = record
        try:
            await self._answer(scope, receive, send, record)
        finally:
            self._close(scope, record, time.perf_counter() - record.began_at)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: LogContext) -> None:
        response_started = False

        async def note_status(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                record.status = message["status"]
                request_id = record.request_id.encode()
                message["headers"] = [
                    *message["headers"],
                    # Another site could show a page of this daemon in a frame, and lead clicks to it.
                    (b"x-frame-options", b"DENY"),
                    # The names that the clients of OpenAI and Anthropic read.
                    (b"x-request-id", request_id),
                    (b"request-id", request_id),
                ]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except asyncio.CancelledError:
            # When the daemon stops, uvicorn cancels the remaining requests. It would log a traceback for each.
            if self._daemon.status != "stopping":
                raise
            stopping = NotReady("the daemon is stopping")
            record.error = logged(stopping)
            if not response_started:
                await error_response(scope, stopping)(scope, receive, note_status)
        except Exception:
            log.exception("%s %s failed unexpectedly", scope["method"], _path(scope))
            if response_started:
                raise
            hidden = DiskPrefixError("internal error; the daemon's log has the details", code="internal_error")
            await error_response(scope, hidden)(scope, receive, note_status)

    def _close(self, scope: Scope, record: LogContext, elapsed_s: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._daemon.metrics.count_request(route, record)
        self._daemon.recent.note(record, scope["method"], route, elapsed_s)
        # While the model loads, the status is 503.
        is_quiet = route in _QUIET_ROUTES and (record.status < 400 or record.status == 503)
        level = logging.DEBUG if is_quiet else logging.INFO
        caller = f" · key {record.caller.name}" if record.caller.name else ""
        answered = f"{record.status}{caller}{_figures(record)} · {elapsed_s:.2f} s"
        log.log(level, "%s %s %s", scope["method"], _path(scope), answered)


def _path(scope: Scope) -> str:
    """Returns the path as it was sent, with its escapes, cut to a readable length."""
    raw: bytes = scope["raw_path"]
    return shown(raw.decode("ascii", "replace"), _LOGGED_PATH_CHARS)


def _figures(record: LogContext) -> str:
    if record.done is None:
        progress = ""
        if (at := record.cancelled_at) is not None:
            progress = f" · prompt {at.ready_tokens} of {at.prompt_tokens} tokens · restored {at.restored_tokens}"
            progress += f" · reply {at.reply_tokens} tokens"
        return f"{progress} · {record.error}" if record.error else progress
    usage, cache, timings = record.done.usage, record.done.cache, record.done.timings
    return (
        f" · prompt {usage.prompt_tokens} tokens · restored {cache.restored} ({cache.miss_reason or cache.source})"
        f" · reply {usage.completion_tokens} tokens · first token after {timings.ttft_ms:.0f} ms"
    )
