"""Who keeps a place when more connections are opened than there is room for."""

from __future__ import annotations

import random
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.server.process.connection import LimitedConnection
from diskprefix.daemon.server.process.places import Places
from diskprefix.daemon.server.share import UNNAMED, Share
from tests.daemon.server.scripted import AppServer, ScriptedEngine, scripted_app

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MANY = 1500


class Connection:
    """A connection without a socket. `looks`: how often it was asked whether something is unsent."""

    def __init__(self, *, has_unsent: bool = False) -> None:
        self.is_unsent, self.is_open, self.looks = has_unsent, True, 0

    @property
    def has_unsent(self) -> bool:
        self.looks += 1
        return self.is_unsent

    def give_up(self) -> None:
        assert self.is_open
        self.is_open = False


def opened(places: Places, number: int, address: str | None = None, **options: Any) -> list[Connection]:
    connections = [Connection(**options) for _ in range(number)]
    assert all(places.take(connection, Share.of_connection(address, None)) for connection in connections)
    return connections


def used(places: Places, number: int, address: str | None = None, **options: Any) -> list[Connection]:
    connections = []
    for _ in range(number):
        connections += opened(places, 1, address, **options)
        places.begin_request(connections[-1])
        places.end_request(connections[-1])
    return connections


def num_open(connections: list[Connection]) -> int:
    return sum(connection.is_open for connection in connections)


def test_silent_connections_close_only_their_share_of_idle_ones() -> None:
    places = Places(100, most_new=40, most_of_share=100)
    idle = used(places, 100)
    flood = opened(places, MANY)
    assert (num_open(idle), num_open(flood), places.num) == (60, 40, 100)
    assert all(connection.is_open for connection in (*idle[40:], *flood[-40:])), "those are closed that waited longest"


def test_a_new_connection_has_the_time_until_its_share_is_opened_after_it() -> None:
    for others in (used, opened):
        places = Places(100, most_new=40, most_of_share=100)
        others(places, 100)
        [tenants] = opened(places, 1)
        opened(places, 39)
        assert tenants.is_open
        places.begin_request(tenants)
        opened(places, MANY)
        assert tenants.is_open, "it is in a request"
        places.end_request(tenants)
        assert tenants.is_open


def test_a_new_head_restarts_the_idle_time() -> None:
    places = Places(3, most_new=2, most_of_share=3)
    first, second, third = used(places, 3)
    places.begin_head(first)
    opened(places, 1)
    assert [connection.is_open for connection in (first, second, third)] == [True, False, True]


