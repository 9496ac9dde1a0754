"""The caller of a request: by the API keys of the file `--api-keys`, or else by the token of the daemon's owner."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.server.process.peer_user import NAMES_USERS
from diskprefix.daemon.server.process.token_file import agents_key, log_key
from diskprefix.daemon.server.tenant_names import TenantNames
from diskprefix.errors import SettingsError
from diskprefix.private_file import read_private
from diskprefix.tenant_ids import short_tenant
from diskprefix.user_key import user_tenant
from diskprefix.values import SHARED, Tenant

log = logging.getLogger("diskprefix")

ADMIN = "admin"
"""The name of the key that may read `/props`, `/metrics` and the dashboard."""

MIN_KEY_CHARS = 16
"""Names are shorter, so that a key is never taken for a name and logged."""
_MAX_KEYS = 16
"""The most keys of one user that a miss checks for a hit."""
_FLAG = "--api-keys"
_MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},}}")
"""Printable ASCII characters without blanks, which a header can hold."""
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


class Caller(Struct, frozen=True, kw_only=True):
    """The sender of a request. `name` is the name of its API key. A caller who `sees_all` may see what the daemon does
    for all callers, and their figures unless it `is_other_user`: the kernel names another user than the daemon's. An
    owner may also see texts, delete, and control the daemon."""

    name: str | None = None
    tenant: Tenant = SHARED
    sees_all: bool = False
    is_other_user: bool = False
    is_owner: bool = False

    def require_admin(self) -> None:
        """Raises `HttpError` 403 unless the caller `sees_all`, and 401 for another user of this machine: figures of all
        requests show one tenant what another does."""
        self._require_all()
        if self.is_other_user:
            raise HttpError(401, f"this is about everybody's requests, and needs the daemon's token: {TOKEN_PLACE}")

    def require_owner(self) -> None:
        """Raises `HttpError` 403 unless the caller `sees_all`, and without keys 401 for a caller without the token."""
        self._require_all()
        if not self.is_owner:
            what = "this shows texts of prompts, or changes something, and needs the daemon's token"
            raise HttpError(401, f"{what}: {TOKEN_PLACE}")

    def _require_all(self) -> None:
        if not self.sees_all:
            raise HttpError(403, f"this is about everybody's requests: only the key named {ADMIN} may do it")


ANYBODY = Caller(sees_all=True)
"""The caller of a request without a bearer, to a daemon without keys."""
NOBODY = Caller()
"""The caller of a request without a valid key, to a daemon with keys."""


TOKEN_PLACE = (
    "`diskprefix dashboard` opens the page with it, `diskprefix dashboard --print` prints it after #token=, and "
    "programs send it in the header Authorization: Bearer TOKEN"
)
_TOKEN_MARK = "diskprefix-owner-"
"""The beginning of every token. It keeps the token of another daemon from being taken for the key of a tenant."""
_PAGE_MARK = "diskprefix-page-"


@dataclass(frozen=True)
class OwnerToken:
    """The token of a daemon without API keys. The owner's `tenant` follows from the key of the daemon's user
    (`user_key`). All programs of this user on this machine share the tenant, and each other user has another one.

    A token is valid for one process: an open page sends it to any program that listens on the port later.
    """

    text: str = field(repr=False)
    tenant: Tenant

    @classmethod
    def drawn(cls) -> OwnerToken:
        """Returns a new token. If the user's key cannot be stored, logs that: the owner is a tenant of its own then."""
        text = _TOKEN_MARK + secrets.token_hex(32)
        try:
            return cls(text, user_tenant())
        except SettingsError as error:
            lost = "agents of this user do not find what its commands and pages compute"
            log.warning("[auth] %s; %s", error.message, lost)
            return cls(text, Tenant.of_owner(text))

    def caller(self, authorization: str | None, user: int | None = None, origin: str | None = None) -> Caller | None:
        """Returns the owner, or a caller with the tenant of `user`, who opened the connection. A page of another
        `origin` has a tenant of its own: its requests come over its visitor's connection. If the kernel named no
        user, the key in the header `Authorization` decides, and no key leads to the tenant of a user. Only where the
        kernel names nobody, the owner's agents prove with their key of this process whose they are. Returns None for
        another daemon's token."""
        if not authorization:
            return self._of_nobody(user, origin)
        match = _BEARER.fullmatch(authorization)
        key = match[1] if match is not None else authorization
        if self._is_the_token(key) or (origin is None and self._is_of_the_log(key, user)):
            return Caller(tenant=self.tenant, sees_all=True, is_owner=True)
        if key.startswith(_TOKEN_MARK):
            return None
        if origin is not None:
            return self._of_nobody(user, origin)
        if user is None and not NAMES_USERS and hmac.compare_digest(_ascii(key), agents_key(self.text).encode()):
            user = os.geteuid()
        return Caller(tenant=Tenant.of_key(key), sees_all=True) if user is None else self._of_user(user)

    def _of_nobody(self, user: int | None, origin: str | None) -> Caller:
        """Returns the caller of a request without a bearer that counts."""
        if origin is not None:
            return Caller(tenant=self.tenant.of_origin(origin), sees_all=True, is_other_user=True)
        return ANYBODY if user is None else self._of_user(user)

    def _of_user(self, user: int) -> Caller:
        """Returns the caller for a user of this machine. Its tenant differs on each machine: user 1000 is another
        person there, and one bucket may serve both machines. No bearer and no salt leads to it."""
        if user == os.geteuid():
            return Caller(tenant=self.tenant, sees_all=True)
        return Caller(tenant=self.tenant.of_other_user(user), sees_all=True, is_other_user=True)

    def _is_the_token(self, key: str) -> bool:
        """Also accepts the token without its mark: people may copy only the digits."""
        own = self.text.encode()
        return any(hmac.compare_digest(_ascii(text), own) for text in (key, _TOKEN_MARK + key))

    def _is_of_the_log(self, key: str, user: int | None) -> bool:
        return user == os.geteuid() and hmac.compare_digest(_ascii(key), log_key(self.text).encode())

    def page_token(self, caller: Caller) -> str:
        """Returns the token that a page of the caller stores and sends. Raises `HttpError` unless it is the owner."""
        caller.require_owner()
        return self.text

    @property
    def tenant_names(self) -> TenantNames:
        return TenantNames(own=self.tenant)


