"""The recording of a daemon: one line of JSON for each request. `diskprefix simulate` replays it."""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from diskprefix.prefixstore.recording.radix_tree import RadixTree
from diskprefix.prefixstore.recording.recorded_request import VERSION, RecordedRequest
from diskprefix.prefixstore.recording.recording_file import append
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.printable import first_line
from diskprefix.scope import parse_scope
from diskprefix.thread_pool import standing_thread
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheOptions, CacheReport, Prompt

log = logging.getLogger("diskprefix")

_HASH_BYTES = 8
_KEY_BYTES = 8
_MOST_WAITING = 256
"""The maximum number of requests that wait to be written. If the disk hangs, recording stops, not the daemon."""
_CLOSE_TIMEOUT_S = 5.0


class RequestRecorder:
    """Appends requests to a file, in a thread of its own. `record_request` only queues them. Several processes, such as
    the workers of several models, may append to one file.

    An error of the file never fails a request. It is logged once until writing works again. If the file was moved or
    deleted, a new one is started. `secret_of` returns the store's secret. `know` and `forget` may be called in any
    thread, the other methods in one thread only.
    """

    def __init__(self, path: Path, settings: StoreOptions, secret_of: Callable[[], int], model_name: str = "") -> None:
        """Raises `SettingsError` if the file cannot be written or is no recording."""
        self._path = path
        self._settings, self._model_name = settings, model_name
        self._default_scope = parse_scope(settings.disk_prefix_cache, param="--disk-prefix-cache")
        self._secret_of = secret_of
        self._random_key = secrets.token_bytes(_KEY_BYTES)
        self._prompts = RadixTree()
        self._is_failing = False
        self._layout: dict[str, Any] = {}
        append(path, b"")
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        """The work of the thread. None ends it."""
        self._thread = standing_thread(self._write_all, "record")
        self._thread.start()

    def describe(
        self, *, bytes_per_token: int, state_bytes: int, logits_bytes: int, exact_at: Literal["token", "grid"]
    ) -> None:
        """Sets the size and kind of the model's state for later lines. Replies are recorded only after this call."""
        sizes = {"bytes_per_token": bytes_per_token, "state_bytes": state_bytes, "logits_bytes": logits_bytes}
        self._layout = {**sizes, "exact_at": exact_at}

    def know(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """Adds prompts from before this process, oldest first. New prompts are cut where they part from these."""
        with suppress(queue.Full):
            self._waiting.put_nowait(partial(self._add_known, root, [token_ids.copy() for token_ids in prompts]))

    def forget(self) -> None:
        """Drops all known prompts, because some were deleted."""
        with suppress(queue.Full):
            self._waiting.put_nowait(lambda: setattr(self, "_prompts", RadixTree()))

    def record_request(
        self,
        prompt: Prompt,
        options: CacheOptions,
        report: CacheReport,
        *,
        root: bytes,
        when: float,
        reply: TokenIds,
        prefill_ms: float,
        remembered: bool,
        is_ahead: bool = False,
    ) -> None:
        """Queues a finished request, which arrived at `when` (seconds since 1970). `reply` has the tokens that were
        computed after the prompt. `remembered`: the prompt was computed to its end and has no pictures. `is_ahead`:
        nobody sent the prompt, which is computed while nobody waits."""
        layout = self._layout
        reply = (reply if layout.get("exact_at") == "token" else reply[:0]).copy()

        def write() -> None:
            record = RecordedRequest(
                version=VERSION,
                when=round(when, 3),
                scope=str(options.scope),
                block_size=self._settings.block_size,
                min_tokens=self._settings.kv_cache_min_tokens,
                prompt_tokens=len(prompt.token_ids),
                is_trusted=not options.tenant.is_salted,
                own_scope=options.scope != self._default_scope,
                save=options.save,
                ttl_s=options.ttl_s,
                model=self._model_name,
                reply_tokens=len(reply),
                boundaries=list(prompt.boundaries),
                system_end=prompt.system_end,
                question_end=prompt.question_end,
                marks=list(prompt.marks),
                remembered=remembered,
                is_ahead=is_ahead,
                **layout,
                restored=report.restored,
                prefill_ms=round(prefill_ms, 2),
                **self._hashed_fields(prompt, reply, root, options),
            )
            append(self._path, msgspec.json.encode(record) + b"\n")
            self._is_failing = False

        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self._warn_once("requests come faster than they are written")

    def close(self) -> None:
        """Writes the queued requests and ends the thread. Waits for a limited time only, as the disk may hang."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("[record] %s: not everything was written in time", self._path)

    def _write_all(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:
                # No error may end the thread.
                log.debug("[record] failed", exc_info=error)
                self._warn_once(getattr(error, "strerror", None) or first_line(error))

    def _warn_once(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning("[record] %s: a request was not recorded: %s (said once)", self._path, reason)

    def _hashed_fields(self, prompt: Prompt, reply: TokenIds, root: bytes, options: CacheOptions) -> dict[str, Any]:
        """Returns the hashed fields of the record, and the cuts."""
        key, block_size = self._key(), self._settings.block_size
        token_ids = np.concatenate([prompt.token_ids, reply])
        group = _keyed_hash(key, b"group", options.group) if options.group else ""
        fields: dict[str, Any] = {"root": _keyed_hash(key, b"root", root), "group": group}
        positions = {
            *prompt.boundaries,
            *(mark.position for mark in prompt.marks),
            prompt.system_end,
            prompt.question_end,
            *range(block_size, len(token_ids), block_size),
            len(prompt.token_ids),
            len(token_ids),
        }
        path, parted = self._prompts.add(root, token_ids)
        positions.update(node.position for node in path)
        cuts = sorted(position for position in positions if 0 < position <= len(token_ids))
        hashes = _prefix_hashes(key, root, token_ids, cuts)
        digest_at = dict(zip(cuts, hashes, strict=True))
        for node in path:
            node.digest = digest_at[node.position]
        if parted is not None and parted.parent is not None and parted.digest:
            fields |= {"parted_at": parted.parent.position, "parted_from": parted.digest.hex()}
        return fields | {"cuts": cuts, "hashes": [digest.hex() for digest in hashes]}

    def _add_known(self, root: bytes, prompts: Sequence[TokenIds]) -> None:
        for token_ids in prompts:
            path, _ = self._prompts.add(root, token_ids)
            hashes = _prefix_hashes(self._key(), root, token_ids, [node.position for node in path])
            for node, digest in zip(path, hashes, strict=True):
                node.digest = digest

    def _key(self) -> bytes:
        """Returns the store's secret as a key. Without a store, the key is random and no other recording matches."""
        secret = self._secret_of()
        return secret.to_bytes(_KEY_BYTES, "little") if secret else self._random_key


def _keyed_hash(key: bytes, kind: bytes, value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=_HASH_BYTES, key=key, person=kind).hexdigest()


def _prefix_hashes(key: bytes, root: bytes, token_ids: TokenIds, positions: Sequence[int]) -> list[bytes]:
    """Returns the keyed hashes of a prompt up to each of the ascending positions, in one pass over its tokens."""
    digest = hashlib.blake2b(root, digest_size=_HASH_BYTES, key=key)
    hashes, start = [], 0
    for position in positions:
        digest.update(token_ids[start:position].tobytes())
        hashes.append(digest.digest())
        start = position
    return hashes
