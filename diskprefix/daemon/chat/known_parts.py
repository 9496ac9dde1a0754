"""Encoded texts of earlier prompts, in memory."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.fair_cache import FairCache
from diskprefix.tokens import TokenIds

_KNOWN_TOKENS = 2 << 20
"""Tokens of earlier prompts that stay in memory; each takes 12 bytes."""


class Encoding(NamedTuple):
    """The tokens of a text."""

    token_ids: TokenIds
    offsets: npt.NDArray[np.int32]
    """First and last character (exclusive) of each token, shape (num_tokens, 2). (0, 0): a token without text."""


class KnownParts:
    """Encoded parts of earlier prompts. For any thread."""

    def __init__(self) -> None:
        self._parts = FairCache[tuple[Hashable, bytes], tuple[Encoding, float]](_KNOWN_TOKENS)
        """The encodings by owner and digest of the text, each with the time at which it expires."""

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, owner: Hashable, text: str) -> Encoding | None:
        encoding, expires_at = self._parts.get((owner, _digest(text))) or (None, 0.0)
        return encoding if expires_at > time.monotonic() else None

    def put(self, owner: Hashable, text: str, encoding: Encoding, lasts_s: float, share: str = "") -> None:
        """Adds an encoding, which expires `lasts_s` seconds after this use. Its room counts for `share`."""
        expires_at = time.monotonic() + lasts_s
        self._parts.put((owner, _digest(text)), (encoding, expires_at), share, len(encoding.token_ids))

    def forget(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Drops expired parts, and the parts of owners that are gone."""
        now, owners = time.monotonic(), {owner for owner, _ in self._parts}
        gone = {owner for owner in owners if is_gone(owner)}
        self._parts.remove_if(lambda key, part: part[1] <= now or key[0] in gone)


class OwnedParts(Struct, frozen=True):
    """The known parts of the `owner` of a request. With `keeps`, new parts last `lasts_s` seconds after each use. Their
    room counts for `share`."""

    known: KnownParts
    owner: Hashable
    lasts_s: float
    keeps: bool = True
    share: str = ""

    def get(self, text: str) -> Encoding | None:
        return self.known.get(self.owner, text)

    def put(self, text: str, encoding: Encoding) -> None:
        """Adds a part, or renews the time of a known one."""
        if self.keeps:
            self.known.put(self.owner, text, encoding, self.lasts_s, self.share)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
