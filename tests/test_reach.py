"""What a change reaches: the nearest tests first, by imports, names in strings and names of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.reach import UNFIT, changed_since, distances, imports
from tests.test_closing import CONFTEST, run

FILES = {
    "diskprefix/__init__.py": "",
    "diskprefix/low.py": "",
    "diskprefix/desk/middle.py": "from diskprefix import low",
    "diskprefix/desk/named.py": "COMMAND = 'desk.middle:command'",
    "diskprefix/desk/page.css": "",
    "tests/conftest.py": "",
    "tests/helper.py": "import diskprefix.desk.named",
    "tests/test_low.py": "from diskprefix.low import some",
    "tests/test_far.py": "from tests.helper import other",
    "tests/desk/test_page.py": "",
    "tests/desk/test_middle.py": "def test():\n    import diskprefix.desk.middle",
    "tests/test_named.py": "PAGE = 'page.css'",
    "tests/test_other.py": "TOOL = 'tools/run'",
    "tests/test_last.py": "def test_run(): ''",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("diskprefix/low.py", {"test_low": 1, "desk/test_middle": 2, "test_far": 4}),
        ("diskprefix/desk/middle.py", {"desk/test_middle": 1, "test_far": 3}),
        ("diskprefix/desk/page.css", {"test_named": 1, "desk/test_middle": 2, "desk/test_page": 2}),
        ("diskprefix/desk/parts/source.cpp", {"desk/test_middle": 2, "desk/test_page": 2}),
        ("tools/run", {"test_other": 1}),
        ("tests/helper.py", {"test_far": 1}),
        ("tests/test_other.py", {"test_other": 0}),
        ("diskprefix/gone.py", {}),
    ],
)
def test_a_change_reaches_the_tests_that_import_or_name_it(
    changed: str, reached: dict[str, int], project: Path
) -> None:
    found = distances([changed], imports(project), project)
    assert [*found.items()] == [(f"tests/{name}.py", number) for name, number in reached.items()]


def test_a_changed_conftest_reaches_the_tests_below_it(project: Path) -> None:
    tests = {name for name in FILES if "/test_" in name}
    assert distances(["tests/conftest.py"], imports(project), project) == dict.fromkeys(sorted(tests), 1)


def test_of_tests_that_are_equally_near_those_of_the_most_similar_folder_come_first() -> None:
    tests = ["tests/desk/test_a.py", "tests/daemon/test_b.py", "tests/daemon/engine/test_c.py", "tests/test_d.py"]
    loop = "diskprefix/daemon/engine/loop.py"
    graph = {loop: set[str]()} | {test: {loop} for test in tests}
    assert [*distances([loop], graph)] == [tests[2], tests[1], tests[0], tests[3]]


@pytest.mark.slow
def test_each_module_is_guarded() -> None:
    """A module that no test reaches, directly or by others, is run by nothing."""
    graph = imports()
    modules = [file for file in graph if file.startswith("diskprefix/") and not file.endswith("__main__.py")]
    assert [file for file in modules if not distances([file], graph)] == []


def test_changes_are_those_of_the_branch_and_what_is_not_committed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        user = ["-c", "user.name=T", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=no"]
        subprocess.run(["git", "-C", str(tmp_path), *user, *arguments], check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text("1")
        git("add", name)
        git("commit", "--message", name)

    git("init", "--initial-branch", "main")
    commit("a")
    git("checkout", "-b", "branch")
    commit("b")
    git("checkout", "main")
    commit("of_main")
    git("checkout", "branch")
    (tmp_path / "a").write_text("2")
    (tmp_path / "new").write_text("1")
    assert changed_since("main", tmp_path) == ["a", "b", "new"]


REACHING = (
    CONFTEST
    + """
    from tests import reach
    config.option.since, config.option.began_at = "main", 0.0 if {is_late} else float("inf")
    config.option.reached = {{"test_it.py": 1}}
    reach.ROOT = config.rootpath

def pytest_addoption(parser):
    parser.addoption("--since")

def pytest_collection_modifyitems(config, items):
    from tests import reach
    reach.keep_reached(config, items)

def pytest_runtest_setup(item):
    from tests import reach
    reach.skip_unfit(item.config)
"""
)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_would_begin_too_late_is_named(is_late: bool, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): ...")
    tests = "def test_one(): ...\ndef test_two(): ..."
    ended = run(tmp_path, REACHING.format(longest_s=60.0, is_late=is_late), tests)
    assert ("2 skipped" if is_late else "2 passed") in ended.stdout, "the other one is not reached"
    assert (f"2 tests that the changes reach {UNFIT}: test_it.py (2)" in ended.stdout) == is_late
