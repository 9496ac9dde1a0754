"""The state of a request on the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diskprefix.extras.vllm.request_options import RequestOptions
from diskprefix.nouns import Selection, Tenant
from diskprefix.tokens import TokenIds


class EngineRequest(Protocol):
    """The fields of the engine's request that are used. `num_tokens` counts the known tokens of prompt and reply,
    `num_preemptions` how often the request lost its pages."""

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

    `names` are the names of its full blocks, for each rank. All ranks have stored the first `num_stored` of them, or
    will have. `num_matched` of them can be loaded. `selection` says how much is kept.

    `num_preemptions` is the engine's value at the last lookup. `loading` are the tokens being loaded. `num_restored`
    tokens were loaded. `num_saved` blocks are new. `has_saves`: workers received blocks to save, which may fail.
    `is_broken`: a block is missing, so later ones cannot be saved.
    """

    request: EngineRequest
    options: RequestOptions
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
        """Returns the number of blocks to load. At least one token is left to compute."""
        return min(self.num_matched, (len(self.prompt) - 1) // block_size)

    def set_stored(self, num_blocks: int) -> None:
        """Corrects the number of stored blocks."""
        self.num_saved = max(0, self.num_saved - max(0, self.num_stored - num_blocks))
        self.num_stored = num_blocks
