from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from diskprefix.errors import StoreCorrupt, StoreUnavailable
from diskprefix.prefixstore.store import environment
from diskprefix.prefixstore.store.compact import compact_folder, compacted_bytes, copy_store, rewrite_folder
from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from diskprefix.prefixstore.store.pieces import split_payload
from diskprefix.prefixstore.store.store import Publication, Store
from tests import forked
from tests.faults.damage import damaged
from tests.prefixstore.store import compacting_process, other_process
from tests.prefixstore.store.building import (
    BLOCK,
    Clock,
    is_clean,
    is_whole,
    layout_of,
    open_store,
    prompt,
    publication,
)
from tests.prefixstore.store.other_process import beside
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Publication]]:
    """A store of which most was deleted, and what is left in it."""
    folder = tmp_path_factory.mktemp("template")
    store = open_store(folder, clock=Clock())
    layout = layout_of(600_000)
    pubs = [publication(store, prompt(seed, 3 * BLOCK + seed), layout=layout) for seed in range(12)]
    for pub in pubs:
        store.publish(pub)
    for pub in pubs[2:10]:
        for node in reversed(pub.nodes):
            store.quarantine(node.name, node.parent)
    store.close()
    return folder, [*pubs[:2], *pubs[10:]]


@pytest.fixture
def pubs(template: tuple[Path, list[Publication]]) -> list[Publication]:
    return template[1]


@pytest.fixture
def folder(template: tuple[Path, list[Publication]], tmp_path: Path) -> Path:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    shutil.copy(template[0] / "data.mdb", folder / "data.mdb")
    (folder / "data.mdb").chmod(0o600)
    (folder / "diskprefix.lock").touch(mode=0o600)
    return folder


def records(folder: Path) -> dict[str, dict[bytes, bytes]]:
    with damaged(folder) as all_:
        names = ("meta", "roots", "nodes", "children", "usage", "payloads", "entries", "seen")
        return {name: {key: all_.get(name, key) for key in all_.keys(name)} for name in names}


def test_a_compacted_store_holds_the_same_in_fewer_bytes(folder: Path, pubs: list[Publication]) -> None:
    before = records(folder)
    expected = compacted_bytes(folder)
    done: list[int] = []
    result = compact_folder(folder, done.append)
    assert records(folder) == before
    assert result.after_bytes == (folder / "data.mdb").stat().st_size
    assert abs(result.after_bytes - expected) < 2**20
    assert result.after_bytes < 0.5 * result.before_bytes
    assert expected * 0.9 < sum(done) < expected
    store = open_store(folder)
    assert all(is_whole(store, pub) for pub in pubs)
    assert is_clean(store)
    more = publication(store, prompt(77, 2 * BLOCK))
    store.publish(more)
    assert is_whole(store, more)


def test_the_blocks_of_a_prompt_lie_behind_each_other(folder: Path, pubs: list[Publication]) -> None:
    compact_folder(folder)
    data = (folder / "data.mdb").read_bytes()
    for pub in pubs:
        # The tail is so small that it lies among the records.
        places = [data.index(bytes(node.payload[0][:64])) for node in pub.nodes[:-1]]
        assert places == sorted(places)
        assert places[-1] - places[0] < sum(node.payload_bytes for node in pub.nodes) + 64 * 4096


def test_what_no_block_owns_is_copied_too(folder: Path) -> None:
    with damaged(folder) as all_:
        all_.put("payloads", b"short", b"x")
        all_.put("payloads", all_.keys("nodes")[0] + b"long", b"y")
        all_.put("payloads", bytes(18), b"z")
        all_.put("nodes", b"odd", b"")
        all_.delete("nodes", all_.keys("nodes")[-1])
    before = records(folder)
    compact_folder(folder)
    assert records(folder) == before


