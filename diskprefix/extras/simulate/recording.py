"""The recording of a daemon: one line of JSON for each request. `diskprefix simulate` replays it.

A recording has neither text nor token ids. Each prompt is cut at the positions that matter to the cache: every grid
point, boundary and mark, the end of the system part, the end of the prompt, the ends of earlier prompts that it
continues, and the position where it parts from an earlier prompt. For each cut, the recording has a hash of the prompt
up to there. Two prompts of one root share their first p tokens if and only if both have the same hash at p. All hashes
are keyed with the store's secret. Without the secret, nobody can test a guess of a prompt or a tenant.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import SettingsError
from diskprefix.extras.simulate.radix_tree import RadixTree
from diskprefix.nouns import SHARED, CacheOptions, CacheReport, MissReason, Prompt, StateSource
from diskprefix.printable import first_line
from diskprefix.settings import Settings
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

VERSION = 1

_HASH_BYTES = 8
_KEY_BYTES = 8
_MOST_WAITING = 256
"""The maximum number of requests that wait to be written. If the disk hangs, recording stops, not the daemon."""
_CLOSE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 2.0
"""Seconds between checks whether the file was moved or deleted."""
_LOCK_PATIENCE_S, _LOCK_PAUSE_S = 1.0, 0.02
"""The time that opening the file waits for another process which holds it, and between two tries."""
_MOST_TOKENS = 1 << 24
"""The maximum length of a prompt."""
_BEGINNING = b'{"version":'
_LONGEST_LINE_BYTES = 1 << 24

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, a line of the file. An absent field has its default.

    `when` is in seconds since 1970. `root` identifies model and tenant, `group` is that of `CacheOptions`, `caller` the
    API key, whatever its salts; all are keyed hashes of 16 hex digits, empty for none. `is_shared`: the request had
    neither key nor salt. `own_scope`: it set another scope than the daemon's. `bytes_per_token`, `state_bytes`,
    `logits_bytes` and `exact_at` describe the model's state as `kv.layout.Layout` does; the sizes are 0 if unknown.
    `model` is its name where a daemon has several, `memory_bytes` what it needs of memory, `load_s` the time in which
    it was loaded. `took_s` is the time from the request's arrival at the model to its end. `marks` are the positions
    that the client marked, with their times to live in seconds: see `nouns.Mark`. `reply_tokens` counts the known
    tokens of the reply, 0 unless the model is exact at every token.

    `cuts` are ascending positions in tokens. The end of the prompt is one of them, the end of the reply is the last
    one. `hashes` has for each cut the hash of prompt and reply up to there, 16 hex digits. `parted_at`, one of the
    cuts, is the position where the prompt parts from an earlier one that has no cut there. `parted_from` is the hash of
    that one at a later cut.

    `remembered`: the prompt was computed to its end and has no media, so any scope could have kept it. The last fields
    are the cache's work: see `CacheReport`.
    """

    version: int
    when: _Amount
    root: str
    scope: str
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    min_tokens: _Count
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
    cuts: list[int]
    hashes: list[str]
    parted_at: int = 0
    parted_from: str = ""
    is_shared: bool = True
    own_scope: bool = False
    group: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")] = ""
    caller: str = ""
    save: bool = True
    ttl_s: _Amount | None = None
    reuse_generated: bool = False
    output_tokens: _Count = 0
    reply_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)] = 0
    boundaries: list[int] = []
    system_end: int = 0
    marks: list[tuple[int, _Amount | None]] = []
    remembered: bool = True
    bytes_per_token: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    state_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    logits_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    exact_at: Literal["token", "grid"] = "grid"
    model: str = ""
    memory_bytes: _Count = 0
    load_s: _Amount = 0.0
    took_s: _Amount = 0.0
    restored: _Count = 0
    source: StateSource = "none"
    miss_reason: MissReason | None = None
    prefill_ms: _Amount = 0.0
    restore_ms: _Amount = 0.0

    def check(self) -> None:
        """Checks the rules that the types do not express. Raises `ValueError` or `InvalidScope`."""
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the recording is not known here ({VERSION} is)")
        parse_scope(self.scope, param="scope")
        positions = [0, *self.cuts]
        end = self.prompt_tokens + self.reply_tokens
        if not self.cuts or len(self.hashes) != len(self.cuts) or positions[-1] != end:
            raise ValueError("cuts: they must end with the prompt and its reply, and have a hash each")
        if self.prompt_tokens not in positions:
            raise ValueError("cuts: the prompt's end must be one")
        if any(later <= earlier for earlier, later in pairwise(positions)):
            raise ValueError("cuts: they must ascend")
        if self.parted_at and self.parted_at not in self.cuts:
            raise ValueError("parted_at: is no cut")
        marks = [position for position, _ in self.marks]
        for key, found in (("boundaries", self.boundaries), ("marks", marks), ("system_end", [self.system_end])):
            if found != sorted(found) or not all(0 <= place <= self.prompt_tokens for place in found):
                raise ValueError(f"{key}: must ascend and lie within the prompt")


