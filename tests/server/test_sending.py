"""Large replies: what is on its way to one caller is bounded, and a client that does not read is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import Response

from diskprefix.server import body as reading
from diskprefix.server.log_context import LogContext
from diskprefix.server.sending import LARGE_BYTES, PIECE_BYTES, Sending

LARGE = bytes(range(256)) * (LARGE_BYTES // 256) + b"end"


class Connection:
    """A request, and what is sent to its client: nothing more once the client has stopped reading."""

    def __init__(self, *, reads: bool = True) -> None:
        self.messages: list[dict[str, Any]] = []
        self.goes_on = asyncio.Event()
        if reads:
            self.goes_on.set()
        self.scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {"record": LogContext()}}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            await self.goes_on.wait()

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])


def answering(body: bytes) -> Sending:
    return Sending(Response(body), max_bytes=LARGE_BYTES * 3 // 2)


async def answered(app: Sending, connection: Connection) -> None:
    await app(connection.scope, connection.receive, connection.send)


@pytest.mark.parametrize("body", [b"", b"small", LARGE])
def test_a_reply_arrives_whole_in_pieces_that_are_waited_for(body: bytes) -> None:
    async def scenario() -> None:
        connection = Connection()
        await answered(answering(body), connection)
        assert (connection.status, connection.body) == (200, body)
        assert max(len(message.get("body", b"")) for message in connection.messages) <= PIECE_BYTES
        assert [message.get("more_body", False) for message in connection.messages][-1] is False

    asyncio.run(scenario())


def test_a_large_reply_beside_one_that_is_not_read_yet_is_refused() -> None:
    async def scenario() -> None:
        app, slow = answering(LARGE), Connection(reads=False)
        task = asyncio.create_task(answered(app, slow))
        while len(slow.messages) < 2:
            await asyncio.sleep(0)
        refused = Connection()
        await answered(app, refused)
        assert refused.status == 503
        assert b"not read yet" in refused.body
        slow.goes_on.set()
        await task
        assert slow.body == LARGE
        later = Connection()
        await answered(app, later)
        assert later.body == LARGE

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)

    async def scenario() -> None:
        app, slow = answering(LARGE), Connection(reads=False)
        await answered(app, slow)
        assert len(slow.body) == PIECE_BYTES
        assert slow.messages[-1]["more_body"], "the end is missing, so nobody takes it for a whole reply"
        monkeypatch.setattr(reading, "_PATIENCE_S", 30.0)
        later = Connection()
        await answered(app, later)
        assert later.body == LARGE

    asyncio.run(scenario())
    assert "was not sent: it was not read in time" in caplog.text
