"""The keys that machines which share objects have in common, and the form of their objects.

`BucketKey` leaves objects as they are, but for their MACs. With the key of `--kv-cache-encryption-key-file` they are
encrypted. Path and MAC key follow from both files then, so machines that encrypt have a namespace of their own: plain
machines and those with another key neither find nor touch its objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.encryption import EncryptionKey
from diskprefix.store.schema import SEAL_BYTES
from diskprefix.tokens import HASH_BYTES

Seal: TypeAlias = Callable[[bytes, bytes | bytearray], bytes | bytearray]
"""Returns a part of an object as it is written, given what names its place, and the part."""


class BucketKey:
    """The key of machines that do not encrypt. `digest` (16 bytes) begins the paths of their objects and identifies the
    namespace without revealing anything; `mac_key` (32 bytes) signs objects."""

    def __init__(self, namespace: NamespaceKey) -> None:
        self.namespace, self.mac_key, self.digest = namespace, namespace.mac_key, namespace.digest

    @staticmethod
    def of(namespace: NamespaceKey, encryption: EncryptionKey | None) -> BucketKey:
        return BucketKey(namespace) if encryption is None else EncryptingBucketKey(namespace, encryption)

    def path_name(self, name: bytes) -> str:
        """Returns what stands for the name of a root or a node in a path: 32 hex digits."""
        return name.hex()

    def sealer(self) -> Seal:
        """Returns what seals the parts of one object."""
        return lambda _place, part: part

    def opened(self, _place: bytes, stored: bytes | memoryview) -> bytes | memoryview | None:
        """Returns a part as it was given to the sealer; None if it is not the part of this place."""
        return stored


class EncryptingBucketKey(BucketKey):
    """The key of machines that encrypt: AES-256-GCM, see `sealed_values`. Nothing is random but the keys of objects, so
    all machines with both files read each other's objects.

    Names are hashes with a seed of 64 bits: who guesses a prompt could try it. So paths have keyed digests of them.
    """

    def __init__(self, namespace: NamespaceKey, encryption: EncryptionKey) -> None:
        from diskprefix.store.sealed_values import SealedValues, derived

        super().__init__(namespace)
        secret = encryption.secret + namespace.mac_key
        self.mac_key, digest, self._names, values = (
            derived(secret, namespace.digest, b"diskprefix bucket 2 " + what)
            for what in (b"mac", b"digest", b"names", b"values")
        )
        self.digest = digest[: len(namespace.digest)]
        self._values = SealedValues(values, b"diskprefix bucket 2 object")

    def path_name(self, name: bytes) -> str:
        return hashlib.blake2b(name, key=self._names, digest_size=HASH_BYTES).hexdigest()

    def sealer(self) -> Seal:
        return self._values.sealer()

    def opened(self, place: bytes, stored: bytes | memoryview) -> memoryview | None:
        if len(stored) < SEAL_BYTES:
            return None
        out = memoryview(bytearray(len(stored) - SEAL_BYTES))
        return out if self._values.opens(place, memoryview(stored), out) else None
