"""The operators: which variant is taken, why there is none, and how they are compiled."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.errors import SettingsError
from diskprefix.native import build, compute_threads, library
from tests.native.variants import chosen, of_this_cpu
from tools.releasing.release import GLIBC

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AMX = _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"}
NEEDED_FLAGS: dict[str, set[str]] = {
    "amx": _AMX,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "neon_i8mm": {"asimddp", "i8mm"},
    "neon_dot": {"asimddp"},
    "baseline": set(),
}


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    library._loaded.cache_clear()
    yield
    library._loaded.cache_clear()


def test_the_best_variant_of_this_cpu_is_taken() -> None:
    found = library.operators()
    assert found is not None
    assert library.described() == f"native ({found.variant})"
    assert found.variant == library.variants()[0]


def test_a_variant_that_is_named_is_taken() -> None:
    last = of_this_cpu()[-1]
    library.choose(last)
    assert library.described() == f"native ({last})"


def test_rows_of_bfloat16_need_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^--rows bf16 needs the kernels amx, not baseline; leave --kernels out$"):
        library.choose("baseline", "bf16")
    monkeypatch.setattr(library, "has_bfloat16_rows", lambda: False)
    with pytest.raises(SettingsError, match=r"^--rows bf16 needs a CPU with AMX, .*leave --rows out$"):
        library.choose("auto", "bf16")
    library.choose("torch", "bf16")
    assert library.operators() is None


def test_rows_choose_the_operators() -> None:
    for rows in ("8", "15"):
        assert (chosen("auto", rows).rows, chosen("auto", rows).variant) == (rows, of_this_cpu()[0])
    if library.has_bfloat16_rows():
        assert "amx" not in library.variants()
        assert chosen("auto", "bf16").variant == chosen("amx", "bf16").variant == "amx"


def test_each_variant_that_the_cpu_has_is_there() -> None:
    """Read from the kernel, because the operators decide themselves which of them the CPU computes."""
    name = "Features" if platform.machine() == "aarch64" else "flags"
    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if not (line := re.search(rf"^{name}\s*:(.*)$", cpus, re.MULTILINE)):
        pytest.skip("the kernel does not tell, or qemu shows another CPU's")
    flags = set(line[1].split())
    there = {*of_this_cpu(), *(["amx"] if library.has_bfloat16_rows() else [])}
    assert there == {name for name, needed in NEEDED_FLAGS.items() if needed <= flags}


def test_the_oldest_variant_is_there_on_every_cpu() -> None:
    library.choose("baseline")
    found = library.operators()
    assert found is not None
    assert found.identity == f"baseline, rows 8, {found.compiler}, {build.digest()}"
    assert re.search(r"\d+\.\d+", found.compiler)


def test_torch_can_be_chosen() -> None:
    library.choose("torch")
    assert library.operators() is None
    assert library.described() == "torch (as it was chosen)"


def test_the_error_of_a_missing_variant_lists_the_available_ones() -> None:
    library.choose("baseline")
    there = ", ".join(("auto", "torch", *of_this_cpu()))
    with pytest.raises(SettingsError, match=rf"^--kernels: 'avx9' is not one of {there}$"):
        library.choose("avx9")
    assert library.described() == "native (baseline)"


def test_without_the_library_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    assert library.described() == "torch (the operators were not compiled when diskprefix was installed)"
    with pytest.raises(SettingsError, match=r"is not one of auto, torch: the operators"):
        library.choose("baseline")


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "digest", lambda: "0" * 16)
    assert library.operators() is None
    assert "not of this version" in library.described()


def test_a_library_that_cannot_be_loaded_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"diskprefix source " + build.digest().encode())
    monkeypatch.setattr(build, "LIBRARY", broken)
    assert library.operators() is None
    assert "cannot be loaded" in library.described()


def test_the_library_runs_with_the_oldest_glibc_of_a_release() -> None:
    needed = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", build.LIBRARY.read_bytes())
    assert max((tuple(map(int, one)) for one in needed), default=GLIBC) <= GLIBC


# Compiling: when, with what, and what happens without a compiler.

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
    build.build("all")
    left = "V(avx512_vnni) V(avx512) V(avx2_vnni) V(avx2) V(baseline)"
    expected = f'-DVARIANTS={left} -DCOMPILER="an odd compiler 1.0"'
    assert expected in calls.read_text()
    assert build.LIBRARY.exists()
    assert {path.name for path in folder.iterdir()} == {"source", "compiler", "calls", "_operators.so"}


@pytest.mark.parametrize(
    ("cpu", "variants"), [("riscv64", "V(baseline)"), ("arm64", "V(neon_i8mm) V(neon_dot) V(baseline)")]
)
def test_the_compiler_says_for_which_cpu_it_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, variants: str
) -> None:
    calls = use_compiler(folder, monkeypatch, refused="-mavx2", cpu=cpu)
    build.build()
    assert f"-DVARIANTS={variants} " in calls.read_text()


def test_the_error_of_a_failing_compiler_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_compiler(folder, monkeypatch, refused="-O2")
    assert build.main() == 0
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "compiling the operators, 0 of 6, 0 s"
    assert last == (
        "the C++ operators were not compiled, torch's take their place: "
        "cc1plus: error: unrecognized command-line option"
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


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="Linux says it")
def test_the_tests_have_all_variants_that_this_cpu_can_run_and_an_installation_the_best(tmp_path: Path) -> None:
    flags = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line).split())
    known = NEEDED_FLAGS.keys() - {"neon_i8mm", "neon_dot"}
    assert {name for [name] in build._wanted(build._compiler(), tmp_path, "all")} == known
    runnable = [name for [name] in build._wanted(build._compiler(), tmp_path, "runnable")]
    assert set(runnable) == {name for name in known if NEEDED_FLAGS[name] <= flags}
    assert sorted(of_this_cpu()) == sorted(set(runnable) - {"amx"})
    assert [build.is_complete(extent) for extent in ("needed", "runnable")] == [True, True]
    needed = [name for name, *_ in build._wanted(build._compiler(), tmp_path, "needed")]
    assert set(needed) == {of_this_cpu()[0], "baseline", *({"amx"} & set(runnable))}


def rebuilt(folder: Path, extent: str) -> list[str]:
    """Builds a library of an extent if it is not complete. Returns the variants that were compiled."""
    (folder / "calls").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISKPREFIX_VARIANTS", extent)
        assert build.main() == 0
    calls = (folder / "calls").read_text()
    if tried := re.search(rf'-DSOURCE="(diskprefix source {build.digest()}.*?)"', calls):
        build.LIBRARY.write_bytes(tried[1].encode() + b"\0")
    assert build.is_complete(extent)
    return [name for name in NEEDED_FLAGS if f"-DVARIANT={name} " in calls]


def test_an_installation_is_compiled_anew_for_a_better_cpu_for_the_tests_and_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(folder, monkeypatch, refused="-no-flag")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    runnable = ["avx2", "baseline"]
    monkeypatch.setattr(build, "_runnable", lambda _names, _library: runnable)
    assert rebuilt(folder, "needed") == ["avx2", "baseline"]
    assert rebuilt(folder, "runnable") == []
    runnable = ["amx", "avx512_vnni", "avx512", "avx2", "baseline"]
    assert rebuilt(folder, "needed") == ["amx", "avx512_vnni", "baseline"]
    assert (folder / "calls").read_text().count("-O1 ") == 1, "nobody computes with the spare one"
    assert rebuilt(folder, "needed") == []
    assert rebuilt(folder, "runnable") == runnable
    assert rebuilt(folder, "needed") == []
    assert rebuilt(folder, "all") == ["amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "baseline"]
    assert "-O1 " not in (folder / "calls").read_text()
    assert rebuilt(folder, "runnable") == []


def test_a_cpu_that_has_only_the_baseline_gets_a_fast_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(folder, monkeypatch, refused="-no-flag")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_runnable", lambda _names, _library: ["baseline"])
    assert rebuilt(folder, "needed") == ["baseline"]
    assert "-O1 " not in (folder / "calls").read_text()


def test_where_the_compiler_is_too_old_for_the_best_variant_the_next_one_takes_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(folder, monkeypatch, refused="-mavx512vnni")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_runnable", lambda _names, _library: ["avx512_vnni", "avx512", "avx2", "baseline"])
    assert rebuilt(folder, "needed") == ["avx512_vnni", "avx512", "baseline"]
    assert b" avx512_vnni avx512 baseline\0" in build.LIBRARY.read_bytes()
    assert rebuilt(folder, "needed") == []


def test_an_unknown_extent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.chosen_extent() == "needed"
    monkeypatch.setenv("DISKPREFIX_VARIANTS", "every")
    with pytest.raises(SystemExit, match=r"^DISKPREFIX_VARIANTS: 'every' is not one of needed, runnable, all$"):
        build.main()


# A machine gets another CPU.

TABLES = """
#include "interface.h"
namespace diskprefix {
static int32_t fail() { return 1; }
#define FAIL(name) (decltype(Operators::name)) fail
extern const Operators baseline;
const Operators baseline = {"baseline",    FAIL(require_matrix), FAIL(attention), FAIL(pack),
                            FAIL(look_up), FAIL(run),            FAIL(split),     FAIL(join)};
}
"""


def use_library_of_another_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch, tried: str) -> None:
    """A library that has `baseline` alone, for which the variants `tried` were requested."""
    tables, made = folder / "tables.cpp", folder / "_operators.so"
    tables.write_text(TABLES, encoding="utf-8")
    defined = ["-DVARIANTS=V(baseline)", '-DCOMPILER=""', f'-DSOURCE="diskprefix source {build.digest()} {tried}"']
    sources = [str(tables), str(build.SOURCES / "library.cpp"), f"-I{build.SOURCES}"]
    flags = [*build._FLAGS, "-shared", *defined]
    subprocess.run([*build._compiler(), *flags, *sources, "-o", str(made)], check=True, capture_output=True)
    monkeypatch.setattr(build, "LIBRARY", made)
    library._loaded.cache_clear()


def test_on_another_cpu_than_it_was_installed_on_baseline_is_taken_and_it_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    better = of_this_cpu()[:-1]
    use_library_of_another_cpu(tmp_path, monkeypatch, "neon_i8mm baseline")
    assert library.variants() == ("baseline",)
    assert library.described() == "native (baseline)"
    told = library.of_another_cpu()
    assert told.startswith(f"{', '.join(better)} was not compiled, as diskprefix was installed on another CPU: ")
    assert "`pip install --force-reinstall --no-deps .`" in told
    with pytest.raises(SettingsError, match=r"^--kernels: '\w+' is not one of auto, torch, baseline: .*=runnable pip"):
        library.choose(better[0])
    with pytest.raises(SettingsError, match=r"^--kernels: 'avx9' is not one of auto, torch, baseline$"):
        library.choose("avx9")


def test_a_variant_that_the_compiler_could_not_compile_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_library_of_another_cpu(tmp_path, monkeypatch, " ".join(NEEDED_FLAGS))
    assert library.variants() == ("baseline",)
    assert library.of_another_cpu() == ""


def test_an_installation_for_this_cpu_misses_nothing() -> None:
    assert library.of_another_cpu() == ""


def test_the_cpus_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, of_core in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{of_core}\n")
    for allowed, expected in (({0, 1, 2, 3}, 2), ({0, 2}, 1), ({1, 7}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, found=allowed: found, raising=False)
        assert compute_threads.num_cores(tmp_path) == expected


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("2,1", 2), ("0", 1), ("many", 5), (None, 5)])
def test_the_environment_may_name_the_number_of_threads(
    given: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(compute_threads, "num_cores", lambda: 5)
    assert compute_threads._usual.__wrapped__() == expected


def test_building_imports_the_standard_library_only() -> None:
    code = f"import sys; sys.argv = ['']; exec(open({build.__file__!r}).read(), {{'__name__': 'x', '__file__': ''}})"
    code += "; print([name for name in ('torch', 'numpy', 'diskprefix') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
