"""Tells an error after which the accelerator can compute nothing more from one that concerns a single request."""

from __future__ import annotations

import re

import torch

from diskprefix.errors import DiskPrefixError
from diskprefix.kv.layout import is_out_of_memory

_DRIVER_ERROR = re.compile(
    r"\b(CUDA|HIP)( driver)? error|cudaError|hipError|\b(CUBLAS|CUDNN)_STATUS_|device-side assert"
)
_ACCELERATOR_ERROR: type[Exception] | None = getattr(torch, "AcceleratorError", None)
"""torch has this class since 2.8. Before, the same errors are of the class RuntimeError."""


def is_device_lost(error: BaseException) -> bool:
    """Returns whether `error`, or an error that it followed from, comes from the driver of the accelerator.

    CUDA repeats such an error at every later call of the process, so only a new process helps. Running out of memory is
    no such error: the next request may fit.
    """
    found: BaseException | None = error
    # An error of ours explains its cause itself.
    while found is not None and not isinstance(found, DiskPrefixError):
        if _is_from_driver(found):
            return True
        found = found.__cause__ or found.__context__
    return False


def _is_from_driver(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    is_accelerator_error = _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR)
    return is_accelerator_error or _DRIVER_ERROR.search(str(error)) is not None
