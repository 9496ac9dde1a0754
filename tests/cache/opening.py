"""Runners of models that are exact at every token, on the grid, or have states, and a disk that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.architectures import tiny_model
from tests.runner import Runner, tiny_llama, tiny_settings


def open_runner(name: str, folder: Path, **changes: Any) -> Runner:
    """Opens a runner of a model: `token` and `grid` are a llama that is exact there."""
    settings = tiny_settings(folder, **changes)
    if name in ("token", "grid"):
        return Runner(tiny_llama(), settings, exact_at=None if name == "token" else "grid")
    return Runner(tiny_model(name, torch.float32), settings, name)


@contextmanager
def gated(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that does nothing before the event is set, which is at the end of the block at the latest."""
    disk, publish = threading.Event(), runner.cache.store.publish
    with monkeypatch.context() as patch:
        patch.setattr(runner.cache.store, "publish", lambda pub: publish(pub) if disk.wait(30) else 0)
        try:
            yield disk
        finally:
            disk.set()
        runner.flush()
