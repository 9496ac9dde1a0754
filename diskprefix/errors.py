"""The errors of diskprefix, with the HTTP status and the exit code that each one becomes.

    DiskPrefixError                     500  exit 1
    ├── InvalidRequest                  400          the client sent something that cannot be served
    │   ├── InvalidScope                400          a cache scope outside the grammar
    │   └── ContextTooLong              400          prompt plus reply exceed the model's positions
    ├── ModelNotFound                   404  exit 2  the request names a model that is not served
    ├── ResponseNotFound                404          the request names a response that is not stored
    ├── EntryNotFound                   404          the request names a saved prompt that is not stored
    ├── QueueFull                       503          too many requests wait; Retry-After is sent
    │   └── ShareFull                   429          too many of one API key's requests wait; Retry-After is sent
    ├── NotReady                        503          the daemon is loading or stopping, or its memory is held or refused
    ├── DeviceLost                      500  exit 5  the accelerator failed; only a new process can use it again
    ├── NonFiniteLogits                 500          the model computed NaN or infinity instead of logits
    ├── SettingsError                        exit 2  a flag, an environment variable or a policy file is wrong
    ├── ModelError                           exit 3  the model cannot be found, fetched, read or fitted
    └── CacheError                      500  exit 4  the store cannot be used; a request goes on without it
        ├── StoreUnavailable                         the folder cannot be created, read, written or locked, or is full
        │   ├── StoreReplaced                        another process put a new file in the place of the open one
        │   ├── ReaderStays                          a reader that does not end keeps freed pages from being reused
        │   └── DiskStalled         503              a read was not answered in time; Retry-After is sent
        ├── StoreFormatError                         the store has a format that this version does not read
        ├── StoreCorrupt                             a record or payload fails its checks
        ├── StoreFull                                a publication does not fit the budget
        │   └── LargerThanStore                      a publication does not fit even an empty store
        └── PrefixGone                               the parent of a publication was evicted, purged or not saved

A message is one line that says what is wrong and what to do next. Errors of a library are translated where the library
is called, so that no other module needs to know them.
"""

from __future__ import annotations

from copy import copy
from typing import Self

GOT = " (got "
"""The text before the value at fault, at the end of a message."""


class DiskPrefixError(Exception):
    """The base class. `param` names the request field at fault. `code` is a stable word for programs. `for_all` is the
    message for callers who may not see paths of this machine, None if the message has none."""

    http_status = 500
    exit_code = 1
    error_type = "server_error"
    code: str | None = None
    for_all: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, for_all: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if for_all is not None:
            self.for_all = for_all

    def for_caller(self, *, sees_all: bool) -> DiskPrefixError:
        """Returns the error as a caller gets it."""
        if sees_all or self.for_all is None:
            return self
        error = copy(self)
        error.message = self.for_all
        return error


class InvalidRequest(DiskPrefixError):
    http_status = 400
    exit_code = 2
    error_type = "invalid_request_error"
    code = "invalid_value"

    @classmethod
    def at(cls, param: str, problem: str, code: str | None = None) -> Self:
        """Returns the error of one field of a request. The message begins with its path."""
        return cls(f"{param}: {problem}", param=param, code=code)


class InvalidScope(InvalidRequest):
    code = "invalid_scope"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(DiskPrefixError):
    http_status = 404
    exit_code = 2
    error_type = "invalid_request_error"
    code = "model_not_found"


class ResponseNotFound(DiskPrefixError):
    http_status = 404
    error_type = "invalid_request_error"
    code = "response_not_found"


class EntryNotFound(DiskPrefixError):
    http_status = 404
    error_type = "invalid_request_error"
    code = "entry_not_found"


class QueueFull(DiskPrefixError):
    """`retry_after_s` is the time that the requests before this one are expected to take."""

    http_status = 503
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShareFull(QueueFull):
    """The status is not 503, because other callers are served and a proxy must not consider the daemon down."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "too_many_requests"


class NotReady(DiskPrefixError):
    http_status = 503
    code = "not_ready"


class DeviceLost(DiskPrefixError):
    exit_code = 5
    code = "device_lost"


class NonFiniteLogits(DiskPrefixError):
    code = "non_finite_logits"


class SettingsError(DiskPrefixError):
    exit_code = 2
    code = "invalid_settings"


class ModelError(DiskPrefixError):
    exit_code = 3
    code = "model_error"
    for_all = "the model cannot be loaded; the daemon's log has the reason"


class CacheError(DiskPrefixError):
    exit_code = 4
    code = "cache_error"


class StoreUnavailable(CacheError):
    code = "store_unavailable"


class StoreReplaced(StoreUnavailable):
    code = "store_replaced"


class ReaderStays(StoreUnavailable):
    code = "reader_stays"


class DiskStalled(StoreUnavailable):
    http_status = 503
    code = "disk_stalled"
    for_all = "the disk of the cache does not answer in time; try again"


class StoreFormatError(CacheError):
    code = "store_format"


class StoreCorrupt(CacheError):
    code = "store_corrupt"


class StoreFull(CacheError):
    code = "store_full"


class LargerThanStore(StoreFull):
    code = "larger_than_store"


class PrefixGone(CacheError):
    code = "prefix_gone"
