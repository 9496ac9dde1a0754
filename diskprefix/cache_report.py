"""What the cache did for one request. Apart from `prefix_cache`, so that the server needs no torch to speak of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["none", "memory", "disk"]
MissReason: TypeAlias = Literal[
    "first_request",
    "diverged",
    "too_short",
    "no_checkpoint",
    "one_pass",
    "gate",
    "off",
    "media",
    "unsupported",
    "error",
]
Refused: TypeAlias = Literal["no_logits", "no_checkpoint", "one_pass", "damaged", "gate"]
Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What the cache did for one request; the `prefix_cache` object of the response.

    `reason` says why so much is kept (the words of `policy.select.Reason`), `window` how many recent prompts `auto`
    would look at, `recent` how many there were, `common` the longest prefix, in tokens, shared with one of them. What
    else it was decided by: see `policy.select.Selection` for `seen`, `lost`, `continues`, `trials`, `again`, `price`.
    `selected` is the policy's boundary in tokens, `aligned` the same floored to the grid, `restored` the tokens that
    were not prefilled. `saved`: `none` nothing to save, `queued` handed to the writer, `stored` already there,
    `dropped` refused (buffer or budget full). `miss_reason` is None when something was restored; `first_request`
    means that nothing of the prompt was stored; `diverged` that it leaves every recent prompt within the first block,
    at token `diverged_at`; `gate` that computing the prompt is faster here than restoring what was found of it;
    `media` that it holds images or sounds, whose state is neither saved nor restored.

    `matched` is how many tokens were found in the store. Where more were found than restored, `refused` says why:
    `no_logits` at least one token must be computed for the next-token logits, `no_checkpoint` state that cannot be cut
    is there at checkpoints only, `one_pass` such state of a model that computes a prompt in one pass, `damaged` what
    was found did not verify, `gate` computing is faster; all but `no_logits` and `damaged` are miss reasons too.
    `retained` names the tokens whose state was needed, as [first, end), by kind of state. `checkpoints` are where
    states are saved. `exact`: what was restored is what a prefill computes, bit for bit; false only where a reply is
    reused.
    """

    scope: str
    reason: str = "off"
    window: int = 0
    recent: int = 0
    common: int = 0
    seen: int = 0
    lost: int = 0
    continues: bool = False
    trials: int = 0
    again: int = 0
    price: int = 0
    selected: int = 0
    aligned: int = 0
    checkpoints: tuple[int, ...] = ()
    restored: int = 0
    matched: int = 0
    refused: Refused | None = None
    retained: dict[str, tuple[int, int]] = field(default_factory=dict)
    exact: bool = True
    source: Source = "none"
    restore_ms: float = 0.0
    saved: Saved = "none"
    miss_reason: MissReason | None = None
    diverged_at: int | None = None
