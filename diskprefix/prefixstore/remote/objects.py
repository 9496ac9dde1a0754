"""The object store: S3, Google Cloud Storage, Azure, or a folder. The only module that imports obstore.

obstore retries with exponential back-off and jitter. A request that still fails counts for a circuit breaker. Reading
and writing have one each, because a bucket that is full or read-only can still be read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from diskprefix.errors import CacheError, SettingsError
from diskprefix.prefixstore.remote.breaker import Breaker
from diskprefix.prefixstore.remote.shared_folder import prepare_folder, put_in_folder
from diskprefix.prefixstore.remote.signing import ObjectRefused
from diskprefix.printable import escaped, first_line

log = logging.getLogger("diskprefix")

_CONNECT_S = 2.0
_MAX_RETRY_S = 5.0
_WRITE_S = 60.0
"""Longer than for reads, because no request waits for a write."""
_MAX_PATHS = 4_000_000
"""The maximum length of a listing: so many bundles take about 10 TB."""
_FLAG = "--remote-tier"
_REFUSED = {"PermissionDeniedError": 403, "UnauthenticatedError": 401}
_STATUS = re.compile(r"\bstatus:? (40[0-3]|407|501)\b")
"""The statuses of servers that refuse the caller, which no further try changes."""
_CHECK = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The environment variables with the credentials, by the scheme of a URL."""
_PROBE = "diskprefix-probe"
"""The path of an object that is never written."""
_Result = TypeVar("_Result")


class RemoteUnavailable(CacheError):
    """The object store does not answer, or it refuses the request."""


class ObjectStore:
    """A bucket, and a prefix in it. Methods are for any thread, wait for the network, and raise `RemoteUnavailable`."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, makes_folder: bool = True) -> None:
        """`url` is as obstore takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///folder`. Keys, region and
        endpoint come from the environment, as the library of each provider reads them. Reads take at most `timeout_s`
        seconds. With `makes_folder`, a missing folder is created. Raises `SettingsError`; see `prepare_folder`."""
        self.url, self._obstore = url, _import()
        self.breaker, self.write_breaker = Breaker(), Breaker()
        self.problem = ""
        """Why the last read was refused, with what to check; "" if it was not. A bucket may be read-only."""
        try:
            folder = _folder_of(url)
            if folder is not None:
                prepare_folder(_FLAG, folder, makes_folder=makes_folder)
            self._store = _open_store(url, timeout_s)
            self._write_store = _open_store(url, max(timeout_s, _WRITE_S))
        except (self._obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise SettingsError(f"{_FLAG}: {url!r} cannot be used: {escaped(first_line(error))}") from error
        self._put: Callable[[str, bytes], object]
        """Writes an object. Raises `FileNotFoundError` if there is no such bucket."""
        if folder is not None:
            self._put = partial(put_in_folder, folder)
        else:
            self._put = partial(self._obstore.put, self._write_store, use_multipart=False)

    def get(self, path: str, max_bytes: int) -> memoryview | None:
        """Returns an object, or None if it is missing. Raises `ObjectRefused` if it is larger than `max_bytes`, which
        is known before it is read."""

        def read() -> memoryview:
            result = self._obstore.get(self._store, path)
            if (num_bytes := result.meta["size"]) > max_bytes:
                raise ObjectRefused("oversized", f"{path} has {num_bytes} bytes, and {max_bytes} at most are expected")
            return memoryview(result.bytes())

        return self._call(read)

    def has(self, path: str) -> bool:
        """Returns whether an object exists, without reading it."""
        return self._call(lambda: self._obstore.head(self._store, path)) is not None

    def probe(self) -> None:
        """Makes one request, so that `problem` is known and logged before the first prompt. It counts for no breaker:
        prompts may come meanwhile. Never raises."""
        with suppress(RemoteUnavailable):
            self._call(lambda: self._obstore.head(self._store, _PROBE), Breaker())

    def put(self, path: str, data: bytes) -> None:
        """Writes an object atomically."""

        def put() -> bool:
            self._put(path, data)
            return True

        if self._call(put, self.write_breaker) is None:
            raise RemoteUnavailable(f"{self.url}: there is no such bucket")

    def delete(self, paths: Sequence[str]) -> None:
        """Removes objects. A missing object is no error."""

        def remove() -> None:
            try:
                self._obstore.delete(self._write_store, list(paths))
            except FileNotFoundError:
                # In a folder a missing object ends the call, and others of the list stay.
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._obstore.delete(self._write_store, path)

        self._call(remove, self.write_breaker)

    def list(self, prefix: str) -> list[str]:
        """Returns the paths of all objects below a prefix. Raises `RemoteUnavailable` also for a listing that is too
        long to be true."""

        def read() -> list[str]:
            paths: list[str] = []
            for page in self._obstore.list(self._store, prefix):
                paths += [meta["path"] for meta in page]
                if len(paths) > _MAX_PATHS:
                    raise RemoteUnavailable(f"{self.url} lists more than {_MAX_PATHS} objects")
            return paths

        return self._call(read) or []

    def _call(self, request: Callable[[], _Result], breaker: Breaker | None = None) -> _Result | None:
        """Returns the result of a request, or None if there is no such object. `breaker` defaults to the breaker for
        reading."""
        breaker = breaker or self.breaker
        reads = breaker is not self.write_breaker
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
        except BaseException as error:  # a panic in obstore is no `Exception`
            if reads:
                self._note_refusal(error)
            if breaker.failed() and not (reads and self.problem):
                log.warning("[remote] going on without %s: %s", self.url, escaped(first_line(error)))
            raise RemoteUnavailable(f"{self.url}: {escaped(first_line(error))}") from error
        if breaker.is_failing or (reads and self.problem):
            log.info("[remote] %s answers again", self.url)
        if reads:
            self.problem = ""
        breaker.succeeded()
        return result

    def _note_refusal(self, error: BaseException) -> None:
        """Keeps and logs why the server refuses the caller, once until a request succeeds."""
        text = first_line(error)
        status = _REFUSED.get(type(error).__name__) or ((match := _STATUS.search(text)) and match[1])
        if status and not self.problem:
            variables = _CHECK.get(urlsplit(self.url).scheme, "the credentials in the environment")
            self.problem = f"the bucket {self.url} answers {status}: check {variables}"
            log.warning("[remote] %s; going on without it (%s)", self.problem, escaped(text))


def _import() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise SettingsError(f"{_FLAG} needs obstore; pip install obstore") from error
    return obstore


def _folder_of(url: str) -> Path | None:
    """Returns the folder that a URL names, None for a bucket. Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError("a folder is written as file:///absolute/path")
    return Path(unquote(parts.path))


def _open_store(url: str, timeout_s: float) -> Any:
    from obstore.store import LocalStore, from_url

    if (folder := _folder_of(url)) is not None:
        return LocalStore(folder)
    retry_s = min(_MAX_RETRY_S, timeout_s / 2)
    return from_url(
        url,
        client_options={
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s),
            # The endpoint in the environment says whether it is http or https.
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
