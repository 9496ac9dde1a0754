"""Loading the operators: which variant is taken, and why there is none."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diskprefix.native import build, library
from tests.native.variants import of_this_cpu

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
NEEDED_FLAGS: dict[str, set[str]] = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": {"asimddp", "i8mm", "bf16"},
    "neon_dot": {"asimddp"},
    "baseline": set(),
}


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    library._loaded.cache_clear()
    yield
    library._loaded.cache_clear()


def test_the_best_variant_of_this_cpu_is_taken() -> None:
    library.choose("auto")
    found = library.operators()
    assert found is not None
    assert library.described() == f"native ({found.variant})"
    assert found.variant == next(name for name in library.VARIANTS if library._loaded(name)[0])


def test_each_variant_that_the_cpu_has_is_there() -> None:
    """Read from the kernel, because the operators decide themselves which of them the CPU computes."""
    name = "Features" if platform.machine() == "aarch64" else "flags"
    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if not (line := re.search(rf"^{name}\s*:(.*)$", cpus, re.MULTILINE)):
        pytest.skip("the kernel does not tell, or qemu shows another CPU's")
    flags = set(line[1].split())
    assert set(of_this_cpu()) == {name for name, needed in NEEDED_FLAGS.items() if needed <= flags}


def test_the_oldest_variant_is_there_on_every_cpu() -> None:
    library.choose("baseline")
    found = library.operators()
    assert found is not None
    assert found.identity == f"baseline, {found.compiler}, {build.digest()}"
    assert re.search(r"\d+\.\d+", found.compiler)


def test_torch_can_be_chosen() -> None:
    library.choose("torch")
    assert library.operators() is None
    assert library.described() == "torch (as it was chosen)"


def test_a_variant_that_is_not_there_is_an_error_when_it_is_chosen() -> None:
    with pytest.raises(library.Unavailable, match="no operators 'avx9' for this CPU"):
        library.choose("avx9")
    assert library._chosen != "avx9"


def test_without_the_library_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    assert library.described() == "torch (the operators were not compiled when diskprefix was installed)"


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


def test_a_torch_that_does_not_lend_its_threads_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "__file__", str(build.LIBRARY))
    assert library.operators() is None
    assert library.described() == "torch (this torch does not lend its threads; 2.10 and newer do)"
