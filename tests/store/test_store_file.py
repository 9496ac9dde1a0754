"""A store remembers the namespace key that seeds its names, and is read where it cannot be written."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.folder import DATA
from diskprefix.store.opening import DAMAGED
from diskprefix.store.store import Store
from diskprefix.store.store_file import OnCorruption

A, B = NamespaceKey.of(b"key of the one fleet"), NamespaceKey.of(b"key of the other one")
BUDGET = 32 << 20


def opened(path: Path, namespace: NamespaceKey | None, on_corruption: OnCorruption = "quarantine") -> Store:
    return Store(path, budget_bytes=BUDGET, serving=True, namespace=namespace, on_corruption=on_corruption)


def test_stores_with_one_namespace_key_name_alike_and_others_do_not(tmp_path: Path) -> None:
    seeds = []
    for number, key in enumerate((A, A, B, None, None)):
        store = opened(tmp_path / str(number), key)
        seeds.append(store.secret)
        store.close()
    assert seeds[:3] == [A.names_seed, A.names_seed, B.names_seed]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    ("first", "then", "advice"),
    [
        (A, B, "another namespace key; give that one with --namespace-key-file, or choose another --kv-cache-dir"),
        (A, None, "with a namespace key; give the file with --namespace-key-file, or choose another --kv-cache-dir"),
        (None, A, "not made with a namespace key; leave --namespace-key-file out, or choose another --kv-cache-dir"),
    ],
    ids=["another", "none", "its own secret"],
)
def test_a_daemon_with_another_key_is_refused_and_the_store_stays(
    first: NamespaceKey | None, then: NamespaceKey | None, advice: str, tmp_path: Path
) -> None:
    store = opened(tmp_path, first)
    store_id, secret = store.store_id, store.secret
    store.close()
    with pytest.raises(StoreUnavailable) as caught:
        opened(tmp_path, then)
    assert caught.value.message.endswith(advice)
    assert "\n" not in caught.value.message
    again = opened(tmp_path, first)
    assert (again.store_id, again.secret) == (store_id, secret)
    again.close()


def test_commands_need_no_key(tmp_path: Path) -> None:
    opened(tmp_path, A).close()
    tool = Store(tmp_path, read_only=True)
    assert tool.secret == A.names_seed
    tool.close()


def test_a_store_that_the_disk_does_not_make_durable_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, None).close()

    def failing(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    store = opened(tmp_path, None)
    assert store.problem is not None
    with store.snapshot() as snapshot:
        assert snapshot.counts()["entries"] == 0
    store.close()


PAGE = mmap.PAGESIZE
VERSION, PAGE_SIZE = 20, 40
"""Places in a meta page."""


def with_number(page: bytes, place: int, number: int) -> bytes:
    return page[:place] + number.to_bytes(4, "little") + page[place + 4 :]


def of_later_lmdb(metas: list[bytes]) -> bytes:
    """A number of the transaction stands before what each meta page has."""
    later = [with_number(meta, VERSION, 3) for meta in metas]
    return b"".join(meta[:16] + bytes(8) + meta[16:-8] for meta in later)


def of_larger_pages(metas: list[bytes]) -> bytes:
    return b"".join(with_number(meta, PAGE_SIZE, 4 * PAGE) + bytes(3 * PAGE) for meta in metas)


OTHERS: dict[str, tuple[Callable[[list[bytes]], bytes], str]] = {
    "version": (lambda metas: b"".join(with_number(meta, VERSION, 2) for meta in metas), "has LMDB's data version 2"),
    "later": (of_later_lmdb, "has LMDB's data version 3"),
    "pages": (of_larger_pages, f"has pages of {4 * PAGE} bytes"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_store_of_another_lmdb_or_another_kind_of_machine_is_left_alone(which: str, tmp_path: Path) -> None:
    opened(tmp_path, None).close()
    file, (change, problem) = tmp_path / DATA, OTHERS[which]
    data = file.read_bytes()
    file.write_bytes(change([data[:PAGE], data[PAGE : 2 * PAGE]]) + data[2 * PAGE :])
    before = file.read_bytes()
    with pytest.raises(StoreUnavailable, match=f"{DATA} {problem}, which LMDB .* cannot use on this machine") as caught:
        opened(tmp_path, None)
    assert "\n" not in caught.value.message
    assert file.read_bytes() == before
    assert not (tmp_path / DAMAGED).exists()


@pytest.mark.parametrize("place", [VERSION, PAGE_SIZE])
def test_a_data_version_or_page_size_that_one_meta_page_alone_has_is_damage(place: int, tmp_path: Path) -> None:
    opened(tmp_path, None).close()
    file = tmp_path / DATA
    file.write_bytes(with_number(file.read_bytes(), place, 2 * PAGE))
    opened(tmp_path, None).close()
    assert (tmp_path / DAMAGED).exists()


def test_a_store_that_the_installed_lmdb_refuses_for_its_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, None).close()
    before = (tmp_path / DATA).read_bytes()

    def refusing(*_: object, **__: object) -> None:
        raise lmdb.VersionMismatchError("MDB_VERSION_MISMATCH: Database environment version mismatch")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", refusing)
        with pytest.raises(StoreUnavailable, match=r"another version, which LMDB .* cannot use"):
            opened(tmp_path, None)
    assert (tmp_path / DATA).read_bytes() == before
    assert not (tmp_path / DAMAGED).exists()
