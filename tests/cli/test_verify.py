from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from diskprefix.store.schema import piece_key
from diskprefix.store.store import Publication
from tests.cli.conftest import Run
from tests.faults.damage import damaged
from tests.store.building import BLOCK, is_whole, open_store, prompt, publication


@pytest.fixture
def pubs(folder: Path) -> list[Publication]:
    """Two prompts in a closed store."""
    store = open_store(folder)
    pubs = [publication(store, prompt(seed, 3 * BLOCK)) for seed in range(2)]
    for pub in pubs:
        store.publish(pub)
    store.close()
    return pubs


def damage(folder: Path, pub: Publication) -> None:
    """One bit in a payload, and a count."""
    with damaged(folder) as records:
        records.flip("payloads", piece_key(pub.nodes[1].name, 0), 100)
        records.change_usage(pub.nodes[0].name, children=5)


@pytest.mark.usefixtures("pubs")
def test_a_sound_store_is_clean(run: Run, folder: Path) -> None:
    before = (folder / "data.mdb").read_bytes()
    ended = run("verify", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("clean: 8 blocks, 2 saved prompts, ")
    assert (folder / "data.mdb").read_bytes() == before


@pytest.mark.usefixtures("pubs")
def test_json_says_what_was_checked(run: Run, folder: Path) -> None:
    report = run("verify", "--json", "--kv-cache-dir", folder).json
    payload_bytes = report.pop("payload_bytes")
    assert report == {"clean": True, "blocks": 8, "entries": 2, "prompts": 2, "roots": 1, "pieces": 8, "problems": []}
    assert payload_bytes > 2 * 3 * 20_000 * 0.9


def test_problems_are_listed_and_exit_code_1(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[0])
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert f"nodes {pubs[0].nodes[1].name.hex()}: piece 0: " in ended.stdout
    assert f"nodes {pubs[0].nodes[0].name.hex()}: its usage record says that 5 blocks continue it" in ended.stdout
    assert "\n2 problems: 8 blocks" in ended.stdout
    report = run("verify", "--json", "--kv-cache-dir", folder).json
    assert not report["clean"]
    assert [set(problem) for problem in report["problems"]] == [{"database", "key", "message"}] * 2


def test_fix_removes_and_says_what_went(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[0])
    ended = run("verify", "--fix", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert pubs[0].last_node is not None
    removed = f"removed 4 blocks, 1 saved prompt, 0 recent prompts\n{pubs[0].last_node.hex()[:12]}\n"
    assert ended.stdout.endswith(removed)
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    store = open_store(folder)
    assert store.counts()["blocks"] == 4
    assert is_whole(store, pubs[1])
    store.close()


def test_fix_tells_of_records_that_went_alone(run: Run, folder: Path, pubs: list[Publication]) -> None:
    last_node = pubs[0].last_node
    assert last_node is not None
    with damaged(folder) as records:
        records.put("entries", last_node, b"no record")
        records.put("seen", b"h" * 24, b"no prompt")
    report = run("verify", "--fix", "--json", "--kv-cache-dir", folder).json
    assert report["removed"] == {"entries": [last_node.hex()], "blocks": 0, "prompts": 1}
    assert run("verify", "--fix", "--json", "--kv-cache-dir", folder).json["clean"]


def test_a_long_list_is_cut_on_the_terminal_alone(run: Run, folder: Path, pubs: list[Publication]) -> None:
    with damaged(folder) as records:
        for n in range(30):
            records.put("payloads", bytes([n]) * 18, b"x")
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.stdout.count("it belongs to no block") == 20
    assert "… and 10 more; --json shows them all" in ended.stdout
    assert len(run("verify", "--json", "--kv-cache-dir", folder).json["problems"]) == 30
    assert pubs


def test_a_folder_that_cannot_be_written_is_verified(run: Run, disk: Path) -> None:
    store = open_store(disk)
    pub = publication(store, prompt(1, 3 * BLOCK))
    store.publish(pub)
    store.close()
    damage(disk, pub)
    (disk / "lock.mdb").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    report = run("verify", "--json", "--kv-cache-dir", disk).json
    assert len(report["problems"]) == 2
    ended = run("verify", "--fix", "--kv-cache-dir", disk)
    ended.assert_refused(4, "Read-only file system")
