"""The bytes of single tokens, which may be a part of a character."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The bytes by the letters that stand for them in byte-level vocabularies (GPT-2)."""


class TokenBytes:
    """Returns the bytes of tokens of a tokenizer of the `tokenizers` library. Joined, the bytes of a text's tokens are
    the text in UTF-8."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._decoder: bytes = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece: str = self._backend.id_to_token(token) or ""
        if b'"ByteLevel"' in self._decoder:
            return bytes(_LETTERS[letter] for letter in piece) if _LETTERS.keys() >= set(piece) else piece.encode()
        if b'"ByteFallback"' in self._decoder and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if "▁".encode() in self._decoder:
            return piece.replace("▁", " ").encode()
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()
