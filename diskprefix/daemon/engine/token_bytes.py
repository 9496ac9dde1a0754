"""The bytes of single tokens. They may be a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The bytes by the letters that stand for them in byte-level vocabularies (GPT-2)."""


class TokenBytes:
    """Returns the bytes of a token, for a tokenizer of the `tokenizers` library. The joined bytes of a text's tokens
    are the text in UTF-8."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        whole = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        steps = whole.get("decoders", [whole])
        self._kinds = {step.get("type") for step in steps}
        self._replaced = [
            ("▁", " ") if step["type"] == "Metaspace" else (step["pattern"].get("String", ""), step["content"])
            for step in steps
            if step.get("type") in ("Metaspace", "Replace")
        ]
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}

    def __call__(self, token: int) -> bytes:
        piece: str = self._added.get(token) or self._backend.id_to_token(token) or ""
        for text, instead in self._replaced if token not in self._added else ():
            piece = piece.replace(text, instead) if text else piece
        if token in self._added:
            return piece.encode()
        if "ByteLevel" in self._kinds and _LETTERS.keys() >= set(piece):
            return bytes(_LETTERS[letter] for letter in piece)
        if "ByteFallback" in self._kinds and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._replaced:
            return piece.encode()
        decoded: str = self._backend.decode([token], skip_special_tokens=False)
        return decoded.encode()
