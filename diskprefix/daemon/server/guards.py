"""The two guards before the body of a request is read: `BrowserGuard` refuses other sites' pages, and `Auth` identifies
the caller and limits how many requests the caller has.

A browser on this machine can reach the loopback address for any web page. In cross-site request forgery, a page sends
what looks like a form; browsers mark it with `Origin` and `Sec-Fetch-Site`. In DNS rebinding, the page's own host name
resolves to an address of this machine; then `Host` holds that name. An address or a name without a dot in `Host` is no
sign of DNS rebinding: no stranger's page has such a name.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.origins import Origins
from diskprefix.daemon.server.keys import NOBODY, TOKEN_PLACE, ApiKeys, Caller, OwnerToken
from diskprefix.daemon.server.limits import InFlight
from diskprefix.daemon.server.share import Share, conversation_of, share_of_connection
from diskprefix.errors import DiskPrefixError
from diskprefix.printable import shown

OPEN_PATHS = frozenset({"/", "/chat", "/dashboard", "/favicon.ico", "/health"})
"""The paths that need no key: load balancers, service managers, probing clients and pages have none."""

_LINKED_PATHS = OPEN_PATHS | {"/docs"}
"""The paths that pages of other sites may link to. They hold no data: their scripts fetch it afterwards."""


class Auth:
    """ASGI middleware: records the caller and the share of a request, or answers 401. With a token instead of keys, all
    callers are served, and routes for the owner check the caller. Too many requests get the errors of
    `InFlight.counted`."""

    def __init__(self, app: ASGIApp, access: ApiKeys | OwnerToken, in_flight: InFlight) -> None:
        self._app = app
        self._access = access
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Not imported above: the router, which has these guards too, does not import the engine.
        from starlette.requests import Request

        from diskprefix.daemon.server.error_replies import refuse
        from diskprefix.daemon.server.log_context import log_context

        try:
            record = log_context(Request(scope))
            record.caller = caller_of(self._access, scope)
            record.share, record.conversation = share_of(scope, record.caller), conversation_of(scope)
            counted = self._in_flight.counted(scope, record.share, record.conversation)
        except DiskPrefixError as error:
            await refuse(scope, receive, send, error)
            return
        with counted as scope["state"]["place"]:
            await self._app(scope, receive, send)


def caller_of(access: ApiKeys | OwnerToken, scope: Scope) -> Caller:
    """Returns the caller of a request. Raises `HttpError` 401 for a missing or unknown key, and for a wrong token."""
    headers = Headers(scope=scope)
    # Anthropic's clients send the key alone, in a header of its own.
    key = headers.get("x-api-key")
    authorization = headers.get("authorization") or (key and f"Bearer {key}")
    if isinstance(access, OwnerToken):
        origin = scope.get("state", {}).get("origin")
        caller = access.caller(authorization, share_of_connection(scope).user, origin)
    else:
        caller = access.caller(authorization)
    if caller is not None:
        return caller
    if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
        return NOBODY
    if isinstance(access, OwnerToken):
        raise HttpError(401, f"the token is not this daemon's: {TOKEN_PLACE}")
    missing = "an API key is needed: send the header Authorization: Bearer KEY"
    raise HttpError(401, "the API key is not one of this daemon's" if authorization else missing)


def share_of(scope: Scope, caller: Caller) -> Share:
    """Returns the share of a request: its caller's key, or else its connection's."""
    return share_of_connection(scope) if caller.name is None else Share("key", caller.name)


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = frozenset({"same-origin", "none"})
"""`none`: the user typed the address. `same-site` is refused: another port of this machine is another program."""

_NOT_FOR_PAGES = (
    "and other sites' pages may not use this daemon: allow it with --allowed-origins, or let the page's server call it"
)
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/\s]+))(?::(?P<port>\d{0,5}))?", re.ASCII | re.IGNORECASE
)
_DEFAULT_PORT = "80"
"""The port of http, which the daemon speaks."""


_OF_CONTAINERS = frozenset({"host.docker.internal", "host.containers.internal"})
"""The names by which containers of Docker and Podman call their host. The DNS of the internet has no such names."""
_FOR_ORIGINS = re.compile(
    r"POST /(v1/(chat/completions|completions|messages(/count_tokens)?|responses(/input_tokens|/compact)?|embeddings)"
    r"|api/(chat|generate|embed|show))|(GET|HEAD) /(v1/models(/.*)?|api/(tags|version|ps))"
)
"""What pages of allowed origins may ask for: replies, and what models there are."""


class BrowserGuard:
    """ASGI middleware for a daemon that listens on `host`, which is resolved once.

    On a loopback address, `Host` must be a name of that address. On other addresses it may also be any address, any
    name without a dot, the machine's name, also with `.local`, and the name by which containers call their host. With
    keys any name is accepted: a page of another site has no key. Pages of `origins` get replies.
    """

    def __init__(self, app: ASGIApp, host: str, *, has_keys: bool, origins: Origins = Origins()) -> None:  # noqa: B008 (immutable)
        self._app = app
        self._origins = origins
        self._is_loopback = is_loopback(host)
        self._any_host = has_keys
        self._own_names = {name.lower().rstrip(".") for name in ("localhost", host)}
        if not self._is_loopback:
            machine = socket.gethostname().lower()
            self._own_names |= {machine, f"{machine}.local", *_OF_CONTAINERS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        from diskprefix.daemon.server.error_replies import refuse

        await refuse(scope, receive, send, HttpError(403, refusal))

    def refusal(self, scope: Scope, headers: Headers) -> str | None:
        """Returns the reason to refuse a request, None to accept it. Only HTTP/1.0 may omit `Host`, which browsers
        send.

        Read-only requests of other sites are refused too: they could hold connections, and load a model.
        """
        host = headers.get("host")
        if host is not None and not self._any_host and not self._is_ours(_name_in(host)):
            which = ", which listens on the loopback address; use localhost or 127.0.0.1" if self._is_loopback else ""
            return (
                f"the Host '{shown(host)}' is not a name of this daemon{which} (with --api-keys any is; a proxy "
                "may send one of them)"
            )
        if scope["method"] in _SAFE_METHODS and scope["path"] in _LINKED_PATHS:
            return None
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none").lower()
        scope.setdefault("state", {})["origin"] = None
        if origin is not None and not self._is_own_origin(origin, host):
            if not self._origins.allow(origin):
                return f"the Origin '{shown(origin)}' is another site, {_NOT_FOR_PAGES}"
            if not _FOR_ORIGINS.fullmatch(f"{scope['method']} {scope['path']}"):
                return f"the Origin '{shown(origin)}' may ask for replies and models, and for nothing else"
            # `Auth` gives it a tenant of its own.
            scope["state"]["origin"] = origin
            return None
        if site not in _OWN_SITES:
            return f"the request is {shown(site)}, {_NOT_FOR_PAGES}"
        return None

    def _is_own_origin(self, origin: str, host: str | None) -> bool:
        """Returns whether a page is the daemon's own: it has the scheme, name and port of the request. With keys, the
        scheme and port may be a proxy's."""
        scheme, _, authority = origin.partition("://")
        if host is None or _name_in(authority) is None or _name_in(authority) != _name_in(host):
            return False
        if self._any_host:
            return scheme in ("http", "https")
        return scheme == "http" and _port_in(authority) == _port_in(host)

    def _is_ours(self, name: str | None) -> bool:
        if name is None:
            return False
        is_open = not self._is_loopback and ("." not in name or _address_in(name) is not None)
        return is_open or name in self._own_names or _is_loopback_address(name)


class AllowedOrigins(CORSMiddleware):
    """ASGI middleware that lets pages of `origins` read answers, and answers their browsers, which ask first. What
    another page sends goes on to `BrowserGuard`, which refuses it."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        super().__init__(app, allow_methods=("GET", "POST"), allow_headers=("*",), allow_private_network=True)
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] == "http" and self.is_allowed_origin(Headers(scope=scope).get("origin", ""))
        await (super().__call__ if is_allowed else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allow(origin)


def is_loopback(host: str) -> bool:
    """Returns whether every address of `host` is a loopback address. True for a name that does not resolve."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True
    return all(_is_loopback_address(str(address[0])) for *_, address in addresses)


def _is_loopback_address(text: str) -> bool:
    address = _address_in(text)
    return address is not None and address.is_loopback


def _address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _port_in(authority: str) -> str:
    match = _AUTHORITY.fullmatch(authority)
    return (match["port"] if match else None) or _DEFAULT_PORT


def _name_in(authority: str) -> str | None:
    """Returns the host name: `LocalHost:8642` → `localhost`, `[::1]:8642` → `::1`. None for malformed text."""
    match = _AUTHORITY.fullmatch(authority)
    return (match["v6"] or match["name"].rstrip(".")).lower() if match else None
