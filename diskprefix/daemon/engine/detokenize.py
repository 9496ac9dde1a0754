"""Decodes tokens to text one by one, and finds stop strings that may span tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace
from tokenizers.decoders import DecodeStream

from diskprefix.daemon.engine.request import FinishReason, TextEvent, TokenLogprob
from diskprefix.daemon.engine.token_bytes import TokenBytes

_MAX_UNDECODED = 16
"""The most tokens to wait for a complete character. No character has this many. A longer run is decoded although it is
incomplete."""


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens by their texts."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


class TextStream:
    """The text of one reply. Holds back an incomplete character, and text that may be the start of a stop string.
    `hidden` tokens have no text. `ends` are the tokens that end a reply; they are special or hidden."""

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], hidden: Collection[int], ends: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden, self._ends = hidden, ends
        self._stream = DecodeStream(skip_special_tokens=False)
        self._undecoded: list[int] = []
        self._decoded: list[int] = []
        """The tokens that completed the last text."""
        self._stops = [_StopSearch(text) for text in stop]
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def event(
        self, choice: int, token: int, logprobs: tuple[TokenLogprob, ...], end: FinishReason | None
    ) -> tuple[TextEvent, FinishReason | None]:
        """Returns the event of one token, and the reason why the reply ends with it, None if the reply goes on. `end`
        is a reason to end here that does not depend on the token."""
        if token in self._ends:
            return TextEvent(choice, self.push(token) + self.finish(), (token,)), "stop"
        is_first = not self._decoded and not self._undecoded
        text = self.push(token)
        reason: FinishReason | None = "stop" if self.stopped_by else end
        if reason is not None and not self.stopped_by:
            text += self.finish()
        named = tuple(self._with_bytes(item, is_first=is_first) for item in logprobs)
        return TextEvent(choice, text, (token,), named), reason

    def named(self, tokens: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Returns tokens of the beginning of a text, with their bytes added."""
        return tuple(self._with_bytes(item, is_first=not index) for index, item in enumerate(tokens))

    def push(self, token: int) -> str:
        """Returns the text that `token` completes, perhaps "". Sets `stopped_by` when a stop string is complete."""
        if token in self._hidden:
            return ""
        return self._release_text(self._text_of(token))

    def finish(self) -> str:
        """Returns the text that is still held back, at the end of a reply without a stop string."""
        rest = self._decode(self._undecoded) if self._undecoded else ""
        held, self._held = self._held, ""
        return held + rest

    @cached_property
    def _bytes_of(self) -> TokenBytes:
        return TokenBytes(self._tokenizer.backend_tokenizer)

    def _with_bytes(self, item: TokenLogprob, *, is_first: bool) -> TokenLogprob:
        data = self._bytes_of(item.token_id)
        if is_first and data.startswith(b" ") and not self._decode([item.token_id]).startswith(" "):
            # Some decoders drop the space at the beginning of a text.
            data = data[1:]
        # Bound: the alternatives of a token have no alternatives themselves.
        return replace(item, data=data, top=tuple(self._with_bytes(other, is_first=is_first) for other in item.top))

    def _text_of(self, token: int) -> str:
        """Returns the new text up to `token`, "" while a character is incomplete."""
        self._undecoded.append(token)
        text = self._step(token)
        if text is not None:
            self._decoded, self._undecoded = self._undecoded, []
            return text
        return self._broken() if len(self._undecoded) > _MAX_UNDECODED else ""

    def _broken(self) -> str:
        """Returns the text of bytes that are not a character. The last bytes may begin a character, so they are kept
        together."""
        ids, self._undecoded = self._undecoded, []
        pieces = {cut: [self._decode(ids[:cut]), self._decode(ids[cut:])] for cut in range(len(ids) - 3, len(ids))}
        cut = min(reversed(pieces), key=lambda cut: sum(map(len, pieces[cut])))
        self._stream = DecodeStream(ids=self._decoded, skip_special_tokens=False)
        return pieces[cut][0] + "".join(map(self._text_of, ids[cut:]))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.backend_with(ids).decode(ids, skip_special_tokens=False)
        return text

    def _step(self, token: int) -> str | None:
        """Returns the new text up to `token`, None while a character is incomplete. After an invalid byte, a
        byte-fallback decoder replaces the whole run of bytes around it. The stream fails if it has already returned a
        part of this run. Then the rest is decoded separately, and a new stream continues."""
        try:
            backend = self._tokenizer.backend_with([*self._decoded, *self._undecoded])
            text: str | None = self._stream.step(backend, token)
        except Exception:  # noqa: BLE001 (tokenizers raises nothing narrower)
            text = self._decode(self._undecoded)
            self._stream = DecodeStream(ids=list(self._undecoded), skip_special_tokens=False)
        return text

    def _release_text(self, text: str) -> str:
        self._held += text
        complete = [
            (len(self._held) - rest, stop.text) for stop in self._stops if (rest := stop.add_text(text)) is not None
        ]
        if complete:
            start, self.stopped_by = min(complete)
            ready, self._held = self._held[:start], ""
            return ready
        keep = max((stop.matched for stop in self._stops), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready


class _StopSearch:
    """Finds a stop string in a growing text with the algorithm of Knuth, Morris and Pratt, in linear time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """The length of the longest suffix of the added text that is a prefix of `text`."""

    @cached_property
    def _ends(self) -> list[int]:
        """For each prefix of `text`, the length of its longest proper suffix that is also a prefix of `text`."""
        ends = [0]
        for character in self.text[1:]:
            ends.append(self._extended(ends[-1], character, ends))
        return ends

    def add_text(self, text: str) -> int | None:
        """Adds text. Returns the number of characters from the start of the stop string to the end of the text; None if
        the stop string has not occurred."""
        for at, character in enumerate(text):
            self.matched = self._extended(self.matched, character)
            if self.matched == len(self.text):
                self.matched = 0
                return len(self.text) + len(text) - at - 1
        return None

    def _extended(self, matched: int, character: str, ends: list[int] | None = None) -> int:
        """Returns the length of the longest prefix of `text` that matches the end of the added text with one more
        `character`. Before this character, `matched` characters matched."""
        # Bound: each round falls back to a shorter prefix.
        while matched and self.text[matched] != character:
            matched = (ends or self._ends)[matched - 1]
        return matched + (self.text[matched] == character)
