"""One request on its way to a worker and back, with a worker of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from diskprefix.extras.front.passing import Incoming, NotTaken, WorkerGone, pass_on

Worker = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def passed(worker: Worker, tmp_path: Path, *messages: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """Returns the status and the messages that the client got. Behind its `messages`, the client waits."""
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "raw_path": b"/a%20b", "query_string": b"c=d", "headers": raw}
    left = list(messages)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> int:
        server = await asyncio.start_unix_server(worker, tmp_path / "s")
        async with server:
            return await asyncio.wait_for(pass_on(str(tmp_path / "s"), scope, Incoming(receive), send), 30)

    return asyncio.run(run()), sent


def chunk(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_the_request_comes_whole(tmp_path: Path) -> None:
    got = bytearray()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"body"))
        writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX-Own: 1\r\nConnection: close\r\n\r\nreply")
        await writer.drain()
        writer.close()

    headers = {"host": "h", "content-length": "9", "connection": "te"}
    status, sent = passed(worker, tmp_path, chunk(b"whole", more=True), chunk(b"body"), headers=headers)
    lines = bytes(got).decode().split("\r\n")
    assert lines[0] == "POST /a%20b?c=d HTTP/1.1"
    assert lines[-1] == "wholebody"
    assert status == 201
    assert (b"x-own", b"1") in sent[0]["headers"]
    assert b"connection" not in dict(sent[0]["headers"])
    assert b"".join(message.get("body", b"") for message in sent) == b"reply"


def test_a_worker_that_took_nothing_leaves_the_request_to_another(tmp_path: Path) -> None:
    async def worker(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with pytest.raises(NotTaken):
        passed(worker, tmp_path, chunk(b"body"), headers={"content-length": "4"})


@pytest.mark.parametrize("begins", [False, True])
def test_a_worker_that_dies_with_a_request_fails_it(tmp_path: Path, begins: bool) -> None:
    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if begins:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await writer.drain()
        writer.close()

    with pytest.raises(WorkerGone) as gone:
        passed(worker, tmp_path, chunk(b"body"), headers={"content-length": "4"})
    assert gone.value.has_begun == begins


def test_a_client_that_hangs_up_closes_the_connection_to_the_worker(tmp_path: Path) -> None:
    rests: list[bytes] = []

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        rests.append(await reader.read())
        writer.close()

    status, sent = passed(
        worker, tmp_path, chunk(b"body"), {"type": "http.disconnect"}, headers={"content-length": "4"}
    )
    assert (status, sent, rests) == (499, [], [b""])


def test_a_worker_may_answer_although_the_body_never_comes(tmp_path: Path) -> None:
    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    assert passed(worker, tmp_path, headers={"content-length": "4"})[0] == 408
