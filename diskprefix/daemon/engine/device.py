"""Distinguishes errors that lose the accelerator from errors of a single request."""

from __future__ import annotations

import logging
import re

from diskprefix.errors import DeviceLost, DiskPrefixError
from diskprefix.prefixstore.kv.layout import is_out_of_memory
from diskprefix.printable import first_line

log = logging.getLogger("diskprefix")

_DRIVER_ERROR = re.compile(
    r"\b(CUDA|HIP)( driver)? error|cudaError|hipError|\b(CUBLAS|CUDNN)_STATUS_|device-side assert|\bUR_RESULT_ERROR_"
)


def is_device_lost(error: BaseException) -> bool:
    """Returns True if `error` comes from the accelerator's driver and the accelerator can compute nothing more. A
    driver's error may concern one call only, so this function tries the devices: after an error that only a new process
    can repair, every later CUDA call fails. Running out of memory does not count, because the next request may fit."""
    if not _follows_from_driver(error):
        return False
    try:
        probe_devices()
    except RuntimeError as failure:
        return not is_out_of_memory(failure)
    return False


def raise_if_lost(error: BaseException) -> None:
    """Raises `DeviceLost` if the accelerator can compute nothing more."""
    if is_device_lost(error):
        log.error("[engine] the accelerator failed", exc_info=error)
        message = f"the accelerator failed and cannot be used any more: {first_line(error)}"
        raise DeviceLost(message) from error


def probe_devices() -> None:
    """Waits for all GPUs with memory of this process, and computes on them. Raises the errors of torch."""
    import torch  # Imported here, because only the grid needs it.

    for of_device in (torch.cuda, torch.xpu):
        for index in range(of_device.device_count()):
            if of_device.memory_reserved(index):
                of_device.synchronize(index)
                torch.ones(1, device=torch.device(of_device.__name__.removeprefix("torch."), index)).add_(1).item()


def _follows_from_driver(error: BaseException) -> bool:
    cause: BaseException | None = error
    seen: set[int] = set()
    # An error of this project explains its cause itself. An unrelated error that was raised while a driver's error was
    # handled is not caused by it.
    # Bound: no error is visited twice, although errors may name each other as causes.
    while cause is not None and id(cause) not in seen and not isinstance(cause, DiskPrefixError):
        seen.add(id(cause))
        if _is_from_driver(cause):
            return True
        cause = cause.__cause__ or (cause.__context__ if isinstance(cause, RuntimeError) else None)
    return False


def _is_from_driver(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or _DRIVER_ERROR.search(str(error)) is not None
