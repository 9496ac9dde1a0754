"""What the requests in the engine are doing, for whoever looks.

Any thread may read it while the engine goes on. Nothing is locked, and nothing is kept for it: a figure may be a step
behind another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from diskprefix.nouns import Scope

RequestState: TypeAlias = Literal["waiting", "restoring", "prefilling", "decoding"]


@dataclass(frozen=True, kw_only=True)
class Activity:
    """One request. `waiting`: it has no memory yet, or lost it to others for a while.

    `ready_tokens` of the prompt are restored or computed. `reply_tokens` and `tokens_per_s` are those of all choices
    together. Times are in seconds, `elapsed_s` since the arrival in the queue; what is not known yet is None.
    """

    id: str
    state: RequestState
    scope: Scope
    prompt_tokens: int
    restored_tokens: int = 0
    ready_tokens: int = 0
    reply_tokens: int = 0
    elapsed_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
