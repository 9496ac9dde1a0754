"""The places of open connections, and which connection gives its place to a new one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from diskprefix.daemon.server.share import UNNAMED, Share

_TRIES = 16
"""The most idle connections to examine for a new one, so that a burst of new connections costs little."""


class Placed(Protocol):
    """A connection, as the places see it."""

    @property
    def has_unsent(self) -> bool:
        """Returns whether the client has not read all of a response yet."""

    def give_up(self) -> None:
        """Closes the connection at once. Called only while it is in no request."""


@dataclass(eq=False)
class _Places:
    """The connections of all clients, or of one share.

    `new` have not sent a whole request yet, and `idle` have been answered. Both begin with the longest wait.
    """

    num: int = 0
    new: OrderedDict[Placed, None] = field(default_factory=OrderedDict)
    idle: OrderedDict[Placed, None] = field(default_factory=OrderedDict)


class Places:
    """At most `most` connections are open, and at most `most_of_share` of one share. Those of this machine whose user
    is unknown have no such limit: they may be anybody's.

    A client that opens many connections must close neither connections that others use, nor one whose request is about
    to arrive. So while fewer than `most_new` connections have sent no request, a new one replaces an idle one.
    Otherwise it replaces the oldest one without a request, which has had time until `most_new` more were open.
    """

    def __init__(self, most: int, most_new: int, most_of_share: int) -> None:
        self.most, self.most_new, self.most_of_share = most, max(1, most_new), most_of_share
        self._all = _Places()
        self._of_shares: dict[Share, _Places] = {}
        self._share: dict[Placed, Share] = {}

    @property
    def num(self) -> int:
        return self._all.num

    def take(self, connection: Placed, share: Share) -> bool:
        """Gives a place to a new connection of a share. Returns False if no place is free, because all connections are
        in requests."""
        of_share = self._of_shares.get(share)
        if of_share is not None and of_share.num >= self.most_of_share and not self._close_one(of_share):
            return False
        if self._all.num >= self.most and not self._close_one(self._all):
            return False
        self._share[connection] = share
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
        """Records the first byte of another request: the connection's idle time starts again."""
        for places in self._places_of(connection):
            if connection in places.idle:
                places.idle.move_to_end(connection)

    def release(self, connection: Placed) -> None:
        """Gives back the place of a connection, if it has one."""
        for places in self._places_of(connection):
            places.num -= 1
            places.new.pop(connection, None)
            places.idle.pop(connection, None)
        share = self._share.pop(connection, UNNAMED)
        if share != UNNAMED and not self._of_shares[share].num:
            del self._of_shares[share]

    def _places_of(self, connection: Placed) -> list[_Places]:
        """Returns the groups that count a connection, none for a connection without a place."""
        if connection not in self._share:
            return []
        share = self._share[connection]
        return [self._all] if share == UNNAMED else [self._all, self._of_shares.setdefault(share, _Places())]

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
