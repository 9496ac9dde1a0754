"""Buffers that pages are copied to before they are written. They are used again: memory that was touched once is
several times faster to fill."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from diskprefix.store.codec.planes import Bytes

_MOST_FREE = 64
"""Buffers that are kept for the next blocks."""


class Staging:
    """Hands out buffers of `num_bytes` each. A buffer comes back when its last view is gone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # Without a lock, because a buffer may come back at any moment, inside of `take` too.
        self._free: deque[Bytes] = deque(maxlen=_MOST_FREE)

    def take(self) -> Bytes:
        """Returns a buffer, shape [num_bytes]. It is taken as long as this array, or a view of it, is there."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._num_bytes, np.uint8)
        # A view of its own, whose memory is that of the buffer behind it.
        view = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(view, self._free.append, buffer)
        return view
