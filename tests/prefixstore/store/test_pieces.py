"""The cuts of payloads, by kind of node and layout."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.codec.codec import PIECE_BYTES, Element
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind
from tests.prefixstore.packs.exported import HYBRID, LAYOUT
from tests.prefixstore.store.building import BLOCK

TOKEN_BYTES, STATE_BYTES, LOGITS_BYTES = 60, 392, 100
DENSE, WITH_STATES = PayloadLayout.parse(LAYOUT), PayloadLayout.parse(HYBRID)


def elements(layout: PayloadLayout, num_tokens: int, kind: NodeKind) -> list[Element]:
    return [piece.element for piece in layout.pieces(num_tokens, kind)]


def test_a_block_holds_tokens_a_checkpoint_states_and_a_tail_both_and_the_logits() -> None:
    tokens, states, logits = [Element.BF16, Element.FP32], [Element.BF16, Element.FP32], [Element.FP32]
    assert elements(WITH_STATES, BLOCK, NodeKind.BLOCK) == tokens
    assert elements(WITH_STATES, 0, NodeKind.CHECKPOINT) == states
    assert elements(WITH_STATES, 5, NodeKind.TAIL) == tokens + states + logits
    assert elements(WITH_STATES, 0, NodeKind.TAIL) == states + logits
    assert WITH_STATES.payload_bytes(BLOCK, NodeKind.BLOCK) == TOKEN_BYTES * BLOCK
    assert WITH_STATES.payload_bytes(0, NodeKind.CHECKPOINT) == STATE_BYTES
    assert WITH_STATES.payload_bytes(5, NodeKind.TAIL) == 5 * TOKEN_BYTES + STATE_BYTES + LOGITS_BYTES


def test_without_states_a_checkpoint_holds_nothing_and_a_tail_no_more_than_before() -> None:
    assert DENSE.pieces(0, NodeKind.CHECKPOINT) == ()
    assert DENSE.payload_bytes(5, NodeKind.TAIL) == 5 * TOKEN_BYTES + LOGITS_BYTES


def test_groups_are_counted_through() -> None:
    pieces = WITH_STATES.pieces(5, NodeKind.TAIL)
    assert [piece.group for piece in pieces] == [0, 1, 2, 3, 4]
    assert WITH_STATES.logits_group == 4
    assert [piece.group for piece in WITH_STATES.pieces(0, NodeKind.CHECKPOINT)] == [2, 3]


def test_large_states_are_cut_between_their_rows() -> None:
    state = {"shape": [6, PIECE_BYTES // 16], "rows": 6, "dtype": "float32", "tensors": ["0.conv0", "1.conv0"]}
    layout = PayloadLayout.parse(json.dumps(json.loads(LAYOUT) | {"states": [state]}))
    pieces = layout.pieces(0, NodeKind.CHECKPOINT)
    # A row is a quarter of a piece; twelve rows are three pieces.
    assert [(piece.first_row, piece.num_rows) for piece in pieces] == [(0, 4), (4, 4), (8, 4)]


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"rows": -1}, {"rows": 5}, {"shape": [-6, 3]}, {"shape": "all"}, {"dtype": "float5"}],
)
def test_states_that_cannot_be_are_no_layout(change: dict[str, Any]) -> None:
    text = json.loads(HYBRID)
    text["states"][0] |= change
    with pytest.raises(StoreCorrupt, match="a payload layout cannot be read"):
        PayloadLayout.parse(json.dumps(text))


def paged(**change: Any) -> PayloadLayout:
    group = {"heads": 2, "head_dim": 8, "dtype": "bfloat16", "tensors": ["0.pages", "1.pages", "2.pages"]}
    group |= {"axes": ["page", "head", "token", "dim"], "page": 4} | change
    return PayloadLayout.parse(json.dumps({"version": 1, "groups": [group], "logits": [0, "float32"]}))


def test_a_layer_in_pages_is_one_row_whatever_the_order_inside_a_page() -> None:
    assert [(piece.num_rows, piece.row_bytes) for piece in paged().pieces(8, NodeKind.BLOCK)] == [(3, 8 * 2 * 8 * 2)]
    assert paged(axes=["page", "token", "head", "dim"]).groups == paged().groups
    in_tokens = paged(axes=["head", "token", "dim"], page=1)
    assert [(piece.num_rows, piece.row_bytes) for piece in in_tokens.pieces(8, NodeKind.BLOCK)] == [(6, 8 * 8 * 2)]


def test_pieces_follow_the_layers_so_that_a_load_can_go_layer_by_layer() -> None:
    pieces = paged(head_dim=PIECE_BYTES // 64).pieces(16, NodeKind.BLOCK)
    assert [(piece.first_row, piece.num_rows) for piece in pieces] == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"page": 0},
        {"axes": []},
        {"axes": ["head", "token", "dim"]},
        {"axes": ["token"]},
        {"axes": ["layer", "dim"]},
        {"axes": ["head", "token", "dim"], "page": 1, "heads": 0},
    ],
)
def test_pages_that_cannot_be_are_no_layout(change: dict[str, Any]) -> None:
    with pytest.raises(StoreCorrupt, match="layout cannot be read"):
        paged(**change)
