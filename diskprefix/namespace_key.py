"""The key that machines share who share what they computed (`--namespace-key-file`).

Names of nodes are seeded with it instead of a secret of each store, so that all of them name a prefix alike. What comes
from outside the machine carries a MAC by it: who can plant state steers answers. Three values are derived from the
file with keyed BLAKE2b, and none of them gives away the others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.private_file import read_private

_LEAST_BYTES, _MOST_BYTES = 16, 4096
_FLAG = "--namespace-key-file"


@dataclass(frozen=True)
class NamespaceKey:
    """`names_seed` (64 bits) seeds the names, `mac_key` (32 bytes) signs remote objects, and `digest` (16 bytes) tells
    the key from others without giving it away."""

    names_seed: int = field(repr=False)
    mac_key: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, secret: bytes) -> NamespaceKey:
        """Returns what is derived from the content of a key file."""
        # BLAKE2b takes a key of at most 64 bytes.
        key = hashlib.blake2b(secret, person=b"diskprefix key").digest()

        def derived(size: int, what: bytes) -> bytes:
            return hashlib.blake2b(key=key, digest_size=size, person=what).digest()

        seed = int.from_bytes(derived(8, b"names"), "little")
        return cls(seed, derived(32, b"remote objects"), derived(16, b"namespace"))

    @classmethod
    def read(cls, path: Path) -> NamespaceKey:
        """Returns the key in a file, without the white space around it. Raises `SettingsError`, also if others may read
        the file: who has the key can write state that machines believe."""
        try:
            secret = read_private(path, _MOST_BYTES).strip()
        except SettingsError as error:
            raise SettingsError(f"{_FLAG}: {error.message}") from error
        if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
            raise SettingsError(
                f"{_FLAG}: {path} must hold {_LEAST_BYTES} to {_MOST_BYTES} bytes that nobody can guess; write them "
                f"for example with: (umask 077; openssl rand -base64 32 > {path})"
            )
        return cls.of(secret)
