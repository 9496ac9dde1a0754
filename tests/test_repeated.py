"""What CI repeats: few tests, none of what must be right at the first try, and none that is repeated for long."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.closing import MOST_REPEATED
from tests.faults.seeds import NO_COMMIT, commit_of
from tests.test_closing import CONFTEST, run

ROOT = Path(__file__).parent.parent
MOST_MARKED = 40
MOST_COMMITS = 20
"""A test that is still repeated after so many commits is to be mended."""
PLACES = ("tests/desk/", "tests/daemon/server/process/", "tests/daemon/router/", "tests/tools/test_bench.py")
"""Where tests wait for processes, terminals and browsers, or measure. Bits, stores, faults, interleavings and
simulators are tested elsewhere."""
ONCE = re.compile(r"simulate|auth|token|peer_user|origins|refusals|modes|key")
"""Files and tests in these places that are about security or simulate: they are never repeated."""


def marked_in(source: str) -> Iterator[str]:
    """Yields the tests of a source that have the mark, and what else has it."""
    for node in ast.walk(ast.parse(source)):
        decorators = getattr(node, "decorator_list", [])
        if any("mark.timing" in ast.unparse(one) for one in decorators):
            yield node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "mark.timing" in ast.unparse(node):
            yield ast.unparse(node)


def may_be_repeated(test: str) -> bool:
    return test.startswith(PLACES) and not ONCE.search(test) and re.fullmatch(r"[\w/]+\.py::test_\w+", test) is not None


MARKED = {
    f"{path.relative_to(ROOT)}::{name}"
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if path != Path(__file__) and "mark.timing" in (text := path.read_text(encoding="utf-8"))
    for name in marked_in(text)
}
"""All tests with the mark."""


def too_old(lines: list[str], checkout: Path) -> list[str]:
    """Returns the lines whose commit is too far behind, or is not behind the present one."""
    found = []
    for line in lines:
        commit = line.partition(" ")[0]
        counted = subprocess.run(
            ["git", "-C", str(checkout), "rev-list", "--count", "HEAD", f"^{commit}"], capture_output=True, text=True
        )
        if counted.returncode or int(counted.stdout) > MOST_COMMITS:
            found.append(line)
    return found


def test_few_tests_have_the_mark_and_none_of_bits_stores_faults_and_security() -> None:
    assert 0 < len(MARKED) <= MOST_MARKED
    assert {test for test in MARKED if not may_be_repeated(test)} == set()


@pytest.mark.parametrize(
    ("test", "may"),
    [
        ("tests/desk/watch/test_top.py::test_a", True),
        ("tests/faults/test_kills.py::test_a", False),
        ("tests/desk/simulate/test_simulate.py::test_a", False),
        ("tests/desk/clients/test_launch.py::test_a_key_is_sent", False),
        ("tests/desk/watch/test_top.py::pytestmark = pytest.mark.timing('a')", False),
    ],
)
def test_a_mark_in_a_wrong_place_is_found(test: str, may: bool) -> None:
    assert may_be_repeated(test) == may
    source = "@pytest.mark.timing('a')\ndef test_a(): ...\npytestmark = pytest.mark.timing('a')\ndef test_b(): ..."
    assert [*marked_in(source)] == ["test_a", "pytestmark = pytest.mark.timing('a')"]


def test_few_tests_are_repeated_and_none_for_long() -> None:
    lines = (ROOT / "tests/repeated.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_REPEATED
    assert {line.partition(" ")[2].partition("[")[0] for line in lines} <= MARKED
    is_shallow = (ROOT / ".git/shallow").exists()
    assert commit_of() == NO_COMMIT or is_shallow or too_old(lines, ROOT) == []


def test_a_line_that_is_older_than_some_commits_is_found(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=no"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    commits = list[str]()
    for number in range(MOST_COMMITS + 2):
        message = ("--allow-empty", "--quiet", "--message", str(number))
        subprocess.run([*git, "commit", *message], check=True)
        commits.append(commit_of.__wrapped__(tmp_path)[:8])
    lines = [f"{commit} tests/desk/test_it.py::test_a" for commit in (*commits[:2], "cafecafe")]
    assert too_old(lines, tmp_path) == [lines[0], lines[2]]


TIMED = """
import pytest

@pytest.mark.timing("a clock")
@pytest.mark.parametrize("number", range({timed}))
def test_timed(number):
    assert not number

def test_other():
    assert {other}

def test_skipped():
    pytest.skip("{reason}")
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("timed", "other", "reason", "repeated"),
    [
        (3, True, "needs root", ["test_it.py::test_timed[1]", "test_it.py::test_timed[2]"]),
        (3, False, "needs root", []),
        (3, True, "nobody knows why", []),
        (MOST_REPEATED + 2, True, "needs root", []),
        (1, True, "needs root", []),
    ],
)
def test_a_run_names_what_may_be_repeated(
    timed: int, other: bool, reason: str, repeated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISKPREFIX_TEST_REPEAT", str(tmp_path / "repeat"))
    tests = TIMED.format(timed=timed, other=other, reason=reason)
    run(tmp_path, CONFTEST.format(longest_s=60.0), tests, is_ci=True)
    written = tmp_path / "repeat"
    assert (written.read_text().splitlines() if written.exists() else []) == repeated


TOOL = """#!/usr/bin/env bash
echo "$*" >>calls
[[ "$*" == *::* ]] && exit {again}
printf '%s' "{failed}" >"$DISKPREFIX_TEST_REPEAT"
exit {first}
"""
FAILED = "tests/desk/test_it.py::test_a['b' c]\n"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("failed", "first", "again", "code"),
    [("", 0, 0, 0), ("", 1, 0, 1), (FAILED, 1, 0, 0), (FAILED, 1, 1, 1), ("", 3, 0, 3)],
)
def test_ci_repeats_only_what_the_run_names_and_says_so(
    failed: str, first: int, again: int, code: int, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "tools").mkdir()
    for name, text in (
        ("test", TOOL.format(failed=failed, first=first, again=again)),
        ("bench", "#!/usr/bin/env bash\n"),
    ):
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    for program in ("apt-get", "chromium", "promtool", "curl", "systemd-analyze", "umoci"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=no"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--allow-empty", "--quiet", "--message", "first"], check=True)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [tmp_path / ".ci/run", "-k", "a"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    name = FAILED.strip()
    assert (tmp_path / "calls").read_text().splitlines() == ["-k a", *([f"--all -n 0 {name}"] if failed else [])]
    line = f"\n{commit_of.__wrapped__(tmp_path)[:8]} {name}\n"
    assert (line in ended.stderr) == (bool(failed) and not again)
