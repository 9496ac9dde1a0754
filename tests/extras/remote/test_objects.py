"""The object store: what it reads at most, and how long it may take, and that changed objects are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.extras.remote.objects import ObjectStore, RemoteUnavailable
from diskprefix.extras.remote.signing import ObjectRefused, signed, verified
from tests.extras.remote.made import KEY


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

    monkeypatch.setattr("diskprefix.extras.remote.objects._open_store", note)
    ObjectStore(tmp_path.as_uri(), timeout_s=0.4)
    ObjectStore(tmp_path.as_uri(), timeout_s=100.0)
    assert opened == [0.4, 60.0, 100.0, 100.0]


def test_a_bucket_that_is_not_there_takes_nothing(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> Any:
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(objects, "_put", missing)
    with pytest.raises(RemoteUnavailable, match="no such bucket"):
        objects.put("a", b"lost")


def test_what_an_object_store_says_is_no_control_of_a_terminal(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise OSError("\x1b[31mred")

    monkeypatch.setattr(objects._obstore, "head", fail)
    with pytest.raises(RemoteUnavailable) as caught:
        objects.has("a")
    assert caught.value.message.isprintable()


def test_a_listing_that_is_too_long_to_be_true_is_not_read_to_its_end(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = iter([[{"path": "a"}, {"path": "b"}]] * 1000)
    monkeypatch.setattr(objects._obstore, "list", lambda *_: pages)
    monkeypatch.setattr("diskprefix.extras.remote.objects._MAX_PATHS", 10)
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