def test_only_its_owner_may_read_the_new_file_and_nothing_else_is_left(folder: Path) -> None:
    (folder / "lock.mdb").write_bytes(b"of the old file")
    (folder / "replacement").mkdir()
    (folder / "replacement" / "data.mdb").write_bytes(b"left behind by a kill")
    compact_folder(folder)
    assert {path.name for path in folder.iterdir()} == {"data.mdb", "diskprefix.lock", "names.lock"}
    assert stat.S_IMODE((folder / "data.mdb").stat().st_mode) == 0o600


@pytest.mark.parametrize("read_only", [True, False])
def test_a_store_that_is_open_elsewhere_is_refused_and_copied(
    folder: Path, tmp_path: Path, pubs: list[Publication], read_only: bool
) -> None:
    before = (folder / "data.mdb").stat()
    with beside(other_process.hold, folder, read_only):
        with pytest.raises(StoreUnavailable, match="diskprefix backup"):
            compact_folder(folder)
        assert (folder / "data.mdb").stat().st_ino == before.st_ino
        result = copy_store(folder, tmp_path / "a" / "copy")
    assert result.after_bytes < result.before_bytes
    copy = tmp_path / "a" / "copy"
    assert {path.name for path in copy.iterdir()} == {"data.mdb", "names.lock"}
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert stat.S_IMODE((copy / "data.mdb").stat().st_mode) == 0o600
    assert records(copy) == records(folder)
    store = open_store(copy)
    assert all(is_whole(store, pub) for pub in pubs)
    store.close()
    assert compact_folder(folder).after_bytes < before.st_size


def test_a_copy_beside_a_writer_is_a_store_of_one_moment(tmp_path: Path) -> None:
    source = tmp_path / "kv"
    with beside(other_process.churn, source, 64 << 20, 100_000) as writer:
        for n in range(8):
            copy_store(source, tmp_path / str(n))
            store = Store(tmp_path / str(n), read_only=True)
            assert is_clean(store)
            assert store.counts()["entries"] > 10
            store.close()
        assert writer.is_alive()


def test_a_copy_is_written_over_no_store(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    open_store(other).close()
    before = (other / "data.mdb").read_bytes()
    for target in (other, folder):
        with pytest.raises(StoreUnavailable, match="holds a store already"):
            copy_store(folder, target)
    assert (other / "data.mdb").read_bytes() == before


class FullDisk:
    """The answer of `os.statvfs` on a disk with one page free."""

    f_bavail, f_frsize = 1, 4096


def test_a_disk_without_room_is_found_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "data.mdb").read_bytes()
    monkeypatch.setattr(os, "statvfs", lambda _path: FullDisk)
    with pytest.raises(StoreUnavailable, match=r"takes .* MiB and the disk has 4.0 KiB: .* MiB are missing"):
        compact_folder(folder)
    with pytest.raises(StoreUnavailable, match="are missing"):
        copy_store(folder, tmp_path / "copy")
    assert (folder / "data.mdb").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"data.mdb", "diskprefix.lock"}
    assert not (tmp_path / "copy").exists()


def test_a_disk_that_fills_up_meanwhile_leaves_the_old_file(folder: Path, pubs: list[Publication]) -> None:
    code = f"""
import resource, sys
from pathlib import Path
from diskprefix.daemon.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}))
main(["compact", "--kv-cache-dir", {str(folder)!r}])
"""
    before = (folder / "data.mdb").read_bytes()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "the disk is full or fails" in result.stderr
    assert (folder / "data.mdb").read_bytes() == before
    assert not (folder / "replacement").exists()
    store = open_store(folder)
    assert all(is_whole(store, pub) for pub in pubs)


def test_a_damaged_file_is_not_copied(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / "data.mdb").read_bytes())
    data[2 * 4096 :] = bytes(len(data) - 2 * 4096)
    (folder / "data.mdb").write_bytes(data)
    with pytest.raises(StoreCorrupt):
        compact_folder(folder)
    with pytest.raises(StoreCorrupt):
        copy_store(folder, tmp_path / "copy")
    assert (folder / "data.mdb").read_bytes() == data


