"""A run of CI fails for a skip that nobody accepts, and names the tests without a mark that take long. Of a test with
many cases it runs some, others with each commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import chosen_of
from tests.closing import LISTED, unlisted

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests import closing

closing.LONGEST_S = {longest_s}

def pytest_configure(config):
    config.pluginmanager.register(closing.ClosingLines())
"""
TESTS = """
import pytest

{mark}
def test_of_a_folder():
    {skip}

{mark}
def test_one():
    pass
"""
SAMPLING = """
from tests import cases, closing
from tests.faults.seeds import seed_of_run

pytest_addoption = cases.pytest_addoption

def pytest_configure(config):
    cases.take_seed(config)
    config.pluginmanager.register(closing.ClosingLines())

def pytest_collection_modifyitems(items):
    cases.mark_as_slow(items, seed_of_run())
"""
CASES = """
import pytest

@pytest.mark.cases(2)
@pytest.mark.parametrize("upper", [1, 2, 3])
@pytest.mark.parametrize("lower", [4, 5, 6])
def test_cases(upper, lower):
    pass

@pytest.mark.cases(2)
@pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_slow_case(case):
    pass
"""
ACCEPTED, OTHER = 'pytest.skip("needs root")', 'pytest.skip("nobody knows why")'


@pytest.mark.parametrize(
    ("is_ci", "skip", "longest_s", "mark", "line"),
    [
        (True, ACCEPTED, 60.0, "", ""),
        (True, OTHER, 60.0, "", "CI does not accept this skip: test_it.py::test_of_a_folder: nobody knows why"),
        (False, OTHER, 60.0, "", "CI does not accept this skip: test_it.py::test_of_a_folder: nobody knows why"),
        (False, 'pytest.skip("needs a_program")', 60.0, "", ""),
        (True, ACCEPTED, -1.0, "", "make it cheaper or mark it slow: test_it.py::test_one"),
        (True, ACCEPTED, -1.0, "@pytest.mark.slow", ""),
    ],
)
def test_what_fails_a_run_of_ci_and_what_takes_long_is_named(
    is_ci: bool, skip: str, longest_s: float, mark: str, line: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, CONFTEST.format(longest_s=longest_s), TESTS.format(skip=skip, mark=mark), is_ci=is_ci)
    assert ended.returncode == (1 if is_ci and "skip" in line else 0), ended.stdout
    assert line in ended.stdout
    assert line or "make it cheaper" not in ended.stdout


def run(
    folder: Path, conftest: str, tests: str, *options: str, is_ci: bool = False
) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    cases\n    timing\n")
    environment = {name: value for name, value in os.environ.items() if name != "DISKPREFIX_TEST_MISSING"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"DISKPREFIX_TEST_MISSING": ""} if is_ci else {})
    # To import its plugins takes longer than the tests.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-p", "no:cacheprovider", *options]
    return subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, check=False)


def test_of_the_cases_of_a_test_some_run_always_and_all_if_asked(tmp_path: Path) -> None:
    for options, told in [(("-m", "not slow"), "3 passed, 8 deselected"), ((), "11 passed")]:
        ended = run(tmp_path, SAMPLING, CASES, *options, "--sample", "cafe")
        assert told in ended.stdout
        assert "sample cafe (given): `tools/test --sample SEED` tries one again" in ended.stdout.splitlines()[-2]


def test_some_dozen_seeds_choose_each_case_and_one_seed_the_same_ones_in_every_run() -> None:
    cases = [f"tests/test_it.py::test_cases[{lower}-{upper}]" for lower in range(4) for upper in range(5)]
    turns = [chosen_of(cases, 3, f"{number:08x}") for number in range(36)]
    assert {len(turn) for turn in turns} == {3}
    assert set().union(*turns) == {*cases}
    assert turns[0] != turns[1]
    assert chosen_of(cases[::-1], 3, "00000000") == turns[0]


def test_a_skip_is_listed_by_words_of_its_reason() -> None:
    reasons = ["needs chromium", "needs chromium-driver", "mounting a file system needs root", "needs roots"]
    assert unlisted(reasons, "chromium") == ["needs chromium-driver", "needs roots"]
    assert unlisted(reasons[:1], "") == reasons[:1]
    assert unlisted(reasons, None) == []


def test_each_listed_reason_is_one_that_a_test_gives() -> None:
    given = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != ROOT / "tests/closing.py")
    for reason in LISTED:
        assert reason in given or "import" in reason, reason
