"""A bundle: an object with consecutive nodes of one prefix and their payloads."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.errors import StoreCorrupt
from diskprefix.extras.remote.signing import PREAMBLE_BYTES, ObjectRefused, signed, verified
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.codec.codec import Codec, decode_piece, encode_piece
from diskprefix.store.pieces import Payload
from diskprefix.store.schema import Kind
from diskprefix.tokens import ID_BYTES

ABOUT = "about"
"""The name of the object with the record of a root."""
ABOUT_MOST_BYTES = 64 << 10
_TARGET_BYTES = 4 << 20
_MOST_BLOCKS = 16
"""The last block of another machine's shorter prompt may be any block of a bundle: all of them are asked for."""
_MOST_HEADER_BYTES = 4 << 20
"""Path, token ids and sizes of the largest bundles take less than a quarter of it."""
_LENGTH = struct.Struct("<I")


class BundledNode(msgspec.Struct, frozen=True, array_like=True):
    """A node in a bundle. `token_ids` are int32, little-endian; `sizes` are those of the encoded pieces, which follow
    each other behind the header, node after node."""

    name: bytes
    parent: bytes
    position: int
    kind: int
    token_ids: bytes
    sizes: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a bundle. `root` and `created_at` (seconds since the epoch) are for people."""

    root: bytes
    created_at: float
    nodes: tuple[BundledNode, ...]


class BundleSlot(NamedTuple):
    """The place of a bundle in a prompt: blocks `first` to `last`, and the prompt's tail if it `has_tail`."""

    first: int
    last: int
    has_tail: bool = False


