"""Hashes of many strings at once, to find which of them may be equal. Equal strings have equal hashes, and nearly all
others have different ones.

The hash of bytes b is the sum of (b[i] + 1) · M^(n - 1 - i), modulo 2^64: the hash of a joined text follows from those
of its parts. The arrays of numpy are long, so other threads of Python run meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with bits as in a random number: the golden ratio."""
LONGEST = 4096
"""Of longer strings, only so many bytes are hashed: a step of numpy takes a byte of each."""
_TABLE_BITS = 18, 24


def hashes_within(data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the hashes of the pieces of `data` that begin and end there, uint64 [pieces]."""
    content = np.frombuffer(data, np.uint8)
    lengths = np.minimum(ends - begins, LONGEST)
    longest = int(lengths.max(initial=0))
    # Numbers of two bytes are sorted five times as fast.
    order = np.argsort((longest - lengths).astype(np.uint16 if longest < 1 << 16 else np.int64), kind="stable")
    begins, lengths = begins[order], lengths[order]
    sums = np.zeros(len(lengths), np.uint64)
    # The pieces that have a byte number k come first.
    longer = len(lengths) - np.searchsorted(lengths[::-1], np.arange(1, longest + 1), "left")
    for k, count in enumerate(longer.tolist()):
        _add(sums[:count], content[begins[:count] + k])
    hashes = np.empty_like(sums)
    hashes[order] = sums
    return hashes


def hashes_of(texts: Collection[bytes]) -> NDArray[np.uint64]:
    """Returns the hashes of these texts, uint64 [texts]."""
    lengths = np.array(list(map(len, texts)), np.int64)
    ends = np.cumsum(lengths)
    return hashes_within(b"".join(texts), ends - lengths, ends)


def hashes_of_parts(words: Collection[bytes], longest: int, most: int) -> NDArray[np.uint64] | None:
    """Returns the hashes of all parts of these words, of 1 to `longest` bytes each; None if they are more than
    `most`."""
    content, lengths = np.frombuffer(b"".join(words), np.uint8), np.array(list(map(len, words)), np.int64)
    at = np.arange(len(content))
    left = np.repeat(np.cumsum(lengths), lengths) - at
    if np.minimum(left, longest).sum() > most:
        return None
    sums = np.zeros(len(at), np.uint64)
    hashes = [sums[:0]]
    for k in range(min(longest, int(left.max(initial=0)))):
        reaches = left > k
        at, left, sums = at[reaches], left[reaches], sums[reaches]
        _add(sums, content[at + k])
        hashes.append(sums.copy())
    return np.concatenate(hashes)


def hashes_of_pairs(
    left: NDArray[np.uint64], right: NDArray[np.uint64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Returns the hashes of texts that are joined of two parts. `lengths` are those of the `right` ones, in bytes."""
    factors = np.full(lengths.max(initial=0) + 1, _MULTIPLIER)
    factors[0] = 1
    powers: NDArray[np.uint64] = np.cumprod(factors, dtype=np.uint64)
    return left * powers[lengths] + right


def _add(sums: NDArray[np.uint64], content: NDArray[np.uint8]) -> None:
    """Appends a byte to each of the texts with these hashes."""
    sums *= _MULTIPLIER
    sums += content
    sums += np.uint64(1)


def among(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the numbers of the hashes that are among the `wanted` ones, ascending, and of a few others. The time per
    hash does not grow with the number of wanted ones."""
    # At most one place of 128 is taken, so few others are found.
    bits = min(max(len(wanted).bit_length() + 7, _TABLE_BITS[0]), _TABLE_BITS[1])
    table, shift = np.zeros(1 << bits, bool), np.uint64(64 - bits)
    # The last byte of a text is only in the low bits of its hash.
    table[(wanted * _MULTIPLIER) >> shift] = True
    return np.flatnonzero(table[(hashes * _MULTIPLIER) >> shift])
