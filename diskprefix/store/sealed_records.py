"""Sealed records: AES-256-GCM for values (see `sealed_values`), AES for names.

**Keys.** HKDF-SHA-256 (RFC 5869) derives the keys of a store from the 32 bytes of the key file and a random salt of the
store. So several stores may have one key file: a record of one does not open in another. The store remembers its salt
and a check value, which tell a wrong key from damage and reveal nothing of the right one.

**Names.** A value is sealed with its database, its key and its bytes that are not sealed (`CLEAR_BYTES`, which stand
behind it) as associated data, so it opens nowhere else. The key of a node
names its tenant, model, layout and tokens. An older value of the same key opens: for a node, that is the same state.
Names are hashes: who guesses a prompt and knows the secret of the names could look it up. So the secret is sealed, and
each name in a key is one block of AES, a permutation of 16 bytes, which keeps equal beginnings equal. In `children`
each token id is replaced by 4 bytes of a CBC-MAC of all tokens up to it. An observer sees which prompts begin alike,
and sizes, times and counts, but no token.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from hmac import compare_digest

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CBC, ECB

from diskprefix.store.schema import (
    CHECKSUM_BYTES,
    CLEAR_BYTES,
    ENCRYPTION,
    FORMAT,
    FORMAT_VERSION,
    MODEL_MARK,
    SALT_BYTES,
    SEAL_BYTES,
)
from diskprefix.store.sealed_values import SealedValues, derived
from diskprefix.tokens import HASH_BYTES, ID_BYTES

_CHECK_BYTES = 16
_UNSEALED = frozenset({("meta", ENCRYPTION.encode()), ("meta", FORMAT.encode())})
"""What is read before the key is known."""
_PLAIN_DATABASES = frozenset({"usage"})
"""Sizes, times and counts, which eviction reads all at once."""
_BOTH_ENDS = 2 * HASH_BYTES
"""A longer key has a name, or the hash of a note's id, at its end too."""


class SealedRecords:
    """The form of the records of an encrypted store. See `RecordForm`."""

    verifies_pieces = True

    def __init__(self, secret: bytes, salt: bytes) -> None:
        info = b"diskprefix store %d " % FORMAT_VERSION
        names, codes, values, check = (
            derived(secret, salt, info + what) for what in (b"names", b"codes", b"values", b"check")
        )
        self.remembered = salt + check[:_CHECK_BYTES]
        self._names, self._codes = AES256(names), AES256(codes)
        self._values = SealedValues(values, info + b"transaction")
        self._local = _Local()

    @classmethod
    def new(cls, secret: bytes) -> SealedRecords:
        return cls(secret, secrets.token_bytes(SALT_BYTES))

    @classmethod
    def open(cls, secret: bytes, remembered: bytes) -> SealedRecords | None:
        """Returns the form of a store that remembers this of its key; None if the key is another."""
        form = cls(secret, remembered[:SALT_BYTES])
        return form if compare_digest(form.remembered, remembered) else None

    def stored_key(self, database: str, key: bytes) -> bytes:
        return self._translated(database, key, is_stored=False)

    def plain_key(self, database: str, stored: bytes) -> bytes:
        return self._translated(database, stored, is_stored=True)

    def _translated(self, database: str, key: bytes, *, is_stored: bool) -> bytes:
        mark = MODEL_MARK if database == "meta" and key.startswith(MODEL_MARK) else b""
        key = key.removeprefix(mark)
        if len(key) < HASH_BYTES:
            return mark + key
        permutations = self._local.permutations(self._names)
        permute = permutations[is_stored]
        begin, end = key[:HASH_BYTES], key[HASH_BYTES:]
        first = permute(begin)
        if len(key) > _BOTH_ENDS:
            end = end[:-HASH_BYTES] + permute(end[-HASH_BYTES:])
        elif database == "history" and len(key) == _BOTH_ENDS:
            # The group is of 8 bytes, less than a block: it is hidden by one that belongs to this root and time.
            pad = permutations[False]((begin if is_stored else first)[:8] + end[:8])
            end = end[:8] + bytes(a ^ b for a, b in zip(end[8:], pad, strict=False))
        return mark + first + end

    def sealer(self) -> Callable[[str, bytes, bytes | bytearray], bytes | bytearray]:
        seal = self._values.sealer()

        def sealed(database: str, key: bytes, value: bytes | bytearray) -> bytes | bytearray:
            if database in _PLAIN_DATABASES or (database, key) in _UNSEALED or (not value and database == "children"):
                return value
            if database not in CLEAR_BYTES:
                return seal(_associated(database, key), value)
            # The checksum is sealed: it covers the text, so who sees it could try a guess.
            end = CHECKSUM_BYTES + CLEAR_BYTES[database]
            clear = bytes(value[CHECKSUM_BYTES:end])
            return seal(_associated(database, key, clear), value[:CHECKSUM_BYTES] + value[end:]) + clear

        return sealed

    def opened(self, database: str, key: bytes, stored: memoryview | bytes) -> memoryview | bytes:
        if database in _PLAIN_DATABASES or (database, key) in _UNSEALED:
            return stored
        num_clear = CLEAR_BYTES.get(database, 0)
        if len(stored) < SEAL_BYTES + num_clear:
            return b""
        out = memoryview(bytearray(len(stored) - SEAL_BYTES))
        begin = len(stored) - num_clear
        view, clear = memoryview(stored)[:begin], bytes(stored[begin:])
        if not self._values.opens(_associated(database, key, clear), view, out[num_clear:]):
            return b""
        if clear:
            out[: CHECKSUM_BYTES + num_clear] = bytes(out[num_clear:][:CHECKSUM_BYTES]) + clear
        return out

    def opened_piece(self, key: bytes, stored: memoryview) -> memoryview:
        # A piece is decoded at once, so the memory is used again: new memory costs more than to decrypt into it.
        out = self._local.buffer(max(0, len(stored) - SEAL_BYTES))
        is_sound = len(stored) >= SEAL_BYTES and self._values.opens(_associated("payloads", key), stored, out)
        return out if is_sound else out[:0]

    def legible(self, database: str, stored: memoryview | bytes) -> memoryview | bytes:
        return bytes(CHECKSUM_BYTES) + bytes(stored[-CLEAR_BYTES[database] :])

    def codes(self, beginning: bytes, token_ids: bytes) -> bytes:
        blocks = np.zeros((len(token_ids) // ID_BYTES, HASH_BYTES), np.uint8)
        blocks[:, :ID_BYTES] = np.frombuffer(token_ids, np.uint8).reshape(-1, ID_BYTES)
        # With random-looking blocks to begin with, no two inputs of AES are equal but by chance.
        start = self._local.permutations(self._names)[False](beginning)
        chained = Cipher(self._codes, CBC(start)).encryptor().update(blocks.tobytes())
        return np.frombuffer(chained, np.uint8).reshape(-1, HASH_BYTES)[:, :ID_BYTES].tobytes()


class _Local(threading.local):
    """The memory and the ciphers of one thread."""

    _buffer = memoryview(bytearray())
    _permutations: tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] | None = None

    def buffer(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(2 * size))
        return self._buffer[:size]

    def permutations(self, names: AES256) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
        """Returns the functions that encrypt and decrypt a name."""
        if self._permutations is None:
            cipher = Cipher(names, ECB())
            self._permutations = cipher.encryptor().update, cipher.decryptor().update
        return self._permutations


def _associated(database: str, key: bytes, clear: bytes = b"") -> bytes:
    return database.encode() + b"\0" + clear + key
