"""Has nodes named in another way than the store names them."""

from __future__ import annotations

from typing import Protocol

import pytest

from diskprefix.prefixstore.cache.tiers import nodes
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import TokenPath


class Name(Protocol):
    """As `store.schema.node_name`."""

    def __call__(self, secret: int, parent: bytes, token_ids: bytes, kind: NodeKind, /) -> bytes: ...


def name_nodes(patch: pytest.MonkeyPatch, name: Name) -> None:
    def block_names(path: TokenPath) -> list[bytes]:
        names = [path.root]
        for token_ids in path.token_ids[: path.num_blocks * path.block_size].reshape(-1, path.block_size):
            names.append(name(path.secret, names[-1], token_ids.tobytes(), NodeKind.BLOCK))
        return names[1:]

    patch.setattr(nodes, "node_name", name)
    patch.setattr(TokenPath, "block_names", property(block_names))
