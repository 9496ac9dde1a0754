"""Encoded texts of earlier prompts, in memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.tokens import TokenIds

_KNOWN_TOKENS = 2 << 20
"""Tokens of earlier prompts that stay in memory; each takes 12 bytes."""


class Encoding(NamedTuple):
    """The tokens of a text."""

    token_ids: TokenIds
    offsets: npt.NDArray[np.int32]
    """First and last character (exclusive) of each token, shape (num_tokens, 2). (0, 0): a token without text."""


class KnownParts:
    """An LRU cache of encoded parts of prompts. Thread-safe."""

    def __init__(self) -> None:
        self._parts: OrderedDict[tuple[Hashable, bytes], tuple[Encoding, float]] = OrderedDict()
        """The encodings by owner and digest of the text, each with the time at which it expires."""
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, owner: Hashable, text: str) -> Encoding | None:
        key = owner, _digest(text)
        with self._lock:
            encoding, expires_at = self._parts.get(key, (None, 0.0))
            if encoding is None or expires_at <= time.monotonic():
                return None
            self._parts.move_to_end(key)
            return encoding

    def put(self, owner: Hashable, text: str, encoding: Encoding, lasts_s: float) -> None:
        """Adds an encoding, which expires `lasts_s` seconds after this use."""
        key = owner, _digest(text)
        with self._lock:
            self._drop(key)
            self._parts[key] = encoding, time.monotonic() + lasts_s
            self._num_tokens += len(encoding.token_ids)
            while self._num_tokens > _KNOWN_TOKENS:
                self._drop(next(iter(self._parts)))

    def forget(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Drops expired parts, and the parts of owners that are gone."""
        now = time.monotonic()
        with self._lock:
            for key in [key for key, (_, until) in self._parts.items() if until <= now or is_gone(key[0])]:
                self._drop(key)

    def _drop(self, key: tuple[Hashable, bytes]) -> None:
        if key in self._parts:
            self._num_tokens -= len(self._parts.pop(key)[0].token_ids)


class OwnedParts(Struct, frozen=True):
    """The known parts of the `owner` of a request. With `keeps`, new parts last `lasts_s` seconds after each use."""

    known: KnownParts
    owner: Hashable
    lasts_s: float
    keeps: bool = True

    def get(self, text: str) -> Encoding | None:
        return self.known.get(self.owner, text)

    def put(self, text: str, encoding: Encoding) -> None:
        """Adds a part, or renews the time of a known one."""
        if self.keeps:
            self.known.put(self.owner, text, encoding, self.lasts_s)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
