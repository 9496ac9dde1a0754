"""Folders and pip settings of a test's own, for the tests that make models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cache_folder import USERS
from tests.runtime.plan import tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched and converted models, empty and of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diskprefix" / "models"


@pytest.fixture
def users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(USERS))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's pip settings: no index, a folder of wheels."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "index"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_folder(tmp_path / "tiny-llama")
