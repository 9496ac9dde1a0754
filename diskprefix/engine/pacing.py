"""How many rows of prompts a step may have beside replies, so that the next tokens of these come in time.

A step that computes prompts takes longer than one that only decodes, and each reply in it waits that long for its
token. What it takes is measured, as two numbers: a step that only decodes, and what each row of a prompt adds. Which
rows are in a step changes no bit of what a model computes that is exact at every token; others cannot be cut, and are
not paced.
"""

from __future__ import annotations

LEAST_ROWS = 8
"""So that a prompt gets on whatever is measured."""
_LEAST_SHARE = 0.5
"""Of the time of a step, for prompts: where decoding alone takes long, they would wait for ever."""
_WEIGHT, _WHOLE_ROWS = 0.3, 32
"""Of one step in the averages; of one with fewer rows of prompts than these, a part of it."""


class Pace:
    """Measures the steps of one engine. For its thread."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: how long a step with replies and prompts may take, in seconds; 0 for any time."""
        self._target_s = target_s
        self._decoding_s = 0.0
        """Of a step without prompts, lately; 0 if there was none."""
        self._row_s = 0.0
        """What a row of a prompt adds; 0 if none was computed."""

    def most_rows(self) -> int | None:
        """Returns how many rows of prompts the next step may have if it has replies, None for any number."""
        if not self._target_s or not self._row_s:
            return None
        for_prompts_s = max(self._target_s - self._decoding_s, self._decoding_s * _LEAST_SHARE / (1 - _LEAST_SHARE))
        return max(LEAST_ROWS, int(for_prompts_s / self._row_s))

    def note(self, num_decoding: int, num_prompt_rows: int, seconds: float) -> None:
        """Adds a step of sequences that pack: `num_decoding` replies, and so many rows of prompts."""
        if not num_prompt_rows:
            self._decoding_s += (seconds - self._decoding_s) * (_WEIGHT if self._decoding_s else 1.0)
            return
        row_s = max(0.0, seconds - (self._decoding_s if num_decoding else 0.0)) / num_prompt_rows
        weight = _WEIGHT * min(1.0, num_prompt_rows / _WHOLE_ROWS) if self._row_s else 1.0
        self._row_s += (row_s - self._row_s) * weight
