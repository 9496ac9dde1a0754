"""A real model in several wheels of a package index is fetched and put together, with the user's own pip."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.errors import ModelError
from tests.runtime.plan import tiny
from tools.models.real import SplitModel, split_file

PARTS = (b"GGUF" * 50_000, b"tail" * 30_000)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SplitModel:
    """Its parts are in a folder of wheels, and the cache is empty."""
    index = tmp_path / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    for number, content in enumerate(PARTS, start=1):
        part = tmp_path / "part.bin"
        part.write_bytes(content)
        tiny.write_wheel(index, part, name=f"part_{number}")
    whole = b"".join(PARTS)
    return SplitModel(
        name="split",
        folder="Split",
        gguf="split.gguf",
        requirements=("part-1==1.0", "part-2==1.0"),
        sha256=hashlib.sha256(whole).hexdigest(),
        download_bytes=len(whole),
        disk_bytes=4 * len(whole),
        note="",
    )


def test_the_parts_of_a_model_are_fetched_and_joined(model: SplitModel) -> None:
    assert split_file(model, lambda _: None).read_bytes() == b"".join(PARTS)


def test_parts_that_do_not_make_the_file_are_refused(model: SplitModel) -> None:
    with pytest.raises(ModelError, match="do not make the file that is expected"):
        split_file(replace(model, sha256="0" * 64), lambda _: None)
