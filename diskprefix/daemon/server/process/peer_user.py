"""The user at the other end of a connection, as the kernel knows it.

A client can choose its bearer, but not the user that the kernel reports. So the user decides on the tenant. Alone it
gives no rights of the owner: pages in the owner's browser and programs in a sandbox have the same user, and behind a
forwarder (a proxy, a tunnel) the user of the forwarding process is reported.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

NAMES_USERS = sys.platform == "linux"
"""Whether this system's kernel names the users of local connections."""
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
"""`nlmsghdr`: length, type, flags, sequence number, port."""
_ADDRESSES = struct.Struct("!HH16s16s")
_REQUEST = struct.Struct("=BBBxI")
"""The beginning of `inet_diag_req_v2`: family, protocol, extensions, states. Addresses and `_INTERFACE` follow."""
_INTERFACE = struct.Struct("=III")
"""The interface, then `_ANY_COOKIE`. A question without an interface finds no socket that is bound to one, and any user
can bind its own."""
_ANY_COOKIE = (0xFFFFFFFF, 0xFFFFFFFF)
_LOOPBACK = 1
"""The loopback interface in every network namespace. Connections to an address of the same machine come through it, but
for link-local addresses, which name their interface."""
_MESSAGE = struct.Struct("=BBBB")
"""The beginning of `inet_diag_msg`: family, state, timer, retransmissions."""
_OWNER_AT = _MESSAGE.size + _ADDRESSES.size + _INTERFACE.size + 3 * 4
"""The offset of the user and the inode in an `inet_diag_msg`, in bytes."""
_OWNER = struct.Struct("=II")
_ALL_STATES = 0xFFFFFFFF
_OPEN = frozenset((1, 8))
"""The states of an accepted connection: ESTABLISHED, and CLOSE_WAIT, if the client has sent all that it will."""
_CONNECTED = frozenset((1, 4, 5))
"""The states of its client: ESTABLISHED, and FIN_WAIT1 and FIN_WAIT2 in place of CLOSE_WAIT."""
_CREDENTIALS = struct.Struct("3i")
_MAX_ANSWER_BYTES = 8192
_NOBODY = 65534
"""The default of `/proc/sys/kernel/overflowuid`: the kernel reports it for users that a user namespace does not map."""


def user_of(connected: socket.socket, *, takes_root: bool) -> int | None:
    """Returns the user of an accepted connection's client on this machine. Call it before anything is read. Never
    waits.

    Returns None for another machine, a system other than Linux, a client that has closed its socket, and a user that
    this process's user namespace does not map; also for root, which is often a forwarder, unless `takes_root`.
    """
    user = None
    with suppress(OSError, ValueError, struct.error):
        user = _user_at_path(connected) if connected.family == socket.AF_UNIX else _user_at_port(connected)
    return None if user == _NOBODY or (user == 0 and not takes_root) else user


def is_client_open(connected: socket.socket) -> bool:
    """Returns whether a process of this machine still has the other end of an accepted connection, although it will
    send nothing more. Returns False where the kernel does not say so, as for another machine. Never waits."""
    if connected.family == socket.AF_UNIX:
        if not hasattr(select, "poll"):
            return False
        # A client that ended only its sending side has not hung up.
        poll = select.poll()
        poll.register(connected, 0)
        return not poll.poll(0)
    with suppress(OSError, ValueError, struct.error):
        return _user_at_port(connected) is not None
    return False


def _user_at_path(connected: socket.socket) -> int | None:
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def _user_at_port(connected: socket.socket) -> int | None:
    """Raises `OSError` if the kernel does not answer."""
    if not hasattr(socket, "AF_NETLINK"):
        return None
    (host, port, *of_v6), (own_host, own_port, *_) = connected.getpeername(), connected.getsockname()
    interface = of_v6[1] if of_v6 else 0
    # A client may have any address of this machine. One of another machine has no socket here.
    user = _owner_of(_address(host), port, _address(own_host), own_port, interface or _LOOPBACK)
    # While this end is open, no other socket can have taken the client's place.
    is_open = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _OPEN
    return user if is_open else None


def _owner_of(
    client: IPv4Address | IPv6Address, port: int, own: IPv4Address | IPv6Address, own_port: int, interface: int
) -> int | None:
    """Returns the user of the socket with these addresses and ports. `interface` is the number of the interface through
    which the client is reached. Raises `OSError`."""
    family = socket.AF_INET if client.version == 4 else socket.AF_INET6
    numbers = _ADDRESSES.pack(port, own_port, client.packed, own.packed) + _INTERFACE.pack(interface, *_ANY_COOKIE)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + numbers
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        # This never waits: the kernel answers within `sendto`, and without an answer `recvfrom` raises.
        kernel.setblocking(False)
        kernel.sendto(header + request, (0, 0))
        answer, sender = kernel.recvfrom(_MAX_ANSWER_BYTES)
    if sender[0] != 0:
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    message = answer[_HEADER.size :]
    message_family, state, _, _ = _MESSAGE.unpack_from(message)
    *ports, packed_client, packed_own = _ADDRESSES.unpack_from(message, _MESSAGE.size)
    addresses = _unpacked(message_family, packed_client), _unpacked(message_family, packed_own)
    # Without such a connection, the kernel names a socket that listens on the client's port.
    if state not in _CONNECTED or ports != [port, own_port] or addresses != (client, own):
        return None
    user, inode = _OWNER.unpack_from(message, _OWNER_AT)
    return int(user) if inode else None


def _address(host: str) -> IPv4Address | IPv6Address:
    """Returns an address without its interface. An IPv4 address that is mapped into IPv6 becomes IPv4."""
    address = ip_address(host.partition("%")[0])
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _unpacked(family: int, packed: bytes) -> IPv4Address | IPv6Address:
    return IPv4Address(packed[:4]) if family == socket.AF_INET else _address(str(IPv6Address(packed)))
