"""Uploading in the background: nodes of the nearer tiers become bundles in the object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.cache.tiers.tier import Upload, View, open_views
from diskprefix.extras.remote.bundle import (
    ABOUT,
    ABOUT_MOST_BYTES,
    BundleSlot,
    blocks_per_bundle,
    encode_bundle,
    object_path,
    slot_nodes,
    slot_path,
    whole_bundles,
)
from diskprefix.extras.remote.counts import Counts
from diskprefix.extras.remote.objects import ObjectStore
from diskprefix.extras.remote.signing import ObjectRefused, signed, verified
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.pieces import Payload
from diskprefix.store.schema import Kind


def write_prompt(
    objects: ObjectStore, key: NamespaceKey, counts: Counts, upload: Upload, is_closing: Callable[[], bool]
) -> None:
    """Writes the missing bundles of a prompt, until `is_closing` or it is not current. Raises `CacheError`.

    Holds no reader of the store while it waits for the network: an open reader keeps freed pages from being used again.
    """
    size = blocks_per_bundle(upload.nodes)
    num_blocks, has_tail = _stored(upload)
    slots = [slot for slot in whole_bundles(upload.nodes, size) if slot.last <= num_blocks]
    end = BundleSlot(num_blocks // size * size, num_blocks, has_tail)
    if end.last > end.first or has_tail:
        slots.append(end)
    is_described = False
    for slot in slots:
        path = slot_path(key, upload.nodes, slot)
        if counts.is_known(path):
            continue
        if is_closing() or not upload.is_current():
            counts.count("dropped")
            return
        if not counts.is_bad(path) and objects.has(path):
            counts.found(path)
            continue
        payloads = _payloads(upload, slot)
        if not payloads:
            # It was evicted meanwhile.
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
        counts.wrote(path, len(data))


def _describe_root(objects: ObjectStore, key: NamespaceKey, upload: Upload) -> None:
    """Writes the description of a root, which `ls` and `purge` read, unless a sound one is there. Each upload checks
    this: the bucket or a purge may have removed it, and without it the tenant of the objects is unknown."""
    path = object_path(key, upload.nodes.path.root, ABOUT)
    try:
        if (got := objects.get(path, ABOUT_MOST_BYTES)) is not None:
            verified(key, path, got)
            return
    except ObjectRefused:
        pass
    objects.put(path, signed(key, path, msgspec.msgpack.encode(upload.record)))


def _nearest(nodes: PromptNodes, views: Sequence[View], node: Node) -> View | None:
    return next((view for view in views if view.has(node, nodes.token_bytes(node))), None)


def first_blocks(nodes: PromptNodes, views: Sequence[View], most: int) -> int:
    """Returns the number of a prompt's first blocks that the views have without a gap, at most `most`."""
    missing = (number for number in range(most) if _nearest(nodes, views, nodes.blocks[number]) is None)
    return next(missing, most)


def _stored(upload: Upload) -> tuple[int, bool]:
    """Returns how many blocks of the offered tokens are in the nearer tiers, and whether the tail is too."""
    nodes = upload.nodes
    with open_views(upload.tiers) as views:
        num_wanted = upload.num_tokens // nodes.block_size
        number = first_blocks(nodes, views, num_wanted)
        is_whole = number == num_wanted and upload.num_tokens == len(nodes.token_ids)
        return number, is_whole and _nearest(nodes, views, nodes.tail()) is not None


def _payloads(upload: Upload, slot: BundleSlot) -> list[tuple[Node, Payload]]:
    """Returns the nodes of a bundle with raw payloads, verified, and behind each block a checkpoint
    within the offered tokens. Returns nothing if a node is no longer there."""
    nodes = upload.nodes
    found: list[tuple[Node, Payload]] = []
    with open_views(upload.tiers) as views:
        for node in slot_nodes(nodes, slot):
            if (view := _nearest(nodes, views, node)) is None:
                return []
            found.append((node, _read(nodes, node, view)))
            if nodes.layout.states and node.kind == Kind.BLOCK:
                found += _checkpoint_behind(upload, views, node)
    return found


def _checkpoint_behind(upload: Upload, views: Sequence[View], block: Node) -> Iterator[tuple[Node, Payload]]:
    """Yields the last checkpoint of the offered tokens that continues a block, if there is one."""
    nodes = upload.nodes
    behind = nodes.checkpoints(block.end // nodes.block_size, upload.num_tokens)
    for checkpoint in (node for node in behind if node.kind == Kind.CHECKPOINT):
        if (view := _nearest(nodes, views, checkpoint)) is not None:
            yield checkpoint, _read(nodes, checkpoint, view)
            return


def _read(nodes: PromptNodes, node: Node, view: View) -> Payload:
    """Returns a copy of a node's raw payload. Raises `StoreCorrupt`."""
    cuts, payload = nodes.cuts(node), list[memoryview]()
    for cut, write in zip(cuts, view.pieces(node, cuts, range(len(cuts))), strict=True):
        out = np.empty((cut.piece.num_rows, cut.piece.row_bytes), dtype=np.uint8)
        write(out)
        payload.append(out.reshape(-1).data)
    return tuple(payload)
