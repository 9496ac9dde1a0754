"""Sends requests to a running daemon."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from diskprefix.daemon.server.process.peer_user import NAMES_USERS
from diskprefix.daemon.server.process.token_file import agents_key, daemon_at, is_of_this_machine, token_of_peer
from diskprefix.errors import NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.units import format_size
from diskprefix.user_key import user_key

Say = Callable[[str], None]
"""Receives a line that says what the command is waiting for."""

_CONNECT_S = 10.0
"""The time limit for connecting, and for the answer of `/health`, which a busy daemon gives at once, too."""
_SILENCE_S = 120.0
"""The longest wait for a byte of any other answer. A daemon that computes a reply sends one every 8 seconds."""
_POLL_S = 0.1
_MAX_ANSWER_BYTES = 64 << 20
"""The limit for an answer, and for a line of a stream. Another program may listen at the address."""


class ConnectionBroken(NotReady):
    """The daemon has begun to answer, and the connection ended before the answer did."""


class Answer(Struct, frozen=True):
    """An HTTP response. `content` should be JSON."""

    status: int
    content: bytes

    @property
    def body(self) -> Any:
        """The parsed JSON, or None if `content` is not JSON."""
        with suppress(ValueError):
            return json.loads(self.content)
        return None

    @property
    def message(self) -> str:
        """The error message, on one line."""
        body = self.body
        error = body.get("error") if isinstance(body, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        return shown(text, 1000) if isinstance(text, str) else f"HTTP status {self.status}"


Call: TypeAlias = Callable[[str, str, object], Answer]
"""Sends a request: method, path, and JSON body or None. Raises `NotReady` if there is no answer."""
Stream: TypeAlias = Callable[[str, object], "AbstractContextManager[Iterator[Any]]"]
"""Posts a JSON body to a path. The context yields the events of the answer as they come; an error is the last event.
Raises `NotReady` if there is no answer, and `ConnectionBroken` if the connection breaks."""


def running_daemon(url: str, api_key: str | None, otherwise: str = "") -> Call:
    """Returns a function that calls the daemon at `url`. `otherwise` is appended to the message of its `NotReady`.
    Raises `SettingsError` for an invalid URL or key."""
    request = _requester(url, api_key, otherwise)

    def call(method: str, path: str, body: object) -> Answer:
        with request(method, path, body) as response:
            return Answer(response.status, _content(response, url))

    return call


def streaming_daemon(url: str, api_key: str | None) -> Stream:
    """Returns a function that reads streams of the daemon at `url`. Raises `SettingsError` for an invalid URL or
    key."""
    request = _requester(url, api_key, "")

    @contextmanager
    def stream(path: str, body: object) -> Iterator[Iterator[Any]]:
        with request("POST", path, body) as response:
            yield _events(response, url)

    return stream


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[Any]:
    if response.status != HTTPStatus.OK:
        yield {"error": {"message": Answer(response.status, _content(response, url)).message}}
        return
    while line := _line(response, url):
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            yield (event := _event(data, url))
            if "error" in event:
                return
    raise ConnectionBroken("the connection ended before the reply did")


def _line(response: http.client.HTTPResponse, url: str) -> bytes:
    with _reading(url):
        line = response.readline(_MAX_ANSWER_BYTES + 1)
    _require_small(line)
    return line


def _event(data: bytes, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise _no_diskprefix(url)
    return event


def _content(response: http.client.HTTPResponse, url: str) -> bytes:
    with _reading(url):
        content = response.read(_MAX_ANSWER_BYTES + 1)
    _require_small(content)
    if response.length:
        # The answer ended before all of its bytes came.
        raise _broken(url, http.client.IncompleteRead(content, response.length))
    return content


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Translates errors of the connection while an answer is read. It stands around the reads alone: an `OSError` of
    the caller's own output is no broken connection."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _broken(url, error) from error


def _broken(url: str, error: Exception) -> ConnectionBroken:
    return ConnectionBroken(f"the connection to {url} broke before the answer ended ({_reason(error)})")


def _require_small(content: bytes) -> None:
    if len(content) > _MAX_ANSWER_BYTES:
        raise NotReady(f"an answer has more than {format_size(_MAX_ANSWER_BYTES)}; check the daemon's address")


def _requester(
    url: str, api_key: str | None, otherwise: str
) -> Callable[[str, str, object], AbstractContextManager[http.client.HTTPResponse]]:
    """Returns a function that sends a request, for a context with the response. Without an API key, it sends the
    daemon's token, or a key of this user."""
    parts = _parts(url)
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError("--api-key: a key has printable ASCII characters only")
        headers["Authorization"] = f"Bearer {api_key}"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    @contextmanager
    def request(method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body)
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(closing(kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)))
                connection.connect()
                connection.sock.settimeout(_CONNECT_S if path == "/health" else _SILENCE_S)
                of_peer = token_of_peer(connection.sock)
                _require_the_same(url, is_own=of_peer is not None)
                own = of_peer if api_key is None else None
                if api_key is None and own is None and method == "POST":
                    # With a key of its own, the user has a cache that other users cannot probe.
                    own = user_key(_peer_name(connection.sock, parts))
                authorization = {"Authorization": f"Bearer {own}"} if own else {}
                connection.request(method, parts.path + path, data, headers | authorization)
                response = connection.getresponse()
            except (OSError, UnicodeError, http.client.HTTPException) as error:
                raise _no_daemon(url, error, otherwise) from error
            yield response

    return request


