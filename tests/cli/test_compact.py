from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.store.store import Publication
from tests.cli.conftest import Run, holds, opened_elsewhere
from tests.store.building import BLOCK, open_store, prompt, publication


@pytest.fixture
def kept(folder: Path) -> Publication:
    """One prompt in a closed store that held six."""
    store = open_store(folder)
    pubs = [publication(store, prompt(seed, 3 * BLOCK), payload_bytes=200_000) for seed in range(6)]
    for pub in pubs:
        store.publish(pub)
    for pub in pubs[:-1]:
        for node in reversed(pub.nodes):
            store.quarantine(node.name, node.parent)
    store.close()
    return pubs[-1]


def test_it_prints_before_and_after(run: Run, folder: Path, kept: Publication) -> None:
    before = (folder / "data.mdb").stat().st_size
    ended = run("compact", "--json", "--kv-cache-dir", folder)
    after = (folder / "data.mdb").stat().st_size
    assert ended.exit_code == 0
    assert ended.json == {
        "file": str(folder / "data.mdb"), "before_bytes": before, "after_bytes": after,
    }  # fmt: skip
    assert after < before / 2
    ended = run("compact", "--kv-cache-dir", folder)
    assert ended.stdout.startswith(f"compacted {folder / 'data.mdb'}: ")
    assert "→" in ended.stdout
    assert holds(folder, kept)


@pytest.mark.usefixtures("kept")
def test_beside_a_daemon_it_refuses_in_one_line_that_says_how_to_go_on(run: Run, folder: Path) -> None:
    with opened_elsewhere(folder):
        ended = run("compact", "--kv-cache-dir", folder)
    ended.assert_refused(4, "stop it, or write a compacted copy with `diskprefix backup FOLDER`")


def test_ctrl_c_leaves_the_old_file_and_nothing_else(folder: Path, kept: Publication) -> None:
    """Pressed when the copy is written."""
    code = f"""
import os, signal
from diskprefix.cli import main
from diskprefix.store import compact
def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
compact.put_in_place = interrupted
main(["compact", "--kv-cache-dir", {str(folder)!r}])
"""
    before = (folder / "data.mdb").read_bytes()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (128 + signal.SIGINT, "", "error: interrupted")
    assert (folder / "data.mdb").read_bytes() == before
    assert not (folder / "replacement").exists()
    assert holds(folder, kept)


def test_a_read_only_disk_is_named_as_such(run: Run, disk: Path) -> None:
    open_store(disk).close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ended = run("compact", "--kv-cache-dir", disk)
    ended.assert_refused(4, "Read-only file system")


def test_a_disk_without_room_for_both_says_how_much_is_missing(run: Run, disk: Path, tmp_path: Path) -> None:
    store = open_store(disk)
    for seed in range(25):
        store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=60_000))
    store.close()
    ended = run("compact", "--kv-cache-dir", disk)
    ended.assert_refused(4, "MiB are missing; free them, or write the copy elsewhere with `diskprefix backup`")
    assert run("verify", "--kv-cache-dir", disk).exit_code == 0
    assert run("backup", tmp_path / "copy", "--kv-cache-dir", disk).exit_code == 0
    assert run("verify", "--kv-cache-dir", tmp_path / "copy").exit_code == 0
