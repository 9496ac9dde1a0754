"""Buffers that hold copies of pages until they are written. They are reused: filling memory that was touched before is
several times faster."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

_MAX_FREE = 64
"""The maximum number of free buffers."""


class Staging:
    """Provides buffers of `num_bytes` each. A buffer becomes free again when its last view is deleted."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # Without a lock: a buffer may become free at any moment, even inside `take`.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=_MAX_FREE)

    def take(self) -> npt.NDArray[np.uint8]:
        """Returns a buffer, shape [num_bytes], which is in use until this array and all views of it are deleted."""
        buffer = self._free.pop() if self._free else np.empty(self._num_bytes, np.uint8)
        # The finalizer needs an object that lives exactly as long as the use: a view of the buffer's memory.
        view = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(view, self._free.append, buffer)
        return view
