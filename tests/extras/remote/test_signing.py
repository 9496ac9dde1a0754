"""Signed objects are read again, and changed ones are refused."""

from __future__ import annotations

import pytest

from diskprefix.extras.remote.signing import ObjectRefused, signed, verified
from tests.extras.remote.made import KEY, OTHER_KEY

CONTENT = b"what the object says"


def refused(path: str, data: bytes) -> str:
    with pytest.raises(ObjectRefused) as caught:
        verified(KEY, path, data)
    assert "\n" not in caught.value.message
    return caught.value.reason


def test_no_byte_can_be_changed_and_no_end_cut_off_or_added() -> None:
    data = signed(KEY, "a/b", CONTENT)
    assert verified(KEY, "a/b", data) == CONTENT
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
    assert refused("a/b", data + b"x") == "truncated"


def test_an_object_is_good_in_its_place_and_in_its_namespace_only() -> None:
    assert refused("a/c", signed(KEY, "a/b", CONTENT)) == "replayed"
    assert refused("a/b", signed(OTHER_KEY, "a/b", CONTENT)) == "foreign"
    planted = signed(KEY, "a/b", CONTENT)[:24] + signed(OTHER_KEY, "a/b", CONTENT)[24:]
    assert refused("a/b", planted) == "mac"
