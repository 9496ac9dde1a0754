"""A backup is what the store was when it began, and comes back whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.store.store import Publication
from tests.cli.conftest import Run, holds, opened_elsewhere, saved
from tests.store.building import BLOCK, prompt


@pytest.fixture
def kept(folder: Path) -> Publication:
    return saved(folder, prompt(1, 3 * BLOCK))


def test_a_backup_leaves_the_store_and_a_restore_brings_it_back(run: Run, folder: Path, kept: Publication) -> None:
    copy, before = folder.parent / "copy", (folder / "data.mdb").read_bytes()
    ended = run("backup", copy, "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stdout.startswith(f"wrote {copy / 'data.mdb'}: ")) == (0, True)
    assert (folder / "data.mdb").read_bytes() == before
    later = saved(folder, prompt(2, 3 * BLOCK))
    ended = run("restore", copy, "--yes", "--json", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.json["file"]) == (0, str(folder / "data.mdb"))
    assert holds(folder, kept)
    assert not holds(folder, later)
    assert holds(copy, kept)


def test_a_backup_is_restored_to_a_folder_that_is_not_there_yet(run: Run, folder: Path, kept: Publication) -> None:
    new = folder.parent / "new"
    assert run("restore", folder, "--kv-cache-dir", new).exit_code == 0
    assert holds(new, kept)
    assert new.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("flags", [["--yes"], []])
def test_beside_a_daemon_a_backup_is_written_and_a_restore_refused(
    run: Run, folder: Path, kept: Publication, flags: list[str]
) -> None:
    with opened_elsewhere(folder):
        copied = run("backup", folder.parent / "copy", "--kv-cache-dir", folder)
        refused = run("restore", folder.parent / "copy", *flags, "--kv-cache-dir", folder)
    assert copied.exit_code == 0
    refused.assert_refused(4, "a daemon or another command has the store open")
    assert holds(folder.parent / "copy", kept)
