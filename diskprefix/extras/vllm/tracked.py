"""The state of a request on the scheduler's side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diskprefix.extras.vllm.fetching import PromptFetch
from diskprefix.extras.vllm.request_options import RequestOptions
from diskprefix.nouns import Selection, Tenant
from diskprefix.tokens import TokenIds


class EngineRequest(Protocol):
    """The used fields of the engine's request. `num_tokens` counts the known tokens, prompt and reply.
    `num_preemptions` counts how often it had to give up its pages."""

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
    stored by all ranks, or will be; `num_matched` of them can be loaded. `selection` says how much is kept.

    `num_preemptions` is the engine's value at the last lookup. `loading` are the tokens that are to be loaded, until
    the engine continues. `num_restored` tokens were loaded. `num_saved` blocks are new. `has_saves`: workers were given
    some to save, which may be lost. The engine had `num_cached` tokens itself.

    `fetch` is its request to the shared tier. `computing` is the time since which it is computed, and the first
    computed token; `is_timed` says that the whole prompt was timed.
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
    num_cached: int = 0
    num_preemptions: int = -1
    loading: range = range(0)
    fetch: PromptFetch | None = None
    computing: tuple[float, int] | None = None
    is_timed: bool = False
    selection: Selection | None = None
    is_broken: bool = False

    def num_loadable(self, block_size: int) -> int:
        """Returns the number of blocks to load: one token at least is left to compute."""
        return min(self.num_matched, (len(self.prompt) - 1) // block_size)

    def store_has(self, num_blocks: int) -> None:
        """Sets the number of stored blocks, whatever was known before."""
        self.num_saved = max(0, self.num_saved - max(0, self.num_stored - num_blocks))
        self.num_stored = num_blocks
