"""Token ids, the chained names of blocks, and checksums. The only module that imports xxhash.

A prompt is a one-dimensional int32 array. The tokens of a picture have ids that are made of its name (`picture_ids`). A
prompt is cut into blocks of `block_size` tokens, counted from position 0. The name of a block is a 128-bit hash of its
parent's name and its own token ids, so it names the whole prefix up to its end. The parent of the first block is the
root, which names the model's numbers. The hash is seeded with a secret of the store, so others cannot compute names.
Correctness does not depend on names, because token ids are stored and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "npt.NDArray[np.int32]"
"""An array of shape (num_tokens,), dtype int32, C-contiguous."""
Logits: TypeAlias = "npt.NDArray[np.float32]"
"""Next-token logits, shape [vocab] or [rows, vocab]."""

HASH_BYTES = 16
ID_BYTES = 4
LEAST_TOKENS = 16
"""Fewer common tokens are not worth a restore or a wait: all prompts share them, and no step gets longer by them."""


def as_token_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> TokenIds:
    """Returns `ids` as a contiguous int32 array of shape (len(ids),)."""
    import numpy as np

    return np.ascontiguousarray(ids, dtype=np.int32)


def picture_ids(name: bytes, num_tokens: int) -> TokenIds:
    """Returns the token ids of a picture: 31 bits each of a hash of its name, on which the names of its blocks then
    depend. They are negative, as no token of a vocabulary is."""
    import numpy as np

    words = np.frombuffer(hashlib.shake_128(name).digest(ID_BYTES * num_tokens), "<i4")
    return as_token_ids(words | np.int32(-(1 << 31)))


def block_hash(secret: int, parent: bytes, token_ids: TokenIds | bytes, mark: bytes = b"") -> bytes:
    """Returns the name (16 bytes) of the node that continues `parent` (16 bytes) with `token_ids`.

    The ids may be given as bytes (int32, little-endian). `mark` tells nodes apart that have the same tokens. It has at
    most 3 bytes, fewer than one token id, so different ids and marks never form the same bytes.
    """
    return xxhash.xxh3_128_digest(parent + bytes(token_ids) + mark, seed=secret)


class TokenPath:
    """A prompt in the tree of names below a root. The name of each full block is hashed once, when it is first asked
    for: in one loop, because a lookup needs hundreds at once. `names` are the known names of its first blocks.
    """

    def __init__(
        self, secret: int, root: bytes, token_ids: TokenIds, block_size: int, names: Sequence[bytes] = ()
    ) -> None:
        self.secret, self.root = secret, root
        self.token_ids, self.block_size = token_ids, block_size
        self.num_blocks = len(token_ids) // block_size
        """The number of full blocks."""
        self._names = names

    @property
    def block_names(self) -> Sequence[bytes]:
        """The names of all full blocks: `block_hash` of each."""
        if len(self._names) < self.num_blocks:
            names, size = [*self._names], ID_BYTES * self.block_size
            parent = names[-1] if names else self.root
            content = self.token_ids[len(names) * self.block_size :].tobytes()
            for start in range(0, len(content) - size + 1, size):
                parent = xxhash.xxh3_128_digest(parent + content[start : start + size], seed=self.secret)
                names.append(parent)
            self._names = names
        return self._names

    def parent(self, num_blocks: int) -> bytes:
        """Returns the parent of a node after the first `num_blocks` blocks: the name of the last of them, or the
        root."""
        return self.block_names[num_blocks - 1] if num_blocks else self.root

    def extended(self, token_ids: TokenIds) -> TokenPath:
        """Returns the path of `token_ids`, a longer or a shorter version of this prompt. Known names are not hashed
        again."""
        names = self._names[: len(token_ids) // self.block_size]
        return TokenPath(self.secret, self.root, token_ids, self.block_size, names)


def beginning_hashes(secret: int, parent: bytes, token_ids: bytes, mark: bytes) -> list[bytes]:
    """Returns the `block_hash` of each beginning of the token ids (int32, little-endian), from the empty one on."""
    hashed, digests = xxhash.xxh3_128(parent, secret), []
    for start in range(0, len(token_ids) + 1, ID_BYTES):
        ended = hashed.copy()
        ended.update(mark)
        digests.append(ended.digest())
        hashed.update(token_ids[start : start + ID_BYTES])
    return digests


class PromptDigest(NamedTuple):
    """A prompt by its number of tokens and a digest (16 bytes) of them, which is equal for all models of a store: a
    draft model reads the prompts of another one."""

    num_tokens: int
    digest: bytes

    @classmethod
    def of(cls, secret: int, token_ids: TokenIds) -> PromptDigest:
        """Returns the digest of a whole prompt. `secret` is the secret of the store."""
        return next(cls.of_beginnings(secret, token_ids, [len(token_ids)]))

    @classmethod
    def of_beginnings(cls, secret: int, token_ids: TokenIds, lengths: Iterable[int]) -> Iterator[PromptDigest]:
        """Yields the digests of the beginnings of these lengths, in ascending order. Reads the tokens once."""
        content, at, hashed = token_ids.tobytes(), 0, xxhash.xxh3_128(seed=secret)
        for length in lengths:
            end = ID_BYTES * length
            hashed.update(content[at:end])
            at = end
            whole = hashed.copy()
            whole.update(b"p")
            yield cls(length, whole.digest())


NO_PROMPT = PromptDigest(0, bytes(HASH_BYTES))
"""The digest in a record that belongs to no prompt, or to several."""


def root_hash(identity: str) -> bytes:
    """Returns the root (16 bytes) of `identity`, a canonical text. It has no seed, so all stores have the same root."""
    return hashlib.sha256(identity.encode()).digest()[:HASH_BYTES]


def common_prefix_length(a: TokenIds, b: TokenIds) -> int:
    """Returns the number of leading tokens that `a` and `b` have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def num_common(a: bytes, b: bytes) -> int:
    """Returns the number of leading tokens that `a` and `b` have in common. Token ids are given as bytes (int32)."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // 4


def floor_to_grid(position: int, block_size: int) -> int:
    """Returns the last multiple of `block_size` that is not above `position`."""
    return position - position % block_size


def checksum(payload: bytes | memoryview, seed: int = 0) -> int:
    """Returns the 64-bit xxh3 of a payload. It finds damage; it does not resist an attacker."""
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def content_digest(content: bytes | memoryview) -> bytes:
    """Returns the 128-bit xxh3 of some bytes."""
    return xxhash.xxh3_128_digest(content)


def file_digest(path: Path, before_piece: Callable[[], None] = lambda: None) -> str:
    """Returns the 128-bit xxh3 of a file as 32 hex digits. Calls `before_piece` before each read. Raises `OSError`."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            before_piece()
            digest.update(piece)
    return digest.hexdigest()


def raw_boundaries(token_ids: TokenIds | Sequence[int], marker_ids: Collection[int]) -> tuple[int, ...]:
    """Returns the positions one past every marker, ascending, each at most len(token_ids).

    All of them are safe cuts of a raw prompt, because its author wrote it whole.
    """
    import numpy as np

    markers = np.isin(np.asarray(token_ids), list(marker_ids))
    return tuple((np.flatnonzero(markers) + 1).tolist())


def text_boundaries(
    token_ids: TokenIds, num_added: tuple[int, int], marker_ids: Collection[int], bos_id: int | None
) -> tuple[int, ...]:
    """Returns the positions after special tokens and markers in a text without a template.

    The `num_added` tokens that the tokenizer adds before and after the text are no boundaries: BOS would be the only
    boundary of a plain text, and then only that token could be saved.
    """
    begin, end = num_added[0], len(token_ids) - num_added[1]
    boundaries = tuple(position for position in raw_boundaries(token_ids, marker_ids) if begin < position <= end)
    first = next((i for i, token_id in enumerate(token_ids.tolist()) if token_id != bos_id), len(token_ids))
    return boundaries if any(position > first for position in boundaries) else ()
