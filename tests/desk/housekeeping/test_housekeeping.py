"""`diskprefix verify`, `purge`, `compact`, `backup` and `restore`: what they print and leave, also beside a daemon."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.native.library import operators
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.prefixstore.store.schema import EntryRecord, RootRecord, piece_key
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.runtime.files.packed_file import PackedMatrix, write_packed
from diskprefix.tokens import root_hash
from diskprefix.user_key import user_tenant
from diskprefix.values import SHARED
from tests.daemon.server.daemon_process import DaemonProcess, ask, running_daemon, text_of
from tests.desk.conftest import Run, holds, opened_elsewhere, saved
from tests.desk.terminal import Terminal
from tests.examples import examples
from tests.faults.damage import damaged
from tests.faults.file_damage import PAGE, DataFile
from tests.prefixstore.remote.made import machine, share_of_each
from tests.prefixstore.store.building import BLOCK, Clock, is_whole, layout_of, of_root, open_store, prompt, publication
from tests.waiting import wait_for

ALICE = str(SHARED.with_salt("alice"))


@pytest.fixture
def pubs(folder: Path) -> list[Publication]:
    """Two prompts of the model `tiny` that share two blocks, used long ago; one of alice's, of `other`, used now."""
    clock = Clock()
    one = prompt(1, 3 * BLOCK)
    two = one.copy()
    two[2 * BLOCK :] += 1
    pubs: list[Publication] = []
    with closing(open_store(folder, clock=clock)) as store:
        for token_ids, model, tenant in ((one, "tiny", ""), (two, "tiny", ""), (one, "other", ALICE)):
            root = root_hash(model + tenant)
            pub = publication(store, token_ids, root=root)
            layout = pub.root_record.layout
            record = RootRecord(model=model, block_size=BLOCK, layout=layout, created_at=0.0, tenant=tenant)
            preview = f"a conversation about {len(pubs)} \x1b[31mbirds"
            entry = EntryRecord(root=root, num_tokens=len(token_ids), scope="full", preview=preview, created_at=1.0)
            if tenant:
                clock.now = time.time()
            pubs.append(of_root(pub, record, entry=entry))
            store.publish(pubs[-1])
    return pubs


def name(pub: Publication) -> str:
    assert pub.last_node is not None
    return pub.last_node.hex()


def entries_left(run: Run, folder: Path) -> set[str]:
    return {entry["id"] for entry in run("inspect", "--json", "--kv-cache-dir", folder).json["entries"]}


def file_of(folder: Path) -> bytes:
    return (folder / "data.mdb").read_bytes()


# -- purge -----------------------------------------------------------------------------------------------------------


