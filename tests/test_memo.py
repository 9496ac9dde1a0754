from __future__ import annotations

import os
from pathlib import Path

import pytest

from diskprefix.memo import Memo


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diskprefix"


def test_a_value_is_found_by_another_memo_of_the_same_version_only() -> None:
    Memo("speed", version=1).put("a", [1, 2])
    assert Memo("speed", version=1).get("a") == [1, 2]
    assert Memo("speed", version=2).get("a") is None


def test_the_newest_records_are_kept() -> None:
    memo = Memo("speed", version=1, max_records=2)
    for number in range(4):
        memo.put(str(number), number)
    assert [memo.get(str(number)) for number in range(4)] == [None, None, 2, 3]


CONTENTS = [b"[", b"", b"\xff\xfe", b"[]", b"null", b'{"format": 1}', b'{"format": 1, "records": []}']


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_memo_is_replaced(content: bytes, home: Path) -> None:
    home.mkdir()
    (home / "speed.json").write_bytes(content)
    memo = Memo("speed", version=1)
    assert memo.get("a") is None
    memo.put("a", 1)
    assert memo.get("a") == 1


def test_a_link_at_the_name_that_a_process_would_choose_is_not_written_through(home: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another's")
    home.mkdir()
    (home / f".speed.json.{os.getpid()}").symlink_to(victim)
    (home / "speed.json").symlink_to(victim)
    Memo("speed", version=1).put("a", 1)
    assert victim.read_text() == "another's"
    assert Memo("speed", version=1).get("a") == 1


def test_a_folder_that_cannot_be_written_is_no_error(home: Path) -> None:
    home.write_text("a file")
    memo = Memo("speed", version=1)
    memo.put("a", 1)
    assert memo.get("a") is None


def test_root_reads_and_writes_no_memo_in_a_folder_of_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memo lists the exact kernels, so others could change what a model answers, or have root write elsewhere."""
    memo = Memo("speed", version=1)
    memo.put("a", 1)
    home.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    memo.put("a", 2)
    assert memo.get("a") is None
    home.chmod(0o700)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent))
    assert memo.get("a") == 1
