from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.codec import compress
from diskprefix.prefixstore.store.note_record import (
    MAX_NOTE_BYTES,
    NoteKind,
    NoteTimes,
    StoredNote,
    decode_note,
    encode_note,
    note_key,
    note_prompt,
    root_limit,
    surplus_notes,
    total_limit,
    used_note,
)
from diskprefix.prefixstore.store.schema import with_checksum
from diskprefix.tokens import PromptDigest, checksum

ROOT = b"r" * 16
KEY = note_key(ROOT, NoteKind.RESPONSE, "resp_1")
TIMES = NoteTimes(last_used=20.0, created_at=10.0, ttl_s=60)
BUDGET = 64 << 20


def stored(
    number: int,
    last_used: float,
    num_bytes: int,
    root: bytes = ROOT,
    kind: NoteKind = NoteKind.TURN,
    share: str = "",
) -> StoredNote:
    return StoredNote(note_key(root, kind, str(number)), NoteTimes(last_used, 0.0, 60), num_bytes, share)


def test_a_note_has_the_documented_bytes() -> None:
    value = encode_note(KEY, b"content", TIMES)
    assert KEY[:17] == ROOT + b"\x00"
    assert len(KEY) == 33
    assert int.from_bytes(value[:8], "little") == checksum(KEY + value[8:])
    assert value[8:32] == (b"\0\0\0\0\0\0\x34\x40" + b"\0\0\0\0\0\0\x24\x40" + b"\x3c\0\0\0" + b"\0\0\0\0")
    assert value[32:48] == bytes(16)
    assert value[48:] == b"\0" + compress(b"content")
    of_share = encode_note(KEY, b"content", TIMES, share="user 1000")
    assert of_share[48:] == b"\x09user 1000" + compress(b"content")
    assert StoredNote.of(KEY, of_share).share == "user 1000"
    assert decode_note(KEY, of_share) == (TIMES, b"content")
    of_prompt = encode_note(KEY, b"content", TIMES, PromptDigest(258, b"d" * 16))
    assert of_prompt[28:48] == b"\2\1\0\0" + b"d" * 16
    assert note_prompt(of_prompt) == PromptDigest(258, b"d" * 16)
    assert decode_note(KEY, value) == (TIMES, b"content")


@given(st.binary(max_size=4000))
def test_any_content_comes_back(content: bytes) -> None:
    assert decode_note(KEY, encode_note(KEY, content, TIMES)) == (TIMES, content)


def test_every_changed_bit_is_noticed() -> None:
    value = encode_note(KEY, b"some content", TIMES)
    for bit in range(8 * len(value)):
        changed = bytearray(value)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupt):
            decode_note(KEY, bytes(changed))


