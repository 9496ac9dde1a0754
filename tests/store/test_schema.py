from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec import decode_tokens, encode_tokens, read_payload
from diskprefix.store.schema import (
    Kind,
    NodeRecord,
    UsageRecord,
    decode_entry,
    decode_node,
    decode_root,
    decode_usage,
    encode_node,
    encode_usage,
)
from diskprefix.tokens import checksum


def record(payload: bytes, num_tokens: int = 3) -> NodeRecord:
    tokens = np.arange(num_tokens, dtype=np.int32)
    size = len(payload)
    return NodeRecord(b"p" * 16, b"r" * 16, 512, tokens, Kind.TAIL, 0, size, size, checksum(payload))


def test_a_node_record_has_the_documented_bytes() -> None:
    value = encode_node(record(b"abc"))
    assert len(value) == 72 + 3 * 4
    assert value[:32] == b"p" * 16 + b"r" * 16
    assert int.from_bytes(value[32:36], "little") == 512
    assert int.from_bytes(value[36:40], "little") == 3
    assert value[40:48] == bytes([0, 1, 0, 0, 0, 0, 0, 0])
    assert int.from_bytes(value[64:72], "little") == checksum(b"abc")
    assert np.frombuffer(value[72:], "<i4").tolist() == [0, 1, 2]


@given(st.binary(max_size=200))
def test_no_bytes_make_a_parser_fail_otherwise_than_as_corrupt(value: bytes) -> None:
    for parse in (decode_node, decode_usage, decode_root, decode_entry, lambda v: decode_tokens(v, max_tokens=100)):
        try:
            parse(value)
        except StoreCorrupt:
            continue


@given(st.floats(allow_nan=False), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_usage_records_round_trip(last_used: float, hits: int, children: int, stored: int) -> None:
    usage = UsageRecord(last_used, hits, children, stored)
    assert decode_usage(encode_usage(usage)) == usage


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300))
def test_token_ids_round_trip(ids: list[int]) -> None:
    assert decode_tokens(encode_tokens(np.array(ids, dtype=np.int32)), max_tokens=300).tolist() == ids


def test_a_history_record_that_claims_too_much_is_refused_before_it_is_read() -> None:
    stored = encode_tokens(np.zeros(1000, dtype=np.int32))
    with pytest.raises(StoreCorrupt, match="claims"):
        decode_tokens(stored, max_tokens=999)


@pytest.mark.parametrize("damage", ["flip", "short", "long", "empty"])
def test_a_damaged_payload_is_never_handed_out(damage: str) -> None:
    payload = bytes(range(256)) * 20
    damaged = {
        "flip": payload[:100] + bytes([payload[100] ^ 1]) + payload[101:],
        "short": payload[:-1],
        "long": payload + b"x",
        "empty": b"",
    }[damage]
    with pytest.raises(StoreCorrupt):
        read_payload(record(payload), memoryview(damaged), expected_bytes=len(payload))
    whole = read_payload(record(payload), memoryview(payload), expected_bytes=len(payload))
    assert bytes(whole) == payload


def test_a_payload_of_another_size_than_the_layout_says_is_refused() -> None:
    payload = b"x" * 64
    with pytest.raises(StoreCorrupt, match="the layout 65"):
        read_payload(record(payload), memoryview(payload), expected_bytes=65)
