"""Compiles the operators in `source/`, once for each kind of CPU, into one library beside this file.

It needs a C++ compiler and nothing else. This module imports the standard library only, as it also runs while the
package is installed. `python diskprefix/native/build.py` builds what is missing or out of date: the variants that this
CPU needs, or what `DISKPREFIX_VARIANTS`, one of `EXTENTS`, asks for. The compiler says for which CPU it compiles, so
`CXX=aarch64-linux-gnu-g++` builds a library for ARM64, with all of its variants.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "source"
_CONTROL_GROUPS = Path(__file__).parent.parent / "control_groups.py"
LIBRARY = Path(__file__).parent / "_operators.so"
_DIGEST_AT = b"diskprefix source "
"""The text before the digest in the library. The names of the requested variants follow the digest."""
EXTENTS = ("needed", "runnable", "all")
"""Which variants a library has: those that this CPU needs (the best one, `amx`, and `baseline` for a machine that gets
an older CPU), those that it can run (the tests compare them), or those of every CPU of its kind (a wheel that is given
to others)."""
_TICK_S = 4.0
"""The longest time without a word while the operators are compiled."""

# -O3 takes a third longer, and its code is no faster. Without -fpeel-loops the loops over a few rows would not be
# unrolled, and prompts would take twice as long.
_OPTIMISED = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops")
_FLAGS = (*_OPTIMISED, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_SPARE_FLAGS = ("-O1", "-fno-tree-vectorize", "-fno-peel-loops")
"""Compile in less than half the time what computes prompts a third longer, and replies half as long again."""
_WITH_OWN_BITS = "amx"
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512, "-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2_vnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
        "baseline": (),
    },
    "aarch64": {
        "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
        "neon_dot": ("-march=armv8.2-a+dotprod",),
        "baseline": (),
    },
}
"""The variants for each kind of CPU, the best first, with their flags. Other kinds have `baseline` alone."""


class BuildError(Exception):
    """The operators cannot be compiled. The message is one line."""


def digest() -> str:
    """Returns a digest of the sources and of this file. The library contains the digest of its own sources."""
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def is_current() -> bool:
    """Returns whether the library is there, made from these sources."""
    return _tried() is not None


def is_complete(extent: str = "needed") -> bool:
    """Returns whether the library is there, made from these sources, with all variants of one of the `EXTENTS`."""
    tried = _tried()
    if tried is None:
        return False
    known = list(flags_of(_kind(platform.machine())))
    wanted = _candidates(known if extent == "all" else _runnable(known, LIBRARY), extent)
    return {first for first, *_ in wanted} <= set(tried)


def _tried() -> list[str] | None:
    """Returns the variants that the build of the library tried; None if there is no library of these sources."""
    begin = _DIGEST_AT + digest().encode()
    try:
        _, is_there, rest = LIBRARY.read_bytes().partition(begin)
    except OSError:
        return None
    return rest.partition(b"\0")[0].decode(errors="replace").split() if is_there else None


def _runnable(names: Sequence[str], library: Path) -> list[str]:
    """Returns the variants that this CPU can run, according to a library made of `library.cpp`; all of them if it
    cannot be loaded."""
    try:
        can_run = ctypes.CDLL(str(library)).diskprefix_can_run
    except (OSError, AttributeError):
        return list(names)
    return [name for name in names if can_run(name.encode())]


def build(extent: str = "needed", say: Callable[[str], None] = lambda _: None) -> None:
    """Compiles the library with the variants of one of the `EXTENTS`, for another kind of CPU than this one with all.
    Tells `say` how far it is every few seconds. Raises `BuildError`."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=LIBRARY.parent) as folder:
        wanted = _wanted(compiler, Path(folder), extent)
        # Only a machine that gets another CPU, and tests, compute with it.
        spare = "baseline" if extent != "all" and len(wanted) > 1 else ""
        objects = _compiled(compiler, Path(folder), wanted, spare, say)
        library = Path(folder, LIBRARY.name)
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
        # The linker takes the umask. Whoever may write to the library runs code in this process.
        library.chmod(library.stat().st_mode & ~0o022)
        library.replace(LIBRARY)


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    for candidate in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildError(f"no C++ compiler was found ({' '.join(named) or 'c++, g++, clang++'})")


def _wanted(compiler: Sequence[str], folder: Path, extent: str) -> list[list[str]]:
    """Returns the `_candidates` to compile. `library.cpp`, compiled without variants, says which ones this CPU can
    run."""
    known = list(flags_of(target(compiler)))
    if extent == "all" or target(compiler) != _kind(platform.machine()):
        return _candidates(known, "all")
    probe = folder / "probe.so"
    defined = ["-DVARIANTS=", '-DCOMPILER=""', '-DSOURCE=""', "-shared"]
    done = _done([*compiler, *_FLAGS, *defined, str(SOURCES / "library.cpp"), "-o", str(probe)])
    return _candidates(known, "all") if done.returncode else _candidates(_runnable(known, probe), extent)


