"""Finds out, from the kernel's table of connections, which user of this machine is at the other end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from starlette.types import Scope

Address: TypeAlias = IPv4Address | IPv6Address

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _USER, _INODE = 1, 2, 7, 9
"""Columns of the tables."""


def is_of_another_user(scope: Scope) -> bool:
    """Returns whether a request was sent on this machine by a user who is neither the daemon's nor root.

    A request whose sender has already closed its end counts as another's. False where the system has
    no such tables, and for requests from other machines.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return False
    sent_from, sent_to = ip_address(client[0].partition("%")[0]), ip_address(server[0].partition("%")[0])
    if not (_unmapped(sent_from).is_loopback or sent_from == sent_to):
        return False
    if not _TABLES[0].exists():
        return False
    users = _users(_forms(sent_from, client[1]), _forms(sent_to, server[1]))
    return not any(user in (0, os.geteuid()) for user in users)


def is_of_this_user(port: int) -> bool:
    """Returns whether what listens at a port of 127.0.0.1 is of this user or root. True where the system has no such
    tables."""
    if not _TABLES[0].exists():
        return True
    any_host = IPv4Address("0.0.0.0"), IPv6Address("::")
    local = {form for host in (IPv4Address("127.0.0.1"), *any_host) for form in _forms(host, port)}
    users = set(_users(local, {form for host in any_host for form in _forms(host, 0)}))
    return bool(users) and users <= {0, os.geteuid()}


def _users(local: set[str], remote: set[str]) -> Iterator[int]:
    """Yields the users of the sockets with such addresses at this end and at the other: for a connection one, or
    none."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            # The kernel lists sockets without an owner as root's.
            if columns[_LOCAL] in local and columns[_REMOTE] in remote and columns[_INODE] != "0":
                yield int(columns[_USER])


def _unmapped(address: Address) -> Address:
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _forms(address: Address, port: int) -> set[str]:
    """Returns an address as the tables have it: that of IPv4 also as one of IPv6."""
    plain = _unmapped(address)
    forms = [plain.packed]
    if isinstance(plain, IPv4Address):
        forms.append(IPv6Address(f"::ffff:{plain}").packed)
    return {f"{_in_words(packed)}:{port:04X}" for packed in forms}


def _in_words(packed: bytes) -> str:
    """Returns hexadecimal words of four bytes, in the machine's order."""
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
