"""Signed objects are read again, and changed ones are refused."""

from __future__ import annotations

import pytest

from diskprefix.extras.remote.signing import (
    MOST_SIGNED_BYTES,
    PREAMBLE_BYTES,
    ObjectRefused,
    piece_digest,
    require_piece,
    signed,
    signed_bytes,
    verified,
)
from tests.extras.remote.made import KEY, OTHER_KEY

CONTENT = b"what the object says"


def refused(path: str, data: bytes) -> str:
    with pytest.raises(ObjectRefused) as caught:
        verified(KEY, path, data)
    assert "\n" not in caught.value.message
    return caught.value.reason


def test_what_was_signed_is_read_again_whatever_follows_it() -> None:
    data = signed(KEY, "a/b", CONTENT)
    assert verified(KEY, "a/b", data + b"the body") == CONTENT
    assert signed_bytes(data[:PREAMBLE_BYTES]) == len(data)


def test_no_byte_can_be_changed_and_no_end_cut_off() -> None:
    data = signed(KEY, "a/b", CONTENT)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            # Four bytes of the beginning say nothing.
            assert verified(KEY, "a/b", bytes(changed)) == CONTENT
            assert at in range(12, 16)
        except ObjectRefused:
            assert at not in range(12, 16)
        assert refused("a/b", data[:at]) == "truncated"


def test_a_header_that_is_too_large_is_neither_written_nor_asked_for() -> None:
    assert MOST_SIGNED_BYTES <= 4 << 20, "so much is read before anything is verified"
    with pytest.raises(ObjectRefused, match="header"):
        signed(KEY, "a/b", bytes(MOST_SIGNED_BYTES))
    beginning = bytearray(signed(KEY, "a/b", CONTENT)[:PREAMBLE_BYTES])
    beginning[8:12] = (MOST_SIGNED_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ObjectRefused, match="not an object of this version"):
        signed_bytes(bytes(beginning))


def test_a_piece_verifies_alone_and_in_its_place_only() -> None:
    name, piece = b"n" * 16, memoryview(b"a piece")
    digest = piece_digest(KEY, name, 1, piece)
    require_piece(KEY, name, 1, piece, digest)
    for key, its_name, index, stored in (
        (OTHER_KEY, name, 1, piece),
        (KEY, b"m" * 16, 1, piece),
        (KEY, name, 0, piece),
        (KEY, name, 1, memoryview(b"A piece")),
    ):
        with pytest.raises(ObjectRefused, match="is not the one that was signed"):
            require_piece(key, its_name, index, stored, digest)
