"""What the cache did for one request. Apart from `prefix_cache`, so that the server needs no torch to speak of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["none", "memory", "disk"]
MissReason: TypeAlias = Literal["first_request", "diverged", "too_short", "off", "unsupported", "error"]
Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What the cache did for one request; the `prefix_cache` object of the response.

    `selected` is the policy's boundary in tokens, `aligned` the same floored to the grid, `restored` the tokens that
    were not prefilled. `saved`: `none` nothing to save, `queued` handed to the writer, `stored` already there,
    `dropped` refused (buffer or budget full). `miss_reason` is None when something was restored; `first_request`
    means that nothing of the prompt was stored; `diverged` that it leaves every recent prompt within the first block,
    at token `diverged_at`.
    """

    scope: str
    selected: int = 0
    aligned: int = 0
    restored: int = 0
    source: Source = "none"
    restore_ms: float = 0.0
    saved: Saved = "none"
    miss_reason: MissReason | None = None
    diverged_at: int | None = None
