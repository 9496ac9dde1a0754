"""The checks of llama.cpp's library in `diskprefix doctor`: its version, its devices, and what has room there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from diskprefix.daemon.settings import Settings
from diskprefix.desk.setup.doctor_machine import Finding, Level
from diskprefix.errors import DiskPrefixError

if TYPE_CHECKING:
    from diskprefix.runtime.llama.load_llama import Placement


def placement_finding(placed: Placement) -> Finding:
    """Returns the finding about the layers that have room on a device."""
    from diskprefix.runtime.llama.load_llama import MAKE_ROOM

    level: Level = "ok" if placed.is_whole else "note"
    return Finding("layers", level, placed.line, "" if placed.is_whole else MAKE_ROOM)


def llama_findings(settings: Settings) -> Iterator[Finding]:
    """Yields the finding about the library, and one about each of its GPUs."""
    from diskprefix.runtime.llama.llama_library import INSTALL, VERSION, open_library

    if find_spec("llama_cpp") is None:
        is_wanted = settings.runtime == "llama"
        text = f"not installed: --runtime llama, which uses GPUs for .gguf files, needs it ({INSTALL})"
        yield Finding("llama.cpp", "problem" if is_wanted else "ok", text, "install it" if is_wanted else "")
        return
    try:
        devices = open_library().devices()
    except DiskPrefixError as error:
        yield Finding("llama.cpp", "problem", error.message, "see the message")
        return
    gpus = [device for device in devices if device.kind != "cpu"]
    names = ", ".join(f"{device.name} ({device.description})" for device in devices)
    advice = "" if gpus else "compile it with CMAKE_ARGS for a GPU, if there is one: diskprefix/runtime/llama/README.md"
    yield Finding("llama.cpp", "ok", f"llama-cpp-python {VERSION}, devices: {names}", advice)
    for device in gpus:
        table = (("free", device.free_bytes), ("of", device.total_bytes))
        yield Finding("GPU", "ok", f"{device.name}: layers of .gguf files go there as far as they fit", table=table)
