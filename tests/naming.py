"""Has nodes named in another way than the store names them."""

from __future__ import annotations

from typing import Protocol

import pytest

from diskprefix.cache.tiers import nodes
from diskprefix.store.schema import Kind


class Name(Protocol):
    """As `store.schema.node_name`."""

    def __call__(self, secret: int, parent: bytes, token_ids: bytes, kind: Kind, /) -> bytes: ...


def name_nodes(patch: pytest.MonkeyPatch, name: Name) -> None:
    def block_hashes(secret: int, root: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
        names, size = [root], 4 * block_size
        for start in range(0, len(token_ids) - size + 1, size):
            names.append(name(secret, names[-1], token_ids[start : start + size], Kind.BLOCK))
        return names[1:]

    patch.setattr(nodes, "node_name", name)
    patch.setattr(nodes, "block_hashes", block_hashes)
