"""A store remembers the namespace key that seeds its names, and is read where it cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
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
