"""Writes packed weights for later starts while there is no request."""

from __future__ import annotations

from collections.abc import Iterator

from diskprefix.daemon.engine.idle.idle_work import IdleWork, Steps

_IDLE_WITHIN_S = 60.0
"""Seconds after which the file is written beside requests, as the daemon is never idle."""
_REST_BESIDE = 7.0


class KeptWeights:
    """The idle task that makes the file of a model, once for a process. What was written stays when a request stops
    it."""

    def __init__(self, idle: IdleWork, pieces: Iterator[None]) -> None:
        self._idle, self._pieces = idle, pieces
        self._beside_at, self._is_over = idle.served.clock() + _IDLE_WITHIN_S, False

    @property
    def wait_s(self) -> float | None:
        """None: the end of the load wakes the engine, and so does each piece."""
        return None

    @property
    def goes_beside(self) -> bool:
        return not self._is_over and self._idle.served.clock() > self._beside_at

    def next_steps(self) -> Steps | None:
        return None if self._is_over else self._write()

    def give_up(self, _reason: str) -> None:
        """Does nothing: a piece that failed was the last one, and requests need no memory of this task."""

    def _write(self) -> Steps:
        # One piece, so that other idle work comes between.
        yield (piece := self._idle.submit_read(self._write_piece))
        self._is_over = piece.result()

    def _write_piece(self) -> bool:
        clock = self._idle.served.clock
        began, is_over = clock(), next(self._pieces, self) is self
        # Beside requests, an eighth of the time.
        self._beside_at = max(self._beside_at, clock() + _REST_BESIDE * (clock() - began))
        return is_over
