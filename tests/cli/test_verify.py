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
    assert report == {
        "clean": True, "blocks": 8, "entries": 2, "prompts": 2, "roots": 1, "pieces": 8, "counts": {}, "problems": [],
    }  # fmt: skip
    assert payload_bytes > 2 * 3 * 20_000 * 0.9


def test_problems_are_listed_counted_and_exit_code_1(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[0])
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert f"damaged payloads {piece_key(pubs[0].nodes[1].name, 0).hex()}: " in ended.stdout
    assert f"miscounted usage {pubs[0].nodes[0].name.hex()}: it says that 5 blocks continue it, 1 do" in ended.stdout
    assert "2 problems (1 miscounted usage, 1 damaged payloads): 8 blocks" in ended.stdout
    report = run("verify", "--json", "--kv-cache-dir", folder).json
    assert (report["clean"], report["counts"]) == (False, {"miscounted": 1, "damaged": 1})
    assert [problem["database"] for problem in report["problems"]] == ["usage", "payloads"]
    assert set(report["problems"][0]) == {"kind", "database", "key", "message"}


def test_fix_mends_and_says_so(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[0])
    ended = run("verify", "--fix", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert pubs[0].last_node is not None
    removed = f"removed 1 saved prompt, 3 blocks, 0 recent prompts\n{pubs[0].last_node.hex()[:12]}\n"
    assert ended.stdout.endswith(f"repaired 2 of 2 problems; {removed}")
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    store = open_store(folder)
    assert store.counts()["blocks"] == 5
    assert is_whole(store, pubs[1])
    store.close()


def test_fix_in_json_tells_what_is_left(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[0])
    report = run("verify", "--fix", "--json", "--kv-cache-dir", folder).json
    assert (report["clean"], len(report["problems"]), report["left"]) == (False, 2, [])
    assert pubs[0].last_node is not None
    assert report["removed"] == {"entries": [pubs[0].last_node.hex()], "blocks": 3, "prompts": 0}
    report = run("verify", "--fix", "--json", "--kv-cache-dir", folder).json
    assert (report["clean"], report["left"]) == (True, [])
    assert report["removed"] == {"entries": [], "blocks": 0, "prompts": 0}


def test_fix_tells_of_records_that_went_alone(run: Run, folder: Path, pubs: list[Publication]) -> None:
    last_node = pubs[0].last_node
    assert last_node is not None
    with damaged(folder) as records:
        records.put("entries", last_node, b"no record")
        records.put("history", b"h" * 24, b"no prompt")
    report = run("verify", "--fix", "--json", "--kv-cache-dir", folder).json
    assert report["removed"] == {"entries": [last_node.hex()], "blocks": 0, "prompts": 1}


def test_a_long_list_is_cut_on_the_terminal_alone(run: Run, folder: Path, pubs: list[Publication]) -> None:
    with damaged(folder) as records:
        for n in range(30):
            records.put("payloads", bytes([n]) * 18, b"x")
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.stdout.count("orphaned payloads") == 20 + 1
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
    assert report["counts"] == {"miscounted": 1, "damaged": 1}
    ended = run("verify", "--fix", "--kv-cache-dir", disk)
    ended.assert_refused(4, "Read-only file system")
