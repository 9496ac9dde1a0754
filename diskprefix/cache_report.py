"""What the cache did for one request. Apart from `prefix_cache`, so that the server needs no torch to speak of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from diskprefix.policy.breaks import Break
from diskprefix.policy.select import Selection
from diskprefix.prompt import Rewriting

Source: TypeAlias = Literal["none", "memory", "disk", "remote"]
Refused: TypeAlias = Literal["no_logits", "no_checkpoint", "whole_prompt_only", "damaged", "faster_to_compute"]
MissReason: TypeAlias = Literal[Refused, "not_stored", "diverged", "too_short", "off", "media", "unsupported", "error"]
MISS_REASONS: tuple[str, ...] = get_args(MissReason)
Saved: TypeAlias = Literal["none", "queued", "stored", "dropped"]


@dataclass(frozen=True, kw_only=True)
class CacheReport:
    """What the cache did for one request. The response's `prefix_cache` object shows a part of it, the debug log all.

    `selection` is what the policy keeps of the prompt, and what it looked at. `restored` is the number of prompt tokens
    that were not computed, `source` where their state came from. `saved`: `none` there was nothing to save, `queued`
    the writer has it, `stored` it is stored already, `dropped` there was no room for it.

    `miss_reason` says why nothing was restored; it is None if something was. server/README.md explains each reason.

    `matched` is the number of prompt tokens found in the store. If not all that is stored was restored, `refused` says
    why, in the words of `miss_reason`. `exact`: the restored state is, bit for bit, what a prefill computes; False only
    for the state of a reply that was decoded. `restore_ms`: reading, verifying and copying the state.

    `broken` is where the prompt leaves an earlier one although most of what follows is the same, `broken_line` the line
    of the prompt there; None and empty if there is no such place, or nobody asks. `rewriting` and
    `replayed` are the prompt's.
    """

    selection: Selection
    restored: int = 0
    source: Source = "none"
    miss_reason: MissReason | None = None
    matched: int = 0
    refused: Refused | None = None
    exact: bool = True
    restore_ms: float = 0.0
    saved: Saved = "none"
    broken: Break | None = None
    broken_line: str = ""
    rewriting: Rewriting = field(default_factory=Rewriting)
    replayed: int = 0

    @property
    def diverged_at(self) -> int | None:
        """Index of the first token that differs from every recent prompt; None unless that is the miss reason."""
        return self.selection.diverged_at if self.miss_reason == "diverged" else None

    def log_line(self) -> str:
        """One line with all figures, `name=value` each; what is empty or None is left out."""
        values = vars(self) | vars(self.selection)
        for name in ("selection", "broken_line", "rewriting"):
            del values[name]
        said = (f"{name}={_shown(value)}" for name, value in values.items() if value not in (None, ()))
        return f"[disk-cache] {' '.join(said)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)
