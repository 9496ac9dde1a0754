"""Scope + history + boundaries + kind of state → what of a prompt is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from diskprefix.policy.boundary import Prompt, last_safe
from diskprefix.policy.scope import Scope
from diskprefix.tokens import TokenIds, common_prefix_length, floor_to_grid

Reason: TypeAlias = Literal[
    "off",
    "full",
    "tokens",
    "best_match",
    "system_guess",
    "no_history",
    "no_match",
    "no_boundary",
    "below_min_tokens",
    "one_pass",
]
"""Why a selection is what it is. Stable words: they stand in log lines.

`off`, `full`, `tokens`: the scope says so. `best_match`: the longest prefix shared with a recent prompt, down to a safe
boundary. `system_guess`: no recent prompts, so the end of the system message. Nothing is kept with the others:
`no_history` no recent prompts and no system message to guess from, `no_match` not even the first token was seen before,
`no_boundary` the shared prefix holds no safe boundary, `below_min_tokens` what would be kept is not worth keeping,
`one_pass` the model's state is restorable at the end of a whole prompt only.
"""
StateKind: TypeAlias = Literal["cuttable", "checkpoints", "one_pass"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to keep of one prompt. All positions and lengths are in tokens.

    `selected` is the policy's boundary; `aligned` the grid point at or below it, up to which whole blocks are kept.
    `keep_tail`: `selected` is the whole prompt, so its partial block and next-token logits are kept too and an exact
    repeat runs no forward; `aligned` may then be 0. `checkpoints` are the grid points, ascending, at which state that
    cannot be cut is kept. `common` is the longest prefix shared with one of the `recent` prompts looked at. `window`
    (the most prompts that would have been) and `safe` (the last safe boundary in `common`, or the guess) are 0 unless
    the scope is auto.
    """

    scope: Scope
    prompt_tokens: int
    reason: Reason
    selected: int = 0
    aligned: int = 0
    keep_tail: bool = False
    checkpoints: tuple[int, ...] = ()
    window: int = 0
    recent: int = 0
    common: int = 0
    safe: int = 0

    @property
    def diverged_at(self) -> int | None:
        """Index of the first token that leaves every prompt looked at; None without any, or if nothing leaves them."""
        return self.common if self.recent and self.common < self.prompt_tokens else None

    def log_line(self) -> str:
        """One line for the log; `selected` in it is the grid point, as that is what a later request can restore."""
        tail = self.prompt_tokens - self.aligned if self.keep_tail else 0
        kept = f"selected={self.aligned} tail={tail} reason={self.reason}"
        match self.scope.kind:
            case "off":
                text = f"off scope: reason={self.reason}"
            case "full":
                text = f"full scope: prompt={self.prompt_tokens} {kept}"
            case "tokens":
                text = f"tokens scope: n={self.scope.value} prompt={self.prompt_tokens} {kept}"
            case "auto":
                text = (
                    f"auto scope: window={self.window} recent={self.recent} safe={self.safe} selected={self.aligned}"
                    f" common={self.common} reason={self.reason}"
                )
        return f"[disk-cache] {text}"


def select(
    scope: Scope,
    prompt: Prompt,
    recent: Sequence[TokenIds],
    *,
    block_size: int,
    min_tokens: int,
    cold_max: int,
    interval: int,
    state: StateKind = "cuttable",
) -> Selection:
    """What of `prompt` to keep under `scope`, given the `recent` prompts, newest first. Same inputs, same answer.

    `auto` looks at its window of `recent` only; the other scopes look at all of it, to say where the prompt leaves what
    was seen. Nothing is kept if it would be less than `min_tokens`. `state`: whether the state of every layer can be
    cut anywhere, or is restorable where a checkpoint was taken, or where a prompt ended that was computed in one pass.
    `cold_max` and `interval` place the checkpoints.
    """
    num_tokens = len(prompt.token_ids)
    if scope.kind == "off":
        return Selection(scope=scope, prompt_tokens=num_tokens, reason="off")
    auto = scope.kind == "auto"
    looked_at = recent[: scope.value] if auto else recent
    common = longest_common_prefix(prompt.token_ids, looked_at)
    selected, reason = _boundary(scope, prompt, bool(len(looked_at)), common)

    aligned, keep_tail = floor_to_grid(selected, block_size), 0 < selected == num_tokens
    if selected and (selected if keep_tail else aligned) < max(min_tokens, 1):
        aligned, keep_tail, reason = 0, False, "below_min_tokens"
    if state == "one_pass" and aligned and not keep_tail:
        aligned, reason = 0, "one_pass"
    checkpoints: tuple[int, ...] = ()
    if state == "checkpoints" and (aligned or keep_tail):
        positions = {aligned} | _continued(aligned, block_size, interval)
        if scope.kind == "full":
            positions |= _structural(prompt, block_size, cold_max)
        checkpoints = tuple(sorted(p for p in positions if p >= max(min_tokens, 1)))
    return Selection(
        scope=scope,
        prompt_tokens=num_tokens,
        reason=reason,
        selected=selected,
        aligned=aligned,
        keep_tail=keep_tail,
        checkpoints=checkpoints,
        window=scope.value if auto else 0,
        recent=len(looked_at),
        common=common,
        safe=selected if auto else 0,
    )


def longest_common_prefix(token_ids: TokenIds, recent: Sequence[TokenIds]) -> int:
    """The most leading tokens that `token_ids` shares with any one of `recent`; 0 if there are none."""
    best = 0
    for other in recent:
        if best == len(token_ids):
            break
        # Only a prompt that agrees at the next position can share more; most are ruled out by this one token.
        if best < len(other) and other[best] == token_ids[best]:
            best = max(best, common_prefix_length(token_ids, other))
    return best


def _boundary(scope: Scope, prompt: Prompt, has_history: bool, common: int) -> tuple[int, Reason]:
    num_tokens = len(prompt.token_ids)
    if scope.kind == "full":
        return num_tokens, "full"
    if scope.kind == "tokens":
        return min(scope.value, num_tokens), "tokens"
    if not has_history:
        return prompt.system_end, "system_guess" if prompt.system_end else "no_history"
    if not common:
        return 0, "no_match"
    safe = last_safe(prompt, common)
    return safe, "best_match" if safe else "no_boundary"


def _continued(end: int, block_size: int, interval: int) -> set[int]:
    """Every `interval` tokens up to `end`: they bound what a prompt that leaves this one in between recomputes."""
    positions = np.arange(interval, end + 1, interval)
    return set((positions - positions % block_size).tolist())


def _structural(prompt: Prompt, block_size: int, cold_max: int) -> set[int]:
    """Cold (a boundary that other conversations share) and the last boundary (what the next turn keeps of this one)."""
    num_tokens = len(prompt.token_ids)
    boundaries = last_safe(prompt, min(cold_max, num_tokens)), last_safe(prompt, num_tokens)
    return {floor_to_grid(position, block_size) for position in boundaries}
