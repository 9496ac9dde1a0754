"""Machines that share a folder in the place of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.prefixstore.remote.made import Machine, MakeMachine, machine


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def make(tmp_path: Path, bucket: Path) -> Iterator[MakeMachine]:
    number = 0
    with ExitStack() as opened:

        def made(**options: Any) -> Machine:
            nonlocal number
            number += 1
            url = options.pop("url", bucket.as_uri())
            return opened.enter_context(machine(tmp_path / str(number), url, **options))

        yield made


@pytest.fixture(autouse=True)
def bundles_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of these tests are small: three of them make a bundle."""
    monkeypatch.setattr("diskprefix.prefixstore.remote.bundle._TARGET_BYTES", 3 * 20_000 - 1000)
