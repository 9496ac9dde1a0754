"""Compiling the operators: when, with what, and what happens without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.native import build

COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *--version*) echo 'an "odd" compiler 1.0'; exit 0 ;;
    *-dumpmachine*) echo {cpu}-any-linux; exit 0 ;;
    *{refused}*) echo "cc1plus: error: unrecognized command-line option" >&2; exit 1 ;;
esac
for last; do :; done
echo object > "$last"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, without a library."""
    shutil.copytree(build.SOURCES, tmp_path / "source")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "source")
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "_operators.so")
    return tmp_path


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str, cpu: str = "x86_64") -> Path:
    """A compiler for `cpu` that notes how it was called, and does not know the flag `refused`."""
    compiler, log = folder / "compiler", folder / "calls"
    compiler.write_text(COMPILER.format(log=log, refused=refused, cpu=cpu), encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


def test_a_variant_that_the_compiler_is_too_old_for_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_compiler(folder, monkeypatch, refused="-mamx-tile")
    build.build()
    expected = '-DVARIANTS=V(avx512_bf16) V(avx512) V(avx2) V(baseline) -DCOMPILER="an odd compiler 1.0"'
    assert expected in calls.read_text()
    assert build.LIBRARY.exists()
    assert {path.name for path in folder.iterdir()} == {"source", "compiler", "calls", "_operators.so"}


@pytest.mark.parametrize(
    ("cpu", "variants"), [("riscv64", "V(baseline)"), ("arm64", "V(neon_bf16) V(neon_dot) V(baseline)")]
)
def test_the_compiler_says_for_which_cpu_it_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, variants: str
) -> None:
    calls = use_compiler(folder, monkeypatch, refused="-mavx2", cpu=cpu)
    build.build()
    assert f"-DVARIANTS={variants} " in calls.read_text()


def test_a_compiler_that_fails_is_told_by_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_compiler(folder, monkeypatch, refused="-O3")
    assert build.main() == 0
    assert capsys.readouterr().err == (
        "the C++ operators were not compiled, torch's take their place: "
        "cc1plus: error: unrecognized command-line option\n"
    )
    assert not build.LIBRARY.exists()


@pytest.mark.usefixtures("folder")
def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found \(no-such-compiler\)"):
        build.build()


def test_a_library_of_other_sources_is_out_of_date(folder: Path) -> None:
    assert not build.is_current()
    build.LIBRARY.write_bytes(b"...diskprefix source " + build.digest().encode() + b"\0...")
    assert build.is_current()
    (folder / "source" / "vector.h").write_text("// changed", encoding="utf-8")
    assert not build.is_current()


def test_building_imports_the_standard_library_only() -> None:
    code = f"import sys; sys.argv = ['']; exec(open({build.__file__!r}).read(), {{'__name__': 'x', '__file__': ''}})"
    code += "; print([name for name in ('torch', 'numpy', 'diskprefix') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
