"""The choice of llama.cpp's library, and of the device that `--device` names there."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from diskprefix.errors import ModelError, SettingsError
from diskprefix.progress import Report
from diskprefix.runtime.load.loader import find_model
from diskprefix.runtime.runtime_options import RuntimeOptions

if TYPE_CHECKING:
    from diskprefix.runtime.llama.llama_library import Device, Library

log = logging.getLogger("diskprefix")

_NAMES = {"mps": ("metal", "mtl"), "xpu": ("sycl",), "cuda": ("cuda", "rocm", "musa")}
"""The beginnings of the names of devices in the library, by the kinds that `--device` has for every runtime."""


def is_chosen(settings: RuntimeOptions, progress: Report) -> bool:
    """Returns whether the library computes the model of `settings`: if `--runtime` says so, or with `auto` if the model
    is a `.gguf` file, and the library is installed and has the device that `--device` names, or any GPU. Fetches the
    model if that decides it. Raises the errors of `find_model`."""
    if settings.runtime != "auto":
        return settings.runtime == "llama"
    if settings.device == "cpu" or find_spec("llama_cpp") is None:
        return False
    # It takes a moment, which most starts do not need.
    from diskprefix.runtime.llama.llama_library import open_library

    try:
        devices = open_library().devices()
    except ModelError as error:
        log.warning("[llama] not used: %s", error.message)
        return False
    if _picked(devices, settings.device) is None:
        return False
    return find_model(settings.model, progress)[0].is_file()


def device_named(library: Library, name: str) -> Device | None:
    """Returns the device that `--device` names; None for the CPU. Raises `SettingsError` if there is none."""
    if name == "cpu":
        return None
    devices = library.devices()
    picked = _picked(devices, name)
    if picked is None and name != "auto":
        has = ", ".join(device.name for device in devices) or "none"
        raise SettingsError(
            f"--device: llama.cpp's library has no {name}; it has {has}. It is compiled for a GPU with CMAKE_ARGS, see "
            "diskprefix/runtime/llama/README.md"
        )
    return picked


def _picked(devices: list[Device], name: str) -> Device | None:
    """Returns the device with a name such as `CUDA0`, `cuda:1` or `mps`; with `auto`, the first GPU."""
    gpus = [device for device in devices if device.kind == "gpu"]
    if name == "auto":
        return next(iter(gpus), None)
    kind, _, index = name.lower().partition(":")
    begins = _NAMES.get(kind, ())
    of_kind = [device for device in gpus if device.name.lower().startswith(begins)] if begins else []
    if of_kind and (index or "0").isdigit() and int(index or 0) < len(of_kind):
        return of_kind[int(index or 0)]
    return next((device for device in devices if device.kind != "cpu" and device.name.lower() == name.lower()), None)