def test_an_entry_goes_by_the_beginning_of_its_id(run: Run, folder: Path, pubs: list[Publication]) -> None:
    ended = run("purge", name(pubs[0])[:10], "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert f"{name(pubs[0])[:12]} tiny 48 tokens a conversation about 0 [31mbirds" in ended.stdout
    assert "to remove: 1 saved prompt, 2 blocks, " in ended.stdout
    assert "2 blocks of them stay: other prompts need them" in ended.stdout
    assert "purged 1 saved prompt, 2 blocks, " in ended.stdout
    assert entries_left(run, folder) == {name(pubs[1]), name(pubs[2])}
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--model", "tiny"], {2}),
        (["--model", "other"], {0, 1}),
        (["--salt", "alice"], {0, 1}),
        (["--salt", ALICE[:8]], {0, 1}),
        (["--older-than", "1h"], {2}),
        (["--older-than", "0s", "--model", "other"], {0, 1}),
        (["--older-than", "1h", "--salt", "alice"], {0, 1, 2}),
        (["--salt", "alice", "--model", "tiny"], {0, 1, 2}),
        (["--all"], set()),
    ],
)
def test_purge_removes_prompts_that_meet_all_conditions_as_a_dry_run_says(
    run: Run, folder: Path, pubs: list[Publication], flags: list[str], left: set[int]
) -> None:
    before = file_of(folder)
    planned = run("purge", *flags, "--dry-run", "--json", "--kv-cache-dir", folder).json
    shown = run("purge", *flags, "--dry-run", "--kv-cache-dir", folder).stdout
    assert file_of(folder) == before
    done = run("purge", *flags, "--yes", "--json", "--kv-cache-dir", folder).json
    assert (planned.pop("dry_run"), done.pop("dry_run"), done["left_blocks"]) == (True, False, 0)
    assert planned == done
    # The last use first, and those of one time by their ids.
    in_order = [2, *sorted((0, 1), key=lambda n: name(pubs[n]))]
    assert [entry["id"] for entry in done["entries"]] == [name(pubs[n]) for n in in_order if n not in left]
    assert entries_left(run, folder) == {name(pubs[n]) for n in left}
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    if len(left) == len(pubs):
        assert (done["blocks"], done["stored_bytes"], shown) == (0, 0, "nothing to purge here\n")
    if not left:
        assert (done["blocks"], done["prompts"], done["roots"]) == (10, 3, 2)
        assert "would be removed: 3 saved prompts" in shown
        assert f"{name(pubs[2])[:12]} other {ALICE[:8]} 48 tokens" in shown, "a bare salt is that of every key's users"
        assert f"{name(pubs[0])[:12]} tiny 48 tokens" in shown


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("flags", "held", "shrinks"),
    [
        (["--all"], False, True),
        (["--all"], True, False),
        (["--salt", "alice"], False, False),
        (["--all", "--erase"], True, True),
    ],
)
@pytest.mark.usefixtures("pubs")
def test_a_purge_shrinks_the_file_where_that_costs_little_or_says_what_does(
    run: Run, folder: Path, flags: list[str], held: bool, shrinks: bool
) -> None:
    before = len(file_of(folder))
    with opened_elsewhere(folder) if held else nullcontext():
        ended = run("purge", *flags, "--yes", "--kv-cache-dir", folder)
    assert (ended.exit_code, len(file_of(folder)) < before) == (0, shrinks)
    assert ("`diskprefix compact`" in ended.stdout) == (not shrinks)
    assert ("the file shrank: " in ended.stdout) == (shrinks and "--erase" not in flags)
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0


def test_blocks_that_cannot_go_and_a_file_that_was_moved_aside_are_told(
    run: Run, folder: Path, pubs: list[Publication]
) -> None:
    (folder / "damaged.mdb").write_bytes(b"whatever it held")
    with damaged(folder) as records:
        records.change_usage(pubs[2].nodes[0].name, children=9)
    ended = run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert "1 block could not be removed" in ended.stderr
    assert f"{folder / 'damaged.mdb'}, which a daemon moved aside, may contain the prompts too" in ended.stderr


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("answer", "exit_code", "left"), [("y\n", 0, 0), ("n\n", 1, 3), ("\n", 1, 3), ("\x03", 130, 3)]
)
def test_at_a_terminal_it_asks(
    run: Run, folder: Path, pubs: list[Publication], answer: str, exit_code: int, left: int
) -> None:
    terminal = Terminal("purge", "--all", "--kv-cache-dir", str(folder))
    terminal.wait_for("Purge 3 saved prompts, 10 blocks, ")
    terminal.wait_for(r"[y/N]")
    if answer == "\x03":
        assert terminal.interrupt() == exit_code
    else:
        terminal.type(answer)
        assert terminal.wait() == exit_code
        assert ("nothing was purged" in terminal.shown) == bool(left)
    assert len(entries_left(run, folder)) == left
    assert pubs


@pytest.fixture
def bucket_flags(tmp_path: Path) -> list[str]:
    key_file, bucket, secret = tmp_path / "key", (tmp_path / "bucket").as_uri(), b"a key that these machines share"
    token_ids = prompt(1, 3 * BLOCK)
    key_file.write_bytes(secret)
    key_file.chmod(0o600)
    with machine(tmp_path / "kv", bucket, key=NamespaceKey.of(secret)) as one:
        share_of_each(one, token_ids, "", ALICE)
    return ["--remote-tier", bucket, "--namespace-key-file", str(key_file)]


def num_objects(tmp_path: Path) -> int:
    return len(list((tmp_path / "bucket").rglob("*.*")))


def test_a_purge_of_everything_here_leaves_the_bucket(run: Run, bucket_flags: list[str], tmp_path: Path) -> None:
    ended = run("purge", "--all", "--yes", "--json", "--kv-cache-dir", str(tmp_path / "kv"), *bucket_flags)
    assert ended.exit_code == 0
    assert "others share it: remove them with the bucket's own tools" in ended.json["remote_error"]
    assert num_objects(tmp_path) == 2


