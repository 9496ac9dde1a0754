"""Signing of objects, and the checks before anything of them is used.

Whoever can write to the bucket could plant state that steers answers, so a checksum is not enough. Each object carries
a MAC over its own path and over keyed digests of all parts, as they are written. Only the machines of one namespace
have the key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, TypeAlias

from diskprefix.errors import CacheError
from diskprefix.namespace_key import NamespaceKey

RefusalReason: TypeAlias = Literal["truncated", "foreign", "mac", "replayed", "damaged", "mismatch", "oversized"]

_MAGIC = b"dpxR"
_VERSION = 2
_PREAMBLE = struct.Struct("<4sHHI4x8s32s")
"""Magic, version, length of the path, length of what is signed, the beginning of the namespace's digest, the MAC."""
PREAMBLE_BYTES = _PREAMBLE.size
MOST_SIGNED_BYTES = 4 << 20
"""The largest signed part (path, token ids and digests) that is read. It is read before it can be verified, so it has a
limit. The largest bundles need less than a quarter of it."""
DIGEST_BYTES = 16


class ObjectRefused(CacheError):
    """A remote object fails its checks. `reason` is a word for the counters."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def signed(key: NamespaceKey, path: str, content: bytes) -> bytes:
    """Returns `content`, signed for the object at `path`. Raises `ObjectRefused` if it is larger than
    readers accept."""
    part = path.encode() + content
    if len(part) > MOST_SIGNED_BYTES:
        raise ObjectRefused("oversized", f"{path} would have a header of {len(part)} bytes")
    mac = _mac(key, len(path), part)
    return _PREAMBLE.pack(_MAGIC, _VERSION, len(path), len(part), key.digest[:8], mac) + part


def signed_bytes(beginning: bytes | memoryview) -> int:
    """Returns the number of bytes of preamble and signed part, as the preamble says. It is bounded, but not verified.
    Raises `ObjectRefused`."""
    return PREAMBLE_BYTES + _preamble(beginning)[1]


def verified(key: NamespaceKey, path: str, data: bytes | memoryview) -> bytes:
    """Returns the signed content of the object at `path`. `data` may be longer. Raises `ObjectRefused`."""
    path_bytes, num_signed, namespace, mac = _preamble(data)
    part = bytes(data[PREAMBLE_BYTES : PREAMBLE_BYTES + num_signed])
    if len(part) != num_signed:
        raise ObjectRefused("truncated", f"it has {len(data)} bytes of {PREAMBLE_BYTES + num_signed}")
    if namespace != key.digest[:8]:
        raise ObjectRefused("foreign", "it was signed with the key of another namespace")
    if not hmac.compare_digest(mac, _mac(key, path_bytes, part)):
        raise ObjectRefused("mac", "its MAC is wrong")
    if part[:path_bytes] != path.encode():
        raise ObjectRefused("replayed", f"it was written as {part[:path_bytes].decode(errors='replace')}")
    return part[path_bytes:]


def piece_digest(key: NamespaceKey, name: bytes, index: int, stored: bytes | bytearray | memoryview) -> bytes:
    """Returns the keyed digest of a piece of the node `name`. It verifies without the rest of the object."""
    digest = hashlib.blake2b(key=key.mac_key, digest_size=DIGEST_BYTES, person=b"dpx piece")
    digest.update(name + struct.pack("<I", index))
    digest.update(stored)
    return digest.digest()


def require_piece(key: NamespaceKey, name: bytes, index: int, stored: memoryview, digest: bytes) -> None:
    """Raises `ObjectRefused` unless a piece of the node `name` has this digest."""
    if not hmac.compare_digest(piece_digest(key, name, index, stored), digest):
        raise ObjectRefused("damaged", f"piece {index} of node {name.hex()} is not the one that was signed")


def _preamble(data: bytes | memoryview) -> tuple[int, int, bytes, bytes]:
    if len(data) < PREAMBLE_BYTES:
        raise ObjectRefused("truncated", f"it has {len(data)} bytes, fewer than its beginning")
    magic, version, path_bytes, num_signed, namespace, mac = _PREAMBLE.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or not path_bytes <= num_signed <= MOST_SIGNED_BYTES:
        raise ObjectRefused("foreign", "it is not an object of this version of diskprefix")
    return path_bytes, num_signed, namespace, mac


def _mac(key: NamespaceKey, path_bytes: int, part: bytes) -> bytes:
    mac = hashlib.blake2b(key=key.mac_key, digest_size=32, person=b"dpx object")
    mac.update(struct.pack("<HHI", _VERSION, path_bytes, len(part)))
    mac.update(part)
    return mac.digest()
