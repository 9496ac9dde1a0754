"""The format and the limits of notes: small records of other packages in the store, such as stored responses.

To the store, a note is bytes under a root, a kind and an id, with its own time to live. `FORMAT.md` gives the format
byte by byte.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.codec import compress, decompress
from diskprefix.prefixstore.store.schema import CHECKSUM_BYTES, paged_bytes, verified, with_checksum
from diskprefix.tokens import HASH_BYTES, NO_PROMPT, PromptDigest

MAX_NOTE_BYTES = 16 << 20
"""Limit for the content of one note."""
_ROOT_SHARE, _TOTAL_SHARE = 64, 16
"""The notes of one root may take 1/64 of the budget, and all notes 1/16."""
_NOTE_SHARE = 4
"""One note may take 1/4 of its root's share."""
_SHRINK_TO = 0.75
"""Notes that exceed a share are reduced to this part of it, so that notes are not counted again at every write."""
SHORT_TTL_S = 86400
"""Notes with a shorter time to live than these seconds are searched as often as nodes with their own time to live."""
_RECORD_AFTER = 1 / 16
"""Another use of a note is recorded only after this part of its time to live: an agent uses all its turns in each
turn."""
_TIMES, _PROMPT = struct.Struct("<ddI"), struct.Struct(f"<I{HASH_BYTES}s")
_SHARE_AT = _TIMES.size + _PROMPT.size
"""The offset of the share's text, behind its length in one byte."""
_MAX_SHARE_BYTES = 255
_OWN_PAGE_BYTES = 2000
"""A value of more bytes shares no page with others."""
_KEY_BYTES = 2 * HASH_BYTES + 1


class NoteKind(IntEnum):
    RESPONSE = 0
    """A stored response of `/v1/responses`."""
    TURN = 1
    """The tokens that the model sampled for a turn."""
    SAVINGS = 2
    """The counts of `savings`."""
    LOGITS = 3
    """The next-token logits at the end of a prompt whose tail a reply replaced. They save little time, so they are
    removed first."""
    PICTURE = 5
    """Size and digest of a picture, for people. The encoder's output for it is under the same root."""
    OPENING = 6
    """The system message, the tools and the first question of conversations in which the chat template writes a
    date."""
    ASKED_OPENING = 7
    """The same of a conversation that a client wants computed ahead, behind a line with the client's name for it."""
    IMPORTED = 8
    """A prompt of a pack that this machine has to compute before it uses it."""


ENCODED_TEXT = 4
"""A kind that is no longer written: the tokens of a text. Such notes expire."""
_KINDS = frozenset({*NoteKind, ENCODED_TEXT})


