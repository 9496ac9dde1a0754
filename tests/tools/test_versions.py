"""`tools/versions` knows every package whose inner parts are used, and tells a failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.test_project import INNER_PARTS, ROOT
from tools.measuring.environments import NotInstalled
from tools.newest import versions
from tools.newest.versions import PACKAGES, VersionsError, counts, newest_of, pins

ANSWER = "{0} ({1})\nAvailable versions: {1}\n  INSTALLED: {2}\n  LATEST:    2.15.0\n"


def test_each_package_with_an_upper_bound_is_tried_with_tests_that_exist() -> None:
    assert set(PACKAGES) >= INNER_PARTS
    assert pins().keys() >= PACKAGES.keys()
    assert [test for tests in PACKAGES.values() for test in tests if not (ROOT / test).exists()] == []


@pytest.mark.parametrize(
    ("listed", "installed", "expected"),
    [
        ("1.10.0, 1.9.1", "1.9.1", "1.10.0"),
        ("1.9.1, 1.10.0", "1.10.0", "1.10.0"),
        ("2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0", "2.12.0+cpu", "2.13.0+cpu"),
        ("2.15.0, 2.13.0", "2.13.0+cpu", "2.13.0+cpu"),
    ],
)
def test_the_newest_version_is_one_of_the_build_that_is_installed(listed: str, installed: str, expected: str) -> None:
    assert newest_of(ANSWER.format("torch", listed, installed)) == expected


def test_an_answer_without_versions_is_an_error() -> None:
    with pytest.raises(VersionsError, match="lists no version"):
        newest_of("ERROR: no such thing\n")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("....\n323 passed in 288.11s (0:04:48)\n", "323 passed"),
        (
            "F\nFAILED one passed in vain\n=== 3 failed, 323 passed, 1 skipped in 2.1s ===\n",
            "3 failed, 323 passed, 1 skipped",
        ),
        ("ImportError\n", "pytest did not end"),
    ],
)
def test_the_counts_are_those_of_the_last_line(output: str, expected: str) -> None:
    assert counts(output) == expected


@pytest.mark.parametrize("problem", ["", "test", "install"])
def test_a_failed_test_or_installation_is_in_the_table_and_in_the_exit_code(
    problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def environment(name: str, version: str) -> Path:
        if problem == "install" and name == "lmdb":
            raise NotInstalled(f"{name} {version} is not for this Python")
        return tmp_path / "bin/python"

    def ended(command: list[Any], **_: Any) -> subprocess.CompletedProcess[str]:
        failed = problem == "test" and any("store" in str(word) for word in command)
        return subprocess.CompletedProcess(command, int(failed), f"{'1 failed, ' * failed}2 passed in 1.00s\n")

    monkeypatch.setattr(versions, "newest", lambda _: "9.0")
    monkeypatch.setattr(versions, "environment", environment)
    monkeypatch.setattr(subprocess, "run", ended)
    ran = CliRunner().invoke(versions.main, ["h11", "lmdb", "--json"])
    said = {"": "2 passed", "test": "1 failed, 2 passed", "install": "lmdb 9.0 is not for this Python"}[problem]
    first, second = json.loads(ran.stdout)["packages"]
    assert (first["result"], first["passed"]) == ("2 passed", True)
    assert (second["result"], second["passed"]) == (said, not problem)
    assert (second["pinned"], second["newest"]) == (pins()["lmdb"], "9.0")
    assert "lmdb 9.0: an environment" in ran.stderr
    assert ran.exit_code == bool(problem)
    table = CliRunner().invoke(versions.main, ["h11", "lmdb"]).stdout
    assert said in table
    assert ("✗" in table) == bool(problem)
