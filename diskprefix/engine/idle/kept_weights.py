"""Writes packed weights for later starts while there is no request."""

from __future__ import annotations

from collections.abc import Iterator

from diskprefix.engine.idle.idle_work import IdleWork, Steps

_IDLE_WITHIN_S = 60.0
"""Seconds after which the file is written beside requests, as the daemon is never idle."""


class KeptWeights:
    """The idle task that makes the file of a model, once for a process. What was written stays when a request stops
    it."""

    def __init__(self, idle: IdleWork, pieces: Iterator[None]) -> None:
        self._idle, self._pieces = idle, pieces
        self._since, self._is_over = idle.served.clock(), False

    @property
    def wait_s(self) -> float | None:
        """None: the end of the load wakes the engine, and so does each piece."""
        return None

    @property
    def goes_beside(self) -> bool:
        return not self._is_over and self._idle.served.clock() - self._since > _IDLE_WITHIN_S

    def next_steps(self) -> Steps | None:
        return None if self._is_over else self._write()

    def give_up(self, _reason: str) -> None:
        """Writes nothing more. `PackedFiles.keep` has logged what the disk refused."""
        self._is_over = True

    def _write(self) -> Steps:
        # One piece, so that other idle work comes between.
        yield (piece := self._idle.submit_read(lambda: next(self._pieces, self)))
        self._is_over = piece.result() is self
