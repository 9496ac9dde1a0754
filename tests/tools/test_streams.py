"""Clients read the daemon's streams alike wherever the network cuts them: samples of `tools/bench streams`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import httpx
import pytest

from diskprefix.daemon.engine.request import GenerateRequest
from tests.daemon.server.agent_model import saying
from tests.daemon.server.scripted import AppServer, Emit, ScriptedEngine
from tools.streams.program import compare
from tools.streams.read_stream import READERS, said
from tools.streams.recording import BODIES, CHAT, CHAT_REPLY, OLLAMA_CHAT, TEXT, WITH_CALLS, recorded
from tools.streams.replayer import EACH, WHOLE, Replayer

OWN_CLIENTS = ("openai", "anthropic", "ollama", "diskprefix")
"""Those that are installed with the project."""
READ = [(client, path) for client, path in READERS if client in OWN_CLIENTS]


def record(agent: AppServer, engine: ScriptedEngine, path: str) -> bytes:
    def script(request: GenerateRequest, emit: Emit, is_cancelled: Callable[[], bool]) -> None:
        saying(CHAT_REPLY if path in WITH_CALLS else TEXT, piece=7)(request, emit, is_cancelled)

    engine.script = script
    with agent.client() as client:
        return recorded(agent.port, path, BODIES[path], dict(client.headers))


def sampled_cuts(response: bytes) -> list[int]:
    """Returns cuts in the headers, between and in lines, and in some of the longer characters."""
    body = response.index(b"\r\n\r\n")
    longer = [at for at, byte in enumerate(response) if 0x80 <= byte < 0xC0]
    places = {1, body + 2, body + 5, len(response) - 3, *longer[:: len(longer) // 6 + 1]}
    places |= {response.find(text) + 1 for text in (b"data: ", b"event: ", b"\n\n", b"[DONE]")}
    return [WHOLE, *sorted(places - {0})]


def asked(ask: Callable[[], object], count: int) -> Iterator[str]:
    return (said(ask) for _ in range(count))


@pytest.mark.parametrize(("client", "path"), READ)
def test_a_client_makes_the_same_message_of_a_stream_wherever_it_is_cut(
    agent: AppServer, engine: ScriptedEngine, client: str, path: str
) -> None:
    response = record(agent, engine, path)
    with ExitStack() as opened:
        make = READERS[client, path]
        made = compare(lambda url, count: asked(make(url, opened), count), path, response, sampled_cuts(response))
    assert (made.fault, made.differing) == ("", [])


def _raw(path: str) -> Callable[[str, int], Iterator[str]]:
    """A client that takes each piece for a whole event."""

    def read(url: str, count: int) -> Iterator[str]:
        for _ in range(count):
            with httpx.stream("POST", f"{url}{path}", json={}) as stream:
                yield json.dumps(
                    {"text": TEXT, "pieces": [piece.decode(errors="replace") for piece in stream.iter_raw()]}
                )

    return read


def test_a_client_that_takes_pieces_for_events_is_seen(agent: AppServer, engine: ScriptedEngine) -> None:
    response = record(agent, engine, OLLAMA_CHAT)
    body = response.index(b"\r\n\r\n") + 4
    # The chunk's size comes first: what differs is a cut in the JSON.
    cuts = [WHOLE, 3, body + 20]
    made = compare(_raw(OLLAMA_CHAT), OLLAMA_CHAT, response, cuts)
    assert [cut for cut, _ in made.differing] == [body + 20]


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda _url, _count: iter(()), "0 messages and 0 requests instead of 2"),
        (lambda url, count: asked(lambda: httpx.post(f"{url}{CHAT}", json={}).status_code and [1], count), "1 of "),
        (lambda url, count: asked(lambda: httpx.post(f"{url}{CHAT}", json={}).status_code and {}, count), "without "),
    ],
)
def test_a_client_that_reads_less_than_the_reply_is_a_fault(
    agent: AppServer, engine: ScriptedEngine, read: Callable[[str, int], Iterator[str]], fault: str
) -> None:
    made = compare(read, CHAT, record(agent, engine, CHAT), [WHOLE, 300])
    assert made.fault.startswith(fault)
    assert not made.holds


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_client_has_read_a_piece_before_the_next_one_is_sent(cut: int) -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + b"abc"
    with Replayer("/a", response, [cut, EACH]) as server, socket.create_connection(_address(server.url), 30) as client:
        assert _received(client, 2) == [response[:cut], response[cut:]]
        assert _received(client, len(response)) == [bytes([byte]) for byte in response]
        assert server.served == 2


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def _received(client: socket.socket, count: int) -> Sequence[bytes]:
    client.sendall(b"GET /a?b=c HTTP/1.1\r\nHost: a\r\n\r\n")
    return [client.recv(1 << 16) for _ in range(count)]