def _candidates(names: Sequence[str], extent: str) -> list[list[str]]:
    """Returns lists of variants, the best first. A library has the first one of each that the compiler can compile."""
    if extent != "needed":
        return [[name] for name in names]
    special = (_WITH_OWN_BITS, "baseline")
    best = [name for name in names if name not in special]
    return [*([best] if best else []), *([name] for name in names if name in special)]


def _compiled(
    compiler: Sequence[str], folder: Path, wanted: Sequence[Sequence[str]], spare: str, say: Callable[[str], None]
) -> list[Path]:
    """Returns the object files of the `wanted` candidates; the variant `spare` takes less time to compile. Leaves out
    variants for which the compiler is too old, except `baseline`."""
    flags = flags_of(target(compiler))

    def compile_first(names: Sequence[str]) -> dict[str, subprocess.CompletedProcess[bytes]]:
        done: dict[str, subprocess.CompletedProcess[bytes]] = {}
        for name in names:
            own = [*flags[name], *(_SPARE_FLAGS if name == spare else ()), f"-DVARIANT={name}"]
            done[name] = _done(_command(compiler, "variant.cpp", folder / f"{name}.o", own))
            if done[name].returncode == 0:
                break
        return done

    # Each takes up to 400 MiB of memory.
    with ThreadPoolExecutor(runpy.run_path(str(_CONTROL_GROUPS))["num_cpus"]()) as pool:
        # The last ones take longest, but for `baseline`.
        running = [pool.submit(compile_first, names) for names in [*reversed(wanted[:-1]), wanted[-1]]]
        _watch(running, say)
    done = dict(chain.from_iterable(compiled.result().items() for compiled in running))
    tried = [name for name in flags if name in done]
    names = [name for name in tried if done[name].returncode == 0]
    if "baseline" not in names:
        raise BuildError(_first_error(done["baseline"].stderr.decode(errors="replace")))
    described = "".join(char for char in _first_line_of(compiler, "--version") if char not in '"\\')
    variants = " ".join(f"V({name})" for name in names)
    source = f"{_DIGEST_AT.decode()}{digest()} {' '.join(tried)}"
    defined = [f"-DVARIANTS={variants}", f'-DCOMPILER="{described}"', f'-DSOURCE="{source}"']
    _run(_command(compiler, "library.cpp", folder / "library.o", defined))
    _run(_command(compiler, "team.cpp", folder / "team.o", []))
    return [folder / f"{name}.o" for name in [*names, "library", "team"]]


def _watch(running: Sequence[Future[Any]], say: Callable[[str], None]) -> None:
    """Reports progress to `say` until all are done."""
    began, left = time.monotonic(), set(running)
    while left:
        seconds = round(time.monotonic() - began)
        say(f"compiling the operators, {len(running) - len(left)} of {len(running)}, {seconds} s")
        left = wait(left, timeout=_TICK_S, return_when=FIRST_COMPLETED).not_done


def flags_of(kind: str) -> dict[str, tuple[str, ...]]:
    """Returns the variants for a kind of CPU, the best first, with their flags."""
    return _VARIANTS.get(kind, {"baseline": ()})


def target(compiler: Sequence[str]) -> str:
    """Returns the kind of CPU that the compiler compiles for."""
    return _kind(_first_line_of(compiler, "-dumpmachine").partition("-")[0])


def _kind(machine: str) -> str:
    """Returns the kind of a CPU as `_VARIANTS` names it."""
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(machine, machine)


def _first_line_of(compiler: Sequence[str], question: str) -> str:
    """Returns the first line of the compiler's answer."""
    done = _done([*compiler, question])
    return done.stdout.decode(errors="replace").partition("\n")[0]


def _command(compiler: Sequence[str], source: str, made: Path, flags: Sequence[str]) -> list[str]:
    return [*compiler, *_FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(made)]


def _done(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _run(command: Sequence[str]) -> None:
    done = _done(command)
    if done.returncode:
        raise BuildError(_first_error(done.stderr.decode(errors="replace")))


def _first_error(messages: str) -> str:
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "the compiler failed")


def chosen_extent() -> str:
    """Returns the one of the `EXTENTS` that the environment asks for. Ends the process with a message if it is none."""
    extent = os.environ.get("DISKPREFIX_VARIANTS") or EXTENTS[0]
    if extent not in EXTENTS:
        sys.exit(f"DISKPREFIX_VARIANTS: {extent!r} is not one of {', '.join(EXTENTS)}")
    return extent


def main() -> int:
    """Builds the library if it is missing, out of date, or lacks variants that are asked for. A failure is no error:
    torch's kernels are used instead."""
    extent = chosen_extent()
    if is_complete(extent):
        return 0
    on_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        print(f"\r\033[K{text}" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        build(extent, say)
        ended = ""
    except (BuildError, OSError) as error:
        ended = f"the C++ operators were not compiled, torch's take their place: {error}\n"
    print(f"\r\033[K{ended}" if on_terminal else ended, end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
