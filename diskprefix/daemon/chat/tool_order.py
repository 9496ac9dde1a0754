"""The order of a tenant's tools: those that were offered before stay in front of new ones, so that their text stays.

It is a record of the tenant, beside those of its replies, so a prompt is found again after a restart. Without it, as
for a tenant's first prompt, tools go by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

RECORD_ID = "tool order"
"""The id of the record. Those of replies are digests."""
_MAX_TOOLS = 4096
"""The most tools that are known. Further ones follow, by name."""


class ToolOrder(Struct, frozen=True):
    """The digests of the names of the `known` tools, in their order."""

    known: tuple[str, ...] = ()

    @classmethod
    def decode(cls, record: bytes | None) -> ToolOrder:
        """Returns the order of a record; without one, or if it is damaged, that of a tenant without tools."""
        with suppress(ValueError, TypeError):
            return cls() if record is None else cls(tuple(map(str, json.loads(record))))
        return cls()

    def encode(self) -> bytes:
        return json.dumps(self.known).encode()

    def indices(self, names: Sequence[str]) -> list[int]:
        """Returns the indices of `names` in their order: known ones as they came, then new ones by name."""
        ranks = {digest: rank for rank, digest in enumerate(self.known)}
        digests = digests_of(names)
        return sorted(range(len(names)), key=lambda index: (ranks.get(digests[index], len(ranks)), names[index]))

    def after(self, names: Iterable[str]) -> ToolOrder:
        """Returns the order once `names`, which are in their order, are known too; `self` if they are."""
        return self.joined(ToolOrder(tuple(digests_of(names))))

    def joined(self, later: ToolOrder) -> ToolOrder:
        """Returns the order with the tools of a later one behind its own; `self` if they are known."""
        known = tuple(dict.fromkeys([*self.known, *later.known]))[: max(_MAX_TOOLS, len(self.known))]
        return self if known == self.known else ToolOrder(known)


def digests_of(names: Iterable[str]) -> list[str]:
    """Returns a short digest of each name of a tool, for records."""
    return [hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest() for name in names]