@pytest.fixture
def elsewhere(tmp_path: Path, bucket_flags: list[str]) -> list[str]:
    """A purge of what only the bucket has: here, alice used another model."""
    with closing(Store(tmp_path / "kv")) as store, store.changes() as changes:
        record = RootRecord(model="other", block_size=BLOCK, layout=layout_of(100), created_at=0.0, tenant=ALICE)
        changes.put_root(bytes(16), record)
    return ["purge", "--model", "tiny", "--salt", "alice", "--kv-cache-dir", str(tmp_path / "kv"), *bucket_flags]


def test_what_only_the_bucket_has_is_purged_there_and_told(run: Run, elsewhere: list[str], tmp_path: Path) -> None:
    asked = run(*elsewhere)
    assert (asked.exit_code, "cannot ask" in asked.stderr) == (2, True)
    ended = run(*elsewhere, "--yes")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout == "nothing to purge here\npurged 1 object from the bucket; copies on other machines stay\n"
    assert num_objects(tmp_path) == 1


def test_purge_reports_undeleted_bucket_objects_and_the_next_purge_deletes_them(
    run: Run, bucket_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--salt", "alice", "--kv-cache-dir", str(tmp_path / "kv"), *bucket_flags]

    def refuse(_objects: ObjectStore, _paths: list[str]) -> None:
        raise RemoteUnavailable("this key may not delete")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete", refuse)
        ended = run("purge", *flags, "--yes")
    why = "this key may not delete; run this again"
    assert (ended.exit_code, ended.stderr) == (1, f"objects in the bucket stay: {why}\n")
    assert num_objects(tmp_path) == 2
    # Nothing is left here that says whose they are.
    ended = run("purge", *flags, "--yes")
    assert (ended.exit_code, num_objects(tmp_path)) == (0, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--remote-tier", "bucket"), "--remote-tier: 'bucket' cannot be used"),
        (("--remote-tier", "s3://[x"), "--remote-tier: 's3://[x' cannot be used"),
        (("--remote-tier", "file:///no/such/folder"), "cannot be used: Generic LocalFileSystem"),
        (("--namespace-key-file", "/none"), "--namespace-key-file: cannot read /none"),
        (("--namespace-key-file", "~nobody-here/k"), "~nobody-here names no user of this machine"),
    ],
)
def test_a_bucket_that_cannot_be_opened_is_told_before_anything_is_purged(
    changed: tuple[str, ...], message: str, run: Run, bucket_flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    ended = run("purge", "--model", "tiny", "--yes", "--kv-cache-dir", folder, *bucket_flags, *changed)
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr
    assert num_objects(tmp_path) == 2


# -- verify ----------------------------------------------------------------------------------------------------------


def damage(folder: Path, pub: Publication) -> None:
    with damaged(folder) as records:
        records.flip("payloads", piece_key(pub.nodes[1].name, 0), 100)
        records.change_usage(pub.nodes[0].name, children=5)


@pytest.mark.usefixtures("pubs")
def test_a_sound_store_is_clean(run: Run, folder: Path) -> None:
    before = file_of(folder)
    ended = run("verify", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("clean: 10 blocks, 3 saved prompts, ")
    report = run("verify", "--json", "--kv-cache-dir", folder).json
    assert report.pop("payload_bytes") > 7 * 20_000 * 0.9
    assert report.pop("packed_weights")["problems"] == []
    assert report == {"clean": True, "blocks": 10, "entries": 3, "prompts": 3, "roots": 2, "pieces": 10, "problems": []}
    assert file_of(folder) == before


def test_problems_are_listed_and_fix_says_what_went(run: Run, folder: Path, pubs: list[Publication]) -> None:
    damage(folder, pubs[2])
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert f"nodes {pubs[2].nodes[1].name.hex()}: piece 0: " in ended.stdout
    assert f"nodes {pubs[2].nodes[0].name.hex()}: its usage record says that 5 blocks continue it" in ended.stdout
    assert "\n2 problems: 10 blocks" in ended.stdout
    report = run("verify", "--json", "--kv-cache-dir", folder).json
    assert not report["clean"]
    assert [set(problem) for problem in report["problems"]] == [{"database", "key", "message"}] * 2
    ended = run("verify", "--fix", "--kv-cache-dir", folder)
    assert ended.exit_code == 1
    assert ended.stdout.endswith(f"removed 4 blocks, 1 saved prompt, 0 recent prompts\n{name(pubs[2])[:12]}\n")
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    with closing(open_store(folder)) as store:
        assert store.counts()["blocks"] == 6
        assert is_whole(store, pubs[0])
        assert is_whole(store, pubs[1])


def test_fix_removes_a_damaged_entry_with_the_blocks_that_no_other_entry_needs(
    run: Run, folder: Path, pubs: list[Publication]
) -> None:
    """Nobody knows any more from which prompt they came, so a deletion of that prompt would not find them."""
    with damaged(folder) as records:
        records.put("entries", bytes.fromhex(name(pubs[0])), b"no record")
        records.put("seen", b"h" * 24, b"no prompt")
    report = run("verify", "--fix", "--json", "--kv-cache-dir", folder).json
    with closing(open_store(folder)) as store, store.snapshot() as snapshot:
        own, others = pubs[0].nodes[2:], [*pubs[1].nodes, *pubs[2].nodes]
        assert [snapshot.node(node.name) for node in own] == [None] * len(own)
        assert all(snapshot.node(node.name) for node in others)
    assert report["removed"] == {"entries": [name(pubs[0])], "blocks": len(own), "prompts": 1}
    assert run("verify", "--fix", "--json", "--kv-cache-dir", folder).json["clean"]
    assert entries_left(run, folder) == {name(pub) for pub in pubs[1:]}


@pytest.mark.usefixtures("pubs")
def test_a_long_list_is_cut_on_the_terminal_alone(run: Run, folder: Path) -> None:
    with damaged(folder) as records:
        for n in range(30):
            records.put("payloads", bytes([n]) * 18, b"x")
    ended = run("verify", "--kv-cache-dir", folder)
    assert ended.stdout.count("it belongs to no block") == 20
    assert "… and 10 more; --json shows them all" in ended.stdout
    assert len(run("verify", "--json", "--kv-cache-dir", folder).json["problems"]) == 30


def test_a_folder_that_cannot_be_written_is_verified_and_named_as_such(run: Run, disk: Path) -> None:
    pub = saved(disk, prompt(1, 3 * BLOCK))
    damage(disk, pub)
    (disk / "lock.mdb").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert len(run("verify", "--json", "--kv-cache-dir", disk).json["problems"]) == 2
    for command in (["verify", "--fix"], ["compact"]):
        run(*command, "--kv-cache-dir", disk).assert_refused(4, "Read-only file system")


@pytest.mark.usefixtures("pubs")
def test_packed_weights_are_compared_with_their_digests_and_what_is_damaged_is_removed(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    if (compiled := operators()) is None:
        pytest.skip("no compiled operators")
    weights, at = tmp_path / "weights", ["--kv-cache-dir", folder, "--packed-weights", tmp_path / "weights"]
    weights.mkdir()
    matrices = [PackedMatrix(bytes([n]) * 16, "Q4_1", np.full((1, 1, 5000), n, np.uint8)) for n in range(4)]
    paths = [weights / f"{number:032x}.packed" for number in range(4)]
    for path in paths:
        with path.open("wb") as file:
            for _ in write_packed(file, matrices, path.stem, [folder], compiled):
                pass
        path.chmod(0o600)
    whole = run("verify", *at)
    assert whole.stdout.splitlines()[-1].startswith("packed weights: clean: 4 files, ")
    assert whole.exit_code == 0
    cut, flipped, shown, sound = paths
    shown.chmod(0o644)
    report = run("verify", *at, "--json").json
    assert report["clean"], "what cannot be used is not damaged"
    os.truncate(cut, 9000)
    with flipped.open("r+b") as file:
        file.seek(0x10000 + 4999)
        file.write(b"x")
    report = run("verify", *at, "--json").json
    problems = [
        {"file": cut.name, "message": "it is cut short or damaged", "is_damage": True},
        {"file": flipped.name, "message": "1 of 4 matrices are damaged", "is_damage": True},
        {"file": shown.name, "message": "other users may read or write it (mode 644)", "is_damage": False},
    ]
    assert not report["clean"]
    assert sorted(report["packed_weights"].pop("problems"), key=lambda problem: problem["file"]) == problems
    num_bytes = sum(path.stat().st_size for path in paths)
    assert report["packed_weights"] == {"folder": str(weights), "files": 4, "bytes": num_bytes, "removed": 0}
    assert run("verify", *at).stdout.count("\npacked weights ") == 3
    fixed = run("verify", *at, "--fix")
    assert (fixed.exit_code, fixed.stdout.splitlines()[-1]) == (
        1,
        "removed 3 files of packed weights; the next start makes them anew",
    )
    assert list(weights.iterdir()) == [sound]
    assert run("verify", *at).exit_code == 0


# -- compact, backup and restore -------------------------------------------------------------------------------------


@pytest.fixture
def kept(folder: Path) -> Publication:
    with closing(open_store(folder)) as store:
        pubs = [publication(store, prompt(seed, 3 * BLOCK), payload_bytes=200_000) for seed in range(6)]
        for pub in pubs:
            store.publish(pub)
        for node in (node for pub in pubs[:-1] for node in reversed(pub.nodes)):
            store.quarantine(node.name, node.parent)
    return pubs[-1]


def test_compact_prints_before_and_after(run: Run, folder: Path, kept: Publication) -> None:
    file, before = folder / "data.mdb", len(file_of(folder))
    ended = run("compact", "--json", "--kv-cache-dir", folder)
    after = len(file_of(folder))
    assert (ended.exit_code, ended.json) == (0, {"file": str(file), "before_bytes": before, "after_bytes": after})
    assert after < before / 2
    ended = run("compact", "--kv-cache-dir", folder)
    assert ended.stdout.startswith(f"compacted {file}: ")
    assert "→" in ended.stdout
    assert holds(folder, kept)


def test_ctrl_c_leaves_the_old_file_and_nothing_else(folder: Path, kept: Publication) -> None:
    """Pressed when the copy is written."""
    code = f"""
import os, signal
from diskprefix.daemon.cli import main
from diskprefix.prefixstore.store import compact
def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
compact.put_in_place = interrupted
main(["compact", "--kv-cache-dir", {str(folder)!r}])
"""
    before = file_of(folder)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (128 + signal.SIGINT, "", "error: interrupted")
    assert file_of(folder) == before
    assert not (folder / "replacement").exists()
    assert holds(folder, kept)


def test_a_disk_without_room_for_both_says_how_much_is_missing(run: Run, disk: Path, tmp_path: Path) -> None:
    with closing(open_store(disk)) as store:
        for seed in range(25):
            store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=60_000))
    ended = run("compact", "--kv-cache-dir", disk)
    ended.assert_refused(4, "MiB are missing; free them, or write the copy elsewhere with `diskprefix backup`")
    assert run("verify", "--kv-cache-dir", disk).exit_code == 0
    assert run("backup", tmp_path / "copy", "--kv-cache-dir", disk).exit_code == 0
    assert run("verify", "--kv-cache-dir", tmp_path / "copy").exit_code == 0


def test_a_backup_leaves_the_store_and_a_restore_brings_it_back(run: Run, folder: Path, kept: Publication) -> None:
    copy, new, before = folder.parent / "copy", folder.parent / "new", file_of(folder)
    ended = run("backup", copy, "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.stdout.startswith(f"wrote {copy / 'data.mdb'}: ")) == (0, True)
    assert file_of(folder) == before
    later = saved(folder, prompt(7, 3 * BLOCK))
    ended = run("restore", copy, "--yes", "--json", "--kv-cache-dir", folder)
    assert (ended.exit_code, ended.json["file"]) == (0, str(folder / "data.mdb"))
    assert run("restore", folder, "--kv-cache-dir", new).exit_code == 0
    assert new.stat().st_mode & 0o777 == 0o700
    assert all(holds(each, kept) for each in (folder, copy, new))
    assert not holds(folder, later)


NUM_DAMAGED = examples(12)


@pytest.mark.slow
def test_no_damaged_backup_is_restored_and_the_old_store_stays(run: Run, tmp_path: Path) -> None:
    """A few bytes of each backup are changed: the first half anywhere, the other in pages of B-trees."""
    backup, folder, damaged_copy = tmp_path / "backup", tmp_path / "kv", tmp_path / "damaged"
    with closing(open_store(backup)) as store:
        for seed in range(8):
            store.publish(publication(store, prompt(seed, 3 * BLOCK), payload_bytes=20_000))
    saved(folder, prompt(77, 3 * BLOCK))
    sound, before, codes = file_of(backup), file_of(folder), Counter[int]()
    for seed in range(NUM_DAMAGED):
        rng, file = random.Random(seed), DataFile(bytearray(sound))
        pages = file.structure if seed % 2 else range(2, file.num_pages)
        for _ in range(4):
            file.data[rng.choice(pages) * PAGE + rng.randrange(16, PAGE)] ^= rng.randrange(1, 256)
        damaged_copy.mkdir(mode=0o700, exist_ok=True)
        (damaged_copy / "data.mdb").write_bytes(file.data)
        ended = run("restore", damaged_copy, "--yes", "--kv-cache-dir", folder)
        codes[ended.exit_code] += 1
        if ended.exit_code:
            ended.assert_refused(4, str(damaged_copy))
            assert file_of(folder) == before, seed
        else:
            # What was changed was free, or is not used.
            assert run("verify", "--kv-cache-dir", folder).exit_code == 0, seed
            (folder / "data.mdb").write_bytes(before)
    assert codes[4] > NUM_DAMAGED / 2, codes
    assert not (folder / "replacement").exists()


def test_a_damaged_backup_is_restored_once_what_is_damaged_was_removed(
    run: Run, folder: Path, kept: Publication
) -> None:
    copy = folder.parent / "a copy"
    assert run("backup", copy, "--kv-cache-dir", folder).exit_code == 0
    with damaged(copy) as records:
        records.flip("payloads", piece_key(kept.nodes[0].name, 0), 99)
    before = file_of(folder)
    ended = run("restore", copy, "--yes", "--kv-cache-dir", folder)
    ended.assert_refused(4, f"{copy} is damaged: 1 problem, the first in nodes {kept.nodes[0].name.hex()}: piece 0")
    assert file_of(folder) == before
    (repair,) = re.findall("`diskprefix (.*)`", ended.stderr)
    assert run(*shlex.split(repair)).exit_code == 1
    assert run("restore", copy, "--yes", "--kv-cache-dir", folder).exit_code == 0
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    assert not holds(folder, kept)


def test_beside_a_daemon_a_backup_is_written_and_what_replaces_the_file_is_refused(
    run: Run, folder: Path, kept: Publication
) -> None:
    copy = folder.parent / "copy"
    with opened_elsewhere(folder):
        assert run("backup", copy, "--kv-cache-dir", folder).exit_code == 0
        for command, words in (
            (["restore", copy, "--yes"], "a daemon or another command has the store open"),
            (["restore", copy], "a daemon or another command has the store open"),
            (["compact"], "stop it, or write a compacted copy with `diskprefix backup FOLDER`"),
        ):
            run(*command, "--kv-cache-dir", folder).assert_refused(4, words)
    assert holds(copy, kept)


@pytest.mark.usefixtures("kept")
def test_a_command_that_fails_on_a_full_disk_leaves_nothing_there(run: Run, folder: Path, disk: Path) -> None:
    copy = folder.parent / "copy"
    assert run("backup", copy, "--kv-cache-dir", folder).exit_code == 0
    shutil.copytree(copy, disk / "small")
    free = os.statvfs(disk)
    with (disk / "filler").open("wb") as filler:
        filler.write(bytes(free.f_bavail * free.f_frsize - (16 << 10)))

    def left() -> dict[Path, bytes | bool]:
        return {path: path.is_file() and path.read_bytes() for path in disk.rglob("*") if path.suffix != ".lock"}

    before = left()
    entry = name(saved(folder, prompt(3, 60 * BLOCK)))
    for command in (
        ["backup", disk / "new", "--kv-cache-dir", folder],
        ["backup", disk / "new/a/b", "--kv-cache-dir", folder],
        ["restore", copy, "--kv-cache-dir", disk / "other"],
        ["restore", copy, "--kv-cache-dir", disk / "other/a"],
        ["restore", copy, "--yes", "--kv-cache-dir", disk / "small"],
        ["compact", "--kv-cache-dir", disk / "small"],
        ["export", entry, "-o", disk / "entry.safetensors", "--kv-cache-dir", folder],
    ):
        run(*command).assert_refused(4, str(disk))
        assert left() == before, command
    assert not [path for path in disk.rglob("*.lock") if path.parent != disk / "small"]


# -- Beside a daemon -------------------------------------------------------------------------------------------------

QUESTION = "What do the birds in the harbor do when the tide goes out, and when does it come back? "


def asked(daemon: DaemonProcess, salt: str | None) -> dict[str, Any]:
    return ask(daemon, QUESTION, salt=salt)


def asked_after_purge(daemon: DaemonProcess, salt: str) -> dict[str, Any]:
    """Asks until the daemon has dropped what memory kept of a tenant: it looks for purges of other processes every
    second. Returns the first answer after that."""
    answers: list[dict[str, Any]] = []

    def is_forgotten() -> bool:
        answers.append(asked(daemon, salt))
        return bool(answers[-1]["prefix_cache"].get("source") != "memory")

    wait_for(is_forgotten)
    return answers[-1]


def restored(answer: dict[str, Any]) -> int:
    number: int = answer["prefix_cache"]["restored"]
    return number


def tenants(run: Run, folder: Path) -> set[str]:
    listed = run("inspect", "--json", "--kv-cache-dir", folder).json
    return {entry["tenant"] for entry in listed["entries"]}


@pytest.mark.slow
def test_tools_beside_a_daemon_change_no_answer(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    mine = user_tenant()
    alice, bob, plain = (str(tenant) for tenant in (mine.with_salt("alice"), mine.with_salt("bob"), mine))
    with running_daemon(chat_model, folder) as daemon:
        cold = {salt: asked(daemon, salt) for salt in ("alice", "bob", None)}
        daemon.wait_saved()
        assert all(restored(asked(daemon, salt)) > 0 for salt in cold)
        assert run("verify", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {alice, bob, plain}

        assert run("purge", "--salt", "alice", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == {bob, plain}
        again = asked_after_purge(daemon, "alice")
        assert asked(daemon, "bob")["prefix_cache"]["source"] == "memory"
        assert (restored(again), text_of(again)) == (0, text_of(cold["alice"]))
        daemon.wait_saved()
        assert tenants(run, folder) == {alice, bob, plain}
        assert restored(asked(daemon, "alice")) > 0

        asked(daemon, "carol")
        daemon.wait_saved()
        run("compact", "--kv-cache-dir", folder).assert_refused(4)
        assert run("backup", tmp_path / "copy", "--kv-cache-dir", folder).exit_code == 0

        assert run("purge", "--all", "--yes", "--kv-cache-dir", folder).exit_code == 0
        assert tenants(run, folder) == set()
        asked_after_purge(daemon, "carol")
        for salt, before in cold.items():
            again = asked(daemon, salt)
            assert (restored(again), text_of(again)) == (0, text_of(before))
        daemon.wait_saved()
        assert run("verify", "--fix", "--kv-cache-dir", folder).exit_code == 0
        assert all(text_of(asked(daemon, salt)) == text_of(before) for salt, before in cold.items())
        with daemon.client() as client:
            assert client.get("/props").json()["full_cache"]["state"]["error"] is None
        assert daemon.stop() == 0
    assert run("verify", "--kv-cache-dir", folder).exit_code == 0
    assert run("compact", "--kv-cache-dir", folder).exit_code == 0
    with running_daemon(chat_model, folder) as daemon:
        for salt, before in cold.items():
            again = asked(daemon, salt)
            assert restored(again) > 0
            assert text_of(again) == text_of(before)
        assert daemon.stop() == 0
    with running_daemon(chat_model, tmp_path / "copy") as daemon:
        assert restored(asked(daemon, "bob")) > 0


@pytest.mark.slow
def test_verify_reports_nothing_while_a_daemon_saves(run: Run, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder, kv_cache_budget="16MiB") as daemon:
        for n in range(6):
            ask(daemon, f"{n} {QUESTION}")
            report = run("verify", "--json", "--kv-cache-dir", folder).json
            assert report["problems"] == []
        assert daemon.stop() == 0
