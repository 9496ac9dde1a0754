"""From tokens to text as it grows: incremental decoding, and stop strings that may span tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tokenizers.decoders import DecodeStream


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens by their texts."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}


class TextStream:
    """Text of one reply. Holds back an incomplete character, and text that may be the start of a stop string.

    `hidden` tokens have no text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], hidden: Collection[int]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._undecoded: list[int] = []
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that is complete."""

    def push(self, token: int) -> str:
        """Returns the text that `token` makes final, perhaps "". Sets `stopped_by` when a stop string is complete."""
        if token in self._hidden:
            return ""
        self._undecoded.append(token)
        text = self._step(token)
        if text is None:
            return ""
        self._undecoded.clear()
        return self._release(text)

    def finish(self) -> str:
        """Returns the text that is still held when the reply ends without a stop string."""
        rest = self._backend.decode(self._undecoded, skip_special_tokens=False) if self._undecoded else ""
        held, self._held = self._held, ""
        return held + rest

    def _step(self, token: int) -> str | None:
        """Returns the text up to `token`, None while a character is incomplete.

        An invalid byte makes a byte-fallback decoder replace its whole run of bytes. The stream fails if part of the
        run is out already. What is not out yet is then decoded by itself, and a new stream continues from there.
        """
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception:  # noqa: BLE001 (tokenizers raises nothing narrower)
            text = self._backend.decode(self._undecoded, skip_special_tokens=False)
            self._stream = DecodeStream(ids=list(self._undecoded), skip_special_tokens=False)
        return text

    def _release(self, text: str) -> str:
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            ready, self._held = self._held[:at], ""
            return ready
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
