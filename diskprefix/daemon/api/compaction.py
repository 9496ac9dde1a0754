"""`POST /v1/responses/compact`: the model writes a summary of a conversation, with which a later request begins."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from diskprefix.daemon.api.dialect import Head, Json
from diskprefix.daemon.api.fields import optional
from diskprefix.daemon.api.reply import WholeReply
from diskprefix.daemon.api.responses import ResponseRequest, Responses
from diskprefix.daemon.api.responses_items import MessageItem, item_id, stored_form
from diskprefix.daemon.api.responses_writer import OutputItems, ResponseWriter

_MAX_CHARS = 20_000
"""The most characters of the user's messages beside the summary."""


class CompactRequest(ResponseRequest):
    """`POST /v1/responses/compact`."""

    model: str | None = Field(
        description="Name of the served model. Required, as in OpenAI's API; null: the served model."
    )
    stream: Literal[False] | None = optional("Not supported.")


class Compaction(Responses):
    """The API for one request."""

    body = CompactRequest

    def __init__(self) -> None:
        super().__init__()
        self.compacts = True

    def writer(self, body: ResponseRequest, head: Head) -> ResponseWriter:
        return CompactionWriter(head, _newest_user_messages(body, head.id))


class CompactionWriter(ResponseWriter):
    """Writes the user's newest messages, then the summary."""

    def __init__(self, head: Head, newest: list[Json]) -> None:
        super().__init__(head, {}, OutputItems(head.id, compacts=True))
        self._newest = newest

    def whole(self, reply: WholeReply) -> Json:
        response = super().whole(reply)
        same = {name: response[name] for name in ("id", "created_at", "usage", "prefix_cache", "timings")}
        return {"object": "response.compaction", **same, "output": [*self._newest, *response["output"]]}


def _newest_user_messages(body: ResponseRequest, response_id: str) -> list[Json]:
    """Returns the newest messages of the user, word for word."""
    newest: list[Json] = []
    room = _MAX_CHARS
    for index, item in reversed(list(enumerate(body.items))):
        if isinstance(item, MessageItem) and item.role == "user":
            form = stored_form(item)
            room -= len(json.dumps(form["content"]))
            if room < 0:
                break
            newest.append({"id": item_id(response_id, "message", index, is_input=True), **form})
    return newest[::-1]
