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

from diskprefix.server.process.connection import LimitedConnection
from diskprefix.server.process.places import Places
from tests.server.scripted import AppServer, ScriptedEngine, scripted_app

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
    assert all(places.take(connection, address) for connection in connections)
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


def test_connections_that_send_nothing_close_each_other_and_at_most_their_share_of_idle_ones() -> None:
    places = Places(100, most_new=40, most_of_address=100)
    idle = used(places, 100)
    flood = opened(places, MANY)
    assert (num_open(idle), num_open(flood), places.num) == (60, 40, 100)
    assert all(connection.is_open for connection in (*idle[40:], *flood[-40:])), "those are closed that waited longest"


def test_a_new_connection_has_the_time_until_its_share_is_opened_after_it() -> None:
    for others in (used, opened):
        places = Places(100, most_new=40, most_of_address=100)
        others(places, 100)
        [tenants] = opened(places, 1)
        opened(places, 39)
        assert tenants.is_open
        places.begin_request(tenants)
        opened(places, MANY)
        assert tenants.is_open, "it is in a request"
        places.end_request(tenants)
        assert tenants.is_open


def test_an_idle_connection_that_begins_another_request_is_idle_longest_no_more() -> None:
    places = Places(3, most_new=2, most_of_address=3)
    first, second, third = used(places, 3)
    places.begin_head(first)
    opened(places, 1)
    assert [one.is_open for one in (first, second, third)] == [True, False, True]


def test_the_work_for_a_connection_above_the_limit_does_not_grow_with_the_limit() -> None:
    for most in (100, 10_000):
        places = Places(most, most_new=most // 2, most_of_address=most)
        unsent = used(places, most, has_unsent=True)
        refused = Connection()
        assert not places.take(refused, None), "nothing is closed that a client has yet to take"
        assert sum(connection.looks for connection in unsent) <= 16
        for connection in unsent:
            connection.is_unsent = False
        assert places.take(refused, None)


def test_if_all_are_in_requests_a_new_one_is_refused() -> None:
    places = Places(3, most_new=2, most_of_address=3)
    for connection in opened(places, 3):
        places.begin_request(connection)
    assert not places.take(Connection(), None)
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
def test_one_address_has_a_limit_before_the_total_but_the_addresses_of_this_machine(
    addresses: list[str | None], is_limited: bool
) -> None:
    places = Places(100, most_new=40, most_of_address=60)
    others = used(places, 40, "198.51.100.1")
    flood = [used(places, 1, address)[0] for _ in range(20) for address in addresses * (8 // len(addresses))]
    assert num_open(others) == (40 if is_limited else 0)
    assert num_open(flood) == (60 if is_limited else 100)
    for connection in (*others, *flood):
        places.release(connection)
        places.release(connection)
    assert (places.num, places._of_addresses, places._address) == (0, {}, {}), "nothing is kept of those that left"


def test_whatever_connections_do_those_in_requests_stay_and_the_limits_hold() -> None:
    chance = random.Random(8)
    for _ in range(50):
        most = chance.randrange(1, 12)
        places = Places(most, most_new=chance.randrange(0, most + 1), most_of_address=chance.randrange(1, most + 1))
        states: dict[Connection, tuple[str, str | None]] = {}
        for _ in range(300):
            alive = [connection for connection in states if connection.is_open]
            one = chance.choice(alive) if alive else None
            match chance.randrange(5):
                case 0 | 1:
                    new, address = Connection(has_unsent=chance.random() < 0.2), chance.choice([None, "1.2.3.4", "1::"])
                    if places.take(new, address):
                        states[new] = ("new", address)
                case 2 if one:
                    states[one] = ("busy", states[one][1])
                    places.begin_request(one)
                case 3 if one and states[one][0] == "busy":
                    states[one] = ("idle", states[one][1])
                    places.end_request(one)
                case 4 if one:
                    del states[one]
                    places.release(one)
            alive = [connection for connection in states if connection.is_open]
            assert places.num == len(alive) <= most
            assert all(states[one][0] != "busy" or one.is_open for one in states)
            for address in ("1.2.3.4", "1::"):
                assert sum(states[one][1] == address for one in alive) <= places.most_of_address


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


def test_a_request_beside_many_connections_at_once_is_read_before_its_place_is_taken(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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
