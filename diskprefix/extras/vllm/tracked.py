"""The state of a request on the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diskprefix.nouns import CacheOptions, Mark, Selection, Tenant
from diskprefix.tokens import TokenIds


class EngineRequest(Protocol):
    """The fields of vLLM's request that the connector reads. `num_tokens` counts the known tokens of prompt and reply;
    `num_preemptions` counts how often the request lost its pages."""

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    num_preemptions: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass
class Tracked:
    """A request that the cache serves.

    `names` has, for each rank, the root and the names of the full blocks. The first `num_stored` blocks are stored by
    all ranks, or are being saved. The first `num_matched` blocks can be loaded. `selection` says how much is kept.

    `num_preemptions` is the engine's value at the last lookup. `loading` is the range of tokens being loaded, and
    `num_restored` the number of tokens loaded. `num_saved` counts new blocks. `has_saves`: workers received blocks to
    save, which may fail. `is_broken`: a block is missing, so the blocks after it cannot be saved.
    """

    request: EngineRequest
    options: CacheOptions
    marks: tuple[Mark, ...]
    tenant: Tenant
    prompt: TokenIds
    names: list[list[bytes]]
    token_ids: bytes
    when: float
    num_matched: int = 0
    num_stored: int = 0
    num_restored: int = 0
    num_saved: int = 0
    has_saves: bool = False
    num_preemptions: int = -1
    loading: range = range(0)
    selection: Selection | None = None
    is_broken: bool = False

    def num_loadable(self, block_size: int) -> int:
        """Returns the number of blocks to load, which leaves at least one token to compute."""
        return min(self.num_matched, (len(self.prompt) - 1) // block_size)

    def set_stored(self, num_blocks: int) -> None:
        """Corrects the number of stored blocks."""
        self.num_saved = max(0, self.num_saved - max(0, self.num_stored - num_blocks))
        self.num_stored = num_blocks
