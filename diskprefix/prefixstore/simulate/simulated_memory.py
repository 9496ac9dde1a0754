"""The KV memory of a daemon without overlapping requests, filled as by `kv.page_cache`: names of blocks, no pages."""

from __future__ import annotations

from diskprefix.prefixstore.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.tokens import ID_BYTES, LEAST_TOKENS, TokenIds, TokenPath, floor_to_grid, num_common, root_hash


class SimulatedMemory:
    """Full blocks, and the partial blocks at the ends of sequences, within `max_bytes`. The least recently used block
    is evicted first, and children before their parents. A partial block takes a whole page. Windows are not
    simulated."""

    def __init__(self, max_bytes: int, geometry: Geometry, block_size: int) -> None:
        self._max_bytes, self._used_bytes = max_bytes, 0
        self._geometry, self._block_size = geometry, block_size
        self._bytes_of: dict[tuple[bytes, bytes], int] = {}
        """The bytes of blocks, by the parent's name and the token ids, the least recently used first."""

    def match(self, tenant: str, token_ids: TokenIds) -> int:
        """Returns the number of leading tokens of a prompt that can be restored from memory."""
        num_tokens = self._num_matched(tenant, token_ids)
        return num_tokens if num_tokens >= LEAST_TOKENS else 0

    def _num_matched(self, tenant: str, token_ids: TokenIds) -> int:
        kind, size, ids = self._geometry.state_kind, self._block_size, token_ids.tobytes()
        parts = self._parts(tenant, token_ids)
        num_blocks = next((n for n, part in enumerate(parts) if part not in self._bytes_of), len(parts) - 1)
        if kind not in AT_CHECKPOINTS:
            parent, rest = parts[num_blocks][0], ids[num_blocks * size * ID_BYTES :]
            common = max((num_common(own, rest) for before, own in self._bytes_of if before == parent), default=0)
            stop = min(num_blocks * size + common, len(token_ids) - 1)
            return stop if kind in AT_ANY_TOKEN else floor_to_grid(stop, size)
        for number in range(num_blocks, -1, -1):
            parent, start = parts[number][0], number * size * ID_BYTES
            last = [own for before, own in self._bytes_of if before == parent and len(own) < size * ID_BYTES]
            last = [own for own in last if ids.startswith(own, start) and (kind in AT_ANY_TOKEN or not own)]
            if stops := [stop for own in last if (stop := start + len(own)) < len(ids)]:
                return max(stops) // ID_BYTES
        return 0

    def keep(self, tenant: str, token_ids: TokenIds, num_exact: int) -> None:
        """Keeps a sequence that has ended. Its first `num_exact` tokens have the state of a prefill."""
        state_bytes, page_bytes = self._geometry.state_bytes, self._block_size * self._geometry.bytes_per_token
        *blocks, rest = self._parts(tenant, token_ids[:num_exact])
        has_end = num_exact == len(token_ids) if state_bytes else rest[1]
        added = [(rest, page_bytes * bool(rest[1]) + state_bytes)] if has_end else []
        for part, num_bytes in [*added, *((block, page_bytes) for block in reversed(blocks))]:
            self._used_bytes += num_bytes - self._bytes_of.pop(part, 0)
            self._bytes_of[part] = num_bytes
        while self._used_bytes > self._max_bytes:
            self._used_bytes -= self._bytes_of.pop(next(iter(self._bytes_of)))

    def _parts(self, tenant: str, token_ids: TokenIds) -> list[tuple[bytes, bytes]]:
        """Returns the parent's name and the token ids of each full block of a prompt, and of the rest."""
        path, size = TokenPath(0, root_hash(tenant), token_ids, self._block_size), self._block_size
        return [(path.parent(n), token_ids[n * size : (n + 1) * size].tobytes()) for n in range(path.num_blocks + 1)]
