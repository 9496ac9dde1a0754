"""`diskprefix purge` with the bucket that machines share."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from diskprefix.cache.tiers.tier import Upload
from diskprefix.extras.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.nouns import SHARED
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Store
from tests.cli.conftest import Run
from tests.extras.remote.made import machine
from tests.store.building import BLOCK, ROOT, layout_of, prompt

PROMPT = prompt(1, 3 * BLOCK)
SECRET = b"a key that these machines share"
ALICE = str(SHARED.with_salt("alice"))


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A bucket with a prompt of everybody's and one of alice's."""
    key_file, bucket = tmp_path / "key", (tmp_path / "bucket").as_uri()
    key_file.write_bytes(SECRET)
    key_file.chmod(0o600)
    with machine(tmp_path / "kv", bucket, key=NamespaceKey.of(SECRET)) as one:
        for number, tenant in enumerate(("", ALICE)):
            root = ROOT[:-1] + bytes([number])
            one.save(PROMPT, root=root)
            record = RootRecord(model="tiny", block_size=BLOCK, layout=one.layout, created_at=0.0, tenant=tenant)
            one.remote.upload(Upload(one.nodes(PROMPT, root), len(PROMPT), record, one.tiers))
        assert one.remote.flush(20)
    return ["--remote-tier", bucket, "--namespace-key-file", str(key_file)]


def num_objects(tmp_path: Path) -> int:
    return len(list((tmp_path / "bucket").rglob("*.*")))


def test_a_purge_of_everything_here_leaves_the_bucket(run: Run, flags: list[str], tmp_path: Path) -> None:
    ended = run("purge", "--all", "--yes", "--json", "--kv-cache-dir", str(tmp_path / "kv"), *flags)
    assert ended.exit_code == 0
    assert "others share it: remove them with the bucket's own tools" in ended.json["remote_error"]
    assert num_objects(tmp_path) == 2


@pytest.fixture
def elsewhere(tmp_path: Path, flags: list[str]) -> list[str]:
    """A purge of what only the bucket has: here, alice used another model."""
    with closing(Store(tmp_path / "kv")) as store, store.changes() as changes:
        record = RootRecord(model="other", block_size=BLOCK, layout=layout_of(100), created_at=0.0, tenant=ALICE)
        changes.put_root(bytes(16), record)
    return ["purge", "--model", "tiny", "--salt", "alice", "--kv-cache-dir", str(tmp_path / "kv"), *flags]


def test_what_only_the_bucket_has_is_purged_there_and_told(run: Run, elsewhere: list[str], tmp_path: Path) -> None:
    asked = run(*elsewhere)
    assert (asked.exit_code, "cannot ask" in asked.stderr) == (2, True)
    ended = run(*elsewhere, "--yes")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout == "nothing to purge here\npurged 1 object from the bucket; copies on other machines stay\n"
    assert num_objects(tmp_path) == 1


def test_what_cannot_be_deleted_in_the_bucket_is_an_error(
    run: Run, elsewhere: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_objects: ObjectStore, _paths: list[str]) -> None:
        raise RemoteUnavailable("this key may not delete")

    monkeypatch.setattr(ObjectStore, "delete", refuse)
    ended = run(*elsewhere, "--yes")
    why = "this key may not delete; remove them with the bucket's own tools"
    assert (ended.exit_code, ended.stderr) == (1, f"objects in the bucket stay: {why}\n")
    assert num_objects(tmp_path) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--remote-tier", "bucket"), "--remote-tier: 'bucket' cannot be used"),
        (("--remote-tier", "s3://[x"), "--remote-tier: 's3://[x' cannot be used"),
        (("--remote-tier", "file:///no/such/folder"), "cannot be used: Generic LocalFileSystem"),
        (("--namespace-key-file", "/none"), "--namespace-key-file: cannot read /none"),
        (("--namespace-key-file", "~nobody-here/k"), "~nobody-here is the home folder of nobody here"),
    ],
)
def test_a_bucket_that_cannot_be_opened_is_told_before_anything_is_purged(
    changed: tuple[str, ...], message: str, run: Run, flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    ended = run("purge", "--model", "tiny", "--yes", "--kv-cache-dir", folder, *flags, *changed)
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr
    assert num_objects(tmp_path) == 2
