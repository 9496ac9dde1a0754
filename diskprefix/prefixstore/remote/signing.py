"""Signs objects, and verifies them before their content is used.

Whoever can write to the bucket could plant state that steers answers, so a checksum is not enough. Each object carries
a MAC of its path and its content. Only the machines of one namespace have the key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal, TypeAlias

from diskprefix.errors import CacheError
from diskprefix.prefixstore.namespace_key import NamespaceKey

RefusalReason: TypeAlias = Literal["truncated", "foreign", "mac", "replayed", "mismatch", "oversized"]

_MAGIC = b"dpxR"
_VERSION = 3
_PREAMBLE = struct.Struct("<4sHHI4x8s32s")
"""Magic, version, length of the path, length of the signed part, the first bytes of the namespace's digest, the MAC."""
PREAMBLE_BYTES = _PREAMBLE.size


class ObjectRefused(CacheError):
    """A remote object failed its checks. `reason` is a word for the counters."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def signed(key: NamespaceKey, path: str, content: bytes) -> bytes:
    """Returns the object at `path` with this content."""
    part = path.encode() + content
    return _PREAMBLE.pack(_MAGIC, _VERSION, len(path), len(part), key.digest[:8], _mac(key, len(path), part)) + part


def verified(key: NamespaceKey, path: str, data: bytes | memoryview) -> memoryview:
    """Returns the content of the object at `path`. Raises `ObjectRefused`."""
    if len(data) < PREAMBLE_BYTES:
        raise ObjectRefused("truncated", f"it has {len(data)} bytes, fewer than its beginning")
    magic, version, path_bytes, num_signed, namespace, mac = _PREAMBLE.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or path_bytes > num_signed:
        raise ObjectRefused("foreign", "it is not an object of this version of diskprefix")
    if namespace != key.digest[:8]:
        raise ObjectRefused("foreign", "it was signed with the key of another namespace")
    part = memoryview(data)[PREAMBLE_BYTES:]
    if len(part) != num_signed:
        raise ObjectRefused("truncated", f"it has {len(data)} bytes of {PREAMBLE_BYTES + num_signed}")
    if not hmac.compare_digest(mac, _mac(key, path_bytes, part)):
        raise ObjectRefused("mac", "its MAC is wrong")
    if bytes(part[:path_bytes]) != path.encode():
        raise ObjectRefused("replayed", f"it was written as {bytes(part[:path_bytes]).decode(errors='replace')}")
    return part[path_bytes:]


def _mac(key: NamespaceKey, path_bytes: int, part: bytes | memoryview) -> bytes:
    mac = hashlib.blake2b(key=key.mac_key, digest_size=32, person=b"dpx object")
    mac.update(struct.pack("<HHI", _VERSION, path_bytes, len(part)))
    mac.update(part)
    return mac.digest()
