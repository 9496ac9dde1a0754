"""How many rows of prompts a step may have beside replies, so that the next tokens of these come in time.

A step that computes prompts takes longer than one that only decodes, and each reply in it waits that long for its
token. What it takes is measured, as two numbers: a step that only decodes, and what each row of a prompt adds. Now and
then a step has no prompts though some wait: else a machine on which all takes longer for a while, because other
programs use it too, would be taken for one on which rows are dear, and the prompts would wait for nothing.

Which rows are in a step changes no bit of what a model computes that is exact at every token; others cannot be cut, and
are not paced.
"""

from __future__ import annotations

from collections import deque

LEAST_ROWS = 16
"""So that a prompt gets on whatever is measured."""
_KEPT = 6
"""Steps of each kind, of which the shortest counts: what disturbs a step only adds to it."""
_STEPS_BETWEEN = 6
"""Steps with prompts and replies between two that only decode."""


class Pace:
    """Measures the steps of one engine. For its thread."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: how long a step with replies and prompts may take, in seconds; 0 for any time."""
        self._target_s = target_s
        self._decoding_s: deque[float] = deque(maxlen=_KEPT)
        """Of steps without prompts."""
        self._row_s: deque[float] = deque(maxlen=_KEPT)
        """What a row of a prompt added."""
        self._num_mixed = 0
        """Steps with prompts and replies since one that only decoded."""

    def most_rows(self) -> int | None:
        """Returns how many rows of prompts the next step may have if it has replies, None for any number."""
        if not self._target_s or not self._row_s:
            return None
        if self._num_mixed >= _STEPS_BETWEEN:
            return 0
        decoding_s, row_s = self._least_decoding_s, min(self._row_s)
        # At least half of the time: where decoding alone takes long, prompts would wait for ever.
        for_prompts_s = max(self._target_s - decoding_s, decoding_s)
        return None if row_s <= 0 else max(LEAST_ROWS, int(for_prompts_s / row_s))

    def note(self, num_decoding: int, num_prompt_rows: int, seconds: float) -> None:
        """Adds a step of sequences that pack: `num_decoding` replies, and so many rows of prompts."""
        if not num_prompt_rows:
            self._decoding_s.append(seconds)
            self._num_mixed = 0
        elif num_prompt_rows >= LEAST_ROWS or not self._row_s:
            # Of fewer, what all steps differ by is more than the rows add.
            decoding_s = self._least_decoding_s if num_decoding else 0.0
            self._row_s.append(max(0.0, seconds - decoding_s) / num_prompt_rows)
        if num_prompt_rows and num_decoding:
            self._num_mixed += 1

    @property
    def _least_decoding_s(self) -> float:
        return min(self._decoding_s) if self._decoding_s else 0.0