def _ascii(key: str) -> bytes:
    return key.encode("ascii", errors="replace")


class ApiKeys:
    """The keys in force. Only their digests are held in memory.

    Pages store no key, but a token of the caller, which is valid for one process of the daemon.
    """

    def __init__(self, path: Path, page_secret: bytes | None = None) -> None:
        """`page_secret` is the router's, whose pages a worker serves. Raises `SettingsError` if the file cannot be
        read, is accessible to others, or has a wrong line."""
        self._path = path
        self.page_secret = page_secret or secrets.token_bytes(32)
        self._callers = _read_keys(path)
        self._log("read")

    def read_again(self) -> None:
        """Reads the file again. If it is wrong, the keys that were read before stay in force."""
        try:
            self._callers = _read_keys(self._path)
        except SettingsError as error:
            log.error("[auth] %s; the keys that were read before stay in force", error.message)
        else:
            self._log("read again")

    def caller(self, authorization: str | None) -> Caller | None:
        """Returns the caller whose key the header `Authorization` holds; None if it holds no key that is in force."""
        match = _BEARER.fullmatch(authorization or "")
        if match is None:
            return None
        # Starlette decodes headers as latin-1. The comparison takes the same time for every key, right or wrong.
        sent = match[1].encode("latin-1")
        if sent.startswith(_PAGE_MARK.encode()):
            known = [(self.page_token(caller).encode(), caller) for caller in self._callers.values()]
        else:
            sent, known = hashlib.sha256(sent).digest(), [*self._callers.items()]
        callers = [caller for key, caller in known if hmac.compare_digest(key, sent)]
        return callers[0] if callers else None

    def page_token(self, caller: Caller) -> str:
        """Returns the token that a page of the caller stores and sends instead of the key."""
        return _PAGE_MARK + hmac.new(self.page_secret, str(caller.tenant).encode(), "sha256").hexdigest()

    @property
    def tenant_names(self) -> TenantNames:
        """The names of the keys in force."""
        return TenantNames(keys={str(caller.tenant): str(caller.name) for caller in self._callers.values()})

    def _log(self, done: str) -> None:
        admin = any(caller.sees_all for caller in self._callers.values())
        hint = "" if admin else f"; none is named {ADMIN}, so /props, /metrics and the dashboard answer nobody"
        log.info("[auth] %d API keys %s from %s%s", len(self._callers), done, self._path, hint)


def _read_keys(path: Path) -> dict[bytes, Caller]:
    """Returns the caller of each key, by the key's digest. Keys with one name belong to one user."""
    callers: dict[bytes, Caller] = {}
    digests = defaultdict[str, list[bytes]](list)
    for number, line in enumerate(_read_private(path).split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = _name_and_key(words, f"{path}:{number}")
        digest, tenant = hashlib.sha256(key.encode()).digest(), Tenant.of_key(key)
        if digest in callers:
            raise _wrong(f"{path}:{number}: this key is in the file already; give each client its own")
        of_admin = name == ADMIN
        callers[digest] = Caller(
            name=name or short_tenant(str(tenant)), tenant=tenant, sees_all=of_admin, is_owner=of_admin
        )
        if name is not None:
            digests[name].append(digest)
    if not callers:
        raise _wrong(f"{path} holds no key; write one on each line, with a name before it if you like")
    for of_user in digests.values():
        tenants = [callers[digest].tenant for digest in of_user[:_MAX_KEYS]]
        for digest in of_user:
            tenant = callers[digest].tenant
            others = tuple(other for other in tenants if other != tenant)
            callers[digest] = replace(callers[digest], tenant=dataclasses.replace(tenant, others=others))
    return callers


def _name_and_key(words: list[str], where: str) -> tuple[str | None, str]:
    """Returns name and key of one line. No message repeats the words, because each may be a key in the wrong place."""
    *names, key = words
    if len(names) > 1:
        raise _wrong(f"{where}: expected a key, or a name and a key; a comment takes a line of its own")
    if any(len(name) >= MIN_KEY_CHARS or not name.isprintable() for name in names):
        raise _wrong(f"{where}: before its key, a name has fewer than {MIN_KEY_CHARS} characters, all printable")
    if not _KEY.fullmatch(key):
        kind = f"at least {MIN_KEY_CHARS} characters, all printable ASCII"
        raise _wrong(f"{where}: a key has {kind}; `openssl rand -hex 32` makes a good one")
    return names[0] if names else None, key


def _read_private(path: Path) -> str:
    content = read_private(_FLAG, path, _MAX_FILE_BYTES)
    if len(content) > _MAX_FILE_BYTES:
        raise _wrong(f"{path} is larger than {_MAX_FILE_BYTES} bytes, so it is not a file of keys")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong(f"{path} is not valid UTF-8 (byte {error.start})") from error


def _wrong(message: str) -> SettingsError:
    return SettingsError(f"{_FLAG}: {message}")
