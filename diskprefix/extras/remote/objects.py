"""The object store: S3, Google Cloud Storage, Azure, or a folder. The only module that imports obstore.

Retries with exponential back-off and jitter are obstore's. What fails after them counts for a circuit breaker: reading
and writing have one each, because a bucket that is full or read-only can still be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from diskprefix.errors import CacheError, SettingsError
from diskprefix.extras.remote.breaker import Breaker
from diskprefix.extras.remote.signing import ObjectRefused
from diskprefix.printable import escaped, first_line

log = logging.getLogger("diskprefix")

_CONNECT_S = 2.0
_LONGEST_RETRY_S = 5.0
_WRITE_S = 60.0
"""Longer than for reads, because no request waits for a write."""
_FLAG = "--remote-tier"
_Result = TypeVar("_Result")


class RemoteUnavailable(CacheError):
    """The object store does not answer, or it refuses the request."""


class ObjectStore:
    """A bucket, and a prefix in it. Methods are for any thread, wait for the network, and raise `RemoteUnavailable`."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, makes_folder: bool = True) -> None:
        """`url` is as obstore takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///folder`. Keys, region and
        endpoint come from the environment, as the library of each provider reads them. A request that reads takes
        `timeout_s` seconds at most. `makes_folder`: whether a folder that is missing is made. Raises
        `SettingsError`."""
        self.url = url
        self.breaker, self.write_breaker = Breaker(), Breaker()
        self._store, self._obstore = _opened(url, timeout_s, makes_folder=makes_folder), _import()
        self._written = _opened(url, max(timeout_s, _WRITE_S), makes_folder=makes_folder)

    def get(self, path: str, most_bytes: int) -> memoryview | None:
        """Returns an object, None if there is none. Raises `ObjectRefused` if it is larger than `most_bytes`."""
        return self._call(lambda: _read(self._obstore.get(self._store, path), path, most_bytes))

    def has(self, path: str) -> bool:
        """Returns whether there is an object, without reading it."""
        return self._call(lambda: self._obstore.head(self._store, path)) is not None

    def put(self, path: str, data: bytes) -> None:
        """Writes an object as a whole: nobody ever sees a part of it."""
        put = partial(self._obstore.put, self._written, path, data, use_multipart=False)
        if self._call(put, self.write_breaker) is None:
            raise RemoteUnavailable(f"{self.url}: there is no such bucket")

    def delete(self, paths: Sequence[str]) -> None:
        """Removes objects; those that are gone already are no error."""
        self._call(lambda: self._obstore.delete(self._written, list(paths)), self.write_breaker)

    def list(self, prefix: str) -> list[str]:
        """Returns the paths of all objects below a prefix."""
        pages = self._call(lambda: list(self._obstore.list(self._store, prefix))) or []
        return [meta["path"] for page in pages for meta in page]

    def _call(self, request: Callable[[], _Result], breaker: Breaker | None = None) -> _Result | None:
        """Returns None if there is no such object. `breaker` is that of reading if none is given."""
        breaker = breaker or self.breaker
        if not breaker.allows():
            raise RemoteUnavailable(f"{self.url} failed several times and is left alone for a while")
        result: _Result | None = None
        try:
            result = request()
        except FileNotFoundError:
            pass
        except ObjectRefused:
            breaker.succeeded()
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # What obstore raises when it panics is no `Exception`.
            if breaker.failed():
                log.warning("[remote] going on without %s: %s", self.url, escaped(first_line(error)))
            raise RemoteUnavailable(f"{self.url}: {escaped(first_line(error))}") from error
        if breaker.is_failing:
            log.info("[remote] %s answers again", self.url)
        breaker.succeeded()
        return result


def _read(result: Any, path: str, most_bytes: int) -> memoryview:
    """Returns what was asked for. Its size is known before it is read."""
    num_bytes = result.meta["size"]
    if num_bytes > most_bytes:
        raise ObjectRefused("oversized", f"{path} has {num_bytes} bytes, and {most_bytes} at most are expected")
    return memoryview(result.bytes())


def _import() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise SettingsError(f"{_FLAG} needs obstore; install the extra: pip install 'diskprefix[remote]'") from error
    return obstore


def _opened(url: str, timeout_s: float, *, makes_folder: bool) -> Any:
    obstore = _import()
    from obstore.store import LocalStore, from_url

    try:
        parts = urlsplit(url)
        if parts.scheme == "file":
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError("a folder is written as file:///absolute/path")
            return LocalStore(Path(unquote(parts.path)), mkdir=makes_folder)
        retry_s = min(_LONGEST_RETRY_S, timeout_s / 2)
        return from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
                "timeout": timedelta(seconds=timeout_s),
                # Whether it is http or https is in the endpoint that the environment names.
                "allow_http": True,
            },
            retry_config={
                "max_retries": 3,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=retry_s / 2),
                    "base": 3,
                },
            },
        )
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        raise SettingsError(f"{_FLAG}: {url!r} cannot be used: {escaped(first_line(error))}") from error
