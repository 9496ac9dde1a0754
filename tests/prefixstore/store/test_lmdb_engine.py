"""Every environment of the package is LMDB 0.9's, whatever the environment variable of the Python package lmdb says."""

from __future__ import annotations

import ast
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.store import compact, lmdb_engine
from diskprefix.prefixstore.store.compact import compact_folder, copy_store, replace_store, rewrite_folder
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from tests.prefixstore.store.building import BLOCK, is_clean, is_whole, open_store, prompt, publication

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "kv")
    for seed in range(3):
        store.publish(publication(store, prompt(seed, 3 * BLOCK)))
    store.close()
    return tmp_path / "kv"


def openings(source: str) -> set[int]:
    """Returns the lines that open an environment of lmdb, or import a name with which one could."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "lmdb":
            lines.add(node.lineno)
        # `lmdb.Environment` is also a type.
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("lmdb.open", "lmdb.Environment"):
            lines.add(node.lineno)
    return lines


def test_one_function_opens_every_environment_of_the_package() -> None:
    files = [*(ROOT / "diskprefix").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix() for file in files if openings(file.read_text(encoding="utf-8"))}
    # The program that shows the idea uses nothing of the package.
    assert found == {"diskprefix/prefixstore/store/lmdb_engine.py", "tools/idea.py"}
    assert openings("import lmdb\nlmdb.open(1)\nlmdb.Environment(1)\nfrom lmdb import open\n") == {2, 3, 4}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command with the variable that chooses LMDB 1.0 for new files."""
    command = [sys.executable, "-m", "diskprefix", *map(str, arguments)]
    environ = dict(os.environ) | {"LMDB_DEFAULT_LIB_VERSION": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=ROOT)


def backup_and_restore(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    copy = folder.parent / "copy"
    return [
        run("backup", copy, "--kv-cache-dir", folder),
        run("restore", copy, "--yes", "--kv-cache-dir", folder),
        run("restore", copy, "--yes", "--kv-cache-dir", folder.parent / "new"),
    ]


COMMANDS: dict[str, tuple[Callable[[Path], list[subprocess.CompletedProcess[str]]], int]] = {
    "compact": (lambda folder: [run("compact", "--kv-cache-dir", folder)], 3),
    "backup": (backup_and_restore, 3),
    "purge": (lambda folder: [run("purge", "--all", "--yes", "--kv-cache-dir", folder)], 0),
    "erase": (lambda folder: [run("purge", "--all", "--yes", "--erase", "--kv-cache-dir", folder)], 0),
}
"""Commands that write a file of the store, and how many saved prompts they leave."""


@pytest.mark.cases(3)
@pytest.mark.parametrize("which", COMMANDS)
def test_commands_write_files_of_lmdb_0_9_whatever_the_variable_says(which: str, folder: Path) -> None:
    command, num_entries = COMMANDS[which]
    results = command(folder)
    assert [result.returncode for result in results] == [0] * len(results), results
    for made in sorted(path for path in folder.parent.iterdir() if path.is_dir()):
        assert lmdb_engine.open_lmdb(made, max_dbs=1, readonly=True).info()
        store = open_store(made)
        assert is_clean(store)
        assert store.counts()["entries"] == num_entries
        store.close()


def test_a_daemon_makes_files_of_lmdb_0_9_whatever_the_variable_says(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from diskprefix.prefixstore.store.store import Store\n"
    code += "Store(Path(sys.argv[1]), budget_bytes=32 << 20, serving=True, on_corruption='quarantine').close()"
    environ = dict(os.environ) | {"LMDB_DEFAULT_LIB_VERSION": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "kv")], check=True, env=environ, cwd=ROOT)
    store = open_store(tmp_path / "kv")
    pub = publication(store, prompt(1, 3 * BLOCK))
    store.publish(pub)
    assert is_whole(store, pub)
    store.close()


def of_later_lmdb(snapshot: Snapshot, folder: Path, *arguments: Any) -> None:
    """Writes a copy, and the data version of LMDB 1.0 into its meta pages."""
    _copy(snapshot, folder, *arguments)
    data = bytearray((folder / DATA).read_bytes())
    for meta in (0, mmap.PAGESIZE):
        data[meta + 20] = 3
    (folder / DATA).write_bytes(data)


def short_records(snapshot: Snapshot) -> Iterator[tuple[str, bytes, bytes | memoryview]]:
    yield from list(_records(snapshot))[:-1]


_copy, _records = compact._copy, compact._records


@pytest.mark.parametrize(
    ("name", "broken", "problem"),
    [("_copy", of_later_lmdb, "cannot be opened"), ("_records", short_records, "lacks records")],
)
@pytest.mark.parametrize(
    "replace",
    [
        compact_folder,
        rewrite_folder,
        lambda folder: copy_store(folder, folder.parent / "copy"),
        lambda folder: replace_store(folder, folder.parent / "other"),
    ],
)
def test_a_copy_that_cannot_be_opened_takes_no_place(
    name: str,
    broken: Callable[..., Any],
    problem: str,
    replace: Callable[[Path], object],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    other.chmod(0o700)
    before = (folder / DATA).read_bytes()
    monkeypatch.setattr(compact, name, broken)
    with pytest.raises(StoreUnavailable, match=problem):
        replace(folder)
    for place in (folder, other):
        assert (place / DATA).read_bytes() == before
        assert not (place / "replacement").exists()
    assert not (folder.parent / "copy" / DATA).exists()


def test_a_package_without_lmdb_0_9_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_engine, "_CHOICE", {})
    monkeypatch.setattr(lmdb, "version", lambda: (1, 0, 2))
    with pytest.raises(StoreUnavailable, match=r"lmdb uses LMDB 1\.0\.2, and a store needs LMDB 0\.9"):
        Store(tmp_path / "kv", budget_bytes=32 << 20)
