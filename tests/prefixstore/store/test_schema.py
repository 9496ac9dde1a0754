from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.schema import (
    USAGE_DTYPE,
    EntryRecord,
    NodeKind,
    NodeRecord,
    PromptRecord,
    RootRecord,
    UsageRecord,
    decode_node,
    decode_record,
    decode_usage,
    encode_node,
    encode_usage,
    is_node,
    node_name,
    piece_index,
    piece_key,
    shorter_names,
)
from diskprefix.tokens import block_hash, checksum

NAME = b"n" * 16


def record(num_tokens: int = 3, kind: NodeKind = NodeKind.TAIL) -> NodeRecord:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return NodeRecord(b"p" * 16, b"r" * 16, 512, tokens, kind, 5, 1000, 800, build=b"digested")


def test_a_node_record_has_the_documented_bytes() -> None:
    value = encode_node(NAME, record())
    assert len(value) == 80 + 3 * 4
    assert value[:32] == b"p" * 16 + b"r" * 16
    assert int.from_bytes(value[32:36], "little") == 512
    assert int.from_bytes(value[36:40], "little") == 3
    assert value[40:48] == bytes([1, 0, 5, 0, 0, 0, 0, 0])
    assert int.from_bytes(value[48:56], "little") == 1000
    assert int.from_bytes(value[56:64], "little") == 800
    assert value[64:72] == b"digested"
    assert int.from_bytes(value[72:80], "little") == checksum(NAME + value[:72] + value[80:])
    assert np.frombuffer(value[80:], "<i4").tolist() == [0, 1, 2]


def test_an_unknown_kind_under_a_good_checksum_is_refused() -> None:
    value = bytearray(encode_node(NAME, record()))
    value[40] = 4
    value[72:80] = checksum(NAME + value[:72] + value[80:]).to_bytes(8, "little")
    with pytest.raises(StoreCorrupt, match="claims 3 tokens of kind"):
        decode_node(NAME, bytes(value))


def test_tails_and_checkpoints_have_names_of_their_own() -> None:
    ids = np.arange(16, dtype=np.int32)
    assert len({node_name(7, NAME, ids, kind) for kind in NodeKind}) == 3
    assert node_name(7, NAME, ids, NodeKind.BLOCK) == block_hash(7, NAME, ids)
    assert node_name(7, NAME, b"", NodeKind.CHECKPOINT) != node_name(7, NAME, b"", NodeKind.TAIL)


@given(st.integers(0, 8 * 92 - 1))
def test_one_wrong_bit_in_a_node_record_is_noticed(bit: int) -> None:
    value = bytearray(encode_node(NAME, record()))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StoreCorrupt):
        decode_node(NAME, bytes(value))


def test_a_node_is_told_from_any_other_by_parent_place_kind_and_tokens() -> None:
    value, ids = memoryview(encode_node(NAME, record())), np.arange(3, dtype="<i4")
    assert is_node(value, b"p" * 16, 512, NodeKind.TAIL, ids.tobytes())
    assert not is_node(value, b"q" * 16, 512, NodeKind.TAIL, ids.tobytes())
    assert not is_node(value, b"p" * 16, 511, NodeKind.TAIL, ids.tobytes())
    assert not is_node(value, b"p" * 16, 512, NodeKind.BLOCK, ids.tobytes())
    assert not is_node(value, b"p" * 16, 512, NodeKind.TAIL, (ids + 1).tobytes())
    assert not is_node(value, b"p" * 16, 512, NodeKind.TAIL, ids[:2].tobytes())
    assert not is_node(value[:40], b"p" * 16, 512, NodeKind.TAIL, b"")


def test_a_payload_key_sorts_by_node_then_by_piece_and_belongs_to_one_node() -> None:
    keys = [piece_key(name, index) for name in (b"a" * 16, b"b" * 16) for index in (0, 1, 255, 256, 65535)]
    assert keys == sorted(keys)
    assert [piece_index(key, b"b" * 16) for key in keys] == [None] * 5 + [0, 1, 255, 256, 65535]


@given(st.binary(max_size=200))
def test_no_bytes_make_a_parser_fail_otherwise_than_as_corrupt(value: bytes) -> None:
    parsers: list[Callable[[bytes], object]] = [
        partial(decode_node, NAME),
        decode_usage,
    ]
    parsers += [partial(decode_record, kind, b"key") for kind in (RootRecord, EntryRecord, PromptRecord)]
    for parse in parsers:
        try:
            parse(value)
        except StoreCorrupt:
            continue


@given(
    st.builds(
        UsageRecord,
        last_used=st.floats(allow_nan=False),
        children=st.integers(0, 2**32 - 1),
        stored_bytes=st.integers(0, 2**64 - 1),
        prefill_s=st.floats(0, 1e6, width=32),
        created_at=st.floats(allow_nan=False),
        restores=st.integers(0, 2**32 - 1),
        ttl_s=st.integers(-(2**31), 2**31 - 1),
    )
)
def test_usage_records_round_trip(usage: UsageRecord) -> None:
    value = encode_usage(usage)
    assert decode_usage(value) == usage
    row = np.frombuffer(value, USAGE_DTYPE)[0]
    assert all(row[name] == getattr(usage, name) for name in USAGE_DTYPE.names or ())


@pytest.mark.parametrize("kind", [NodeKind.BLOCK, NodeKind.TAIL])
def test_the_shorter_names_are_those_of_the_nodes_that_a_node_replaces(kind: NodeKind) -> None:
    token_ids = np.arange(5, dtype=np.int32)
    expected = {
        node_name(7, NAME, token_ids[:end], each) for end in range(5) for each in (NodeKind.BLOCK, NodeKind.TAIL)
    }
    if kind == NodeKind.TAIL:
        expected.add(node_name(7, NAME, token_ids, NodeKind.BLOCK))
    names = shorter_names(7, NAME, token_ids.tobytes(), kind)
    assert (set(names), len(names)) == (expected, len(expected))
    assert shorter_names(7, NAME, b"", NodeKind.BLOCK) == []
