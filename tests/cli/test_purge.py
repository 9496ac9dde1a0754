from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.nouns import SHARED
from diskprefix.store.schema import EntryRecord, RootRecord
from diskprefix.store.store import Publication
from diskprefix.tokens import root_hash
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tests.faults.damage import damaged
from tests.store.building import BLOCK, Clock, open_store, prompt, publication

ALICE = SHARED.with_salt("alice")


@pytest.fixture
def pubs(folder: Path) -> list[Publication]:
    """Two prompts of the model `tiny` that share two blocks, used long ago; one of alice's, of `other`, used now."""
    clock = Clock()
    store = open_store(folder, clock=clock)
    one = prompt(1, 3 * BLOCK)
    two = one.copy()
    two[2 * BLOCK :] += 1
    pubs: list[Publication] = []
    for token_ids, model, tenant in ((one, "tiny", ""), (two, "tiny", ""), (one, "other", str(ALICE))):
        root = root_hash(model + tenant)
        pub = publication(store, token_ids, root=root)
        record = RootRecord(model=model, block_size=BLOCK, layout=pub.root_record.layout, created_at=0.0, tenant=tenant)
        preview = f"a conversation about {len(pubs)} \x1b[31mbirds"
        entry = EntryRecord(root=root, num_tokens=len(token_ids), scope="full", preview=preview, created_at=1.0)
        if tenant:
            clock.now = time.time()
        pubs.append(replace(pub, root_record=record, entry=entry))
        store.publish(pubs[-1])
    store.close()
    return pubs


def name(pub: Publication) -> str:
    assert pub.last_node is not None
    return pub.last_node.hex()


def entries_left(run: Run, folder: Path) -> set[str]:
    listed = run("inspect", "--json", "--kv-cache-dir", folder).json
    return {entry["id"] for entry in listed["entries"]}


def test_an_entry_goes_by_the_beginning_of_its_id(run: Run, folder: Path, pubs: list[Publication]) -> None:
    ended = run("purge", name(pubs[0])[:10], "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert f"{name(pubs[0])[:12]} tiny 48 tokens a conversation about 0 [31mbirds" in ended.stdout
    assert "to remove: 1 saved prompt, 2 blocks, " in ended.stdout
    assert "2 blocks of them stay: other prompts need them" in ended.stdout
    assert "purged 1 saved prompt, 2 blocks, " in ended.stdout
    assert "bytes stay" not in ended.stdout + ended.stderr
    assert entries_left(run, folder) == {name(pubs[1]), name(pubs[2])}
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--model", "tiny"], {2}),
        (["--model", "other"], {0, 1}),
        (["--salt", "alice"], {0, 1}),
        (["--salt", str(ALICE)[:8]], {0, 1}),
        (["--older-than", "1h"], {2}),
        (["--older-than", "0s", "--model", "other"], {0, 1}),
        (["--all"], set()),
    ],
)
def test_what_meets_every_condition_goes(
    run: Run, folder: Path, pubs: list[Publication], flags: list[str], left: set[int]
) -> None:
    assert run("purge", *flags, "--yes", "--kv-cache-dir", folder).exit_code == 0
    assert entries_left(run, folder) == {name(pubs[n]) for n in left}
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0


def test_where_nothing_meets_every_condition_there_is_nothing_to_purge(
    run: Run, folder: Path, pubs: list[Publication]
) -> None:
    ended = run("purge", "--older-than", "1h", "--salt", "alice", "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "nothing to purge here\n", "")
    assert len(entries_left(run, folder)) == len(pubs)


def test_a_dry_run_changes_nothing_and_tells_the_same(run: Run, folder: Path, pubs: list[Publication]) -> None:
    before = (folder / "data.mdb").read_bytes()
    planned = run("purge", "--all", "--dry-run", "--json", "--kv-cache-dir", folder).json
    assert "would be removed: 3 saved prompts" in run("purge", "--all", "--dry-run", "--kv-cache-dir", folder).stdout
    assert (folder / "data.mdb").read_bytes() == before
    done = run("purge", "--all", "--yes", "--json", "--kv-cache-dir", folder).json
    assert (planned.pop("dry_run"), done.pop("dry_run"), done["left_blocks"]) == (True, False, 0)
    assert planned == done
    assert [entry["id"] for entry in done["entries"]] == [name(pubs[n]) for n in (2, *_in_order(pubs))]
    assert (done["blocks"], done["prompts"], done["roots"]) == (10, 3, 2)


def _in_order(pubs: list[Publication]) -> list[int]:
    """The order of the list: the last use first, and those of one time by their ids."""
    return sorted((0, 1), key=lambda n: name(pubs[n]))


def test_json_of_nothing_says_so(run: Run, folder: Path, pubs: list[Publication]) -> None:
    for flag in ("--yes", "--dry-run"):
        nothing = ("--salt", "alice", "--model", "tiny")
        done = run("purge", *nothing, flag, "--json", "--kv-cache-dir", folder).json
        assert (done["entries"], done["blocks"], done["stored_bytes"]) == ([], 0, 0)
        assert done["dry_run"] == (flag == "--dry-run")
    assert len(pubs) == len(entries_left(run, folder))


def test_the_plan_shows_whose_each_prompt_is(run: Run, folder: Path, pubs: list[Publication]) -> None:
    """A bare salt is that of the users of every key."""
    shown = run("purge", "--all", "--dry-run", "--kv-cache-dir", folder).stdout
    assert f"{name(pubs[2])[:12]} other {str(ALICE)[:8]} 48 tokens" in shown
    assert f"{name(pubs[0])[:12]} tiny 48 tokens" in shown


def test_the_help_says_that_a_salt_is_that_of_every_key(run: Run) -> None:
    shown = " ".join(run("purge", "--help").stdout.split())
    assert "a salt (with any key)" in shown
    assert "KEYID/SALTID is one user of one key" in shown


def test_blocks_that_cannot_go_are_told(run: Run, folder: Path, pubs: list[Publication]) -> None:
    with damaged(folder) as records:
        records.change_usage(pubs[2].nodes[0].name, children=9)
    ended = run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert "1 block could not be removed" in ended.stderr


def test_a_file_that_was_moved_aside_is_told_of(run: Run, folder: Path, pubs: list[Publication]) -> None:
    (folder / "damaged.mdb").write_bytes(b"whatever it held")
    ended = run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder)
    assert f"{folder / 'damaged.mdb'}, which a daemon moved aside, may contain the prompts too" in ended.stderr
    assert pubs


@pytest.mark.parametrize(("answer", "exit_code", "left"), [("y\n", 0, 0), ("n\n", 1, 3), ("\n", 1, 3)])
def test_at_a_terminal_it_asks(
    run: Run, folder: Path, pubs: list[Publication], answer: str, exit_code: int, left: int
) -> None:
    terminal = Terminal("purge", "--all", "--kv-cache-dir", str(folder))
    terminal.wait_for("Purge 3 saved prompts, 10 blocks, ")
    terminal.wait_for(r"[y/N]")
    terminal.type(answer)
    assert terminal.wait() == exit_code
    assert ("nothing was purged" in terminal.shown) == bool(left)
    assert len(entries_left(run, folder)) == left
    assert pubs


def test_ctrl_c_at_the_question_changes_nothing(run: Run, folder: Path, pubs: list[Publication]) -> None:
    terminal = Terminal("purge", "--all", "--kv-cache-dir", str(folder))
    terminal.wait_for(r"[y/N]")
    assert terminal.interrupt() == 130
    assert len(entries_left(run, folder)) == len(pubs)
