"""A bundle: an object with consecutive nodes of one prefix and their payloads."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.signing import PREAMBLE_BYTES, ObjectRefused, signed, verified
from diskprefix.prefixstore.store.codec.codec import Codec, decode_piece, encode_piece
from diskprefix.prefixstore.store.pieces import Payload
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import ID_BYTES

ABOUT = "about"
"""The name of the object with the record of a root."""
ABOUT_MAX_BYTES = 64 << 10
_TARGET_BYTES = 4 << 20
_MAX_BLOCKS = 16
"""Every block of a bundle may be the last of another machine's shorter prompt, and is asked for."""
_MAX_HEADER_BYTES = 4 << 20
"""Path, token ids and sizes of the largest bundles take less than a quarter of it."""
_LENGTH = struct.Struct("<I")


class BundledNode(msgspec.Struct, frozen=True, array_like=True):
    """A node in a bundle. `token_ids` are int32, little-endian. `sizes` are the sizes of its encoded pieces, which
    follow the header, node after node."""

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
    """The place of a bundle in a prompt: blocks `first` up to `last` (excluded), and the tail if it `has_tail`."""

    first: int
    last: int
    has_tail: bool = False


def blocks_per_bundle(nodes: PromptNodes) -> int:
    """Returns the number of blocks in a bundle, which depends on the layout only."""
    block_bytes = nodes.layout.payload_bytes(nodes.block_size, NodeKind.BLOCK)
    return max(1, min(_MAX_BLOCKS, -(-_TARGET_BYTES // max(1, block_bytes))))


def whole_bundles(nodes: PromptNodes, size: int) -> list[BundleSlot]:
    """Returns the bundles of `size` blocks at the fixed positions of the prompt."""
    return [BundleSlot(first, first + size) for first in range(0, nodes.num_blocks - size + 1, size)]


def last_bundles(size: int, first: int, num_blocks: int) -> list[BundleSlot]:
    """Returns the bundles of fewer than `size` blocks with which prompts may end after `first` blocks, a multiple of
    `size`, the longest first. `num_blocks` is the number of blocks of this prompt."""
    longest = min(num_blocks, first + size - 1)
    slots = [BundleSlot(first, last) for last in range(longest, first, -1)]
    return [BundleSlot(first, num_blocks, has_tail=True), *slots] if num_blocks < first + size else slots


def slot_nodes(nodes: PromptNodes, slot: BundleSlot) -> Iterator[Node]:
    """Yields the nodes of the bundle in this place, except checkpoints, which are optional."""
    yield from nodes.blocks[slot.first : slot.last]
    if slot.has_tail:
        yield nodes.tail()


def max_object_bytes(nodes: PromptNodes, slot: BundleSlot) -> int:
    """Returns the maximum size of the object in this place. A larger object, which somebody may have planted, is not
    read."""
    block, checkpoint, tail = (
        sum(piece.max_bytes for piece in nodes.layout.pieces(nodes.block_size, kind))
        for kind in (NodeKind.BLOCK, NodeKind.CHECKPOINT, NodeKind.TAIL)
    )
    return PREAMBLE_BYTES + _MAX_HEADER_BYTES + (slot.last - slot.first) * (block + checkpoint) + slot.has_tail * tail


def object_path(key: NamespaceKey, root: bytes, name: str) -> str:
    """Returns the path of an object of a root. `name` is the name of a bundle, or `ABOUT`."""
    return f"{key.digest.hex()}/{root.hex()}/{name}"


def slot_path(key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot) -> str:
    """Returns the path of the bundle in this place: the name of its last node, and the number of blocks up to its
    end."""
    *_, last = slot_nodes(nodes, slot)
    return object_path(key, nodes.path.root, f"{last.name.hex()}.{slot.last}")


def encode_bundle(
    key: NamespaceKey, nodes: PromptNodes, path: str, payloads: Iterable[tuple[Node, Payload]], now: float
) -> bytes:
    """Returns the object with these nodes, parents first, and their raw payloads."""
    bundled: list[BundledNode] = []
    body: list[bytes | bytearray] = []
    for node, payload in payloads:
        # Always the smallest codec, because a network is slower than a decoder. No checksum: there is a MAC.
        parts = zip(payload, nodes.pieces(node), strict=True)
        pieces = [encode_piece(raw, piece, Codec.PLANES, None) for raw, piece in parts]
        token_ids, sizes = nodes.token_bytes(node), tuple(map(len, pieces))
        bundled.append(BundledNode(node.name, node.parent, node.position, node.kind, token_ids, sizes))
        body += pieces
    header = msgspec.msgpack.encode(Header(nodes.path.root, now, tuple(bundled)))
    return signed(key, path, b"".join([_LENGTH.pack(len(header)), header, *body]))


def decode_bundle(
    key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot, path: str, data: memoryview, num_near: int
) -> list[tuple[Node, bytes, Payload]]:
    """Returns the nodes of the bundle at `path` after the prompt's first `num_near` blocks, with their token ids
    (int32, little-endian) and raw payloads. Raises `ObjectRefused`."""
    header, body = split_bundle(verified(key, path, data))
    decoded: list[tuple[Node, bytes, Payload]] = []
    for node, bundled in zip(_require_prompt(nodes, slot, header), header.nodes, strict=True):
        size = sum(bundled.sizes)
        if node.end > num_near * nodes.block_size:
            decoded.append((node, bundled.token_ids, _decode_payload(nodes, node, bundled, body[:size])))
        body = body[size:]
    return decoded


def split_bundle(content: memoryview) -> tuple[Header, memoryview]:
    """Returns the header, and the bytes of the pieces. Raises `ObjectRefused`."""
    try:
        (length,) = _LENGTH.unpack_from(content)
        return msgspec.msgpack.decode(content[_LENGTH.size :][:length], type=Header), content[_LENGTH.size + length :]
    except (msgspec.DecodeError, struct.error) as error:
        raise ObjectRefused("mismatch", f"its header cannot be read: {error}") from error


def _require_prompt(nodes: PromptNodes, slot: BundleSlot, header: Header) -> list[Node]:
    """Returns the bundle's nodes under the names that the prompt gives them. Token ids are compared, because a name is
    no proof. Raises `ObjectRefused` if the bundle is not exactly the bundle of this place, with optional checkpoints
    after its blocks."""
    expected = list(slot_nodes(nodes, slot))
    checked: list[Node] = []
    for item in header.nodes:
        label = f"node {item.name.hex()}"
        if item.kind == NodeKind.CHECKPOINT and checked and checked[-1].kind == NodeKind.BLOCK:
            if len(item.token_ids) % ID_BYTES or len(item.token_ids) // ID_BYTES >= nodes.block_size:
                raise ObjectRefused("mismatch", f"{label} has too many tokens")
            # Its tokens may differ from the prompt's: then the prompt has no use for it.
            node = nodes.child(checked[-1].end // nodes.block_size, item.token_ids, NodeKind.CHECKPOINT)
        elif expected:
            node = expected.pop(0)
        else:
            raise ObjectRefused("mismatch", "it has more nodes than its name says")
        if (item.name, item.parent, item.position, item.kind) != (node.name, node.parent, node.position, node.kind):
            raise ObjectRefused("mismatch", "it has other nodes than its name says")
        if item.kind != NodeKind.CHECKPOINT and item.token_ids != nodes.token_bytes(node):
            raise ObjectRefused("mismatch", f"{label} has other tokens")
        limits, sizes = [piece.max_bytes for piece in nodes.pieces(node)], item.sizes
        if len(sizes) != len(limits) or not all(0 <= n <= limit for n, limit in zip(sizes, limits, strict=True)):
            raise ObjectRefused("mismatch", f"{label} has another layout")
        checked.append(node)
    if expected:
        raise ObjectRefused("mismatch", "it lacks nodes that its name says it has")
    return checked


def _decode_payload(nodes: PromptNodes, node: Node, bundled: BundledNode, stored: memoryview) -> Payload:
    payload: list[memoryview] = []
    for piece, size in zip(nodes.pieces(node), bundled.sizes, strict=True):
        out = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
        try:
            decode_piece(stored[:size], piece, None, out)
        except StoreCorrupt as error:
            raise ObjectRefused("mismatch", f"a piece of node {node.name.hex()}: {error}") from error
        stored = stored[size:]
        payload.append(out.reshape(-1).data)
    return tuple(payload)
