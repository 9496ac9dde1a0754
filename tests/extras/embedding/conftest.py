from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.scripted import AppServer, real_app


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with real_app(folder, tmp_path_factory.mktemp("kv"), kv_cache_gate="off") as server:
        yield server


@pytest.fixture
def client(daemon: AppServer) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client
