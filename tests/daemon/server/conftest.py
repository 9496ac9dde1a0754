"""The fixtures that tests of the server share: a model that calls tools, keys, and a scripted application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.daemon.server.scripted import AppServer, ScriptedEngine, real_app, scripted_app


@pytest.fixture(scope="module")
def agent_daemon(agent_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    """A real engine over random weights: it writes what it must, and nothing sensible besides."""
    with real_app(agent_model, tmp_path_factory.mktemp("kv"), kv_cache_gate="off") as server:
        yield server


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.daemon.server.test_auth import ADMIN, ALICE, BOB, NAMELESS, write_keys

    path = tmp_path_factory.mktemp("keys") / "keys"
    return write_keys(path, f"alice {ALICE}", f"bob {BOB}", f"admin {ADMIN}", NAMELESS)


@pytest.fixture(scope="module")
def server(chat_model: Path, engine: ScriptedEngine) -> Iterator[AppServer]:
    with scripted_app(chat_model, engine) as running:
        yield running


@pytest.fixture
def client(server: AppServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
