"""The key of a user, made at its first use, in a file that only the user can read.

The tenant of the user's programs at their own daemon without API keys is made from it. It is never sent: what a daemon
gets is derived from it and from the daemon's address.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.folders import cache_home
from diskprefix.private_file import distrusted_by_root, make_private_folder, read_private
from diskprefix.values import Tenant

_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}\n")


def user_key(daemon: str) -> str:
    """Returns the key to send to the daemon at an address, whose owner thus learns no other key of this user. Raises
    `SettingsError` if the file cannot be made, or if others can read it."""
    return hmac.new(_secret().encode(), daemon.encode(), "sha256").hexdigest()


def user_tenant() -> Tenant:
    """Returns the tenant of this user's programs at the user's own daemons without API keys. Raises as `user_key`."""
    return Tenant.of_owner(_secret())


def is_users() -> Callable[[str], bool]:
    """Returns a function that takes a tenant's text and returns whether the tenant is `user_tenant` or one of its
    salts. Makes no key, and raises nothing: without a readable key, no tenant is the user's."""
    own = ""
    with suppress(SettingsError):
        own = str(user_tenant()) if _has_key(_path()) else ""
    return lambda tenant: bool(own) and tenant.split("/")[0] == own


def _path() -> Path:
    return cache_home() / "key"


def _has_key(path: Path) -> bool:
    # Not the methods of a path, which raise if the folder is another user's.
    return os.path.exists(path) and bool(os.path.getsize(path))


def _secret() -> str:
    path, what = _path(), "the key of this user"
    if not _has_key(path):
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
