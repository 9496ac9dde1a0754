"""llama.cpp's library, by the package `llama-cpp-python`, whose declarations belong to the library it comes with.

Every call that passes through this folder uses these declarations. The layout of the library's structures changes
without a sign, so only one version is used, and the values of its default parameters are checked at each start.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model_identity import remembered_digest

log = logging.getLogger("diskprefix")

VERSION = "0.3.36"
"""The version of llama-cpp-python whose declarations this folder uses."""
INSTALL = shlex.join([sys.executable, "-m", "pip", "install", f"llama-cpp-python=={VERSION}"])
"""What installs it, if the extra `llama` did not."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama_model_default_params": {"vocab_only": False, "check_tensors": False, "use_extra_bufts": True},
    "llama_context_default_params": {
        **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
        "kv_unified": False,
        "embeddings": False,
        "defrag_thold": -1.0,
        "n_samplers": 0,
    },
}
"""Default values, most of them behind other fields: with another layout, one of them is read wrong."""
_ERROR_LEVEL = 4
_KINDS = ("cpu", "gpu", "gpu", "accelerator")
"""The kinds of devices by the number that ggml gives them. The second kind of GPUs shares the main memory."""

DeviceKind: TypeAlias = Literal["cpu", "gpu", "accelerator"]


class Device(Struct, frozen=True):
    """A device of the library. `name` is such as `CUDA0`, `kind` says what it is, and `handle` is the library's pointer
    to it. Memory is in bytes; 0 if the library does not know."""

    name: str
    description: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int
    handle: int


class Library:
    """The library that a process has loaded. `api` has its functions and structures."""

    def __init__(self, api: Any) -> None:
        """Raises `ModelError` for a library with another layout than its declarations."""
        self.api = api
        self._said = deque[str](maxlen=8)
        self._keep_log()
        _require_layout(api)
        api.llama_backend_init()

    @property
    def reason(self) -> str:
        """The library's errors since `forget_reason`, in one line."""
        said = " ".join(line.strip().partition(": ")[2] or line.strip() for line in self._said)
        return said or "it gives no reason"

    def forget_reason(self) -> None:
        self._said.clear()

    def devices(self) -> list[Device]:
        """Returns the devices with their memory now."""
        parts = [self.api.load_shared_library(name, _folder(self.api)) for name in ("ggml", "ggml-base")]
        count, get = (_function(parts, name) for name in ("ggml_backend_dev_count", "ggml_backend_dev_get"))
        count.restype, get.restype, get.argtypes = ctypes.c_size_t, ctypes.c_void_p, [ctypes.c_size_t]
        name, description, kind, memory = (
            _function(parts, f"ggml_backend_dev_{what}") for what in ("name", "description", "type", "memory")
        )
        for function in (name, description, kind, memory):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
        kind.restype, memory.restype = ctypes.c_int, None
        memory.argtypes = [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]
        devices = []
        for handle in [get(index) for index in range(count())]:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            memory(handle, ctypes.byref(free), ctypes.byref(total))
            of_kind: Any = _KINDS[kind(handle)] if kind(handle) < len(_KINDS) else "accelerator"
            named, described = (text(handle).decode(errors="replace") for text in (name, description))
            devices.append(Device(named, described, of_kind, free.value, total.value, handle))
        return devices

    @property
    def build(self) -> str:
        """The digest of the library's files and of the CPU's abilities, which choose between its parts: 32 hex digits.
        Raises `OSError`."""
        digests = [remembered_digest(file) for file in self._files()]
        return hashlib.sha256(f"{digests} {self.api.llama_print_system_info().decode()}".encode()).hexdigest()[:32]

    def _files(self) -> Iterator[Path]:
        for file in sorted(_folder(self.api).iterdir()):
            if file.is_file() and ("llama" in file.name or "ggml" in file.name):
                yield file

    def _keep_log(self) -> None:
        """Keeps the library's errors, and drops what it says of each layer."""

        def keep(level: int, text: bytes, _data: object) -> None:
            if level == _ERROR_LEVEL:
                line = text.decode(errors="replace").strip()
                self._said.append(line)
                log.debug("[llama] %s", line)

        # The library calls it as long as it is loaded.
        self._callback = self.api.llama_log_callback(keep)
        self.api.llama_log_set(self._callback, ctypes.c_void_p(0))


@lru_cache(maxsize=1)
def open_library() -> Library:
    """Loads the library. Raises `SettingsError` if it is not installed, and `ModelError` if it cannot be used."""
    # A call that breaks the library's rules ends the process. It would start a debugger before.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp
        import llama_cpp.llama_cpp as api
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise ModelError(f"llama.cpp's library cannot be loaded: {error}; install it again: {INSTALL}") from error
        raise SettingsError(
            f"--runtime llama: llama.cpp's library is not installed; install it: {INSTALL} (this compiles it)"
        ) from error
    except (OSError, RuntimeError, AttributeError) as error:
        # A part of it is missing, or a function.
        raise ModelError(f"llama.cpp's library cannot be loaded: {error}; install it again: {INSTALL}") from error
    if llama_cpp.__version__ != VERSION:
        raise ModelError(
            f"--runtime llama needs llama-cpp-python {VERSION}, whose structures it knows; this is "
            f"{llama_cpp.__version__}: {INSTALL}"
        )
    return Library(api)


def _require_layout(api: Any) -> None:
    for function, expected in _DEFAULTS.items():
        values = getattr(api, function)()
        wrong = [name for name, value in expected.items() if getattr(values, name) != value]
        if wrong:
            raise ModelError(
                f"llama.cpp's library does not fit llama-cpp-python {VERSION}: {wrong[0]} is "
                f"{getattr(values, wrong[0])!r} where it should be {expected[wrong[0]]!r}; unset LLAMA_CPP_LIB_PATH, "
                f"or install it again: {INSTALL}"
            )


def _folder(api: Any) -> Path:
    # The package takes its library from there.
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(api.__file__).parent / "lib")


def _function(libraries: list[Any], name: str) -> Any:
    for library in libraries:
        if hasattr(library, name):
            return getattr(library, name)
    raise ModelError(f"llama.cpp's library has no function {name}; install it again: {INSTALL}")
