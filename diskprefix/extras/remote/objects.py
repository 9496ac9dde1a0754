"""The object store: S3, Google Cloud Storage, Azure, or a folder. The only module that imports obstore.

Retries with exponential back-off and jitter are obstore's. What fails after them counts for a circuit breaker: reading
and writing have one each, because a bucket that is full or read-only can still be read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
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
_NO_RANGE = ("NotPartial", "InvalidRange", "416 Range Not Satisfiable")
"""The message of obstore for ranges that were not served."""
_Result = TypeVar("_Result")


class RemoteUnavailable(CacheError):
    """The object store does not answer, or it refuses the request."""


class ObjectInfo(NamedTuple):
    """`modified_at` is in seconds since the epoch."""

    path: str
    num_bytes: int
    modified_at: float


class Got(NamedTuple):
    """An object or a part of it, and when it was written, in seconds since the epoch."""

    data: memoryview
    modified_at: float


class ObjectStore:
    """A bucket, and a prefix in it. Methods are for any thread, wait for the network, and raise `RemoteUnavailable`."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, makes_folder: bool = True) -> None:
        """`url` is as obstore takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///folder`. Keys, region and
        endpoint come from the environment, as the library of each provider reads them. A request that reads takes
        `timeout_s` seconds at most. `makes_folder`: whether a folder that is missing is made. Raises
        `SettingsError`."""
        self.url = url
        self.breaker, self.write_breaker = Breaker(), Breaker()
        self._unreadable: set[int] = set()
        self._store, self._obstore = _opened(url, timeout_s, makes_folder=makes_folder), _import()
        self._written = _opened(url, max(timeout_s, _WRITE_S), makes_folder=makes_folder)

    @property
    def num_unreadable(self) -> int:
        """The number of names that listings have left out."""
        return len(self._unreadable)

    def get(self, path: str, most_bytes: int) -> Got | None:
        """Returns an object, None if there is none. Raises `ObjectRefused` if it is larger than `most_bytes`."""
        return self._call(lambda: _read(self._obstore.get(self._store, path), path, most_bytes))

    def get_range(self, path: str, start: int, end: int, most_bytes: int) -> Got | None:
        """Returns bytes `start` to `end` of an object, fewer if it is shorter; None if there is none.

        Of a server that does not serve ranges, and of an object that is too short, the whole is read. Raises
        `ObjectRefused` if that is larger than `most_bytes`.
        """

        def ranged() -> Got:
            try:
                return _read(self._obstore.get(self._store, path, options={"range": (start, end)}), path, end - start)
            except self._obstore.exceptions.GenericError as error:
                if not any(word in str(error) for word in _NO_RANGE):
                    raise
                whole = _read(self._obstore.get(self._store, path), path, most_bytes)
                return Got(whole.data[start:end], whole.modified_at)

        return self._call(ranged)

    def info(self, path: str) -> ObjectInfo | None:
        """Returns size and time of an object without reading it, None if there is none."""
        meta = self._call(lambda: self._obstore.head(self._store, path))
        return None if meta is None else _info(meta)

    def put(self, path: str, data: bytes) -> None:
        """Writes an object as a whole: nobody ever sees a part of it."""
        put = partial(self._obstore.put, self._written, path, data, use_multipart=False)
        if self._call(put, self.write_breaker) is None:
            raise RemoteUnavailable(f"{self.url}: there is no such bucket")

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object unless there is one, as far as the store can tell. Returns whether it was written."""

        def created() -> bool:
            try:
                self._obstore.put(self._written, path, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return bool(self._call(created, self.write_breaker))

    def delete(self, paths: Sequence[str]) -> None:
        """Removes objects; those that are gone already are no error."""
        self._call(lambda: self._obstore.delete(self._written, list(paths)), self.write_breaker)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yields all objects below a prefix. Names that obstore cannot read are not ours: they are left out and
        counted. In a bucket, what comes before such a name in the same thousand is left out too."""
        start: str | None = None
        while True:
            # One by one: obstore throws away what is in a batch with such a name.
            stream = self._obstore.list(self._store, prefix, offset=start, chunk_size=1)
            error: BaseException | None = None
            while (found := self._call(partial(self._next, stream))) is not None:
                error = None
                if isinstance(found, BaseException):
                    error = found
                    self._unreadable.add(hash(str(found)))
                    log.debug("[remote] %s: %s", self.url, escaped(first_line(found)))
                else:
                    yield from map(_info, found)
            behind = None if error is None else _behind(str(error), prefix)
            # A folder's listing goes on by itself, and is in no order.
            if behind is None or behind <= (start or "") or self.url.startswith("file:"):
                return
            start = behind

    def _next(self, stream: Iterator[Sequence[Any]]) -> Sequence[Any] | BaseException | None:
        """Returns the next page of a listing, None at the end. A name that cannot be read ends a bucket's listing."""
        try:
            return next(stream, None)
        except self._obstore.exceptions.InvalidPathError as error:
            found: BaseException = error
            return found

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
            was_open = breaker.is_open
            if breaker.failed() and not was_open:
                log.warning("[remote] going on without %s: %s", self.url, escaped(first_line(error)))
            raise RemoteUnavailable(f"{self.url}: {escaped(first_line(error))}") from error
        if breaker.is_open:
            log.info("[remote] %s answers again", self.url)
        breaker.succeeded()
        return result


def _read(result: Any, path: str, most_bytes: int) -> Got:
    """Returns what was asked for. Its size is known before it is read."""
    start, end = result.range
    if end - start > most_bytes:
        raise ObjectRefused("oversized", f"{path} has {end - start} bytes, and {most_bytes} at most are expected")
    return Got(memoryview(result.bytes()), result.meta["last_modified"].timestamp())


def _behind(error: str, prefix: str) -> str | None:
    """Returns where a listing goes on behind the name that an error is about: behind all that begin as it does up to
    what cannot be read, and before all names of ours. None if the error does not tell."""
    if (found := re.search(f"{re.escape(prefix)}([^\0-\x1f]*?)(/(?=/)|[\0-\x1f])", error)) is None:
        return None
    readable, unreadable = found.groups()
    return f"{prefix}{readable}/0" if unreadable == "/" else f"{prefix}{readable}!"


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())


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