def note_key(root: bytes, kind: int, id_: str) -> bytes:
    """Returns the key of a note. Ids of any length are hashed (SHA-256, 16 bytes)."""
    return root + bytes([kind]) + hashlib.sha256(id_.encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


def kind_of(key: bytes) -> int | None:
    """Returns the `NoteKind` in a key; None or another number if it is not the key of a note."""
    return key[HASH_BYTES] if len(key) > HASH_BYTES else None


class NoteTimes(NamedTuple):
    """The times of a note's last use and of its creation (seconds since the epoch), and its time to live after the last
    use (seconds)."""

    last_used: float
    created_at: float
    ttl_s: int

    def is_expired(self, now: float) -> bool:
        # NaN, or a time far in the future (from a clock that was wrong), must not keep a note forever.
        return not abs(now - self.last_used) < self.ttl_s

    def is_outdated(self, now: float) -> bool:
        """Returns whether a use at time `now` is worth writing the note again."""
        return not abs(now - self.last_used) < self.ttl_s * _RECORD_AFTER

    def used(self, when: float) -> NoteTimes:
        return self._replace(last_used=max(self.last_used, when))


def encode_note(
    key: bytes, content: bytes, times: NoteTimes, prompt: PromptDigest = NO_PROMPT, share: str = ""
) -> bytes:
    """Returns the record of a note, whose room counts for a `share`; of a long text the first 255 bytes count."""
    whose = share.encode()[:_MAX_SHARE_BYTES]
    header = _TIMES.pack(*times) + _PROMPT.pack(*prompt) + bytes([len(whose)]) + whose
    return with_checksum(key, header + compress(content))


def decode_note(key: bytes, value: bytes | memoryview) -> tuple[NoteTimes, bytes]:
    """Returns the times and the content of a note. Raises `StoreCorrupt`."""
    packed = verified(key, value)
    content_at = _SHARE_AT + 1 + packed[_SHARE_AT] if len(packed) > _SHARE_AT else len(packed) + 1
    if len(key) != _KEY_BYTES or key[HASH_BYTES] not in _KINDS or len(packed) < content_at:
        raise StoreCorrupt(f"a note of {len(value)} bytes under a key of {len(key)} bytes cannot be")
    return NoteTimes(*_TIMES.unpack_from(packed)), decompress(packed[content_at:], max_bytes=MAX_NOTE_BYTES)


def used_note(key: bytes, value: bytes | memoryview, when: float) -> bytes:
    """Returns a stored note with a use at time `when` recorded. Raises `StoreCorrupt`."""
    packed = verified(key, value)
    times = NoteTimes(*_TIMES.unpack_from(packed)).used(when)
    return with_checksum(key, _TIMES.pack(*times) + packed[_TIMES.size :])


def note_prompt(value: bytes | memoryview) -> PromptDigest:
    """Returns the prompt that a note came from, without verifying the record; `NO_PROMPT` if it came from none, or from
    several."""
    if len(value) < CHECKSUM_BYTES + _SHARE_AT:
        return NO_PROMPT
    return PromptDigest(*_PROMPT.unpack_from(value, CHECKSUM_BYTES + _TIMES.size))


def share_of(value: bytes | memoryview) -> str:
    """Returns the share that a note's room counts for, without verifying the record."""
    length_at = CHECKSUM_BYTES + _SHARE_AT
    length = value[length_at] if len(value) > length_at else 0
    return bytes(value[length_at + 1 : length_at + 1 + length]).decode(errors="replace")


class StoredNote(Struct, frozen=True):
    """A stored note without its content. Its record is not verified."""

    key: bytes
    times: NoteTimes
    num_bytes: int
    """The size in the file."""
    share: str = ""

    @classmethod
    def of(cls, key: bytes, value: bytes | memoryview) -> StoredNote:
        """Reads the beginning of a record. A record that is too short counts as expired."""
        is_whole = len(value) >= CHECKSUM_BYTES + _TIMES.size
        times = _TIMES.unpack_from(value, CHECKSUM_BYTES) if is_whole else (0.0, 0.0, 0)
        return cls(key, NoteTimes(*times), note_bytes(len(value)), share_of(value))

    @property
    def root(self) -> bytes:
        return self.key[:HASH_BYTES]

    @property
    def kind(self) -> int | None:
        return kind_of(self.key)

    def used(self, when: float) -> StoredNote:
        return replace(self, times=self.times.used(when))


def note_bytes(value_bytes: int) -> int:
    """Returns the approximate bytes in the file of a note whose value has `value_bytes`: whole pages for a long
    note."""
    if value_bytes > _OWN_PAGE_BYTES:
        return paged_bytes(value_bytes) + 2 * _KEY_BYTES
    return 2 * (value_bytes + _KEY_BYTES)


def root_limit(budget_bytes: int) -> int:
    """Returns the limit for the notes of one root, in bytes."""
    return budget_bytes // _ROOT_SHARE


def note_limit(budget_bytes: int) -> int:
    """Returns the limit for one note, in bytes."""
    return root_limit(budget_bytes) // _NOTE_SHARE


def sizes_by_root(notes: Iterable[StoredNote]) -> Counter[bytes]:
    """Returns the bytes in the file of the notes of each root."""
    sizes: Counter[bytes] = Counter()
    for note in notes:
        sizes[note.root] += note.num_bytes
    return sizes


def total_limit(budget_bytes: int) -> int:
    """Returns the limit for all notes, in bytes."""
    return budget_bytes // _TOTAL_SHARE


def surplus_notes(read: Callable[[], Iterable[StoredNote]], budget_bytes: int, stored_bytes: int = 0) -> list[bytes]:
    """Returns the keys of the notes to remove, in the order of `read`, so that first the notes of each root and then
    all notes fit their shares of the budget. Above the share of all notes, the notes of the `StoredNote.share` that has
    most go first, so that each keeps an equal part. Chooses logits first, then the least recently used notes. An
    exceeded share of the budget is left three quarters full. `stored_bytes` is the size of all notes in the file, if
    the notes are all notes and exceed their share.

    `read` is called twice, and yields the same notes each time: there may be millions, so only a few numbers of each
    note are kept in memory.
    """
    ages, num_bytes, is_logits, of_root, of_share = array("d"), array("q"), bytearray(), array("L"), array("L")
    roots, shares = dict[bytes, int](), dict[str, int]()
    for note in read():
        ages.append(note.times.last_used)
        num_bytes.append(note.num_bytes)
        is_logits.append(note.kind == NoteKind.LOGITS)
        of_root.append(roots.setdefault(note.root, len(roots)))
        of_share.append(shares.setdefault(note.share, len(shares)))
    sizes = np.array(num_bytes, np.int64)
    oldest_first = np.lexsort((np.array(ages), 1 - np.array(is_logits, np.int8)))
    is_surplus = np.zeros(len(ages), bool)
    # The pages may be more or less full than `note_bytes` assumes.
    file_bytes_each = stored_bytes / max(1, int(sizes.sum()))
    limit = root_limit(budget_bytes)
    _take_surplus(is_surplus, oldest_first, of_root, sizes, lambda size: _allowed_bytes(size, limit))
    left = int(sizes[~is_surplus].sum()) * file_bytes_each
    if left > (allowed := _allowed_bytes(left, total_limit(budget_bytes))):
        held = np.bincount(np.array(of_share)[~is_surplus], sizes[~is_surplus], len(shares))
        part = _equal_part(held.tolist(), allowed / file_bytes_each)
        _take_surplus(is_surplus, oldest_first, of_share, sizes, lambda _: part)
    return [note.key for note, is_gone in zip(read(), is_surplus, strict=True) if is_gone] if any(is_surplus) else []


def _take_surplus(
    is_surplus: npt.NDArray[np.bool_],
    oldest_first: npt.NDArray[np.intp],
    owners: Sequence[int],
    sizes: npt.NDArray[np.int64],
    allowed: Callable[[float], float],
) -> None:
    """Marks the oldest notes of each owner as surplus until the others have at most the bytes that are `allowed` for
    their sum."""
    held = Counter[int]()
    for row in map(int, np.flatnonzero(~is_surplus)):
        held[owners[row]] += int(sizes[row])
    most = {owner: allowed(size) for owner, size in held.items()}
    for row in map(int, oldest_first):
        if not is_surplus[row] and held[owners[row]] > most[owners[row]]:
            is_surplus[row] = True
            held[owners[row]] -= int(sizes[row])


def _equal_part(held: Sequence[float], allowed: float) -> float:
    """Returns the most bytes that each owner may keep, so that all together keep `allowed` of what they have."""
    left = allowed
    for number, size in enumerate(sorted(held)):
        part = left / (len(held) - number)
        if size > part:
            return part
        left -= size
    return allowed


def _allowed_bytes(num_bytes: float, limit: int) -> float:
    return limit * _SHRINK_TO if num_bytes > limit else limit
