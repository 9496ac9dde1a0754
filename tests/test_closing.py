"""The closing lines of a run of the tests, and which skips fail it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.closing import LISTED, TESTED, unlisted
from tests.native.variants import of_this_cpu

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.closing import ClosingLines

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ClosingLines())
"""
TESTS = """
import pytest

from tests.closing import needs

def test_operators(record_property):
    for variant in {variants!r}:
        record_property({tested!r}, variant)

@needs("no-such-program")
def test_of_a_program():
    pass

def test_of_a_folder():
    pytest.skip({reason!r})
"""


def closed(folder: Path, missing: str | None, reason: str, variants: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a run in CI with these programs missing, or outside of CI. A test is skipped for that
    reason, and others are of these variants."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS.format(variants=variants, tested=TESTED, reason=reason))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("DISKPREFIX_TEST_MISSING", None)
    if missing is not None:
        environment["DISKPREFIX_TEST_MISSING"] = missing
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    return ended.returncode, ended.stdout


def test_the_variants_that_were_tested_are_counted_and_what_ci_could_not_install_is_named(tmp_path: Path) -> None:
    code, output = closed(tmp_path, "no-such-program other ", "needs root", of_this_cpu())
    assert code == 0
    counts = ", ".join(f"{name} (1 tests)" for name in of_this_cpu())
    assert f"operators tested: {counts}" in output
    assert "not tested, because it could not be installed: no-such-program other" in output


@pytest.mark.parametrize(("missing", "wrong"), [(None, 0), ("", 2)], ids=["a developer's run", "CI"])
def test_any_other_skip_fails_a_run_of_ci(missing: str | None, wrong: int, tmp_path: Path) -> None:
    code, output = closed(tmp_path, missing, "nobody knows why")
    assert code == (1 if wrong else 0)
    lines = [line for line in output.splitlines() if line.startswith("CI does not accept this skip")]
    assert len(lines) == wrong
    assert all("test_of_a_program: needs no-such" in one or "test_of_a_folder: nobody" in one for one in lines)


def test_a_skip_is_listed_by_words_of_its_reason() -> None:
    reasons = ["needs chromium", "needs chromium-driver", "mounting a file system needs root", "needs roots"]
    assert unlisted(reasons, "chromium") == ["needs chromium-driver", "needs roots"]
    assert unlisted(reasons[:1], "") == reasons[:1]


def test_each_listed_reason_is_one_that_a_test_gives() -> None:
    given = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != ROOT / "tests/closing.py")
    for reason in LISTED:
        assert reason in given or "import" in reason, reason


@pytest.mark.parametrize(
    ("mark", "busy", "code"),
    [("", False, 1), ("", True, 0), ("@pytest.mark.slow", False, 0)],
    ids=["plain", "busy", "slow"],
)
def test_a_test_without_a_mark_that_takes_long_fails_ci_on_a_quiet_machine(
    tmp_path: Path, mark: str, busy: bool, code: int
) -> None:
    shorter = "from tests import closing\n\nclosing.LONGEST_S = closing.FAILS_S = -1.0\n"
    (tmp_path / "conftest.py").write_text(f"{shorter}closing.is_busy = lambda: {busy}\n{CONFTEST}")
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n{mark}\ndef test_one():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DISKPREFIX_TEST_MISSING": ""}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stdout
    assert ("make it cheaper or mark it slow: test_it.py::test_one" in ended.stdout) == (mark == "")
