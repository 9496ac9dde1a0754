"""`tools/bench walls` on a small project: what names a part that was taken away is the reason of a red line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.faults import walls

SOUND = {
    "pyproject.toml": '[tool.mypy]\nfiles = ["diskprefix"]\n',
    "diskprefix/__init__.py": "",
    "diskprefix/units.py": "import json\n",
    "diskprefix/prefixstore/__init__.py": "",
    "diskprefix/prefixstore/store.py": "from diskprefix import units\n",
    "diskprefix/bridges/__init__.py": "",
    "diskprefix/bridges/adapter.py": "from diskprefix.prefixstore import store\n",
    "tests/__init__.py": "",
    "tests/test_sound.py": "def test_it():\n    pass\n",
    "tests/prefixstore/__init__.py": "",
    "tests/bridges/__init__.py": "",
    "tests/bridges/helper.py": "",
}


def project(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = ("git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, and no plugins, whose imports take longer than these tests."""
    monkeypatch.setattr(walls, "PYTEST", ("pytest", "--quiet"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tests/test_names.py", "from tests.bridges import helper", "collection: ERROR tests/test_names.py"),
        (
            "tests/deep/test_names.py",
            "from pathlib import Path\ndef test_a_file():\n    assert Path('diskprefix/bridges/adapter.py').exists()\n",
            "tests: FAILED tests/deep/test_names.py::test_a_file",
        ),
        ("tests/deep/test_others.py", "def test_it():\n    assert not 'run, as it names no part'\n", ""),
    ],
)
def test_a_test_that_needs_the_part_is_the_reason(name: str, text: str, reason: str, tmp_path: Path) -> None:
    copy = project(tmp_path / "project", SOUND | {name: text})
    checks = [check for check in walls.without_part("bridges", copy, tmp_path) if check[0] != "mypy"]
    found, last = walls.first_reason(checks, copy, lambda _: None)
    assert (found.startswith(reason), bool(found), "1 passed" in last) == (True, bool(reason), not reason), found


def test_each_part_has_its_line_and_the_copy_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "def choose() -> None:\n    from diskprefix.bridges import adapter\n"
    monkeypatch.setattr(walls, "ROOT", project(tmp_path / "project", SOUND | {"diskprefix/choice.py": wrong}))
    monkeypatch.setattr(walls, "parts", lambda: ["bridges"])
    ended = CliRunner().invoke(walls.main, ["--only", "bridges", "--folder", str(tmp_path)])
    assert ended.exit_code == 1, ended.output
    assert re.match(r"red    bridges +\d+ s  mypy: diskprefix/choice.py:2: error: .*diskprefix.bridges", ended.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_another_part_is_refused() -> None:
    ended = CliRunner().invoke(walls.main, ["--only", "desk/nothing"])
    assert (ended.exit_code, "'desk/nothing' is not one of " in ended.stderr) == (2, True)


@pytest.mark.parametrize("library", ["json", "a_library_that_is_nowhere"])
def test_what_the_store_imports_is_there_without_the_other_houses(library: str, tmp_path: Path) -> None:
    files = SOUND | {"diskprefix/prefixstore/disk.py": f"import {library}\n"}
    copy = project(tmp_path / "project", files)
    checks = dict(walls.alone("prefixstore", copy, tmp_path))
    assert not (copy / "diskprefix/bridges").exists()
    assert not (copy / "tests/bridges").exists()
    imports = ("imports", (sys.executable, *checks["imports"][1:]))
    reason, _ = walls.first_reason([imports], copy, lambda _: None)
    assert reason == ("" if library == "json" else f"imports: ModuleNotFoundError: No module named '{library}'")
