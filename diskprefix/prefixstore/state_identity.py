"""The identity of stored state: what computed it, and its form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from diskprefix.identity import differing, identity_fields, identity_text
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION, LayoutGroup, LayoutText
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.store import Store
from diskprefix.printable import shown
from diskprefix.tokens import root_hash


class StateIdentity(Struct, frozen=True):
    """Everything that changes the numbers of a state (`fingerprint`), its form (`layout`, see
    `store.pieces.LayoutText`), and the number of tokens in a block. States with different identities never mix.
    `tokenizer` is a folder or a file, for commands that show text."""

    model: str
    block_size: int
    layout: str
    layout_version: int
    fingerprint: Mapping[str, str]
    tokenizer: str = ""

    @classmethod
    def of_tensors(
        cls,
        model: str,
        fingerprint: Mapping[str, str],
        groups: tuple[LayoutGroup, ...],
        block_size: int = 256,
        *,
        shard: tuple[int, int] = (0, 1),
        tokenizer: str = "",
    ) -> StateIdentity:
        """Returns the identity of state that consists of tensors with a part for each token. `shard` is the rank of the
        process that computes it, and the number of ranks that share each token."""
        layout = LayoutText(LAYOUT_VERSION, groups, (0, "float32"), shard=shard).text()
        return cls(model, block_size, layout, LAYOUT_VERSION, fingerprint, tokenizer)

    def record(self, tenant: str) -> RootRecord:
        """Returns the record of a tenant's root. `tenant` is the text of a `values.Tenant`, "" for the shared one."""
        return RootRecord(
            model=self.model,
            block_size=self.block_size,
            layout=self.layout,
            created_at=time.time(),
            identity=identity_text(self.fingerprint, self.block_size, self.layout_version, self.layout, tenant),
            tenant=tenant,
            tokenizer=self.tokenizer,
        )

    def root(self, tenant: str) -> bytes:
        return root_hash(self.record(tenant).identity)

    def differences(self, store: Store) -> str | None:
        """Returns the fields in which the closest stored root of this model differs from this identity. Returns None if
        the store has a root of this identity, or no root of the model. Raises `CacheError`."""
        own = identity_fields(self.record("").identity)
        closest: list[str] | None = None
        with store.snapshot() as snapshot:
            for _, record in snapshot.roots():
                with suppress(ValueError):
                    stored = identity_fields(record.identity) if record.model == self.model else None
                    if stored is None:
                        continue
                    if not (names := differing(own, stored)):
                        return None
                    if closest is None or len(names) < len(closest):
                        closest = [
                            f"{name} ({_short(stored.get(name))}, here {_short(own.get(name))})" for name in names
                        ]
        return None if closest is None else ", ".join(closest)


def _short(value: str | None) -> str:
    return shown(value or "none", 40)
