"""The compiled operators for this CPU. If there are none, `operators` returns None, and models run through
transformers' modules."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from diskprefix.errors import SettingsError
from diskprefix.native import build

log = logging.getLogger("diskprefix")

VARIANTS = ("avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_i8mm", "neon_dot", "baseline")
"""Kinds of CPU for which there may be operators, the best one first. `source/library.cpp` says what each needs. All
compute the same bits."""
ROWS = ("8", "15", "bf16")
"""The rows that quantised weights are multiplied with: integers of 8 or 15 bits, or bfloat16."""
_OF_BFLOAT16 = "amx"
"""The variant with products of bfloat16 rows, which has bits of its own."""

_NUM_ARGUMENTS = {
    "require_matrix": 2,
    "attention": 2,
    "pack": 1,
    "look_up": 1,
    "run": 2,
}
"""The operators that compute a step, in the order of `source/interface.h`."""

_chosen = "auto", "8"
"""The kernels and the rows."""


class Unavailable(Exception):
    """There are no operators. The message says why."""


class Operators(Struct, frozen=True, eq=False):
    """The operators of one variant. `rows` is one of `ROWS`."""

    variant: str
    rows: str
    compiler: str
    source: str
    require_matrix: Any
    attention: Any
    pack: Any
    look_up: Any
    run: Any

    @property
    def row_bits(self) -> int:
        """The bits of the rows that quantised weights are multiplied with. `amx` takes rows of bfloat16."""
        return 15 if self.rows == "15" else 8

    @property
    def identity(self) -> str:
        """The variant, the compiler and a digest of the sources, which decide about the bits."""
        return f"{self.variant}, rows {self.rows}, {self.compiler}, {self.source}"


class PlanesCall(ctypes.Structure):
    """The argument of `split` and `join`; see `source/interface.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "bits", "num_rows", "width", "stride", "num_bytes")),
        ("values", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )


class PlanesOperators(Struct, frozen=True):
    """The operators on planes. Each takes a reference to a `PlanesCall` and returns 0, or 1 if it fails."""

    split: Any
    join: Any


class _Table(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in (*_NUM_ARGUMENTS, "split", "join")),
    )


def variants() -> tuple[str, ...]:
    """Returns the available `VARIANTS` for this CPU, the best one first. Imports no torch."""
    try:
        library = _opened()
    except Unavailable:
        return ()
    return tuple(name for name in VARIANTS if library.diskprefix_operators(name.encode()))


def has_bfloat16_rows() -> bool:
    """Returns whether this CPU has operators for rows of bfloat16."""
    try:
        return bool(_opened().diskprefix_operators(_OF_BFLOAT16.encode()))
    except Unavailable:
        return False


def of_another_cpu() -> str:
    """Returns what to do if the operators were compiled for another CPU and this one could run better ones, else ""."""
    there = variants()
    better = [name for name in VARIANTS[: VARIANTS.index(there[0])] if _lacks(name)] if there else []
    return f"{', '.join(better)} {_MOVED}" if better else ""


def _lacks(variant: str) -> bool:
    """Returns whether this CPU can run a variant that nobody tried to compile. If the compiler was too old for it, to
    install again would not help."""
    try:
        library, name = _opened(), variant.encode()
    except Unavailable:
        return False
    return bool(library.diskprefix_can_run(name)) and name not in library.diskprefix_source().split()


def require_kernels(kernels: str, rows: str = "8") -> None:
    """Raises `SettingsError` if `--kernels` is neither `auto`, `torch` nor a variant for this CPU, or if there are none
    for `--rows`. Imports no torch."""
    if kernels == "torch":
        return
    if rows == "bf16":
        if kernels not in ("auto", _OF_BFLOAT16):
            raise SettingsError(f"--rows bf16 needs the kernels {_OF_BFLOAT16}, not {kernels}; leave --kernels out")
        if not has_bfloat16_rows():
            why = f"{_OF_BFLOAT16}, which {_MOVED}" if _lacks(_OF_BFLOAT16) else "a CPU with AMX, which this one is not"
            raise SettingsError(f"--rows bf16 needs {why}; leave --rows out")
    elif kernels != "auto" and kernels not in (there := variants()):
        why = f": {_UNNEEDED}" if _lacks(kernels) else "" if there else f": {_loaded('auto', '8')[1]}"
        raise SettingsError(f"--kernels: {kernels!r} is not one of {', '.join(('auto', 'torch', *there))}{why}")


def choose(kernels: str, rows: str = "8") -> None:
    """Sets the kernels that this process uses: `auto` (the best available), `torch` (no compiled ones), or a variant;
    and the rows that quantised weights are multiplied with. Call it before a model is loaded. Raises
    `SettingsError`."""
    global _chosen
    require_kernels(kernels, rows)
    _chosen = kernels, rows


def operators() -> Operators | None:
    """Returns the chosen operators, None if there are none."""
    return _loaded(*_chosen)[0]


@lru_cache
def planes(variant: str | None = None) -> PlanesOperators | None:
    """Returns the operators on planes of the best variant that this CPU can run, or of `variant`; None if there are
    none. All variants compute the same bits, so no option chooses one."""
    try:
        _, table = _table(variant)
    except Unavailable:
        return None
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(PlanesCall))
    return PlanesOperators(split=prototype(table.split), join=prototype(table.join))


def described() -> str:
    """Returns a text that says which kernels are used, and if they are not the compiled ones, why."""
    chosen, why = _loaded(*_chosen)
    return f"native ({chosen.variant})" if chosen else f"torch ({why})"


def are_missing() -> bool:
    """Returns whether compiled operators are missing, although `--kernels torch` was not chosen."""
    return _chosen[0] != "torch" and operators() is None


_AGAIN = "pip install --force-reinstall --no-deps ."
REMEDY = (
    "install a C++ compiler (Debian and Ubuntu: `apt install g++`, Fedora: `dnf install gcc-c++`, macOS: "
    f"`xcode-select --install`) and diskprefix again (`{_AGAIN}` in its clone), or "
    "install a wheel of `tools/release`, which needs no compiler"
)
"""What to do where the compiled operators are missing."""
_MOVED = (
    f"was not compiled, as diskprefix was installed on another CPU: install it here (`{_AGAIN}` in its clone), or a "
    "wheel of `tools/release`, which has the operators of all CPUs"
)
_UNNEEDED = (
    f"only what this CPU needs was compiled; `DISKPREFIX_VARIANTS=runnable {_AGAIN}` compiles all that it can run"
)


@lru_cache
def _loaded(kernels: str, rows: str) -> tuple[Operators | None, str]:
    try:
        return _load(kernels, rows), ""
    except Unavailable as reason:
        return None, str(reason)


def _load(kernels: str, rows: str) -> Operators:
    if kernels == "torch":
        raise Unavailable("as it was chosen")
    variant = _OF_BFLOAT16 if rows == "bf16" else None if kernels == "auto" else kernels
    library, table = _table(variant)
    functions = {
        name: ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_char_p] * count)(getattr(table, name))
        for name, count in _NUM_ARGUMENTS.items()
    }
    return Operators(
        variant=table.name.decode(),
        rows=rows,
        compiler=library.diskprefix_compiler().decode(),
        source=build.digest(),
        **functions,
    )


def _table(variant: str | None) -> tuple[ctypes.CDLL, _Table]:
    """Returns the library, and the table of `variant`, or of the best variant."""
    library = _opened()
    table = library.diskprefix_operators((variant or variants()[0]).encode())
    if not table:
        raise Unavailable(f"there are no operators {variant!r} for this CPU")
    return library, table.contents


def _opened() -> ctypes.CDLL:
    try:
        stamp = build.LIBRARY.stat()
    except OSError:
        raise Unavailable("the operators were not compiled when diskprefix was installed") from None
    return _opened_once(build.LIBRARY, build.digest(), stamp.st_ino, stamp.st_mtime_ns)


@lru_cache
def _opened_once(path: Path, _digest: str, *_stamp: int) -> ctypes.CDLL:
    """Opens the library. To search it for the digest of its sources takes longer than to read these."""
    if not build.is_current():
        raise Unavailable("the operators are not of this version; install diskprefix again")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the operators cannot be loaded: {error}") from error
    library.diskprefix_operators.argtypes = (ctypes.c_char_p,)
    library.diskprefix_operators.restype = ctypes.POINTER(_Table)
    library.diskprefix_compiler.restype = ctypes.c_char_p
    library.diskprefix_source.restype = ctypes.c_char_p
    return library
