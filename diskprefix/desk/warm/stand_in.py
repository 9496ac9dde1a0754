"""A server that stands in for a daemon: it records requests and ends each reply after one word."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_WORD = "OK"
_CHAT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_MAX_BODY_BYTES = 64 << 20


class StandIn:
    """Serves on a free port of 127.0.0.1 while it is entered."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.has_tools = False
        """A request with tools has come."""
        self._requests: list[tuple[str, dict[str, Any], int]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def record(self, route: str, body: dict[str, Any], num_bytes: int) -> None:
        self._requests.append((route, body, num_bytes))
        self.has_tools |= bool(body.get("tools"))

    def first_prompt(self) -> tuple[str, dict[str, Any]] | None:
        """Returns the route and the body of the largest request with tools, or without them if none has any: agents
        send small requests too, for a title. None if no request has come."""
        requests = [request for request in self._requests if request[1].get("tools")] or self._requests
        route, body, _ = max(requests, key=lambda request: request[2], default=("", {}, 0))
        return (route, body) if route else None


def _handler_of(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(200, {})

        def do_GET(self) -> None:
            model = {"id": stand_in.model, "object": "model", "created": 0, "owned_by": "diskprefix"}
            is_list = self.path.partition("?")[0].rstrip("/").endswith("/models")
            self._answer(200, {"object": "list", "data": [model]} if is_list else model)

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(size) if size <= _MAX_BODY_BYTES else b""
            path = self.path.partition("?")[0].rstrip("/")
            route = next((route for route in (_CHAT, _MESSAGES, _RESPONSES) if path.endswith(route)), None)
            try:
                body = json.loads(raw)
            except ValueError:
                body = None
            if route is None or not isinstance(body, dict):
                self._answer(200, {"input_tokens": 1})
                return
            stand_in.record(route, body, size)
            if body.get("stream"):
                self._stream("".join(_events(route, stand_in.model)))
            else:
                self._answer(200, _reply(route, stand_in.model))

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(content))

        def _stream(self, text: str) -> None:
            self._send(200, "text/event-stream", text)

        def _send(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler


def _reply(route: str, model: str) -> dict[str, Any]:
    """Returns a whole reply of one word."""
    if route == _CHAT:
        message = {"role": "assistant", "content": _WORD}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": model} | {
            "choices": [choice],
            "usage": usage,
        }
    if route == _MESSAGES:
        return _message(model, [{"type": "text", "text": _WORD}], "end_turn")
    return _response(model, "completed", [_item("completed", [_part(_WORD)])])


def _events(route: str, model: str) -> Iterator[str]:
    """Yields the events of a streamed reply of one word."""
    if route == _CHAT:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": model}
        said: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": _WORD}, None), ({}, "stop")]
        for delta, reason in said:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            yield f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"
        return
    for event in _message_events(model) if route == _MESSAGES else _response_events(model):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _message(model: str, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    ended = {"stop_reason": reason, "stop_sequence": None, "usage": usage}
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": content} | ended


def _message_events(model: str) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _message(model, [], None)}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _WORD}}
    yield {"type": "content_block_stop", "index": 0}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _item(status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "status": status, "role": "assistant", "content": content}


def _response(model: str, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}  # type: ignore[dict-item]
    named = {"id": "resp_1", "object": "response", "created_at": 0, "model": model}
    return named | {"status": status, "output": output, "usage": usage}


def _response_events(model: str) -> Iterator[dict[str, Any]]:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = _item("completed", [_part(_WORD)])
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(model, "in_progress", [])},
        {"type": "response.output_item.added", "output_index": 0, "item": _item("in_progress", [])},
        {"type": "response.content_part.added", **place, "part": _part("")},
        {"type": "response.output_text.delta", **place, "delta": _WORD},
        {"type": "response.output_text.done", **place, "text": _WORD},
        {"type": "response.content_part.done", **place, "part": _part(_WORD)},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": _response(model, "completed", [item])},
    ]
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}
