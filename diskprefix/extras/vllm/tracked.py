"""What the scheduler's side knows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diskprefix.extras.vllm.fetching import Fetch
from diskprefix.extras.vllm.request_options import RequestOptions
from diskprefix.nouns import Selection, Tenant
from diskprefix.tokens import TokenIds


class EngineRequest(Protocol):
    """What is used of the engine's request. `num_tokens` counts the tokens that are known, prompt and reply.
    `num_preemptions` is how often it had to give its pages away."""

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
    """A request that the cache serves. `names` are those of its full blocks, for each rank; `num_stored` of them are
    stored by all ranks, or will be; `num_matched` of them can be loaded. `selection` says what is kept.

    `num_preemptions` is what the engine's request had when it was looked up. `loading` are the tokens that are to be
    loaded, until the engine goes on. `num_restored` tokens were loaded; `num_saved` blocks are new, and with
    `has_saves` workers were told of some, which may be lost. The engine had `num_cached` tokens itself.

    `fetch` is what it asked of the tier that machines share. `computing` is since when it is computed, and from which
    token on; `is_timed` says that this is known of the whole prompt."""

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
    num_cached: int = 0
    num_preemptions: int = -1
    loading: range = range(0)
    fetch: Fetch | None = None
    computing: tuple[float, int] | None = None
    is_timed: bool = False
    selection: Selection | None = None
    is_broken: bool = False

    def num_loadable(self, block_size: int) -> int:
        """How many blocks are loaded: one token at least is left to compute."""
        return min(self.num_matched, (len(self.prompt) - 1) // block_size)

    def store_has(self, num_blocks: int) -> None:
        """So many blocks are stored, whatever was known before."""
        self.num_saved = max(0, self.num_saved - max(0, self.num_stored - num_blocks))
        self.num_stored = num_blocks
