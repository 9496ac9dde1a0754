"""Clients of another user of this machine: their connections come from a process of that user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

OTHER_USER = 4711
"""No account has this number, which the kernel does not mind."""
NOBODY = 65534
_FORWARD = """
import socket, sys, threading
def pass_on(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    client, _ = listener.accept()
    daemon = socket.socket()
    if sys.argv[3:]:
        daemon.setsockopt(socket.SOL_SOCKET, 25, sys.argv[3].encode())
    daemon.connect((sys.argv[1], int(sys.argv[2])))
    for ends in ((client, daemon), (daemon, client)):
        threading.Thread(target=pass_on, args=ends, daemon=True).start()
"""


def python_for_all() -> str:
    """A Python that other users can start. The test is skipped if there is none, or not for root."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("only root can start a process of another user")
    return python


@contextmanager
def url_as(user: int, url: str, *interface: str) -> Iterator[str]:
    """An address whose connections to the daemon at `url` are those of `user`. Their sockets are bound to an
    `interface`, if one is given."""
    parts = urlsplit(url)
    command = [python_for_all(), "-c", _FORWARD, str(parts.hostname), str(parts.port), *interface]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, user=user, group=user, cwd="/") as forwarder:
        assert forwarder.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(forwarder.stdout.readline())}"
        finally:
            forwarder.kill()
