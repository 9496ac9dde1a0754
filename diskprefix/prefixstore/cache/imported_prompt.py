"""A prompt of a pack that nobody here trusts: its tokens, and digests of its state.

State steers answers, so this machine computes the prompt itself. The digests then tell whether the pack was right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind, node_name
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import raw_payload
from diskprefix.tokens import ID_BYTES, TokenIds

IMPORTED_TTL_S = 30 * 86400
"""How long a prompt waits to be computed, in seconds."""


class ImportedNode(Struct, frozen=True, array_like=True):
    """A node of the prompt. `digest` is the SHA-256 of its raw payload."""

    kind: NodeKind
    position: int
    num_tokens: int
    digest: bytes


class ImportedPrompt(Struct, frozen=True, array_like=True):
    """Prompt `number` of the pack with this name and hex SHA-256. `ids` are its token ids, int32, little-endian. The
    nodes come parents first."""

    pack: str
    digest: str
    number: int
    ids: bytes
    nodes: tuple[ImportedNode, ...]

    @property
    def id(self) -> str:
        """The id of its note."""
        return f"{self.digest}:{self.number}"

    @property
    def token_ids(self) -> TokenIds:
        return np.frombuffer(self.ids, "<i4").astype(np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    def ends(self, *, has_states: bool) -> list[int]:
        """Returns the numbers of tokens at which state is kept, ascending: the end, and the checkpoints of a model with
        states that cannot be cut."""
        kept = {node.position + node.num_tokens for node in self.nodes if has_states and node.kind != NodeKind.BLOCK}
        return sorted(kept | {self.num_tokens})


def encode_imported(prompt: ImportedPrompt) -> bytes:
    return msgspec.msgpack.encode(prompt)


def decode_imported(content: bytes) -> ImportedPrompt:
    """Raises `ValueError`."""
    return msgspec.msgpack.decode(content, type=ImportedPrompt)


class Comparison(Struct):
    """The result of comparing the state that is stored here with that of a pack: the tokens of the blocks that were
    compared, those of the blocks that are not stored, and the place of the first node that differs (its first token,
    and the one after its last)."""

    compared: int = 0
    missing: int = 0
    differs_at: tuple[int, int] | None = None


def compare(
    store: Store, root: bytes, prompt: ImportedPrompt, layout: PayloadLayout, accepts: Callable[[bytes], bool]
) -> Comparison:
    """Compares the nodes of an imported prompt with those that this machine has stored under a root, by builds whose
    digests are accepted. Waits for the disk. Raises `CacheError`."""
    result, parents = Comparison(), {0: root}
    for node in prompt.nodes:
        stop = node.position + node.num_tokens
        token_ids, parent = prompt.ids[ID_BYTES * node.position : ID_BYTES * stop], parents.get(node.position)
        if parent is None:
            raise StoreCorrupt("its nodes do not join")
        name = node_name(store.secret, parent, token_ids, node.kind)
        # A snapshot for each, because an open one keeps pages from being reused.
        with store.reads.snapshot() as snapshot:
            build = snapshot.build_of(name, parent, node.position, node.kind, token_ids)
            is_stored = build is not None and accepts(build) and name not in snapshot.unverified
            pieces = layout.pieces(node.num_tokens, node.kind)
            payload = raw_payload(snapshot, name, pieces) if is_stored else None
        if payload is not None and hashlib.sha256(payload).digest() != node.digest:
            result.differs_at = node.position, stop
            return result
        if node.kind == NodeKind.BLOCK:
            parents[stop] = name
            result.compared += node.num_tokens if is_stored else 0
            # What is no whole block may be stored as a part of a longer one.
            result.missing += node.num_tokens if not is_stored and stop < prompt.num_tokens else 0
    return result
