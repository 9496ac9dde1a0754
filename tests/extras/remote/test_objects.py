"""The object store: what it reads at most, and how long it may take."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.extras.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.extras.remote.signing import ObjectRefused
from tests.object_server import BUCKET, object_server


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path.as_uri())


def test_what_is_larger_than_it_can_be_is_not_read(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.put("a", bytes(1000))
    got, part = objects.get("a", 1000), objects.get_range("a", 0, 10, 10)
    assert got is not None
    assert part is not None
    assert (len(got.data), len(part.data), part.modified_at) == (1000, 10, got.modified_at)
    with pytest.raises(ObjectRefused, match="1000 bytes, and 999 at most"):
        objects.get("a", 999)
    get = objects._obstore.get
    # A server that does not know ranges sends everything.
    monkeypatch.setattr(objects._obstore, "get", lambda *args, **_: get(*args))
    with pytest.raises(ObjectRefused, match="1000 bytes, and 10 at most"):
        objects.get_range("a", 0, 10, 10_000)
    assert not objects.breaker.is_open


def test_a_range_behind_the_end_of_a_large_object_is_refused(objects: ObjectStore) -> None:
    objects.put("a", bytes(1000))
    with pytest.raises(ObjectRefused, match="at most"):
        objects.get_range("a", 2000, 2010, 999)
    got = objects.get_range("a", 2000, 2010, 1000)
    assert got is not None
    assert len(got.data) == 0


def test_writing_has_more_time_than_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[float] = []

    def note(_url: str, timeout_s: float, **_: Any) -> None:
        opened.append(timeout_s)

    monkeypatch.setattr("diskprefix.extras.remote.objects._opened", note)
    ObjectStore(tmp_path.as_uri(), timeout_s=0.4)
    ObjectStore(tmp_path.as_uri(), timeout_s=100.0)
    assert opened == [0.4, 60.0, 100.0, 100.0]


def test_a_bucket_that_is_not_there_takes_nothing(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> Any:
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(objects._obstore, "put", missing)
    with pytest.raises(RemoteUnavailable, match="no such bucket"):
        objects.put("a", b"lost")


def test_what_an_object_store_says_is_no_control_of_a_terminal(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise OSError("\x1b[31mred")

    monkeypatch.setattr(objects._obstore, "head", fail)
    with pytest.raises(RemoteUnavailable) as caught:
        objects.info("a")
    assert caught.value.message.isprintable()


def test_a_folder_is_made_only_by_who_writes(tmp_path: Path) -> None:
    folder = tmp_path / "mistyped"
    with pytest.raises(SettingsError, match="cannot be used"):
        ObjectStore(folder.as_uri(), makes_folder=False)
    assert not folder.exists()
    ObjectStore(folder.as_uri())
    assert folder.exists()


def test_a_listing_of_a_bucket_goes_on_behind_names_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_server(tmp_path, in_memory=True) as server:
        for name, value in (server.environment | {"AWS_SKIP_SIGNATURE": "true"}).items():
            monkeypatch.setenv(name, value)

        def put(path: str) -> None:
            connection = HTTPConnection("127.0.0.1", server.port)
            connection.request("PUT", f"/{BUCKET}{path}", b"")
            assert connection.getresponse().status == 200
            connection.close()

        put("")
        objects = ObjectStore(server.url)
        # A page of the listing has a thousand names.
        ours = [f"ns/root/{number:04x}.1" for number in range(1100)]
        for path in ours:
            put(f"/shared/{path}")
        assert [one.path for one in objects.list("ns/")] == ours
        for stranger in ("%09first", "0009%0Aname", "0422.1%0D"):
            put(f"/shared/ns/root/{stranger}")
        listed = [one.path for one in objects.list("ns/")]
        assert objects.num_unreadable == 3
        # What is left out stands before a stranger, in the same thousand names.
        assert listed == ours[9:1009] + ours[0x423:]
