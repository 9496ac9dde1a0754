"""A bundle: an object with consecutive nodes of one prefix and their payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.errors import StoreCorrupt
from diskprefix.extras.remote.signing import (
    MOST_SIGNED_BYTES,
    PREAMBLE_BYTES,
    ObjectRefused,
    piece_digest,
    require_piece,
    signed,
    verified,
)
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.codec.codec import Codec, decode_piece, encode_piece
from diskprefix.store.schema import Kind
from diskprefix.tokens import ID_BYTES

ABOUT = "about"
"""The name of the object with the record of a root."""
ABOUT_MOST_BYTES = 64 << 10
REST = "-rest"
"""The ending of the name of an object with a partial block."""
_TARGET_BYTES = 4 << 20
_MOST_BLOCKS = 16
"""The last block of another machine's shorter prompt may be any block of a bundle: all of them are asked for."""


class BundledNode(msgspec.Struct, frozen=True, array_like=True):
    """A node in a bundle. `token_ids` are int32, little-endian; `sizes` and `digests` are those of the encoded pieces,
    which follow each other behind the header, node after node."""

    name: bytes
    parent: bytes
    position: int
    kind: int
    token_ids: bytes
    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The signed beginning of a bundle. `root` and `created_at` (seconds since the epoch) are for people."""

    root: bytes
    created_at: float
    nodes: tuple[BundledNode, ...]


class BundleSlot(NamedTuple):
    """The place of a bundle in a prompt: blocks `first` to `last`, and the prompt's tail if it `has_tail`.

    `is_rest`: only the partial block behind `last` blocks, of the first prompt that wrote it. Where prompts restore to
    the token, its first tokens serve others too.
    """

    first: int
    last: int
    has_tail: bool = False
    is_rest: bool = False


def blocks_per_bundle(nodes: PromptNodes) -> int:
    """Returns the number of blocks in a bundle of a few MiB. All machines with one layout agree on it."""
    block_bytes = nodes.layout.payload_bytes(nodes.block_size, Kind.BLOCK)
    return max(1, min(_MOST_BLOCKS, -(-_TARGET_BYTES // max(1, block_bytes))))


def whole_bundles(nodes: PromptNodes, size: int) -> list[BundleSlot]:
    """Returns the bundles of `size` blocks at the fixed positions of the prompt."""
    return [BundleSlot(first, first + size) for first in range(0, nodes.num_blocks - size + 1, size)]


def ends(size: int, first: int, num_blocks: int, *, with_tail: bool) -> list[BundleSlot]:
    """Returns the shorter bundles that may follow `first` blocks, a multiple of `size`, the longest first.

    A prompt that ends there leaves one behind. `num_blocks` are looked at; `with_tail`: the prompt's tail too.
    """
    last = min(num_blocks, first + size - 1)
    slots = [BundleSlot(first, end) for end in range(last, first, -1)]
    return [BundleSlot(first, num_blocks, has_tail=True), *slots] if with_tail and num_blocks < first + size else slots


def slot_nodes(nodes: PromptNodes, slot: BundleSlot) -> Iterator[Node]:
    """Yields the nodes that a bundle in this place has, without the checkpoints, which it may have."""
    yield from nodes.blocks[slot.first : slot.last]
    if slot.has_tail:
        yield nodes.tail()


def most_bytes(nodes: PromptNodes, slot: BundleSlot) -> int:
    """Returns the most bytes that an object in this place can have. Larger objects, which others may have planted, are
    not read."""
    block, checkpoint, tail = (
        sum(cut.piece.max_bytes for cut in nodes.layout.cuts(nodes.block_size, kind))
        for kind in (Kind.BLOCK, Kind.CHECKPOINT, Kind.TAIL)
    )
    num_blocks = 1 if slot.is_rest else slot.last - slot.first
    return PREAMBLE_BYTES + MOST_SIGNED_BYTES + num_blocks * (block + checkpoint) + slot.has_tail * tail


def object_path(key: NamespaceKey, root: bytes, name: str) -> str:
    """Returns the path of an object of a root. `name` is that of a bundle, or `ABOUT`."""
    return f"{key.digest.hex()}/{root.hex()}/{name}"


def slot_path(key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot) -> str:
    """Returns the path of the bundle in this place: it is named by its last node, and ends with the number of blocks
    before its end."""
    if slot.is_rest:
        name = f"{nodes.parent(slot.last).hex()}{REST}"
    else:
        *_, last = slot_nodes(nodes, slot)
        name = last.name.hex()
    return object_path(key, nodes.root, f"{name}.{slot.last}")


def encode_bundle(
    key: NamespaceKey, nodes: PromptNodes, path: str, payloads: Iterable[tuple[Node, bytes, memoryview]], now: float
) -> bytes:
    """Returns the object with these nodes, parents first, their token ids and their raw payloads."""
    bundled: list[BundledNode] = []
    body: list[bytes | bytearray] = []
    for node, token_ids, payload in payloads:
        pieces: list[bytes | bytearray] = []
        start = 0
        for cut in nodes.cuts(node):
            raw = payload[start : start + cut.piece.num_bytes]
            # A network is slower than a decoder: always as small as it gets. The digest verifies it.
            pieces.append(encode_piece(raw, cut.piece, Codec.PLANES, None))
            start += cut.piece.num_bytes
        digests = tuple(piece_digest(key, node.name, index, piece) for index, piece in enumerate(pieces))
        sizes = tuple(map(len, pieces))
        bundled.append(BundledNode(node.name, node.parent, node.position, node.kind, token_ids, sizes, digests))
        body += pieces
    header = msgspec.msgpack.encode(Header(nodes.root, now, tuple(bundled)))
    return b"".join([signed(key, path, header), *body])


def read_header(key: NamespaceKey, path: str, data: bytes | memoryview) -> Header:
    """Returns the header of the object at `path`. Raises `ObjectRefused`."""
    try:
        return msgspec.msgpack.decode(verified(key, path, data), type=Header)
    except msgspec.DecodeError as error:
        raise ObjectRefused("mismatch", f"its header cannot be read: {error}") from error


def require_prompt(nodes: PromptNodes, slot: BundleSlot, header: Header) -> list[Node]:
    """Returns the bundle's nodes as the prompt names them. A name is no proof, so their token ids are compared.

    Raises `ObjectRefused` if the bundle is not exactly the one of this place, with checkpoints between its blocks.
    """
    if slot.is_rest:
        return [_require_rest(nodes, slot, header)]
    expected = list(slot_nodes(nodes, slot))
    found: list[Node] = []
    for one in header.nodes:
        if one.kind == Kind.CHECKPOINT and found and found[-1].kind == Kind.BLOCK:
            # The prompt may leave its tokens: then it is of no use to this one.
            node = _other(nodes, found[-1].end // nodes.block_size, one)
        elif expected:
            node = expected.pop(0)
        else:
            raise ObjectRefused("mismatch", "it has other nodes than its name says")
        if (one.name, one.parent, one.position, one.kind) != (node.name, node.parent, node.position, node.kind):
            raise ObjectRefused("mismatch", "it has other nodes than its name says")
        if one.kind != Kind.CHECKPOINT and one.token_ids != nodes.token_bytes(node):
            raise ObjectRefused("mismatch", f"node {one.name.hex()} has other tokens")
        _require_pieces(nodes, node, one)
        found.append(node)
    if expected:
        raise ObjectRefused("mismatch", "it lacks nodes that its name says it has")
    return found


def _require_rest(nodes: PromptNodes, slot: BundleSlot, header: Header) -> Node:
    (one,) = header.nodes if len(header.nodes) == 1 else (None,)
    if one is None or one.kind != Kind.BLOCK or not one.token_ids:
        raise ObjectRefused("mismatch", "it is no partial block")
    node = _other(nodes, slot.last, one)
    if (one.name, one.parent, one.position, one.kind) != (node.name, node.parent, node.position, node.kind):
        raise ObjectRefused("mismatch", "it has another node than its name says")
    _require_pieces(nodes, node, one)
    return node


def _other(nodes: PromptNodes, num_blocks: int, one: BundledNode) -> Node:
    """Returns the node of a bundle with a part of the block behind the first `num_blocks`, as its tokens name it."""
    if len(one.token_ids) % ID_BYTES or len(one.token_ids) // ID_BYTES >= nodes.block_size:
        raise ObjectRefused("mismatch", f"node {one.name.hex()} has too many tokens")
    return nodes.behind(num_blocks, one.token_ids, Kind(one.kind))


def _require_pieces(nodes: PromptNodes, node: Node, one: BundledNode) -> None:
    cuts = nodes.cuts(node)
    is_alike = len(one.sizes) == len(one.digests) == len(cuts)
    if not is_alike or not all(0 <= size <= cut.piece.max_bytes for size, cut in zip(one.sizes, cuts, strict=True)):
        raise ObjectRefused("mismatch", f"node {one.name.hex()} has another layout")


def body_range(header: Header, first: int) -> tuple[int, int]:
    """Returns the range of the pieces of the nodes from number `first` on, counted from the header's end."""
    ends_at = list(accumulate((sum(one.sizes) for one in header.nodes), initial=0))
    return ends_at[first], ends_at[-1]


def decode_payload(
    key: NamespaceKey, nodes: PromptNodes, node: Node, bundled: BundledNode, stored: memoryview
) -> memoryview:
    """Returns the raw payload of a node, whose pieces are `stored`. Raises `ObjectRefused`."""
    cuts = nodes.cuts(node)
    if len(stored) != sum(bundled.sizes):
        raise ObjectRefused("truncated", f"node {node.name.hex()} has {len(stored)} bytes of {sum(bundled.sizes)}")
    payload = np.empty(sum(cut.piece.num_bytes for cut in cuts), dtype=np.uint8)
    at = start = 0
    for index, (cut, size) in enumerate(zip(cuts, bundled.sizes, strict=True)):
        piece = stored[at : at + size]
        require_piece(key, node.name, index, piece, bundled.digests[index])
        out = payload[start : start + cut.piece.num_bytes].reshape(cut.piece.num_rows, cut.piece.row_bytes)
        try:
            decode_piece(piece, cut.piece, None, out)
        except StoreCorrupt as error:
            raise ObjectRefused("mismatch", error.message) from error
        at, start = at + size, start + cut.piece.num_bytes
    return payload.data
