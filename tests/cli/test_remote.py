"""`diskprefix remote`: listing and purging the bucket that machines share."""

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


def test_what_is_shared_is_listed_and_purged(run: Run, flags: list[str]) -> None:
    listed = run("remote", "ls", "--json", *flags).json
    assert [(root["model"], root["tenant"], root["objects"]) for root in listed["roots"]] == [
        ("tiny", "", 1),
        ("tiny", ALICE, 1),
    ]
    shown = run("remote", "ls", *flags).stdout.splitlines()
    assert len(shown) == 2
    assert f"tiny  {ALICE[:8]}  1 object" in shown[1]
    planned = run("remote", "purge", "--tenant", "alice", "--dry-run", *flags).stdout
    assert planned.startswith("would remove 1 object, ")
    done = run("remote", "purge", "--tenant", "alice", *flags)
    assert (done.exit_code, done.stdout) == (0, planned.replace("would remove", "removed"))
    assert run("remote", "purge", "--all", *flags).stdout.startswith("removed 1 object, ")
    assert run("remote", "ls", *flags).stdout == "nothing is shared yet by machines with these keys\n"


def test_who_lists_or_purges_is_warned_of_what_is_nobodys(run: Run, flags: list[str], tmp_path: Path) -> None:
    sorted(tmp_path.rglob("about"))[1].unlink()
    warning = "warning: 1 object lies in a root without a valid description, so the tenant is unknown\n"
    assert run("remote", "ls", *flags).stderr == warning
    assert run("remote", "purge", "--model", "tiny", "--dry-run", *flags).stderr == warning
    run("remote", "purge", "--tenant", "alice", *flags).assert_refused(2, "1 object lies in a root")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ls",), "give the bucket with --remote-tier"),
        (("purge", "FLAGS"), "give --tenant, --model or both, or --all alone"),
        (("purge", "--all", "--model", "x", "FLAGS"), "or --all alone"),
        (("purge", "--tenant", "nobody", "FLAGS"), "nothing is shared of this tenant"),
        (("ls", "FLAGS", "--remote-tier", "bucket"), "--remote-tier: 'bucket' cannot be used"),
        (("ls", "FLAGS", "--remote-tier", "s3://[x"), "--remote-tier: 's3://[x' cannot be used"),
        (("ls", "FLAGS", "--remote-tier", "file:///no/such/folder"), "cannot be used: Generic LocalFileSystem"),
        (("ls", "FLAGS", "--namespace-key-file", "/none"), "--namespace-key-file: cannot read /none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line(args: tuple[str, ...], message: str, run: Run, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(SECRET)
    key_file.chmod(0o600)
    (tmp_path / "bucket").mkdir()
    flags = ["--remote-tier", (tmp_path / "bucket").as_uri(), "--namespace-key-file", str(key_file)]
    given = [part for arg in args for part in (flags if arg == "FLAGS" else [arg])]
    run("remote", *given).assert_refused(2, message)


def roots_in_the_bucket(run: Run, flags: list[str]) -> list[str]:
    return [root["tenant"] for root in run("remote", "ls", "--json", *flags).json["roots"]]


def test_a_purge_of_everything_here_leaves_the_bucket(run: Run, flags: list[str], tmp_path: Path) -> None:
    before = roots_in_the_bucket(run, flags)
    ended = run("purge", "--all", "--yes", "--json", "--kv-cache-dir", str(tmp_path / "kv"), *flags)
    assert ended.exit_code == 0
    assert "remote purge" in ended.json["remote_error"]
    assert roots_in_the_bucket(run, flags) == before == ["", ALICE]


@pytest.fixture
def elsewhere(tmp_path: Path, flags: list[str]) -> list[str]:
    """A purge of what only the bucket has: here, alice used another model."""
    with closing(Store(tmp_path / "kv")) as store, store.changes() as changes:
        record = RootRecord(model="other", block_size=BLOCK, layout=layout_of(100), created_at=0.0, tenant=ALICE)
        changes.put_root(bytes(16), record)
    return ["purge", "--model", "tiny", "--salt", "alice", "--kv-cache-dir", str(tmp_path / "kv"), *flags]


def test_what_only_the_bucket_has_is_purged_there_and_told(run: Run, flags: list[str], elsewhere: list[str]) -> None:
    asked = run(*elsewhere)
    assert (asked.exit_code, "cannot ask" in asked.stderr) == (2, True)
    ended = run(*elsewhere, "--yes")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout == "nothing to purge here\npurged 1 object from the bucket; copies on other machines stay\n"
    assert roots_in_the_bucket(run, flags) == [""]


def test_what_cannot_be_deleted_in_the_bucket_is_an_error(
    run: Run, flags: list[str], elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_objects: ObjectStore, _paths: list[str]) -> None:
        raise RemoteUnavailable("this key may not delete")

    monkeypatch.setattr(ObjectStore, "delete", refuse)
    ended = run(*elsewhere, "--yes")
    why = "this key may not delete; remove them with `diskprefix remote purge`"
    assert (ended.exit_code, ended.stderr) == (1, f"objects in the bucket stay: {why}\n")
    assert roots_in_the_bucket(run, flags) == ["", ALICE]
