"""Compiles the operators in `source/`, once for each kind of CPU, into one library beside this file.

It needs a C++ compiler and nothing else. This module imports the standard library only, as it also runs while the
package is installed. `python diskprefix/native/build.py` builds what is missing or out of date: the variants that this
CPU can run. A wheel has those of every CPU (`tools/hatch_build.py`). The compiler says for which CPU it compiles, so
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
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
_CONTROL_GROUPS = Path(__file__).parent.parent / "control_groups.py"
LIBRARY = Path(__file__).parent / "_operators.so"
_DIGEST_AT = b"diskprefix source "
"""The text before the digest in the library. The names of the requested variants follow the digest."""
_TICK_S = 4.0
"""The longest time without a word while the operators are compiled."""

# -O3 takes a third longer, and its code is no faster. Without -fpeel-loops the loops over a few rows would not be
# unrolled, and prompts would take twice as long.
_OPTIMISED = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops")
_FLAGS = (*_OPTIMISED, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512, "-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2_vnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
    },
    "aarch64": {
        "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
        "neon_dot": ("-march=armv8.2-a+dotprod",),
    },
}
"""The variants for each kind of CPU, with their flags. All have `baseline` after them."""


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


def is_complete(*, for_every_cpu: bool = False) -> bool:
    """Returns whether the library is there, made from these sources, with all variants that this CPU can run, or
    `for_every_cpu` of its kind."""
    tried = _tried()
    if tried is None:
        return False
    known = [*_VARIANTS.get(_kind(platform.machine()), {}), "baseline"]
    return set(known if for_every_cpu else _runnable(known, LIBRARY)) <= set(tried)


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


def build(*, for_every_cpu: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
    """Compiles the library: the variants that this CPU can run, or `for_every_cpu` of the kind that the compiler
    compiles for. Tells `say` how far it is every few seconds. Raises `BuildError`."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=LIBRARY.parent) as folder:
        names = _wanted(compiler, Path(folder), for_every_cpu)
        objects = _compiled(compiler, Path(folder), names, say)
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


def _wanted(compiler: Sequence[str], folder: Path, for_every_cpu: bool) -> list[str]:
    """Returns the names of the variants to compile. `library.cpp`, compiled without variants, says which ones this
    CPU can run."""
    known = [*_VARIANTS.get(_target(compiler), {}), "baseline"]
    if for_every_cpu or _target(compiler) != _kind(platform.machine()):
        return known
    probe = folder / "probe.so"
    defined = ["-DVARIANTS=", '-DCOMPILER=""', '-DSOURCE=""', "-shared"]
    done = _done([*compiler, *_FLAGS, *defined, str(SOURCES / "library.cpp"), "-o", str(probe)])
    return known if done.returncode else _runnable(known, probe)


def _compiled(compiler: Sequence[str], folder: Path, wanted: Sequence[str], say: Callable[[str], None]) -> list[Path]:
    """Returns the object files. Leaves out variants for which the compiler is too old, except `baseline`."""
    flags = {**_VARIANTS.get(_target(compiler), {}), "baseline": ()}

    def compile_variant(name: str) -> subprocess.CompletedProcess[bytes]:
        own = [*flags[name], f"-DVARIANT={name}"]
        return _done(_command(compiler, "variant.cpp", folder / f"{name}.o", own))

    # Each takes up to 400 MiB of memory.
    with ThreadPoolExecutor(runpy.run_path(str(_CONTROL_GROUPS))["num_cpus"]()) as pool:
        # The last ones take longest.
        running = {name: pool.submit(compile_variant, name) for name in reversed(wanted)}
        _watch(list(running.values()), say)
    done = {name: running[name].result() for name in wanted}
    names = [name for name, process in done.items() if process.returncode == 0]
    if "baseline" not in names:
        raise BuildError(_first_error(done["baseline"].stderr.decode(errors="replace")))
    described = "".join(char for char in _first_line_of(compiler, "--version") if char not in '"\\')
    variants = " ".join(f"V({name})" for name in names)
    source = f"{_DIGEST_AT.decode()}{digest()} {' '.join(wanted)}"
    defined = [f"-DVARIANTS={variants}", f'-DCOMPILER="{described}"', f'-DSOURCE="{source}"']
    _run(_command(compiler, "library.cpp", folder / "library.o", defined))
    _run(_command(compiler, "team.cpp", folder / "team.o", []))
    return [folder / f"{name}.o" for name in [*names, "library", "team"]]


def _watch(running: Sequence[Future[subprocess.CompletedProcess[bytes]]], say: Callable[[str], None]) -> None:
    """Reports progress to `say` until all are done."""
    began, left = time.monotonic(), set(running)
    while left:
        seconds = round(time.monotonic() - began)
        say(f"compiling the operators, {len(running) - len(left)} of {len(running)}, {seconds} s")
        left = wait(left, timeout=_TICK_S, return_when=FIRST_COMPLETED).not_done


def _target(compiler: Sequence[str]) -> str:
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


def main(*, for_every_cpu: bool = False) -> int:
    """Builds the library if it is missing or out of date. A failure is no error: torch's kernels are used instead."""
    if is_complete(for_every_cpu=for_every_cpu):
        return 0
    on_terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        print(f"\r\033[K{text}" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True)

    try:
        build(for_every_cpu=for_every_cpu, say=say)
        ended = ""
    except (BuildError, OSError) as error:
        ended = f"the C++ operators were not compiled, torch's take their place: {error}\n"
    print(f"\r\033[K{ended}" if on_terminal else ended, end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