def test_replacing_a_connection_takes_constant_work() -> None:
    for most in (100, 10_000):
        places = Places(most, most_new=most // 2, most_of_share=most)
        unsent = used(places, most, has_unsent=True)
        refused = Connection()
        assert not places.take(refused, UNNAMED), "nothing is closed that a client has yet to take"
        assert sum(connection.looks for connection in unsent) <= 16
        for connection in unsent:
            connection.is_unsent = False
        assert places.take(refused, UNNAMED)


def test_if_all_are_in_requests_a_new_one_is_refused() -> None:
    places = Places(3, most_new=2, most_of_share=3)
    for connection in opened(places, 3):
        places.begin_request(connection)
    assert not places.take(Connection(), UNNAMED)
    assert places.num == 3


@pytest.mark.parametrize(
    ("addresses", "is_limited"),
    [
        (["192.0.2.7"], True),
        (["::ffff:192.0.2.7", "192.0.2.7"], True),
        ([f"2001:db8::{number:x}" for number in range(1, 9)], True),
        ([f"fe80::{number:x}%eth0" for number in range(1, 9)], True),
        ([f"192.0.2.{number}" for number in range(1, 9)], False),
        ([f"2001:db8:0:{number:x}::1" for number in range(1, 9)], False),
        *(([address], False) for address in ("127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", None)),
    ],
)
def test_each_remote_address_has_its_own_limit(addresses: list[str | None], is_limited: bool) -> None:
    places = Places(100, most_new=40, most_of_share=60)
    others = used(places, 40, "198.51.100.1")
    flood = [used(places, 1, address)[0] for _ in range(20) for address in addresses * (8 // len(addresses))]
    assert num_open(others) == (40 if is_limited else 0)
    assert num_open(flood) == (60 if is_limited else 100)
    for connection in (*others, *flood):
        places.release(connection)
        places.release(connection)
    assert (places.num, places._of_shares, places._share) == (0, {}, {}), "nothing is kept of those that left"


def test_one_user_of_this_machine_leaves_places_to_other_users() -> None:
    places = Places(100, most_new=40, most_of_share=60)

    def open_as(user: int | None, count: int) -> list[Connection]:
        connections = [Connection() for _ in range(count)]
        for connection in connections:
            assert places.take(connection, Share.of_connection("127.0.0.1", user))
            places.begin_request(connection)
            places.end_request(connection)
        return connections

    others = open_as(1001, 20) + open_as(None, 20)
    flood = open_as(1000, 200)
    assert (num_open(others), num_open(flood)) == (40, 60)


def test_random_connections_keep_requests_and_limits() -> None:
    chance = random.Random(8)
    for _ in range(50):
        most = chance.randrange(1, 12)
        places = Places(most, most_new=chance.randrange(0, most + 1), most_of_share=chance.randrange(1, most + 1))
        states: dict[Connection, tuple[str, str | None]] = {}
        for _ in range(300):
            alive = [connection for connection in states if connection.is_open]
            connection = chance.choice(alive) if alive else None
            match chance.randrange(5):
                case 0 | 1:
                    new, address = Connection(has_unsent=chance.random() < 0.2), chance.choice([None, "1.2.3.4", "1::"])
                    if places.take(new, Share.of_connection(address, None)):
                        states[new] = ("new", address)
                case 2 if connection:
                    states[connection] = ("busy", states[connection][1])
                    places.begin_request(connection)
                case 3 if connection and states[connection][0] == "busy":
                    states[connection] = ("idle", states[connection][1])
                    places.end_request(connection)
                case 4 if connection:
                    del states[connection]
                    places.release(connection)
            alive = [connection for connection in states if connection.is_open]
            assert places.num == len(alive) <= most
            assert all(states[connection][0] != "busy" or connection.is_open for connection in states)
            for address in ("1.2.3.4", "1::"):
                assert sum(states[connection][1] == address for connection in alive) <= places.most_of_share


# A server, and more connections than it has places for.


@pytest.fixture
def server(chat_model: Path) -> Iterator[AppServer]:
    # Both ends of each connection are in this process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with scripted_app(chat_model, ScriptedEngine()) as running:
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Watched:
    """What happens to the connections of the server, in its order: the client's port, and `made` or `read`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[int, str]] = []
        self.connections: list[LimitedConnection] = []
        made, read = LimitedConnection.connection_made, LimitedConnection.data_received

        def note_made(connection: LimitedConnection, transport: Any) -> None:
            self.connections.append(connection)
            self.events.append((transport.get_extra_info("peername")[1], "made"))
            made(connection, transport)

        def note_read(connection: LimitedConnection, data: bytes) -> None:
            self.events.append((connection.transport.get_extra_info("peername")[1], "read"))
            read(connection, data)

        monkeypatch.setattr(LimitedConnection, "connection_made", note_made)
        monkeypatch.setattr(LimitedConnection, "data_received", note_read)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds up the server's loop, so that the kernel has all that a client does meanwhile."""
        let_go = threading.Event()
        self.connections[0].loop.call_soon_threadsafe(let_go.wait)
        yield
        let_go.set()


def answer(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"}"):
        part = connection.recv(65536)
        assert part, "the connection is closed without an answer"
        received += part
    return received


def test_a_request_survives_a_burst_of_connections(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, place = Watched(monkeypatch), ("127.0.0.1", server.port)
    number = min(MANY, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000)
    with ExitStack() as stack:
        kept = stack.enter_context(socket.create_connection(place, timeout=60))
        kept.sendall(GET)
        answer(kept)
        with watched.held():
            for nth in range(number):
                flood = stack.enter_context(socket.socket())
                flood.setblocking(False)
                flood.connect_ex(place)
                if nth == number // 3:
                    tenants = stack.enter_context(socket.create_connection(place, timeout=60))
                    tenants.sendall(GET)
        assert answer(tenants).startswith(b"HTTP/1.1 200 OK")
        port = tenants.getsockname()[1]
        made, read = watched.events.index((port, "made")), watched.events.index((port, "read"))
        between = [event for event in watched.events[made:read] if event[1] == "made"]
        assert len(between) <= 3 * 32, "few are accepted before requests are read"
        kept.sendall(GET)
        assert answer(kept).startswith(b"HTTP/1.1 200 OK"), "nor is a connection closed that somebody uses"
