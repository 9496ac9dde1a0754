"""Clients that a server must bear: they send slowly, read slowly, or say nothing. Each runs until it is cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

READ_BYTES, READ_EVERY_S = 512, 0.5
WRITE_EVERY_S = 1.0
RESPONSE_BYTES = 2048
_ESTABLISHED = 1
"""The state of a connection, in Linux's `tcp_info`."""
_RECEIVE_BUFFER = 4096
"""So that the server, not this machine's kernel, holds what is not read."""


@dataclass
class BadClients:
    """Counts what the server did with each kind. `body` is a chat request with a long reply."""

    port: int
    body: dict[str, Any]
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """One connection of each kind: returns how the server ended it."""
        return {
            "slow reader": self._slow_reader,
            "reader that stops": self._stopped_reader,
            "slow writer of a head": self._slow_head,
            "slow writer of a body": self._slow_body,
            "silent connection": self._silent,
            "half a head, then silence": self._half_a_head,
        }

    async def run(self, kind: str) -> None:
        """Opens one connection after another."""
        while True:
            try:
                end = await self.kinds[kind]()
            except OSError as error:
                end = f"broken: {type(error).__name__}"
            self.ends[f"{kind}: {end}"] += 1
            await asyncio.sleep(WRITE_EVERY_S)

    def _socket(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        connection.setblocking(False)
        return connection

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = self._socket()
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=connection, limit=_RECEIVE_BUFFER)

    def _request(self) -> bytes:
        body = json.dumps(self.body | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        return self._head(len(body)) + body

    def _head(self, length: int) -> bytes:
        lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        return "\r\n".join((*lines, f"Content-Length: {length}", "\r\n")).encode()

    async def _slow_reader(self) -> str:
        reader, writer = await self._connect()
        try:
            writer.write(self._request())
            tail = b""
            while chunk := await reader.read(READ_BYTES):
                tail = (tail + chunk)[-64:]
                if b"data: [DONE]" in tail:
                    return "got all of the reply"
                await asyncio.sleep(READ_EVERY_S)
            return "cut off"
        finally:
            writer.close()

    async def _stopped_reader(self) -> str:
        loop, connection = asyncio.get_running_loop(), self._socket()
        with connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.port))
            await loop.sock_sendall(connection, self._request())
            await loop.sock_recv(connection, READ_BYTES)
            while _is_established(connection):
                await asyncio.sleep(WRITE_EVERY_S)
        return "closed"

    async def _slow_head(self) -> str:
        return await self._drip(self._head(10), b"")

    async def _slow_body(self) -> str:
        return await self._drip(b" " * 10_000, self._head(10_000))

    async def _drip(self, slowly: bytes, at_once: bytes) -> str:
        reader, writer = await self._connect()
        answer = asyncio.ensure_future(reader.read(RESPONSE_BYTES))
        try:
            writer.write(at_once)
            for position in range(len(slowly)):
                writer.write(slowly[position : position + 1])
                done, _ = await asyncio.wait({answer}, timeout=WRITE_EVERY_S)
                if done:
                    return _status(answer.result())
            return "was answered at its end"
        finally:
            answer.cancel()
            writer.close()

    async def _silent(self) -> str:
        return await self._wait(b"")

    async def _half_a_head(self) -> str:
        return await self._wait(self._head(10)[:40])

    async def _wait(self, sent: bytes) -> str:
        reader, writer = await self._connect()
        try:
            writer.write(sent)
            return _status(await reader.read(RESPONSE_BYTES))
        finally:
            writer.close()


def _is_established(connection: socket.socket) -> bool:
    """Asks the kernel: who does not read does not see the end."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _status(answer: bytes) -> str:
    return f"answered {answer.split()[1].decode()}" if answer else "closed"
