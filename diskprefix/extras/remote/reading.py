"""Reading a bundle, or the end of one, and verifying it."""

from __future__ import annotations

from dataclasses import dataclass

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.extras.remote.bundle import (
    BundleSlot,
    body_range,
    decode_payload,
    most_bytes,
    read_header,
    require_prompt,
)
from diskprefix.extras.remote.objects import Got, ObjectStore
from diskprefix.extras.remote.signing import PREAMBLE_BYTES, ObjectRefused, signed_bytes
from diskprefix.namespace_key import NamespaceKey

_BEGINNING_BYTES = 1 << 16
"""Enough for most headers."""


@dataclass(frozen=True)
class BundleRead:
    """Nodes of a bundle with their token ids (int32, little-endian) and raw payloads, the bytes that were read for
    them, and the time at which the object was written, in seconds since the epoch."""

    nodes: list[tuple[Node, bytes, memoryview]]
    num_bytes: int
    modified_at: float


def read_bundle(
    objects: ObjectStore, key: NamespaceKey, nodes: PromptNodes, slot: BundleSlot, num_near: int, path: str
) -> BundleRead | None:
    """Returns the nodes of the bundle at `path` that lie behind the prompt's first `num_near` blocks; None if there is
    no such object. Raises `ObjectRefused` and `RemoteUnavailable`."""
    is_whole, most = num_near <= slot.first, most_bytes(nodes, slot)
    got = objects.get(path, most) if is_whole else _beginning(objects, path, most)
    if got is None:
        return None
    header = read_header(key, path, got.data)
    prompt_nodes = require_prompt(nodes, slot, header)
    first = next((i for i, node in enumerate(prompt_nodes) if node.end > num_near * nodes.block_size), 0)
    start, end = body_range(header, first)
    at = signed_bytes(got.data)
    if is_whole:
        body = got.data[at + start :]
    else:
        rest = objects.get_range(path, at + start, at + end, most)
        body = memoryview(b"") if rest is None else rest.data
    if len(body) != end - start:
        raise ObjectRefused("truncated", f"it has {len(body)} bytes of {end - start} behind its header")
    found, num_bytes = [], at + len(body)
    for node, bundled in zip(prompt_nodes[first:], header.nodes[first:], strict=True):
        size = sum(bundled.sizes)
        found.append((node, bundled.token_ids, decode_payload(key, nodes, node, bundled, body[:size])))
        body = body[size:]
    return BundleRead(found, num_bytes, got.modified_at)


def _beginning(objects: ObjectStore, path: str, most: int) -> Got | None:
    """Returns at least the signed part of an object; None if there is no object."""
    got = objects.get_range(path, 0, _BEGINNING_BYTES, most)
    if got is not None and len(got.data) >= PREAMBLE_BYTES and signed_bytes(got.data) > len(got.data):
        got = objects.get_range(path, 0, signed_bytes(got.data), most)
    return got
