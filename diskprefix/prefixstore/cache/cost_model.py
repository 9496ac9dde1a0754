"""Decides whether restoring is worth it: the time to compute a prompt against the time to read it from disk.

The last timings give two straight lines: seconds to compute by tokens, seconds to restore by bytes. Restoring pays if
it takes less time. The fixed part of computing is left out, as the rest of the prompt costs it in any case. A wrong
refusal costs a prefill, and would never show. So the answer is yes until both lines are known, and in every sixteenth
case after that.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from diskprefix.prefixstore.cache.tiers.tier import Prefetched

log = logging.getLogger("diskprefix")

_CLOSED = "computing is faster here than reading saved prompts, so they are not used; --kv-cache-gate off uses them"
_OPEN = "reading saved prompts is faster again than computing, so they are used"

Use: TypeAlias = Literal["restore", "save", "fetch"]
Sample: TypeAlias = tuple[int, float]
"""A size in tokens or bytes, and the seconds that it took."""
_RECENT, _ENOUGH = 32, 4
"""The maximum number of samples of each kind, and the minimum before anything is decided: the first samples include
costs that occur once."""
_MIN_TOKENS, _TELLING_TOKENS = 16, 128
"""Shorter prefills do not count, as they take a whole step. One prefill of the latter length tells the speed."""
_LET_THROUGH = 16
_MAX_TOKENS, _MAX_UNITS, _MAX_S = 2**31, 2**50, 1e6


class CostLine(NamedTuple):
    """Seconds by size: `fixed_s` + `s_per_unit` × size; below the size `holds_from`, proportionally less. That is the
    smallest sample where the samples do not tell the two parts apart, else 0."""

    fixed_s: float
    s_per_unit: float
    holds_from: int = 0

    def at(self, size: int) -> float:
        on_line = max(size, self.holds_from)
        return (self.fixed_s + self.s_per_unit * on_line) * (size / on_line if on_line else 1.0)

    @classmethod
    def through(cls, samples: Sequence[Sample], *, has_fixed: bool = True) -> CostLine | None:
        """Returns the line through the samples by medians (Theil and Sen): a quarter of them may be far off. None for
        too few samples. Sizes within a factor of two say more about noise than about the slope. If all are, the whole
        time is fixed, or without `has_fixed` proportional."""
        if len(samples) < _ENOUGH:
            return None
        pairs = combinations(sorted(samples), 2)
        slope = max(median([(t - s) / (n - m) for (m, s), (n, t) in pairs if n >= 2 * m] or [0.0]), 0.0)
        fixed_s = median(seconds - slope * size for size, seconds in samples)
        if fixed_s < 0 or not (slope or has_fixed):
            return cls(0.0, median(seconds / size for size, seconds in samples))
        return cls(fixed_s, slope, 0 if slope else min(samples)[0])


class CostModel:
    """Decides by measured times whether to save and to restore. For the engine's thread; questions and
    `record_prefetch` are for any thread.

    `mode` is `--kv-cache-gate`: `off` measures too, but allows everything. `loaded_bytes` returns the bytes that a
    restore of n tokens loads. `prefill_s_per_token` is known after one long prefill.
    """

    def __init__(self, mode: str, loaded_bytes: Callable[[int], int]) -> None:
        self.mode = mode
        self._loaded_bytes = loaded_bytes
        self._samples = {kind: deque[Sample](maxlen=_RECENT) for kind in ("prefill", "restore", "fetch")}
        self._lines: dict[str, CostLine | None] = dict.fromkeys(self._samples)
        self._below: Counter[Use] = Counter()
        self._state = "measuring"
        self.prefill_s_per_token: float | None = None

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records a prefill of `num_tokens`. Call it after every completed prefill."""
        if num_tokens >= _MIN_TOKENS:
            self._record_time("prefill", num_tokens, seconds)

    def record_restore(self, num_bytes: int, seconds: float) -> None:
        """Records a restore: `num_bytes` of state were read from the file, decoded and copied."""
        self._record_time("restore", num_bytes, seconds)

    def record_prefetch(self, prefetched: Prefetched) -> None:
        """Records a fetch from the shared tier for one prompt."""
        self._record_time("fetch", prefetched.telling_bytes, prefetched.seconds)

    def allows(self, num_tokens: int) -> bool:
        """Returns whether restoring the state of the first `num_tokens` tokens pays."""
        return self.mode == "off" or self._is_faster(num_tokens)

    def lets_through(self, use: Use) -> bool:
        """Counts a use that does not pay. Returns True for every sixteenth, which is allowed and measured."""
        self._below[use] += 1
        return self._below[use] % _LET_THROUGH == 0

    def pays(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether loading `num_bytes` more takes less time than computing `num_tokens` more tokens; True if
        unknown."""
        prefill, restore = self._lines["prefill"], self._lines["restore"]
        if self.mode == "off" or prefill is None or restore is None:
            return True
        return restore.s_per_unit * num_bytes < prefill.s_per_unit * num_tokens

    def pays_remote(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether fetching `num_bytes` from the shared tier and restoring them takes less time than computing
        `num_tokens` tokens; True if unknown."""
        prefill, restore, remote = (self._lines[kind] for kind in ("prefill", "restore", "fetch"))
        if self.mode == "off" or prefill is None or remote is None:
            return True
        restore_s = 0.0 if restore is None else restore.at(num_bytes)
        return remote.at(num_bytes) + restore_s < prefill.s_per_unit * num_tokens

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for `/props`. `closed`: restoring pays for no prompt; `open`: it pays for some. Unknown
        times are None."""
        lines = {"restore": self._lines["restore"], "remote": self._lines["fetch"]}
        names: dict[Use, str] = {"restore": "skipped_restores", "save": "skipped_saves", "fetch": "skipped_fetches"}
        return {
            "mode": self.mode,
            "state": self._state,
            "prefill_s_per_token": self.prefill_s_per_token,
            **{f"{kind}_s_per_byte": line.s_per_unit if line else None for kind, line in lines.items()},
            **{f"{kind}_fixed_s": line.fixed_s if line else None for kind, line in lines.items()},
            **{name: self._below[use] - self._below[use] // _LET_THROUGH for use, name in names.items()},
        }

    def _is_faster(self, num_tokens: int) -> bool:
        prefill, restore = self._lines["prefill"], self._lines["restore"]
        if prefill is None or restore is None:
            return True
        return restore.at(self._loaded_bytes(num_tokens)) < prefill.s_per_unit * num_tokens

    def _record_time(self, kind: str, size: int, seconds: float) -> None:
        if not (0 < size < _MAX_UNITS and 0 < seconds < _MAX_S):
            return
        self._samples[kind].append((size, seconds))
        line = self._lines[kind] = CostLine.through(tuple(self._samples[kind]), has_fixed=kind != "prefill")
        if kind == "prefill":
            longest, longest_s = max(self._samples[kind])
            mean_s = longest_s / longest if longest >= _TELLING_TOKENS else None
            self.prefill_s_per_token = (line and line.s_per_unit) or mean_s
        if self._lines["prefill"] is not None and self._lines["restore"] is not None:
            # If restoring pays for a prompt, it pays for all longer ones.
            state = "open" if self.mode == "off" or self._is_faster(_MAX_TOKENS) else "closed"
            if state != self._state and "closed" in (state, self._state):
                log.info("[disk-cache] %s", _CLOSED if state == "closed" else _OPEN)
                log.debug("[disk-cache] gate=%s", self.as_dict() | {"state": state})
            self._state = state
