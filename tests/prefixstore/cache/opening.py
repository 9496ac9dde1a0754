"""Runners of models that are exact at every token, on the grid, or have states, and a disk that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from diskprefix.prefixstore.kv.layout import ExactAt
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.values import CacheOptions, Scope
from tests.exactness.architectures import tiny_model
from tests.runner import Runner, tiny_llama, tiny_settings

Opened: TypeAlias = Callable[..., Runner]
"""The fixture: opens a runner by the name of its model, with changes to the settings."""
OFF, AUTO, FULL = (CacheOptions(scope=scope) for scope in (Scope("off"), Scope("auto", 30), Scope("full")))


def open_runner(name: str, folder: Path, *, exact_at: ExactAt = "grid", **changes: Any) -> Runner:
    """Opens a runner of a model: `token` and `grid` are a llama that is exact there."""
    settings = tiny_settings(folder, **changes)
    if name in ("token", "grid"):
        return Runner(tiny_llama(), settings, exact_at="token" if name == "token" else "grid")
    return Runner(tiny_model(name, torch.float32), settings, name, exact_at=exact_at)


def is_sound(runner: Runner) -> bool:
    """Tells whether each node has its parent, each parent counts its children, and each entry its node."""
    return not verify_index(runner.cache.store).problems


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
