"""Tells an error after which the accelerator can compute nothing more from one that concerns a single request."""

from __future__ import annotations

import logging
import re

import torch

from diskprefix.errors import DeviceLost, DiskPrefixError
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.printable import first_line

log = logging.getLogger("diskprefix")

_DRIVER_ERROR = re.compile(
    r"\b(CUDA|HIP)( driver)? error|cudaError|hipError|\b(CUBLAS|CUDNN)_STATUS_|device-side assert"
)
_ACCELERATOR_ERROR: type[Exception] | None = getattr(torch, "AcceleratorError", None)
"""torch has this class since 2.8. Before, the same errors are of the class RuntimeError."""


def is_device_lost(error: BaseException) -> bool:
    """Returns whether the accelerator can compute nothing more, where `error` comes from its driver.

    Such an error may also concern one call only, like one with an argument out of range. So the devices are tried: CUDA
    repeats the errors after which only a new process helps at every later call. Running out of memory is no such error:
    the next request may fit.
    """
    if not _follows_from_driver(error):
        return False
    try:
        probe_devices()
    except RuntimeError as failure:
        return not is_out_of_memory(failure)
    return False


def raise_if_lost(error: Exception) -> None:
    """Raises `DeviceLost` if the accelerator can compute nothing more."""
    if is_device_lost(error):
        log.error("[engine] the accelerator failed", exc_info=error)
        message = f"the accelerator failed and cannot be used any more: {first_line(error)}"
        raise DeviceLost(message) from error


def synchronize(device: torch.device) -> None:
    """Waits until the device has computed everything, so that its time can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def probe_devices() -> None:
    """Waits for all CUDA devices on which this process has memory, and computes on them. Raises what torch raises."""
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
            torch.ones(1, device=torch.device("cuda", index)).add_(1).item()


def _follows_from_driver(error: BaseException) -> bool:
    found: BaseException | None = error
    # An error of ours explains its cause itself. An error of another kind that merely came up while one of the driver
    # was handled has a cause of its own.
    while found is not None and not isinstance(found, DiskPrefixError):
        if _is_from_driver(found):
            return True
        found = found.__cause__ or (found.__context__ if isinstance(found, RuntimeError) else None)
    return False


def _is_from_driver(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    is_accelerator_error = _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR)
    return is_accelerator_error or _DRIVER_ERROR.search(str(error)) is not None
