"""The object store: what it reads at most, and how long it may take, and that changed objects are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.prefixstore.remote.remote_tier import open_tier
from diskprefix.prefixstore.remote.signing import ObjectRefused, signed, verified
from tests.object_server import SECRET_KEY, object_server
from tests.prefixstore.remote.made import KEY
from tests.waiting import wait_for


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path.as_uri())


def test_what_is_larger_than_it_can_be_is_not_read(objects: ObjectStore) -> None:
    objects.put("a", bytes(1000))
    found = objects.get("a", 1000)
    assert found is not None
    assert bytes(found) == bytes(1000)
    assert objects.get("b", 1000) is None
    with pytest.raises(ObjectRefused, match="1000 bytes, and 999 at most"):
        objects.get("a", 999)
    assert not objects.breaker.is_failing


def test_writing_has_more_time_than_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[float] = []

    def note(_url: str, timeout_s: float, **_: Any) -> None:
        opened.append(timeout_s)

    monkeypatch.setattr("diskprefix.prefixstore.remote.objects._open_store", note)
    ObjectStore(tmp_path.as_uri(), timeout_s=0.4)
    ObjectStore(tmp_path.as_uri(), timeout_s=100.0)
    assert opened == [0.4, 60.0, 100.0, 100.0]


def test_a_bucket_that_is_not_there_takes_nothing(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> Any:
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(objects, "_put", missing)
    with pytest.raises(RemoteUnavailable, match="no such bucket"):
        objects.put("a", b"lost")


def test_errors_of_an_object_store_contain_no_control_characters(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise OSError("\x1b[31mred")

    monkeypatch.setattr(objects._obstore, "head", fail)
    with pytest.raises(RemoteUnavailable) as caught:
        objects.has("a")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("secret", [SECRET_KEY, "WRONG0123456789"])
def test_a_bucket_that_refuses_the_credentials_is_told_at_the_start(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "diskprefix")
    (key := tmp_path / "namespace.key").write_text("0123456789abcdef" * 2)
    key.chmod(0o600)
    with object_server(tmp_path / "server") as server:
        for name, value in (server.environment | {"AWS_SECRET_ACCESS_KEY": secret}).items():
            monkeypatch.setenv(name, value)
        tier = open_tier(Settings(remote_tier=server.url, namespace_key_file=key))
        try:
            wait_for(lambda: server.num_requests == 1 and (secret == SECRET_KEY or tier.stats()["problem"]))
            tier.objects.probe()
            stats = tier.stats()
        finally:
            tier.close(5.0)
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        if secret == SECRET_KEY:
            assert (stats["state"], stats["problem"], told) == ("ok", "", [])
            return
        refusal = f"the bucket {server.url} answers 403: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        assert stats["state"] == "failing"
        assert stats["problem"].startswith(refusal)
        assert len(told) == 1, "it is said once"
        assert refusal in told[0]
        # The user's key was mended: the next request clears it.
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        mended = ObjectStore(server.url)
        mended.problem = stats["problem"]
        mended.probe()
        assert mended.problem == ""


@pytest.mark.parametrize(
    ("raised", "is_refused"),
    [("Client error with status 403 Forbidden", True), ("status 503 SlowDown after 4031 ms", False)],
)
def test_only_a_refusal_is_a_problem(
    raised: str, is_refused: bool, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(raised)

    monkeypatch.setattr(objects._obstore, "head", fail)
    objects.probe()
    assert bool(objects.problem) == is_refused


def test_a_bucket_that_may_only_be_read_is_no_problem_of_reading(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError("Client error with status 403 Forbidden")

    monkeypatch.setattr(objects, "_put", fail)
    with pytest.raises(RemoteUnavailable):
        objects.put("a", b"content")
    assert objects.problem == ""
    objects.problem = "it was refused"
    objects.probe()
    assert objects.problem == ""


def test_a_listing_that_is_too_long_to_be_true_is_not_read_to_its_end(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = iter([[{"path": "a"}, {"path": "b"}]] * 1000)
    monkeypatch.setattr(objects._obstore, "list", lambda *_: pages)
    monkeypatch.setattr("diskprefix.prefixstore.remote.objects._MAX_PATHS", 10)
    with pytest.raises(RemoteUnavailable, match="lists more than 10 objects"):
        objects.list("")
    assert len([*pages]) == 994


@pytest.mark.parametrize("place", [0, 20, 40])
def test_a_missing_object_keeps_no_other_from_being_deleted(place: int, objects: ObjectStore) -> None:
    names = [f"object-{number}" for number in range(40)]
    for name in names:
        objects.put(name, b"")
    objects.delete([*names[:place], "missing", *names[place:]])
    assert objects.list("") == []
    assert not objects.write_breaker.is_failing


def test_a_folder_is_made_only_by_who_writes(tmp_path: Path) -> None:
    folder = tmp_path / "mistyped"
    with pytest.raises(SettingsError, match="cannot be used"):
        ObjectStore(folder.as_uri(), makes_folder=False)
    assert not folder.exists()
    ObjectStore(folder.as_uri())
    assert folder.exists()


CONTENT = b"what the object says"


def refused(path: str, data: bytes) -> str:
    with pytest.raises(ObjectRefused) as caught:
        verified(KEY, path, data)
    assert "\n" not in caught.value.message
    return caught.value.reason


def test_no_byte_can_be_changed_and_no_end_cut_off_or_added() -> None:
    data = signed(KEY, "a/b", CONTENT)
    assert verified(KEY, "a/b", data) == CONTENT
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            # Four bytes of the beginning say nothing.
            assert verified(KEY, "a/b", bytes(changed)) == CONTENT
            assert at in range(12, 16)
        except ObjectRefused:
            assert at not in range(12, 16)
        assert refused("a/b", data[:at]) == "truncated"
    assert refused("a/b", data + b"x") == "truncated"
