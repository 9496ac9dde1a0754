"""Compiles the targets in `targets/` and the operators below them, with sanitizers for libFuzzer or plainly."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diskprefix.control_groups import num_cpus

NATIVE = Path(__file__).resolve().parents[2] / "diskprefix/native"
TARGETS = Path(__file__).parent / "targets"
_COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(24, 14, -1)))
_FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-w", "-O1", "-gline-tables-only")
MEMORY, RACES = "address,undefined", "thread"
"""The sanitizers of a program, as clang names them."""
_FUZZED = "-fsanitize=fuzzer-no-link"
_FUZZER = "-fsanitize=fuzzer"
_EMPTY = b'#include <cstdint>\nextern "C" int LLVMFuzzerTestOneInput(const uint8_t*, unsigned long) { return 0; }'


class CannotCompile(Exception):
    """The targets cannot be compiled. The message is one line."""


def names() -> list[str]:
    """Returns the names of the targets in C++."""
    return sorted(path.stem for path in TARGETS.glob("*.cpp"))


def clang() -> str:
    """Returns a clang that has libFuzzer and the sanitizers. Raises `CannotCompile`."""
    for name in _COMPILERS:
        if shutil.which(name):
            command = [name, *_sanitized(MEMORY), _FUZZER, "-x", "c++", "-", "-o", os.devnull]
            if not subprocess.run(command, input=_EMPTY, capture_output=True, check=False).returncode:
                return name
    raise CannotCompile("no clang with libFuzzer was found (on Debian: clang-19 and libclang-rt-19-dev)")


def _sanitized(sanitizers: str) -> tuple[str, str]:
    return f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"


def compiled(cache: Path, sanitizers: str = MEMORY) -> Path:
    """Returns a folder below `cache` with a program for each target. What is there already is not compiled again.

    Raises `CannotCompile`.
    """
    flags = _sanitized(sanitizers)
    return build(cache, [clang()], [*flags, _FUZZED], [*flags, _FUZZER])


def build(cache: Path, compiler: Sequence[str], flags: Sequence[str], link: Sequence[str]) -> Path:
    """Compiles the operators and the targets. Returns the folder with the programs. Raises `CannotCompile`."""
    source, common = NATIVE / "source", [*compiler, *_FLAGS, *flags]
    # The flags of each variant of the operators come from `native/build.py`.
    module = _build_module()
    chosen = module.flags_of(module.target(compiler))
    named = " ".join(f"V({name})" for name in chosen)
    jobs = [(source / "library.cpp", ['-DCOMPILER=""', '-DSOURCE=""', f"-DVARIANTS={named}"])]
    jobs += [(source / "variant.cpp", [*own, f"-DVARIANT={name}"]) for name, own in chosen.items()]
    parts = [(TARGETS / f"{name}.cpp", [f"-I{source}"]) for name in names()]
    with ThreadPoolExecutor(num_cpus()) as pool:
        objects = list(pool.map(lambda job: _object(cache, [*common, *job[1]], job[0]), [*jobs, *parts]))
        operators, of_targets = objects[: len(jobs)], objects[len(jobs) :]
        folder = cache / hashlib.sha256(repr((link, objects)).encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        links = [
            ([*compiler, str(own), *map(str, operators), *link, "-lpthread"], folder / name)
            for name, own in zip(names(), of_targets, strict=True)
        ]
        list(pool.map(lambda job: _made(*job), links))
    return folder


def _object(cache: Path, command: Sequence[str], source: Path) -> Path:
    """Compiles a source into an object file named after a hash of the command, the source and the headers."""
    digest = hashlib.sha256(repr(command).encode())
    beside = [path for path in sorted(source.parent.iterdir()) if path.suffix == ".h"]
    for path in (source, *beside, NATIVE / "source/interface.h"):
        digest.update(path.name.encode() + path.read_bytes())
    made = cache / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    cache.mkdir(parents=True, exist_ok=True)
    return _made([*command, "-c", str(source)], made)


def _made(command: Sequence[str], path: Path) -> Path:
    """Runs a command that makes `path`, unless it is there."""
    if not path.exists():
        part = path.with_suffix(".part")
        _run([*command, "-o", str(part)])
        part.rename(path)
    return path


def replayer(folder: Path, library: Path) -> Path:
    """Compiles a program that replays files with the operators of a plain library: for each of its arguments, a target
    and a folder, it runs the target once with each file. Raises `CannotCompile`."""
    source = folder / "replayer.cpp"
    lines = [
        f'#define LLVMFuzzerTestOneInput {name}\n#include "{name}.cpp"\n#undef LLVMFuzzerTestOneInput'
        for name in names()
    ]
    table = ", ".join(f'{{"{name}", {name}}}' for name in names())
    source.write_text("\n".join([*lines, f"#define TARGETS {table}", '#include "replay.h"']), encoding="utf-8")
    flags = ["-std=c++17", "-O0", "-w", f"-I{TARGETS}", f"-I{NATIVE / 'source'}"]
    linked = [str(source), str(library), f"-Wl,-rpath,{library.parent}", "-lpthread"]
    return _made([*_build_module()._compiler(), *flags, *linked], folder / "replayer")


def _build_module() -> Any:
    spec = importlib.util.spec_from_file_location("diskprefix_native_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line]
        raise CannotCompile(lines[0] if lines else f"{command[0]} failed")
