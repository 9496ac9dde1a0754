"""Decides whether restoring is worth it: the time to compute a prompt against the time to read it from disk.

Two straight lines are measured: seconds to compute by tokens, seconds to restore by bytes. Restoring n tokens pays if

    restore_fixed_s + restore_s_per_byte × bytes that n tokens load  <  prefill_s_per_token × n

The fixed part of computing is left out, because the rest of the prompt pays it in any case.

A wrong no costs a prefill, and nothing is saved that would show the mistake. So the answer is yes while the lines are
not known, and in every sixteenth case after that. Restores of one size do not tell the fixed part from the slope. Then
the least that any line through them allows is assumed: fewer bytes take less time in proportion, more take no more.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from threading import Lock
from typing import Any, Literal, TypeAlias

from diskprefix.cache.tiers.tier import Prefetched
from diskprefix.memo import Memo
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

Use: TypeAlias = Literal["restore", "save", "fetch"]
Gate: TypeAlias = Literal["measuring", "open", "closed"]
Sample: TypeAlias = tuple[int, float]
"""A size in tokens or bytes, and the seconds that it took."""

_RECENT = 32
"""Samples of each kind that are used. Older ones may be from another load of the machine."""
_ENOUGH = 4
"""Samples of each kind before anything is decided. The first ones include costs that occur only once."""
_FEWEST_TOKENS = 16
"""Computing fewer tokens takes as long as one step, whatever its size."""
_TELLING_TOKENS = 128
"""One prefill of this length tells how long others take."""
_FAR_APART = 2
"""Samples whose sizes differ by less than this factor say more about noise than about the slope."""
_LET_THROUGH = 16
"""One case of this many passes a closed gate. It is counted, so the same cases pass every time."""
_REMEMBER_EVERY = 64
"""Samples between two writes to the cache folder, in case the daemon is killed."""
_MOST_TOKENS = 2**31
"""No prompt is longer."""
_MOST_UNITS, _LONGEST_S = 2**50, 1e6
"""Limits of a sample: a petabyte, eleven days."""

_remembered = Memo("worth", version=1, max_records=64)


@dataclass(frozen=True)
class CostLine:
    """Seconds by size: `fixed_s` + `s_per_unit` × size. If this is known from the size `holds_from` on only, smaller
    sizes are assumed to take proportionally less."""

    fixed_s: float
    s_per_unit: float
    holds_from: int = 0

    def at(self, size: int) -> float:
        """Returns the least time that `size` units are known to take, in seconds."""
        if size < self.holds_from:
            return self.at(self.holds_from) * size / self.holds_from
        return self.fixed_s + self.s_per_unit * size

    @classmethod
    def through(cls, samples: Sequence[Sample], *, if_alike: Literal["fixed", "per_unit"]) -> CostLine:
        """Returns the line through at least one sample, by medians (Theil and Sen): a quarter of them may be far off.

        Samples of about the same size, or larger ones that took less time, do not tell the two parts apart. Then the
        whole time is taken for the part that `if_alike` names, `fixed` from the smallest sample on.
        """
        slopes = [
            (larger[1] - smaller[1]) / (larger[0] - smaller[0])
            for smaller, larger in combinations(sorted(samples), 2)
            if larger[0] >= _FAR_APART * smaller[0]
        ]
        slope = median(slopes) if slopes else 0.0
        if slope <= 0 and if_alike == "fixed":
            return cls(median(seconds for _, seconds in samples), 0.0, min(size for size, _ in samples))
        fixed_s = median(seconds - slope * size for size, seconds in samples)
        if slope <= 0 or fixed_s < 0:
            return cls(0.0, median(seconds / size for size, seconds in samples))
        return cls(fixed_s, slope)


class CostModel:
    """Decides by measured times whether to save and to restore. For the engine thread, except that `as_dict` and
    `record_prefetch` are for any thread, `allows` and `pays` for the one that restores, and `remember` and
    `remember_due` for one that may wait for the disk.

    `mode` is `--kv-cache-gate`: `off` measures too, but allows everything. `loaded_bytes` returns the bytes that
    restoring a number of tokens loads. It grows with the number of tokens, and for each further token by no more than
    for the one before (layers with a window). Measurements are remembered under `key` in the cache folder; with an
    empty key or `off` they are not.
    """

    def __init__(self, mode: str, loaded_bytes: Callable[[int], int], *, key: str = "") -> None:
        self.mode = mode
        self._loaded_bytes = loaded_bytes
        self._below: Counter[Use] = Counter()
        """Cases below the break-even, including those that were let through."""
        self._key = key if mode == "auto" else ""
        record = _remembered.get(self._key) if self._key else None
        kept = record if isinstance(record, dict) else {}
        names = ("prefills", "restores", "remotes")
        self._prefills, self._restores, self._remotes = (deque(_sound(kept.get(name)), _RECENT) for name in names)
        self._num_noted = 0
        self._is_due = False
        """Enough was measured since the last write to the cache folder."""
        self._noting = Lock()
        """Threads that fetch from the shared tier record their times."""
        self._prefill: CostLine | None = None
        self._restore: CostLine | None = None
        self._remote: CostLine | None = None
        self.break_even_tokens: int | None = 0
        """The fewest tokens that are restored faster than computed: 0 if unknown, None if there are none."""
        self._measure()

    @property
    def is_known(self) -> bool:
        """Enough was measured to decide."""
        return self._prefill is not None and self._restore is not None

    @property
    def prefill_s_per_token(self) -> float | None:
        """The seconds that computing a token takes; None while too little was measured."""
        return self._prefill.s_per_unit if self._prefill is not None else None

    @property
    def measured_s_per_token(self) -> float | None:
        """The same, or while too little was measured, the value of the longest prefill of some length; None without
        one."""
        size, seconds = max(self._prefills, default=(0, 0.0))
        return self.prefill_s_per_token or (seconds / size if size >= _TELLING_TOKENS else None)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records a prefill of `num_tokens`. Call it after every completed prefill."""
        if num_tokens >= _FEWEST_TOKENS:
            self._note(self._prefills, num_tokens, seconds)

    def record_restore(self, num_bytes: int, seconds: float) -> None:
        """Records a restore: `num_bytes` of state were read from the file, decoded and copied."""
        self._note(self._restores, num_bytes, seconds)

    def record_prefetch(self, prefetched: Prefetched) -> None:
        """Records what was fetched from the shared tier for one prompt."""
        self._note(self._remotes, prefetched.telling_bytes, prefetched.seconds)

    def allows(self, num_tokens: int, use: Use = "restore") -> bool:
        """Returns whether to restore, or to save, the state of the first `num_tokens` tokens. Every sixteenth no of
        each use becomes a yes, so that restoring is measured again."""
        if self.mode == "off":
            return True
        fewest = self.break_even_tokens
        if fewest is not None and num_tokens >= fewest:
            return True
        self._below[use] += 1
        return self._below[use] % _LET_THROUGH == 0

    def pays(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether loading `num_bytes` more takes less time than computing `num_tokens` more tokens. True while
        that is unknown."""
        prefill, restore = self._prefill, self._restore
        if self.mode == "off" or prefill is None or restore is None:
            return True
        return restore.s_per_unit * num_bytes < prefill.s_per_unit * num_tokens

    def pays_remote(self, num_tokens: int, num_bytes: int) -> bool:
        """Returns whether to fetch `num_bytes` from the shared tier rather than compute `num_tokens`. True while that
        is unknown; every sixteenth no becomes a yes."""
        prefill, remote = self._prefill, self._remote
        if self.mode == "off" or prefill is None or remote is None:
            return True
        restore_s = 0.0 if self._restore is None else self._restore.at(num_bytes)
        if remote.at(num_bytes) + restore_s < prefill.s_per_unit * num_tokens:
            return True
        self._below["fetch"] += 1
        return self._below["fetch"] % _LET_THROUGH == 0

    def remember(self) -> None:
        """Writes the measurements down for the next start, if there is a folder for them."""
        with self._noting:
            self._is_due = False
            record = {"prefills": [*self._prefills], "restores": [*self._restores], "remotes": [*self._remotes]}
        if self._key and self._num_noted:
            _remembered.put(self._key, record)

    def remember_due(self) -> None:
        """Does `remember` if much was measured since the last time: the daemon may be killed."""
        if self._is_due:
            self.remember()

    @property
    def state(self) -> Gate:
        """The state: `closed` if restoring pays for no prompt, `open` if it pays for some."""
        if self.mode == "off":
            return "open"
        if not self.is_known:
            return "measuring"
        return "closed" if self.break_even_tokens is None else "open"

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for `/props`. Times in seconds; None is unknown."""
        prefill, restore = self._prefill, self._restore
        return {
            "mode": self.mode,
            "state": self.state,
            "reason": self._reason(),
            "prefill_s_per_token": prefill.s_per_unit if prefill else None,
            "restore_s_per_byte": restore.s_per_unit if restore else None,
            "restore_fixed_s": restore.fixed_s if restore else None,
            "remote_s_per_byte": self._remote.s_per_unit if self._remote else None,
            "remote_fixed_s": self._remote.fixed_s if self._remote else None,
            "break_even_tokens": self.break_even_tokens if self.is_known else None,
            "prefill_samples": len(self._prefills),
            "restore_samples": len(self._restores),
            "remote_samples": len(self._remotes),
            "skipped_restores": self._skipped("restore"),
            "skipped_saves": self._skipped("save"),
            "skipped_fetches": self._skipped("fetch"),
        }

    def _skipped(self, use: Use) -> int:
        return self._below[use] - self._below[use] // _LET_THROUGH

    def _note(self, samples: deque[Sample], size: int, seconds: float) -> None:
        if not _is_sample(size, seconds):
            return
        with self._noting:
            was_known = self.is_known
            samples.append((size, seconds))
            self._measure()
            self._num_noted += 1
            self._is_due |= self.is_known != was_known or self._num_noted % _REMEMBER_EVERY == 0

    def _measure(self) -> None:
        """Draws the lines and decides. Done here, so that other threads never see samples change."""
        was_closed = self.state == "closed"
        self._prefill = prefill = _line(self._prefills, "per_unit")
        self._restore = restore = _line(self._restores, "fixed")
        self._remote = _line(self._remotes, "fixed")
        if prefill is not None and restore is not None:
            # Each token takes as long to compute as the one before, and no longer to restore: once restoring pays, it
            # pays for all that is longer.
            fewest = bisect_left(
                range(_MOST_TOKENS), True, key=lambda n: restore.at(self._loaded_bytes(n)) < prefill.s_per_unit * n
            )
            self.break_even_tokens = fewest if fewest < _MOST_TOKENS else None
        if was_closed != (self.state == "closed"):
            log.info("[disk-cache] gate=%s: %s", self.state, self._reason())

    def _reason(self) -> str:
        """Returns one sentence with the numbers."""
        prefill, restore = self._prefill, self._restore
        if prefill is None or restore is None:
            prefills, restores = (min(len(samples), _ENOUGH) for samples in (self._prefills, self._restores))
            measured = f"{prefills} of {_ENOUGH} prefills and {restores} of {_ENOUGH} restores are measured"
            return f"{measured}: until then everything is saved and restored"
        first_s = restore.s_per_unit * (self._loaded_bytes(1) - self._loaded_bytes(0))
        first = restore.fixed_s + restore.s_per_unit * self._loaded_bytes(0)
        restoring = f"{_time(first)} and {_time(first_s)} a token"
        if restore.holds_from:
            restoring = f"{_time(first)} for {format_size(restore.holds_from)} and more"
        speeds = f"computing takes {_time(prefill.s_per_unit)} a token, restoring {restoring}"
        fewest = self.break_even_tokens
        if fewest is None:
            verdict = "computing is faster for every prompt"
        elif fewest <= 1:
            verdict = "restoring is faster for every prompt"
        else:
            verdict = f"restoring is faster from {fewest} tokens on"
        in_vain = ", but --kv-cache-gate off saves and restores everything" if self.mode == "off" else ""
        return f"{speeds}: {verdict}{in_vain}"


def _line(samples: Sequence[Sample], if_alike: Literal["fixed", "per_unit"]) -> CostLine | None:
    return CostLine.through(samples, if_alike=if_alike) if len(samples) >= _ENOUGH else None


def _sound(samples: object) -> list[Sample]:
    """Returns the remembered samples that are plausible: the file may hold anything."""
    if not isinstance(samples, list):
        return []
    pairs = [sample for sample in samples if isinstance(sample, list) and len(sample) == 2]
    return [(size, seconds) for size, seconds in pairs if _is_sample(size, seconds)]


def _is_sample(size: object, seconds: object) -> bool:
    is_size = isinstance(size, int) and 0 < size <= _MOST_UNITS
    return is_size and isinstance(seconds, float) and 0 < seconds <= _LONGEST_S


def _time(seconds: float) -> str:
    """Formats a time with at most three digits: 1.3 ms, 23 µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