@pytest.mark.parametrize(
    ("key", "packed"),
    [
        (KEY, b""),
        (KEY, b"\0" * 23),
        (KEY, b"\0" * 24),
        (KEY, b"\0" * 24 + b"no frame"),
        (KEY[:-1], b"\0" * 24 + compress(b"x")),
        (ROOT + b"\xff" + KEY[17:], b"\0" * 24 + compress(b"x")),
    ],
)
def test_what_cannot_be_a_note_is_refused_under_a_good_checksum(key: bytes, packed: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        decode_note(key, with_checksum(key, packed))


def test_a_size_that_is_read_is_not_allocated() -> None:
    bomb = compress(b"\0" * (MAX_NOTE_BYTES + 1))
    assert len(bomb) < 10_000
    with pytest.raises(StoreCorrupt, match="claims 16777217 bytes"):
        decode_note(KEY, with_checksum(KEY, b"\0" * 41 + bomb))


def test_a_use_renews_a_note_and_a_clock_that_jumps_back_does_not_age_it() -> None:
    value = encode_note(KEY, b"content", TIMES)
    assert decode_note(KEY, used_note(KEY, value, 50.0)) == (NoteTimes(50.0, 10.0, 60), b"content")
    assert used_note(KEY, value, 5.0) == value


def test_a_damaged_note_gets_no_right_checksum_by_a_use() -> None:
    value = bytearray(encode_note(KEY, b"content", TIMES))
    value[-1] ^= 1
    with pytest.raises(StoreCorrupt):
        used_note(KEY, bytes(value), 50.0)


@pytest.mark.parametrize(
    ("last_used", "now", "is_expired"),
    [(20.0, 79.0, False), (20.0, 80.0, True), (20.0, 1.0, False), (1e12, 20.0, True), (math.nan, 20.0, True)],
)
def test_a_note_expires_after_its_last_use(last_used: float, now: float, is_expired: bool) -> None:
    assert TIMES._replace(last_used=last_used).is_expired(now) == is_expired


def test_a_record_that_is_cut_short_counts_as_expired() -> None:
    assert StoredNote.of(KEY, b"x").times.is_expired(0.0)
    value = encode_note(KEY, b"x", TIMES)
    assert StoredNote.of(KEY, value).times == TIMES


def test_of_a_root_that_exceeds_its_share_logits_and_then_the_oldest_used_go() -> None:
    limit = root_limit(BUDGET)
    mine = [stored(n, 100.0 - n, limit // 4, kind=NoteKind.LOGITS if n == 1 else NoteKind.TURN) for n in range(5)]
    others = [stored(9, 0.0, limit, b"s" * 16)]
    # Three quarters of the share stay.
    assert surplus_notes(lambda: [*mine, *others], BUDGET) == [mine[1].key, mine[4].key]


def test_of_all_roots_together_the_oldest_used_go_first() -> None:
    limit = root_limit(BUDGET)
    notes = [stored(n, float(n), limit, bytes([n]) * 16) for n in range(5)]
    gone = surplus_notes(lambda: notes, BUDGET, 5 * limit)
    # The share of all is four times that of one, and three quarters of it stay.
    assert gone == [notes[0].key, notes[1].key]


def test_notes_under_many_salts_push_out_no_note_of_another_share() -> None:
    size, now = root_limit(BUDGET) // 8, 1000.0
    hers = [stored(n, 0.0, size, b"a" * 16, share="alice") for n in range(4)]
    theirs = [stored(n, 1.0, size, b"c" * 16, share="carol") for n in range(8)]
    his = [stored(n, now + n, size, bytes([root]) * 16, share="bob") for root in range(6) for n in range(8)]
    notes = [*hers, *theirs, *his]
    gone = set(surplus_notes(lambda: notes, BUDGET, len(notes) * size))
    # The three quarters that stay have room for 24 of these notes.
    assert gone == {note.key for note in sorted(his, key=lambda note: note.times.last_used)[:36]}


def test_others_stay_where_the_surplus_of_one_root_is_all_that_is_too_much() -> None:
    limit = root_limit(BUDGET)
    others = [stored(n, float(n), limit, bytes([n]) * 16) for n in range(3)]
    mine = [stored(n, 100.0 + n, limit // 4, b"m" * 16) for n in range(5)]
    assert surplus_notes(lambda: [*others, *mine], BUDGET, 17 * limit // 4) == [mine[0].key, mine[1].key]


@pytest.mark.parametrize("full", [1.0, 1.5])
def test_three_quarters_of_what_is_in_the_file_stay_however_full_its_pages_are(full: float) -> None:
    """Half full pages are assumed of small notes."""
    size = round(total_limit(BUDGET) * full) // 100
    notes = [stored(n, float(n), size, bytes([n]) * 16) for n in range(101)]
    gone = surplus_notes(lambda: notes, BUDGET, round(101 * size / full))
    assert len(gone) == 26


def test_roots_that_exceed_their_shares_together_lose_no_more_than_one_by_one() -> None:
    size = root_limit(BUDGET) // 4
    notes = [stored(n, float(n), size, bytes([root]) * 16) for root in range(6) for n in range(5)]
    assert len(surplus_notes(lambda: notes, BUDGET)) == 6 * 2


def test_of_many_notes_only_a_few_numbers_of_each_are_in_memory() -> None:
    def read() -> Iterator[StoredNote]:
        for number in range(num_notes):
            yield stored(number, float(number % 1000), total_limit(BUDGET) // 4000, bytes([number % 250]) * 16)

    num_notes = 5000
    surplus_notes(read, BUDGET, total_limit(BUDGET) * 5 // 4)
    tracemalloc.start()
    try:
        gone = surplus_notes(read, BUDGET, total_limit(BUDGET) * 5 // 4)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(gone) == 2000
    assert most < 120 * num_notes, "the notes themselves take 300 bytes each"
