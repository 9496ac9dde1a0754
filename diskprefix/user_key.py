"""The key of a user, made at its first use, in a file that only the user can read.

Agents and commands send it to daemons without API keys, as their tenant: they share a cache, which other users cannot
probe.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.private_file import distrusted_by_root, make_private_folder, read_private
from diskprefix.settings import cache_home

_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}\n")


def user_key(daemon: str | None = None) -> str:
    """Returns the key for this user's daemons, or a key derived for the address of another `daemon`, whose owner thus
    learns no other key. Raises `SettingsError` if the file cannot be made, or if others can read it."""
    key = _secret()
    return key if daemon is None else hmac.new(key.encode(), daemon.encode(), "sha256").hexdigest()


def _secret() -> str:
    path, what = cache_home() / "key", "the key of this user"
    # Not the methods of a path, which raise if the folder is another user's.
    if not os.path.exists(path) or not os.path.getsize(path):
        _draw(path, what)
    content = read_private(what, path, 2 * _BYTES + 1).decode(errors="replace")
    if not _SECRET.fullmatch(content):
        raise SettingsError(f"{what}: {path} holds none; remove the file, and the next command makes another")
    return content.strip()


def _draw(path: Path, what: str) -> None:
    if (reason := distrusted_by_root(path.parent)) is not None:
        raise SettingsError(f"{what}: {reason}")
    try:
        make_private_folder(path.parent)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have been faster.
            if not file.read(1):
                file.write(secrets.token_hex(_BYTES).encode() + b"\n")
    except OSError as error:
        raise SettingsError(f"{what}: cannot make {path}: {error.strerror}") from error