class RequestRecorder:
    """Appends requests to a file, in a thread of its own. `record_request` only queues them. Several processes may
    append to one file, such as the workers of several models.

    Errors of the file never fail a request. They are logged once until writing works again. If the file was moved or
    deleted, a new one is started. `secret_of` returns the store's secret. `know` and `forget` may be called in any
    thread, the other methods in one thread only.
    """

    def __init__(self, path: Path, settings: Settings, secret_of: Callable[[], int]) -> None:
        """Opens the file. A new file is private to its owner. Raises `SettingsError` if the file cannot be written or
        is no recording."""
        self._path = path
        self._settings = settings
        self._default_scope = parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache")
        self._secret_of = secret_of
        self._own_key = secrets.token_bytes(_KEY_BYTES)
        self._partings = RadixTree()
        self._is_failing = False
        self._layout: dict[str, Any] = {}
        self._fd = _open(path)
        self._looked_at = time.monotonic()
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        """The queue of the thread. None ends the thread."""
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def describe(
        self,
        *,
        bytes_per_token: int,
        state_bytes: int,
        logits_bytes: int,
        exact_at: Literal["token", "grid"],
        memory_bytes: int = 0,
        load_s: float = 0.0,
    ) -> None:
        """Sets the size and kind of the model's state for all later lines. Before this call, no replies are
        recorded."""
        self._layout = {
            "memory_bytes": memory_bytes,
            "load_s": round(load_s, 3),
            "bytes_per_token": bytes_per_token,
            "state_bytes": state_bytes,
            "logits_bytes": logits_bytes,
            "exact_at": exact_at,
        }

    def know(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """Adds prompts from before this process, oldest first. New prompts are cut where they part from these."""
        with suppress(queue.Full):
            self._waiting.put_nowait(partial(self._learn, root, [token_ids.copy() for token_ids in prompts]))

    def forget(self) -> None:
        """Drops all known prompts, because some were deleted."""
        with suppress(queue.Full):
            self._waiting.put_nowait(self._forget)

    def record_request(
        self,
        prompt: Prompt,
        options: CacheOptions,
        report: CacheReport,
        *,
        root: bytes,
        when: float,
        output_tokens: int,
        reply: TokenIds,
        prefill_ms: float,
        remembered: bool,
        took_s: float = 0.0,
    ) -> None:
        """Queues a finished request. `when` is its arrival in seconds since 1970; `took_s` later it ended. `reply` has
        the tokens that the model computed after the prompt. `remembered`: see `RecordedRequest`."""
        if self._layout.get("exact_at") != "token" or prompt.media:
            reply = reply[:0]
        record_of = partial(
            RecordedRequest,
            version=VERSION,
            when=round(when, 3),
            scope=str(options.scope),
            block_size=self._settings.block_size,
            min_tokens=self._settings.kv_cache_min_tokens,
            prompt_tokens=len(prompt.token_ids),
            is_shared=options.tenant == SHARED,
            own_scope=options.scope != self._default_scope,
            save=options.save,
            ttl_s=options.ttl_s,
            reuse_generated=options.reuse_generated,
            model=self._settings.served_model_name or "",
            took_s=round(took_s, 3),
            output_tokens=output_tokens,
            reply_tokens=len(reply),
            boundaries=list(prompt.boundaries),
            system_end=prompt.system_end,
            marks=list(prompt.marks),
            remembered=remembered,
            **self._layout,
            restored=report.restored,
            source=report.source,
            miss_reason=report.miss_reason,
            prefill_ms=round(prefill_ms, 2),
            restore_ms=round(report.restore_ms, 2),
        )
        try:
            self._waiting.put_nowait(partial(self._append, record_of, prompt, reply.copy(), root, options))
        except queue.Full:
            self._failed("requests come faster than they are written")

    def close(self) -> None:
        """Writes the queued requests and closes the file. If the disk hangs, waits for a limited time only."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("[record] %s: not everything was written in time", self._path)
        else:
            os.close(self._fd)

    def _write_all(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:
                # No error may end the thread.
                log.debug("[record] failed", exc_info=error)
                self._failed(getattr(error, "strerror", None) or first_line(error))

    def _failed(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning("[record] %s: a request was not recorded: %s (said once)", self._path, reason)

    def _append(
        self,
        record_of: Callable[..., RecordedRequest],
        prompt: Prompt,
        reply: TokenIds,
        root: bytes,
        options: CacheOptions,
    ) -> None:
        self._write(msgspec.json.encode(record_of(**self._hashed(prompt, reply, root, options))) + b"\n")
        self._is_failing = False

    def _hashed(self, prompt: Prompt, reply: TokenIds, root: bytes, options: CacheOptions) -> dict[str, Any]:
        """Returns the hashed fields of the record, and the cuts."""
        key, block_size = self._key(), self._settings.block_size
        # Without keys, all are one caller to the front.
        caller = "" if self._settings.api_keys is None else "".join(options.tenant.ids[:1])
        token_ids = np.concatenate([prompt.token_ids, reply])
        fields: dict[str, Any] = {
            "root": _keyed(key, b"root", root),
            "group": _keyed(key, b"group", options.group) if options.group else "",
            "caller": _keyed(key, b"caller", caller.encode()) if caller else "",
        }
        wanted = {
            *prompt.boundaries,
            *(mark.position for mark in prompt.marks),
            prompt.system_end,
            *range(block_size, len(token_ids), block_size),
            len(prompt.token_ids),
            len(token_ids),
        }
        # With media, equal tokens do not mean equal prompts. A random root makes the hashes unique.
        root = root if not prompt.media else secrets.token_bytes(len(root))
        places, left = ([], None) if prompt.media else self._partings.add(root, token_ids)
        wanted.update(place.position for place in places)
        cuts = sorted(position for position in wanted if 0 < position <= len(token_ids))
        hashes = _prefix_hashes(key, root, token_ids, cuts)
        digest_at = dict(zip(cuts, hashes, strict=True))
        for place in places:
            place.digest = digest_at[place.position]
        if left is not None and left.before is not None and left.digest:
            fields |= {"parted_at": left.before.position, "parted_from": left.digest.hex()}
        return fields | {"cuts": cuts, "hashes": [digest.hex() for digest in hashes]}

    def _forget(self) -> None:
        self._partings = RadixTree()

    def _learn(self, root: bytes, prompts: Sequence[TokenIds]) -> None:
        for token_ids in prompts:
            places, _ = self._partings.add(root, token_ids)
            hashes = _prefix_hashes(self._key(), root, token_ids, [place.position for place in places])
            for place, digest in zip(places, hashes, strict=True):
                place.digest = digest

    def _key(self) -> bytes:
        secret = self._secret_of()
        # Without a store there is no secret. A random key then protects the hashes; later recordings do not match them.
        return secret.to_bytes(_KEY_BYTES, "little") if secret else self._own_key

    def _write(self, line: bytes) -> None:
        """Writes the whole line or nothing. A partial line could never be repaired."""
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            if not _is_at(self._fd, self._path):
                moved, self._fd = self._fd, _open(self._path)
                os.close(moved)
            self._looked_at = time.monotonic()
        with _locked(self._fd, self._path):
            end = os.fstat(self._fd).st_size
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                # Another process was killed while it wrote.
                _check_content(self._fd, self._path)
                end = os.fstat(self._fd).st_size
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError:
                if written:
                    os.ftruncate(self._fd, end)
                raise


def _keyed(key: bytes, kind: bytes, value: bytes) -> str:
    """Returns a keyed hash of a value."""
    return hashlib.blake2b(value, digest_size=_HASH_BYTES, key=key, person=kind).hexdigest()


def _is_at(fd: int, path: Path) -> bool:
    """Returns whether the open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _prefix_hashes(key: bytes, root: bytes, token_ids: TokenIds, positions: Sequence[int]) -> list[bytes]:
    """Returns the keyed hashes of a prompt up to each of the ascending positions, in one pass over its tokens."""
    digest = hashlib.blake2b(root, digest_size=_HASH_BYTES, key=key)
    hashes, start = [], 0
    for position in positions:
        digest.update(token_ids[start:position].tobytes())
        hashes.append(digest.digest())
        start = position
    return hashes


def _open(path: Path) -> int:
    """Opens the file for appending, and removes an unfinished last line. Raises `SettingsError`."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Non-blocking, because opening a pipe would wait.
        fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _refused(f"cannot write {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refused(f"{path} is no regular file")
        with _locked(fd, path, patience_s=_LOCK_PATIENCE_S):
            _check_content(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _locked(fd: int, path: Path, *, patience_s: float | None = None) -> Iterator[None]:
    """Holds the file for this process. Where it cannot be locked, others are not held off. Raises `SettingsError` if
    another process holds it for longer than `patience_s`."""
    since = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if patience_s is None else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if time.monotonic() - since > (patience_s or 0.0):
                    raise _refused(f"another process holds {path}") from None
                time.sleep(_LOCK_PAUSE_S)
    except OSError as error:
        log.debug("[record] %s cannot be locked: %s", path, error)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _check_content(fd: int, path: Path) -> None:
    """Raises `SettingsError` if the file is no recording. Removes an unfinished last line, which a crash may leave."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _LONGEST_LINE_BYTES, max(size - _LONGEST_LINE_BYTES, 0))
    last_line = len(tail) - (tail.rfind(b"\n") + 1)
    is_other = not _BEGINNING.startswith(os.pread(fd, len(_BEGINNING), 0))
    if is_other or (last_line == len(tail) and size > len(tail)):
        raise _refused(f"{path} is not a recording; give another name")
    if last_line:
        log.warning("[record] %s: %d bytes of an unfinished last line are removed", path, last_line)
        os.ftruncate(fd, size - last_line)


def _refused(message: str) -> SettingsError:
    return SettingsError(f"--record: {message}")


def joined(requests: Sequence[RecordedRequest]) -> dict[str, str]:
    """Returns, for each hash in the recording, the hash at the last known cut before it, "" at the start of a prompt.
    The earlier hash may come from another prompt.

    The tokens between two cuts are the same in all prompts that have both hashes. So a prompt can be rebuilt from its
    last hash backwards, with the cuts of all prompts that share its beginning.
    """
    before: dict[str, str] = {}
    position_of = {"": 0}
    for request in requests:
        earlier = ""
        for position, later in zip(request.cuts, request.hashes, strict=True):
            position_of[later] = position
            _link(before, position_of, earlier, later)
            earlier = later
    for request in requests:
        # The line of the other prompt may be missing.
        if request.parted_at and position_of.get(request.parted_from, 0) > request.parted_at:
            parted = request.hashes[request.cuts.index(request.parted_at)]
            _link(before, position_of, parted, request.parted_from)
    return before


def _link(before: dict[str, str], position_of: dict[str, int], earlier: str, later: str) -> None:
    """Records that the prefix `earlier` is a beginning of `later`, and inserts both into the known chain."""
    while True:
        known = before.get(later)
        if known is None:
            before[later] = earlier
            return
        if position_of[known] == position_of[earlier]:
            return
        if position_of[known] > position_of[earlier]:
            later = known
        else:
            before[later] = earlier
            later, earlier = earlier, known
