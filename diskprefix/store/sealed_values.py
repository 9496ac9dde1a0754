"""Sealed values: AES-256-GCM with a key of its own for each batch. Only this and `sealed_records` import cryptography.

GCM fails if one key seals two values with one nonce, and random nonces of 96 bits bound a key to 2³² values (NIST SP
800-38D, 8.3). So each batch (a write transaction, an object of a bucket) derives a key of its own from 16 random bytes,
and counts its values from 0: the deterministic nonce of 8.2.1, with one device for each key and at most 2³² values.
Nothing is remembered between batches. So a crash, several processes or machines, a fork and a restored backup cannot
repeat a nonce, only two equal draws of 16 bytes could: expected after 2⁶⁴ batches. A virtual machine that is resumed
twice from one snapshot needs a kernel that draws new random numbers then (Linux 5.18).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from diskprefix.store.schema import KEY_BYTES, SALT_BYTES, SEAL_BYTES, SEAL_COUNT

MOST_VALUES = 1 << 32
"""The most values of one key: the counter has 32 bits."""
_PREFIX_BYTES = SALT_BYTES + SEAL_COUNT.size
_NONCE_START = bytes(8)
_SUBKEYS = 4096


def derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Returns 32 bytes that follow from a secret (HKDF-SHA-256, RFC 5869), and reveal neither it nor others of it."""
    key: bytes = HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)
    return key


class SealedValues:
    """Seals and opens values. Keys of batches are derived from `secret` and named by `info`. For any thread."""

    def __init__(self, secret: bytes, info: bytes) -> None:
        self._key = lru_cache(_SUBKEYS)(lambda drawn: AESGCM(derived(secret, drawn, info)))

    def sealer(self) -> ValueSealer:
        """Returns what seals one batch."""
        return ValueSealer(self._key)

    def opens(self, associated: bytes, stored: memoryview, out: memoryview) -> bool:
        """Writes a value to `out`, which has `SEAL_BYTES` less than is stored. Returns whether it is what was sealed
        with this associated data."""
        try:
            self._key(bytes(stored[:SALT_BYTES])).decrypt_into(
                _NONCE_START + bytes(stored[SALT_BYTES:_PREFIX_BYTES]), stored[_PREFIX_BYTES:], associated, out
            )
        except InvalidTag:
            return False
        return True


class ValueSealer:
    """Seals the values of one batch. Used by one thread."""

    def __init__(self, key_of: Callable[[bytes], AESGCM]) -> None:
        self._key_of = key_of
        self._count = MOST_VALUES

    def __call__(self, associated: bytes, value: bytes | bytearray) -> bytearray:
        """Returns the sealed value: random bytes, number, what is encrypted, tag."""
        if self._count >= MOST_VALUES:
            self._salt, self._count = secrets.token_bytes(SALT_BYTES), 0
            self._key = self._key_of(self._salt)
        count = SEAL_COUNT.pack(self._count)
        self._count += 1
        sealed = bytearray(len(value) + SEAL_BYTES)
        sealed[:_PREFIX_BYTES] = self._salt + count
        self._key.encrypt_into(_NONCE_START + count, value, associated, memoryview(sealed)[_PREFIX_BYTES:])
        return sealed
