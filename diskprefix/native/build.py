"""Compiles the operators in `source/`, once for each kind of CPU, into one library beside this file.

It needs a C++ compiler and nothing else. This module imports the standard library only, as it also runs while the
package is installed. `python diskprefix/native/build.py` builds what is missing or out of date. The compiler says for
which CPU it compiles, so `CXX=aarch64-linux-gnu-g++` builds a library for ARM64.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
_CONTROL_GROUPS = Path(__file__).parent.parent / "control_groups.py"
LIBRARY = Path(__file__).parent / "_operators.so"
_DIGEST_AT = b"diskprefix source "
"""The text before the digest in the library."""

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512, "-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "avx512_bf16": (*_AVX512, "-mavx512bf16"),
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512": _AVX512,
        "avx2_vnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
    },
    "aarch64": {
        "neon_bf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        "neon_dot": ("-march=armv8.2-a+dotprod",),
    },
}
"""The variants for each kind of CPU, with their flags. All have `baseline` after them."""


class BuildError(Exception):
    """The operators cannot be compiled. The message is one line."""


def digest() -> str:
    """Returns a digest of the sources and of this file. The library carries that of the sources it was made from."""
    found = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)} ".encode() + content)
    return found.hexdigest()[:16]


def is_current() -> bool:
    """Returns whether the library is there, made from these sources."""
    try:
        return _DIGEST_AT + digest().encode() in LIBRARY.read_bytes()
    except OSError:
        return False


def build() -> None:
    """Compiles the library. Raises `BuildError`."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=LIBRARY.parent) as folder:
        objects = _compiled(compiler, Path(folder))
        found = Path(folder, LIBRARY.name)
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(found)])
        # The linker takes the umask. Whoever may write to the library runs code in this process.
        found.chmod(found.stat().st_mode & ~0o022)
        found.replace(LIBRARY)


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").split()
    for candidate in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise BuildError(f"no C++ compiler was found ({' '.join(named) or 'c++, g++, clang++'})")


def _compiled(compiler: Sequence[str], folder: Path) -> list[Path]:
    """Returns the object files. A variant that the compiler is too old for is left out, but for the last one."""
    wanted = {**_VARIANTS.get(_target(compiler), {}), "baseline": ()}

    def compile_variant(name: str) -> subprocess.CompletedProcess[bytes]:
        own = [*wanted[name], f"-DVARIANT={name}"]
        return _done(_command(compiler, "variant.cpp", folder / f"{name}.o", own))

    # Each takes up to 400 MiB of memory.
    with ThreadPoolExecutor(runpy.run_path(str(_CONTROL_GROUPS))["num_cpus"]()) as pool:
        done = dict(zip(wanted, pool.map(compile_variant, wanted), strict=True))
    names = [name for name, process in done.items() if process.returncode == 0]
    if "baseline" not in names:
        raise BuildError(_first_error(done["baseline"].stderr.decode(errors="replace")))
    described = "".join(char for char in _first_line_of(compiler, "--version") if char not in '"\\')
    variants = " ".join(f"V({name})" for name in names)
    defined = [f"-DVARIANTS={variants}", f'-DCOMPILER="{described}"', f'-DSOURCE="{_DIGEST_AT.decode()}{digest()}"']
    _run(_command(compiler, "library.cpp", folder / "library.o", defined))
    _run(_command(compiler, "team.cpp", folder / "team.o", []))
    return [folder / f"{name}.o" for name in [*names, "library", "team"]]


def _target(compiler: Sequence[str]) -> str:
    """Returns the kind of CPU that the compiler compiles for."""
    found = _first_line_of(compiler, "-dumpmachine").partition("-")[0]
    return {"arm64": "aarch64"}.get(found, found)


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


def main() -> int:
    """Builds if that is needed. Without it everything works, with torch's kernels: it is no error."""
    if is_current():
        return 0
    try:
        build()
    except (BuildError, OSError) as error:
        print(f"the C++ operators were not compiled, torch's take their place: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
