"""How many CPUs a process may keep busy, as the kernel's files of a container or a service say it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from diskprefix import control_groups as module
from diskprefix.control_groups import control_groups, cpu_quota, num_cpus
from diskprefix.native import compute_threads

ROOT = Path(__file__).parent.parent
V1 = "12:cpuset:/\n4:cpu,cpuacct:{0}\n2:memory:{0}\n0::/"


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")
    return folder


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        pytest.param("0::/", {}, None, id="no limit on a machine"),
        pytest.param("0::/a", {"a/cpu.max": "max 100000"}, None, id="a group without a limit"),
        pytest.param("0::/", {"cpu.max": "200000 100000"}, 2, id="docker --cpus 2, with a namespace of its own"),
        pytest.param("0::/", {"cpu.max": "150000 100000"}, 2, id="one and a half, rounded up"),
        pytest.param("0::/", {"cpu.max": "10000 100000"}, 1, id="a tenth"),
        pytest.param(
            "0::/kubepods/pod/c",
            {
                "kubepods/pod/c/cpu.max": "800000 100000",
                "kubepods/pod/cpu.max": "300000 100000",
                "cpu.max": "max 100000",
            },
            3,
            id="the tightest parent counts",
        ),
        pytest.param("0::/../../b", {"cpu.max": "200000 100000"}, 2, id="a group outside of the namespace"),
        pytest.param("0::/", {"cpu.max": "max"}, None, id="half a line"),
        pytest.param("0::/", {"cpu.max": "50000 0"}, None, id="no period"),
        pytest.param("0::/", {"cpu.max": "many 100000"}, None, id="no number"),
        pytest.param(
            V1.format("/docker/1"),
            {"cpu,cpuacct/cpu.cfs_quota_us": 400000, "cpu,cpuacct/cpu.cfs_period_us": 100000},
            4,
            id="version 1 in a container, which sees its own group as the root",
        ),
        pytest.param(
            V1.format("/system.slice/a.service"),
            {
                "cpu/system.slice/a.service/cpu.cfs_quota_us": 25000,
                "cpu/system.slice/a.service/cpu.cfs_period_us": 50000,
                "cpu/system.slice/cpu.cfs_quota_us": -1,
                "cpu/system.slice/cpu.cfs_period_us": 100000,
            },
            1,
            id="version 1, mounted by the name of one controller",
        ),
        pytest.param(V1.format("/"), {"cpuset/cpu.cfs_quota_us": 1, "cpuset/cpu.cfs_period_us": 1}, None, id="others"),
        pytest.param("nonsense", {"cpu.max": "100000 100000"}, None, id="a line that is none"),
        pytest.param("", {"cpu.max": "100000 100000"}, None, id="without /proc"),
    ],
)
def test_a_quota_of_cpus_is_that_of_the_group_and_its_parents(
    own: str, files: dict[str, object], quota: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, mounted = write(tmp_path / "proc", {"self/cgroup": own}), write(tmp_path / "cgroup", {"x": "", **files})
    assert cpu_quota(proc, mounted) == quota
    for cpus in (1, 3, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cpus=cpus: set(range(cpus)), raising=False)
        assert num_cpus(proc, mounted) == min(cpus, quota or cpus)


def test_groups_never_lie_outside_of_where_they_are_mounted(tmp_path: Path) -> None:
    for own in ("0::/../../..", "0:://a/../../b", "3:cpu:/../x"):
        proc = write(tmp_path / "proc", {"self/cgroup": own})
        found = list(control_groups("cpu", proc, tmp_path / "cgroup"))
        assert found
        assert all(group == tmp_path / "cgroup" or tmp_path / "cgroup" in group.parents for group in found)


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs of eight."""
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/"})
    mounted = write(tmp_path / "cgroup", {"cpu.max": "200000 100000"})
    monkeypatch.setattr(compute_threads, "cpu_quota", lambda: cpu_quota(proc, mounted))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(compute_threads, "_core_of", lambda _folder, cpu: str(cpu))
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        # What is set later is taken back only if there is something to restore.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("quota")
def test_operators_and_libraries_have_no_more_threads_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_threads._usual.__wrapped__() == 2
    compute_threads.limit_libraries()
    assert [os.environ[name] for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")] == ["2", "2"]
    # What a user names stays.
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    compute_threads.limit_libraries()
    assert (os.environ["OMP_NUM_THREADS"], compute_threads._usual.__wrapped__()) == ("7", 7)


@pytest.mark.usefixtures("quota")
def test_a_quota_that_is_no_limit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, 8, 64):
        monkeypatch.setattr(compute_threads, "cpu_quota", lambda found=found: found)
        compute_threads.limit_libraries()
        assert "OMP_NUM_THREADS" not in os.environ
        assert compute_threads._usual.__wrapped__() == 8


@pytest.mark.slow
def test_torch_takes_the_number_that_the_libraries_are_given() -> None:
    code = (
        "from diskprefix.native import compute_threads; compute_threads.cpu_quota = lambda: 1; "
        "compute_threads._allowed_cores = lambda _: 64; compute_threads.limit_libraries(); "
        "import torch; print(torch.get_num_threads(), compute_threads.num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout == "1 1\n"


COUNTS = re.compile(r"\b(os\.)?(cpu_count|process_cpu_count|sched_getaffinity)\(")
COUNTED = {
    "diskprefix/control_groups.py": "the place",
    "diskprefix/native/compute_threads.py": "cores, which `cpu_quota` limits",
    "diskprefix/processors.py": "which CPUs, not how many",
    "tools/benchmarks/engines.py": "which CPUs, not how many",
}
"""The files that ask the system for CPUs, and why."""


def test_all_others_ask_the_one_place_that_knows_the_quota() -> None:
    files = [path for folder in ("diskprefix", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if COUNTS.search(path.read_text(encoding="utf-8"))}
    assert found == COUNTED.keys()
    assert Path("/proc") == module.PROC
