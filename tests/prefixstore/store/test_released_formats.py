"""Stores of every released format are opened, and what is in them is restored bit for bit."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.schema import FORMAT_VERSION
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.verify import verify_index
from tests.prefixstore.store.building import Clock
from tests.prefixstore.store.released_format import FORMATS, contents

ROOT = Path(__file__).parents[3]
RELEASED = sorted(FORMATS.glob("*.mdb.gz"))
DIGESTS = {
    "16.json": "553489a27ea712d2dd4a9529cc135792efcff2fedb3d593d68d3d96e484466bb",
    "16.mdb.gz": "8ba96884947772a8bea1cf2a4d03af71d86f23842c5bfc165c76b94a8bcbbea5",
}


def opened(path: Path, folder: Path) -> Store:
    (folder / "data.mdb").write_bytes(gzip.decompress(path.read_bytes()))
    (folder / "data.mdb").chmod(0o600)
    return Store(folder, clock=Clock(1.7e9))


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.name)
def test_a_store_of_a_released_format_is_restored_bit_for_bit(path: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store = opened(path, tmp_path)
    expected = json.loads(path.with_name(path.name.replace(".mdb.gz", ".json")).read_text(encoding="utf-8"))
    assert contents(store) == expected
    assert verify_index(store).problems == ()


def test_what_is_kept_is_what_was_released() -> None:
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FORMATS.iterdir()} == DIGESTS


def test_the_current_format_is_among_them_and_none_is_large() -> None:
    assert f"{FORMAT_VERSION}.mdb.gz" in {path.name for path in RELEASED}
    assert all(path.stat().st_size <= 100_000 for path in RELEASED)


def test_the_changelog_names_the_current_format() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert f"The store's format is {FORMAT_VERSION}." in newest


def test_the_kept_store_has_every_kind_of_node_and_every_codec(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store = opened(FORMATS / f"{FORMAT_VERSION}.mdb.gz", tmp_path)
    with store.snapshot() as snapshot:
        names = list(snapshot.keys("usage"))
        kinds = {node.kind for name in names if (node := snapshot.node(name)) is not None}
        codecs = {piece[16] for name in names for _, piece in snapshot.pieces(name)}
    store.close()
    assert len(kinds) == 3
    assert codecs == set(Codec)
