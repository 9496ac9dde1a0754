"""Token ids, the chained names of blocks, and checksums. The only importer of xxhash.

A prompt is a one-dimensional int32 array. It is cut into blocks of `block_size` tokens counted from position 0. The
name of a block is a 128-bit hash of its parent's name and its own token ids, so it names the whole prefix that ends
with it; the first block's parent is the root, which names the model's numbers. The hash is seeded with a secret of the
store, so that nobody else can compute names. Correctness never rests on a name: token ids are stored and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Shape (num_tokens,), dtype int32, C-contiguous."""

HASH_BYTES = 16


def as_token_ids(ids: Sequence[int] | npt.NDArray[np.integer[npt.NBitBase]]) -> TokenIds:
    """A contiguous int32 copy of `ids`, shape (len(ids),)."""
    return np.ascontiguousarray(ids, dtype=np.int32)


def block_hash(secret: int, parent: bytes, token_ids: TokenIds | bytes, mark: bytes = b"") -> bytes:
    """Name of what holds `token_ids` and continues `parent` (16 bytes in, 16 bytes out).

    The ids may be given as the bytes that they are: int32, little-endian. What holds the same tokens in another way is
    told apart by `mark`, up to 3 bytes: so no ids and mark look like others.
    """
    return xxhash.xxh3_128_digest(parent + bytes(token_ids) + mark, seed=secret)


def root_hash(identity: str) -> bytes:
    """The root of what `identity`, a canonical text, identifies: 16 bytes. Unseeded: it is the same in every store."""
    return hashlib.sha256(identity.encode()).digest()[:HASH_BYTES]


def common_prefix_length(a: TokenIds, b: TokenIds) -> int:
    """How many leading tokens `a` and `b` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def floor_to_grid(position: int, block_size: int) -> int:
    """The last grid point at or below `position`."""
    return position - position % block_size


def checksum(payload: bytes | memoryview, seed: int = 0) -> int:
    """64-bit xxh3 of a payload. It finds corruption; it is not meant to resist an attacker."""
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def file_digest(path: Path) -> str:
    """128-bit xxh3 of a file's content as 32 hex digits, read in 8 MiB pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
    return digest.hexdigest()
