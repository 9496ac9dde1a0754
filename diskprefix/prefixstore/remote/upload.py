"""Uploading in the background: nodes of the nearer tiers become bundles in the object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Upload, View, open_views
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.bundle import (
    ABOUT,
    ABOUT_MAX_BYTES,
    BundleSlot,
    blocks_per_bundle,
    encode_bundle,
    object_path,
    slot_nodes,
    slot_path,
    whole_bundles,
)
from diskprefix.prefixstore.remote.counts import Counts
from diskprefix.prefixstore.remote.objects import ObjectStore
from diskprefix.prefixstore.remote.signing import ObjectRefused, signed, verified
from diskprefix.prefixstore.store.pieces import Payload
from diskprefix.prefixstore.store.schema import NodeKind


def write_prompt(
    objects: ObjectStore, key: NamespaceKey, counts: Counts, upload: Upload, is_closing: Callable[[], bool]
) -> None:
    """Writes the missing bundles of a prompt, until `is_closing` or `upload` is not current. Raises `CacheError`.

    Holds no reader of the store while it waits for the network: an open reader keeps freed pages from being reused.
    """
    size = blocks_per_bundle(upload.nodes)
    num_blocks, has_tail = _stored_blocks(upload)
    slots = [slot for slot in whole_bundles(upload.nodes, size) if slot.last <= num_blocks]
    last = BundleSlot(num_blocks // size * size, num_blocks, has_tail)
    if last.last > last.first or has_tail:
        slots.append(last)
    is_described = False
    for slot in slots:
        path = slot_path(key, upload.nodes, slot)
        if counts.is_known(path):
            continue
        if is_closing() or not upload.is_current():
            counts.count("dropped")
            return
        if not counts.is_bad(path) and objects.has(path):
            counts.add_known(path)
            continue
        if not (payloads := _payloads(upload, slot)):
            # A node was evicted meanwhile.
            return
        if not is_described:
            _describe_root(objects, key, upload)
            is_described = True
        data = encode_bundle(key, upload.nodes, path, payloads, time.time())
        objects.put(path, data)
        if not upload.is_current():
            # The purge may have looked at the bucket before this object was there.
            objects.delete([path])
            counts.count("dropped")
            return
        counts.add_written(path, len(data))


def _describe_root(objects: ObjectStore, key: NamespaceKey, upload: Upload) -> None:
    """Writes the description of a root, which `purge` reads, unless a valid one exists. Each upload checks this: a
    lifecycle rule or a purge may have removed the description, and without it the tenant of the objects is unknown."""
    path = object_path(key, upload.nodes.path.root, ABOUT)
    with suppress(ObjectRefused):
        if (data := objects.get(path, ABOUT_MAX_BYTES)) is not None:
            verified(key, path, data)
            return
    objects.put(path, signed(key, path, msgspec.msgpack.encode(upload.record)))


def _nearest(nodes: PromptNodes, views: Sequence[View], node: Node) -> View | None:
    return next((view for view in views if view.has(node, nodes.token_bytes(node))), None)


def num_first_blocks(nodes: PromptNodes, views: Sequence[View], num_blocks: int) -> int:
    """Returns how many of a prompt's first `num_blocks` blocks the views have without a gap."""
    missing = (number for number in range(num_blocks) if _nearest(nodes, views, nodes.blocks[number]) is None)
    return next(missing, num_blocks)


def _stored_blocks(upload: Upload) -> tuple[int, bool]:
    """Returns how many blocks of the offered tokens the nearer tiers have, and whether they have the tail."""
    nodes = upload.nodes
    with open_views(upload.tiers) as views:
        num_offered = upload.num_tokens // nodes.block_size
        num_stored = num_first_blocks(nodes, views, num_offered)
        is_whole = num_stored == num_offered and upload.num_tokens == len(nodes.token_ids)
        return num_stored, is_whole and _nearest(nodes, views, nodes.tail()) is not None


def _payloads(upload: Upload, slot: BundleSlot) -> list[tuple[Node, Payload]]:
    """Returns the nodes of a bundle with raw, verified payloads, each block followed by its last checkpoint within the
    offered tokens. Returns an empty list if a node is missing."""
    nodes = upload.nodes
    payloads: list[tuple[Node, Payload]] = []
    with open_views(upload.tiers) as views:
        for node in slot_nodes(nodes, slot):
            if (view := _nearest(nodes, views, node)) is None:
                return []
            payloads.append((node, _read(nodes, node, view)))
            if nodes.layout.states and node.kind == NodeKind.BLOCK:
                for point in nodes.checkpoints(node.end // nodes.block_size, upload.num_tokens):
                    if point.kind == NodeKind.CHECKPOINT and (view := _nearest(nodes, views, point)) is not None:
                        payloads.append((point, _read(nodes, point, view)))
                        break
    return payloads


def _read(nodes: PromptNodes, node: Node, view: View) -> Payload:
    """Returns a copy of a node's raw payload. Raises `StoreCorrupt`."""
    pieces, payload = nodes.pieces(node), list[memoryview]()
    for piece, write in zip(pieces, view.piece_writes(node, pieces, range(len(pieces))), strict=True):
        out = np.empty((piece.num_rows, piece.row_bytes), dtype=np.uint8)
        write(out)
        payload.append(out.reshape(-1).data)
    return tuple(payload)
