"""Runners that are closed when their test is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.prefixstore.cache.opening import Opened, open_runner
from tests.runner import Runner


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens runners, each with a folder of its own."""
    with ExitStack() as stack:

        def open_one(name: str = "grid", **changes: Any) -> Runner:
            folder = tmp_path / f"kv{len(stack._exit_callbacks)}"  # type: ignore[attr-defined]
            runner = open_runner(name, folder, **changes)
            stack.callback(runner.close)
            return runner

        yield open_one
