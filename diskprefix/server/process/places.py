"""The places of open connections, and which connection gives its place to a new one."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

_TRIES = 16
"""The most idle connections that are looked at for a new one, so that many open at once cost little."""
_V6_NETWORK_BITS = 64
"""A client with IPv6 has at least that many addresses."""


class Placed(Protocol):
    """A connection, as the places see it."""

    @property
    def has_unsent(self) -> bool:
        """Returns whether its client has yet to take a part of a response."""

    def give_up(self) -> None:
        """Closes it at once. It is in no request."""


@dataclass(eq=False)
class _Places:
    """The connections of all clients, or of one address.

    `new` have not sent a whole request yet, and `idle` have been answered: each with those first that wait longest.
    """

    num: int = 0
    new: OrderedDict[Placed, None] = field(default_factory=OrderedDict)
    idle: OrderedDict[Placed, None] = field(default_factory=OrderedDict)


class Places:
    """At most `most` connections are open, and at most `most_of_address` from one address, but for loopback addresses:
    all users of a machine have the same.

    Who opens many connections must neither close those that others use, nor one whose request is about to arrive. So a
    new connection takes the place of an idle one while fewer than `most_new` have sent no request, and else of the
    oldest of these: it has the time until `most_new` more are open.
    """

    def __init__(self, most: int, most_new: int, most_of_address: int) -> None:
        self.most, self.most_new, self.most_of_address = most, max(1, most_new), most_of_address
        self._all = _Places()
        self._of_addresses: dict[str, _Places] = {}
        self._address: dict[Placed, str | None] = {}

    @property
    def num(self) -> int:
        return self._all.num

    def take(self, connection: Placed, address: str | None) -> bool:
        """Gives a place to a new connection from an address, None for a socket of this machine. Returns False if there
        is none, because all are in requests."""
        network = _network(address)
        if network is not None:
            of_address = self._of_addresses.get(network)
            if of_address is not None and of_address.num >= self.most_of_address and not self._close_one(of_address):
                return False
        if self._all.num >= self.most and not self._close_one(self._all):
            return False
        self._address[connection] = network
        for places in self._places_of(connection):
            places.num += 1
            places.new[connection] = None
        return True

    def begin_request(self, connection: Placed) -> None:
        for places in self._places_of(connection):
            places.new.pop(connection, None)
            places.idle.pop(connection, None)

    def end_request(self, connection: Placed) -> None:
        for places in self._places_of(connection):
            places.idle[connection] = None

    def begin_head(self, connection: Placed) -> None:
        """Records the first byte of another request: the connection is idle no longer than from here."""
        for places in self._places_of(connection):
            if connection in places.idle:
                places.idle.move_to_end(connection)

    def release(self, connection: Placed) -> None:
        """Gives back the place of a connection, if it has one."""
        for places in self._places_of(connection):
            places.num -= 1
            places.new.pop(connection, None)
            places.idle.pop(connection, None)
        network = self._address.pop(connection, None)
        if network is not None and not self._of_addresses[network].num:
            del self._of_addresses[network]

    def _places_of(self, connection: Placed) -> list[_Places]:
        """Returns nothing for a connection without a place."""
        if connection not in self._address:
            return []
        network = self._address[connection]
        return [self._all] if network is None else [self._all, self._of_addresses.setdefault(network, _Places())]

    def _close_one(self, places: _Places) -> bool:
        """Closes one of `places` for a new connection. Returns False if none can be closed without loss."""
        connection = self._longest_idle(places) if len(places.new) < self.most_new else None
        connection = connection or next(iter(places.new), None)
        if connection is None:
            return False
        self.release(connection)
        connection.give_up()
        return True

    def _longest_idle(self, places: _Places) -> Placed | None:
        for _ in range(min(_TRIES, len(places.idle))):
            connection = next(iter(places.idle))
            if not connection.has_unsent:
                return connection
            places.idle.move_to_end(connection)
        return None


def _network(address: str | None) -> str | None:
    """Returns which client an address is for the limit: the address, or its network with IPv6; None for loopback."""
    if address is None:
        return None
    # A listener on `::` names the interface of a link-local address.
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            network = int(parsed) >> (128 - _V6_NETWORK_BITS)
            return None if parsed.is_loopback else f"{network:x}::"
        parsed = parsed.ipv4_mapped
    return None if parsed.is_loopback else str(parsed)
