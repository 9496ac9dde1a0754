"""A backup is what the store was when it began, and comes back whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.store.store import Publication
from tests.cli.conftest import Run
from tests.store.building import BLOCK, is_clean, is_whole, open_store, prompt, publication


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def kept(folder: Path) -> Publication:
    return save(folder, 1)


def save(folder: Path, seed: int) -> Publication:
    store = open_store(folder)
    made = publication(store, prompt(seed, 3 * BLOCK))
    store.publish(made)
    store.close()
    return made


def holds(folder: Path, made: Publication) -> bool:
    store = open_store(folder)
    try:
        return is_clean(store) and is_whole(store, made)
    finally:
        store.close()


def test_a_backup_leaves_the_store_and_a_restore_brings_it_back(run: Run, folder: Path, kept: Publication) -> None:
    copy, before = folder.parent / "copy", (folder / "data.mdb").read_bytes()
    ended = run("backup", copy, "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stdout.startswith(f"wrote {copy / 'data.mdb'}: ")) == (0, True)
    assert (folder / "data.mdb").read_bytes() == before
    later = save(folder, 2)
    ended = run("restore", copy, "--yes", "--json", "--kv-cache-dir", folder)
    assert (ended.exit_code, json.loads(ended.stdout)["file"]) == (0, str(folder / "data.mdb"))
    assert holds(folder, kept)
    assert not holds(folder, later)
    assert holds(copy, kept)


def test_a_backup_is_restored_to_a_folder_that_is_not_there_yet(run: Run, folder: Path, kept: Publication) -> None:
    new = folder.parent / "new"
    assert run("restore", folder, "--kv-cache-dir", new).exit_code == 0
    assert holds(new, kept)
    assert new.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("kept")
def test_a_store_is_not_replaced_without_being_asked(run: Run, folder: Path) -> None:
    other = folder.parent / "other"
    mine = save(other, 2)
    ended = run("restore", folder, "--kv-cache-dir", other)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n"), "--yes" in ended.stderr) == (2, "", 1, True)
    assert holds(other, mine)


def test_beside_a_daemon_a_backup_is_written_and_a_restore_refused(run: Run, folder: Path, kept: Publication) -> None:
    # A descriptor of its own, as another process has one.
    code = (
        "import sys; from pathlib import Path; from diskprefix.store.store import Store; "
        "s = Store(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "open\n"
        copied = run("backup", folder.parent / "copy", "--kv-cache-dir", folder)
        refused = run("restore", folder.parent / "copy", "--yes", "--kv-cache-dir", folder)
        daemon.communicate("")
    assert (copied.exit_code, refused.exit_code, refused.stderr.count("\n")) == (0, 4, 1)
    assert "a daemon or another command has the store open" in refused.stderr
    assert holds(folder.parent / "copy", kept)


def test_a_damaged_backup_is_refused_and_the_store_stays(run: Run, folder: Path, kept: Publication) -> None:
    copy = folder.parent / "copy"
    run("backup", copy, "--kv-cache-dir", folder)
    data = bytearray((copy / "data.mdb").read_bytes())
    data[2 * 4096 :] = b"\xff" * (len(data) - 2 * 4096)
    (copy / "data.mdb").write_bytes(data)
    ended = run("restore", copy, "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (4, "", 1)
    assert holds(folder, kept)


@pytest.mark.usefixtures("kept")
def test_the_folder_of_the_store_is_no_backup_of_itself(run: Run, folder: Path) -> None:
    ended = run("restore", folder, "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stderr.count("\n")) == (4, 1)
    ended = run("backup", folder, "--kv-cache-dir", folder)
    assert (ended.exit_code, "holds a store already" in ended.stderr) == (4, True)
