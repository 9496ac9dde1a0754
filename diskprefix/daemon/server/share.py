"""The share of a request, by which all limits, turns and budgets of the daemon count.

It is known when a connection is accepted, or, with API keys, when the head of a request is read. Tenants say what may
be found, and never who may wait: a salt makes no share. Within a share, turns go by conversation, since all agents of
one person are one user, and all clients behind a proxy have one address.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import Struct
from starlette.datastructures import Headers

if TYPE_CHECKING:
    from starlette.types import Scope

SESSION_HEADERS = (
    *("x-claude-code-session-id", "session_id", "session-id", "conversation_id", "x-session-id"),
    *("x-opencode-session", "x-session-affinity", "x-qwen-code-session-id"),
)
"""The headers in which agents name a session: Claude Code, Codex, OpenCode, Qwen Code and others."""
MAX_SESSION_CHARS = 512
"""Longer names of sessions are ignored."""
SHARE_HEADER = b"diskprefix-share"
"""The header in which the router names the share of the client's connection to a worker. Only workers read it, and the
router removes it from the requests of clients."""
_V6_NETWORK_BITS = 64
"""A client with IPv6 has at least a network of this prefix length."""
_Kind = Literal["key", "user", "address"]


class Share(Struct, frozen=True):
    """A caller for limits, turns and budgets: the name of an API key, else the number of the user of this machine whom
    the kernel names, else the address. Of an IPv6 address it has the network. `name` is empty for clients of this
    machine whom the kernel does not name."""

    kind: _Kind
    name: str

    @classmethod
    def of_connection(cls, address: str | None, user: int | None) -> Share:
        """Returns the share of a connection from an address, None for a Unix socket, and a user, if it is known."""
        return cls("address", _network(address)) if user is None else cls("user", str(user))

    @classmethod
    def parse(cls, text: str) -> Share:
        """Returns the share with this text, the inverse of `str`. Raises `ValueError`."""
        kind, _, name = text.partition(" ")
        for known in get_args(_Kind):
            if kind == known:
                return cls(known, name)
        raise ValueError(f"not a share: {text!r}")

    @property
    def user(self) -> int | None:
        return int(self.name) if self.kind == "user" else None

    @property
    def is_known(self) -> bool:
        """True if the share belongs to one person: anybody may have many addresses."""
        return self.kind != "address"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


UNNAMED = Share("address", "")
"""The share of all clients of this machine whom the kernel does not name."""


def share_of_connection(scope: Scope) -> Share:
    """Returns the share of a request's connection, behind a router of the connection to the router."""
    state = scope.get("state") or {}
    if not state.get("is_behind_router"):
        share: Share = state.get("share", UNNAMED)
        return share
    named = [value.decode("ascii") for name, value in scope["headers"] if name == SHARE_HEADER]
    return Share.parse(named[0]) if named else UNNAMED


def session_of(scope: Scope) -> str | None:
    """Returns the name of an agent's session from the headers, None if no header names one."""
    headers = Headers(scope=scope)
    named = (headers.get(header, "") for header in SESSION_HEADERS)
    return next((name for name in named if 0 < len(name) <= MAX_SESSION_CHARS), None)


def conversation_of(scope: Scope) -> str:
    """Returns the conversation of a request, for turns within its share: a session's name, or else the program's."""
    return session_of(scope) or Headers(scope=scope).get("user-agent", "")[:MAX_SESSION_CHARS]


def _network(address: str | None) -> str:
    """Returns the name of an address: the address, or its network with IPv6; "" for loopback and for a Unix socket."""
    if address is None:
        return ""
    # A listener on `::` names the interface of a link-local address.
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            network = int(parsed) >> (128 - _V6_NETWORK_BITS)
            return "" if parsed.is_loopback else f"{network:x}::"
        parsed = parsed.ipv4_mapped
    return "" if parsed.is_loopback else str(parsed)