def blocks_per_bundle(nodes: PromptNodes) -> int:
    """Returns the number of blocks in a bundle of a few MiB. All machines with one layout agree on it."""
    block_bytes = nodes.layout.payload_bytes(nodes.block_size, Kind.BLOCK)
    return max(1, min(_MOST_BLOCKS, -(-_TARGET_BYTES // max(1, block_bytes))))


def whole_bundles(nodes: PromptNodes, size: int) -> list[BundleSlot]:
    """Returns the bundles of `size` blocks at the fixed positions of the prompt."""
    return [BundleSlot(first, first + size) for first in range(0, nodes.num_blocks - size + 1, size)]


def ends(size: int, first: int, num_blocks: int) -> list[BundleSlot]:
    """Returns the shorter bundles that may follow `first` blocks, a multiple of `size`, the longest first.

    A prompt that ends there leaves one behind. `num_blocks` are looked at, and the prompt's tail.
    """
    last = min(num_blocks, first + size - 1)
    slots = [BundleSlot(first, end) for end in range(last, first, -1)]
    return [BundleSlot(first, num_blocks, has_tail=True), *slots] if num_blocks < first + size else slots


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
    return PREAMBLE_BYTES + _MOST_HEADER_BYTES + (slot.last - slot.first) * (block + checkpoint) + slot.has_tail * tail


def object_path(key: NamespaceKey, root: bytes, name: str) -> str:
    """Returns the path of an object of a root. `name` is that of a bundle, or `ABOUT`."""
    return f"{key.digest.hex()}/{root.hex()}/{name}"


def slot_path(key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot) -> str:
    """Returns the path of the bundle in this place: it is named by its last node, and ends with the number of blocks
    before its end."""
    *_, last = slot_nodes(nodes, slot)
    return object_path(key, nodes.path.root, f"{last.name.hex()}.{slot.last}")


def encode_bundle(
    key: NamespaceKey, nodes: PromptNodes, path: str, payloads: Iterable[tuple[Node, Payload]], now: float
) -> bytes:
    """Returns the object with these nodes, parents first, and their raw payloads."""
    bundled: list[BundledNode] = []
    body: list[bytes | bytearray] = []
    for node, payload in payloads:
        # A network is slower than a decoder: always as small as it gets. The MAC verifies it.
        cuts = zip(payload, nodes.cuts(node), strict=True)
        pieces = [encode_piece(raw, cut.piece, Codec.PLANES, None) for raw, cut in cuts]
        token_ids, sizes = nodes.token_bytes(node), tuple(map(len, pieces))
        bundled.append(BundledNode(node.name, node.parent, node.position, node.kind, token_ids, sizes))
        body += pieces
    header = msgspec.msgpack.encode(Header(nodes.path.root, now, tuple(bundled)))
    return signed(key, path, b"".join([_LENGTH.pack(len(header)), header, *body]))


def decode_bundle(
    key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot, path: str, data: memoryview, num_near: int
) -> list[tuple[Node, bytes, Payload]]:
    """Returns the nodes of the bundle at `path` that lie behind the prompt's first `num_near` blocks, with their token
    ids (int32, little-endian) and raw payloads. Raises `ObjectRefused`."""
    header, body = split_bundle(verified(key, path, data))
    found: list[tuple[Node, bytes, Payload]] = []
    for node, bundled in zip(_require_prompt(nodes, slot, header), header.nodes, strict=True):
        size = sum(bundled.sizes)
        if node.end > num_near * nodes.block_size:
            found.append((node, bundled.token_ids, _decode_payload(nodes, node, bundled, body[:size])))
        body = body[size:]
    return found


def split_bundle(content: memoryview) -> tuple[Header, memoryview]:
    """Returns the header, and the pieces behind it. Raises `ObjectRefused`."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        return msgspec.msgpack.decode(content[_LENGTH.size :][:length], type=Header), content[_LENGTH.size + length :]
    except (msgspec.DecodeError, struct.error) as error:
        raise ObjectRefused("mismatch", f"its header cannot be read: {error}") from error


def _require_prompt(nodes: PromptNodes, slot: BundleSlot, header: Header) -> list[Node]:
    """Returns the bundle's nodes as the prompt names them. A name is no proof, so their token ids are compared.

    Raises `ObjectRefused` if the bundle is not exactly the one of this place, with checkpoints between its blocks.
    """
    expected = list(slot_nodes(nodes, slot))
    found: list[Node] = []
    for one in header.nodes:
        if one.kind == Kind.CHECKPOINT and found and found[-1].kind == Kind.BLOCK:
            # The prompt may leave its tokens: then it is of no use to this one.
            node = _checkpoint(nodes, found[-1].end // nodes.block_size, one)
        elif expected:
            node = expected.pop(0)
        else:
            raise ObjectRefused("mismatch", "it has other nodes than its name says")
        if (one.name, one.parent, one.position, one.kind) != (node.name, node.parent, node.position, node.kind):
            raise ObjectRefused("mismatch", "it has other nodes than its name says")
        if one.kind != Kind.CHECKPOINT and one.token_ids != nodes.token_bytes(node):
            raise ObjectRefused("mismatch", f"node {one.name.hex()} has other tokens")
        cuts = nodes.cuts(node)
        fits = len(one.sizes) == len(cuts)
        if not fits or not all(0 <= size <= cut.piece.max_bytes for size, cut in zip(one.sizes, cuts, strict=True)):
            raise ObjectRefused("mismatch", f"node {one.name.hex()} has another layout")
        found.append(node)
    if expected:
        raise ObjectRefused("mismatch", "it lacks nodes that its name says it has")
    return found


def _checkpoint(nodes: PromptNodes, num_blocks: int, one: BundledNode) -> Node:
    """Returns the checkpoint of a bundle behind the first `num_blocks` blocks, as its tokens name it."""
    if len(one.token_ids) % ID_BYTES or len(one.token_ids) // ID_BYTES >= nodes.block_size:
        raise ObjectRefused("mismatch", f"node {one.name.hex()} has too many tokens")
    return nodes.behind(num_blocks, one.token_ids, Kind.CHECKPOINT)


def _decode_payload(nodes: PromptNodes, node: Node, bundled: BundledNode, stored: memoryview) -> Payload:
    payload: list[memoryview] = []
    for cut, size in zip(nodes.cuts(node), bundled.sizes, strict=True):
        out = np.empty((cut.piece.num_rows, cut.piece.row_bytes), dtype=np.uint8)
        try:
            decode_piece(stored[:size], cut.piece, None, out)
        except StoreCorrupt as error:
            raise ObjectRefused("mismatch", f"a piece of node {node.name.hex()}: {error}") from error
        stored = stored[size:]
        payload.append(out.reshape(-1).data)
    return tuple(payload)