def test_the_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    env = open_lmdb(tmp_path, max_dbs=1)
    with env.begin(write=True) as txn:
        txn.put(b"key", b"value", db=env.open_db(b"theirs", txn=txn))
    env.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreUnavailable, match="holds no diskprefix store"):
        compact_folder(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_kill_at_every_step_on_the_file_system_leaves_a_store(
    folder: Path, pubs: list[Publication], template: tuple[Path, list[Publication]]
) -> None:
    sizes = set()
    for step in range(100):
        shutil.copy(template[0] / "data.mdb", folder / "data.mdb")
        code = forked.run(compacting_process.compact_until_killed, folder, step)
        sizes.add((folder / "data.mdb").stat().st_size)
        store = open_store(folder)
        assert all(is_whole(store, pub) for pub in pubs), step
        store.close()
        assert not (folder / "replacement").exists()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert step > 5
    # The old one, and the new one.
    assert len(sizes) == 2


def unique(pub: Publication, rng: random.Random) -> Publication:
    """The same publication with payloads that no other has."""
    nodes = [
        replace(node, payload=split_payload(memoryview(rng.randbytes(node.payload_bytes)), node.pieces))
        for node in pub.nodes
    ]
    return replace(pub, nodes=tuple(nodes))


@pytest.mark.slow
def test_no_byte_of_a_purged_prompt_is_left_beside_a_process_that_saves_on(tmp_path: Path) -> None:
    rng, folder = random.Random(1), tmp_path / "kv"
    store = open_store(folder)
    pubs = [unique(publication(store, prompt(seed, 3 * BLOCK)), rng) for seed in range(8)]
    for pub in pubs:
        store.publish(pub)
    store.close()
    gone, kept = pubs[::2], pubs[1::2]
    # Some bytes of each payload, and the token ids of each block.
    nodes = [node for pub in gone for node in pub.nodes]
    marks = [bytes(piece)[at : at + 32] for node in nodes for piece in node.payload for at in (0, 40)]
    marks += [node.token_ids.tobytes() for node in nodes if len(node.token_ids)]
    assert min(map(len, marks)) == 32

    def found() -> set[str]:
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        return {name for name, content in contents.items() if any(mark in content for mark in marks)}

    assert found() == {"data.mdb"}
    with beside(other_process.save_on, folder):
        ids = [pub.last_node.hex() for pub in gone if pub.last_node]
        command = [sys.executable, "-m", "diskprefix", "purge", *ids, "--yes", "--kv-cache-dir", str(folder)]
        subprocess.run([*command, "--erase"], check=True, capture_output=True)
        with closing(Store(folder, read_only=True)) as looking:
            num_entries = looking.counts()["entries"]
            wait_for(lambda: looking.counts()["entries"] > num_entries)
        assert found() == set()
    assert found() == set()
    store = open_store(folder)
    assert all(is_whole(store, pub) for pub in kept)
    assert is_clean(store)
    store.close()


def rewrite(folder: Path, is_let_go: bool) -> None:
    environment._READER_PATIENCE_S = 0.2
    assert rewrite_folder(folder) == is_let_go


def test_a_file_that_is_rewritten_beside_a_process_loses_nothing_that_it_saves(
    folder: Path, pubs: list[Publication]
) -> None:
    store, inode = open_store(folder), (folder / "data.mdb").stat().st_ino
    assert forked.run(rewrite, folder, False) == 0
    assert (folder / "data.mdb").stat().st_ino != inode
    new = publication(store, prompt(50, 3 * BLOCK), layout=layout_of(600_000))
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        store.publish(new)
    assert store.maintain()
    store.publish(new)
    assert all(is_whole(store, pub) for pub in (*pubs, new))
    store.close()
    store = open_store(folder)
    assert is_clean(store)
