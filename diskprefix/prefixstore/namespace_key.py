"""The key of machines that share a cache (`--namespace-key-file`).

The key replaces each store's own secret as the seed of node names, so all machines use the same names. Remote objects
carry a MAC, because whoever can plant state controls answers. Keyed BLAKE2b derives three values from the file, none of
which reveals another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.private_file import read_private

_MIN_BYTES, _MAX_BYTES = 16, 4096
_FLAG = "--namespace-key-file"


@dataclass(frozen=True)
class NamespaceKey:
    """The values of a key: `names_seed` (64 bits) seeds the names, `mac_key` (32 bytes) signs remote objects, and
    `digest` (16 bytes) identifies the key without revealing it."""

    names_seed: int = field(repr=False)
    mac_key: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, secret: bytes) -> NamespaceKey:
        """Derives the values from the content of a key file."""
        # BLAKE2b takes a key of at most 64 bytes.
        key = hashlib.blake2b(secret, person=b"diskprefix key").digest()

        def derived(size: int, what: bytes) -> bytes:
            return hashlib.blake2b(key=key, digest_size=size, person=what).digest()

        seed = int.from_bytes(derived(8, b"names"), "little")
        return cls(seed, derived(32, b"remote objects"), derived(16, b"namespace"))

    @classmethod
    def read(cls, path: Path) -> NamespaceKey:
        """Reads a key file, without the white space around the key.

        Raises `SettingsError`, also if other users may read the file: with the key they could plant state.
        """
        secret = read_private(_FLAG, path, _MAX_BYTES).strip()
        if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
            sizes = f"{_MIN_BYTES} to {_MAX_BYTES} bytes that nobody can guess"
            command = f"(umask 077; openssl rand -base64 32 > {path})"
            raise SettingsError(f"{_FLAG}: {path} must hold {sizes}; write them for example with: {command}")
        return cls.of(secret)