_own_urls: set[str] = set()
"""The addresses at which this process has found daemons of its user."""


def expect_own(url: str) -> None:
    """From now on, this process sends nothing to what listens at `url` unless it is a daemon of this user."""
    _own_urls.add(full_url(url))


def _require_the_same(url: str, *, is_own: bool) -> None:
    """Raises `NotReady` if a daemon of this user was at `url`, and what listens there now is none."""
    if is_own:
        expect_own(url)
    elif full_url(url) in _own_urls:
        raise NotReady(f"your daemon at {url} has ended, and what listens there now is not known as yours")


def full_url(url: str) -> str:
    """Returns the address of a daemon, given without `http://` or with OpenAI's `/v1`, in full."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def _parts(url: str) -> SplitResult:
    parts = urlsplit(full_url(url))
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise SettingsError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8642")
    return parts


def _no_daemon(url: str, error: Exception, otherwise: str = "") -> NotReady:
    return NotReady(
        f"no daemon answers at {url} ({_reason(error)}); start one with `diskprefix serve`, or give its "
        f"address with --url{otherwise}"
    )


def _no_diskprefix(url: str) -> NotReady:
    return NotReady(f"what answers at {url} is no diskprefix daemon; give the address of one with --url")


def _reason(error: Exception) -> str:
    return shown(getattr(error, "strerror", None) or str(error) or type(error).__name__)


@contextmanager
def _connection(url: str) -> Iterator[socket.socket]:
    parts = _parts(url)
    port = parts.port or {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[parts.scheme]
    try:
        with socket.create_connection((parts.hostname, port), _CONNECT_S) as connected:
            yield connected
    except (OSError, UnicodeError) as error:
        raise _no_daemon(url, error) from error


def token_of(url: str) -> str | None:
    """Returns the token of the daemon at `url`, "" if the daemon has API keys, or None if it is not this user's. Raises
    `NotReady` if nothing listens there, and `SettingsError` for an invalid URL."""
    with _connection(url) as connected:
        return token_of_peer(connected)


def process_of(url: str) -> int | None:
    """Returns the process id of the daemon at `url`, or None if it is not this user's. Raises as `token_of`."""
    with _connection(url) as connected:
        daemon = daemon_at(*connected.getpeername()[:2]) if is_of_this_machine(connected) else None
        return None if daemon is None else daemon[0]


def key_for(url: str) -> str:
    """Returns the key that agents of this user send to the daemon at `url`. Raises as `token_of` and `user_key`."""
    with _connection(url) as connected:
        token = None if NAMES_USERS else token_of_peer(connected)
        return agents_key(token) if token else user_key(_peer_name(connected, _parts(url)))


def _peer_name(connected: socket.socket, parts: SplitResult) -> str:
    """Returns the name of a daemon for `user_key`: its address on this machine, or the host in the URL."""
    host, port, *_ = connected.getpeername()
    return f"{host if is_of_this_machine(connected) else parts.hostname}:{port}"


def wait_ready(call: Call, url: str, say: Say) -> None:
    """Waits until the daemon at `url` serves requests. Raises `NotReady` if it never will."""
    while (state := state_of(call, url))["status"] == "loading":
        say(f"the daemon is loading its model: {shown(str(state.get('message') or '…'))}")
        time.sleep(_POLL_S)


def state_of(call: Call, url: str) -> dict[str, Any]:
    """Returns the `/health` of a daemon that loads or serves. Raises `NotReady` for other states and programs."""
    body = call("GET", "/health", None).body
    status = body.get("status") if isinstance(body, dict) else None
    if status in ("stopping", "failed"):
        raise NotReady(f"the daemon at {url} serves no requests: its status is {status}")
    if status not in ("loading", "ok", "degraded"):
        raise _no_diskprefix(url)
    return dict(body)
