"""Arrays of strings of a GGUF file. A string is its length, 8 bytes, and its bytes. Where an array ends, whether it is
UTF-8, and where given strings are in it, is found without making its strings: the tokens and merges of a vocabulary are
300,000."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_BYTES = 1 << 14
"""The bytes of an array that are read at once, unless a string is longer."""


class StringPiece(Struct, frozen=True, dict=True):
    """Whole strings of an array: their bytes, and where in them each string begins and ends, int64 [strings]."""

    data: bytes
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, data: bytes, most: int) -> StringPiece:
        """Returns the strings that are whole in `data`, which begins with one; `most` of them at most."""
        import numpy as np

        words = np.ndarray(max(len(data) - 7, 0), "<u8", data, strides=(1,))
        lengths_at = np.flatnonzero(words < 256)[:most]
        begins = lengths_at + 8
        ends = begins + words[lengths_at].astype(np.int64)
        # These are all lengths, and only them, unless a string is longer or has zeros.
        if not begins.size or begins[0] != 8 or (ends[:-1] != lengths_at[1:]).any():
            begins, ends = _one_by_one(data, most)
        count = int(np.searchsorted(ends, len(data), "right"))
        return cls(data, begins[:count], ends[:count])

    @classmethod
    def of_one(cls, data: bytes) -> StringPiece:
        """Returns a string of any length, given without it."""
        import numpy as np

        return cls(data, np.array([0]), np.array([len(data)]))

    @classmethod
    def with_ends(cls, data: bytes, ends: NDArray[np.int64]) -> StringPiece:
        """Returns the strings of `data` that end there. Raises `ValueError` unless the lowest bytes of their lengths in
        it say the same."""
        import numpy as np

        content, begins = np.frombuffer(data, np.uint8), np.concatenate([[0], ends])[:-1] + 8
        if len(data) != ends.max(initial=0) or (content[begins - 8] != (ends - begins) & 255).any():
            raise ValueError("it has other strings")
        return cls(data, begins, ends)

    @property
    def count(self) -> int:
        return len(self.begins)

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, number: int) -> str:
        """Returns a string. Raises `UnicodeDecodeError`."""
        return self.data[self.begins[number] : self.ends[number]].decode()

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """The hash of each string, uint64 [strings]."""
        from diskprefix.runtime.files.string_hashes import hashes_within

        return hashes_within(self.data, self.begins, self.ends)

    def numbers_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the numbers of those of the `texts` that are among the strings; of equal strings, the last one's."""
        from diskprefix.runtime.files.string_hashes import among, hashes_of

        wanted = {text.encode(): text for text in texts}
        numbers = among(self.hashes, hashes_of(wanted)).tolist()
        texts_at = ((wanted.get(self.data[self.begins[number] : self.ends[number]]), number) for number in numbers)
        return {text: number for text, number in texts_at if text is not None}

    @property
    def num_bytes(self) -> int:
        """The bytes of the strings, with their lengths."""
        return int(self.ends[-1]) if self.count else 0

    def is_utf8(self) -> bool:
        return isinstance(self._joined(), str)

    def texts(self) -> list[str | bytes]:
        """Returns the strings, and the bytes of those that are not UTF-8."""
        joined = self._joined()
        if self.count == 1:
            return [joined]
        if isinstance(joined, str) and joined.count("\0") == 8 * self.count:
            return [*joined.split("\0" * 8)[1:]]
        return [
            decoded(self.data[begin:end]) for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        ]

    def _joined(self) -> str | bytes:
        """Returns the only string, or all of them, each after 8 zeros, which are no part of a character. Returns bytes
        unless each is UTF-8."""
        import numpy as np

        if self.count == 1:
            return decoded(self.data[self.begins[0] : self.ends[0]])
        content = np.frombuffer(self.data, np.uint8, self.num_bytes).copy()
        for byte in range(1, 9):
            content[self.begins - byte] = 0
        return decoded(content.tobytes())


def _one_by_one(data: bytes, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where the strings begin and end that are whole in `data`."""
    import numpy as np

    ends = [0]
    while len(ends) <= most and ends[-1] + 8 <= len(data):
        begin = ends[-1] + 8
        end = begin + int.from_bytes(data[begin - 8 : begin], "little")
        if end > len(data):
            break
        ends.append(end)
    of_all = np.array(ends, np.int64)
    return of_all[:-1] + 8, of_all[1:]


def decoded(data: bytes) -> str | bytes:
    """Returns a string, or its bytes if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
