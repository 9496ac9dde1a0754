"""What another scope would have done, from a recording of the daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.policy.scope import parse_scope
from diskprefix.server.dashboard import simulation
from diskprefix.server.dashboard.simulation import Simulation
from diskprefix.server.serving import Serving
from diskprefix.settings import Settings
from tests.cli.test_simulate import record

LAYOUT = SimpleNamespace(state_bytes=0, exact_at="token")


def serving() -> Serving:
    engine = SimpleNamespace(cache=SimpleNamespace(layout=LAYOUT))
    return cast("Serving", SimpleNamespace(engine=engine, scope=parse_scope("auto:5", param="scope")))


def run(path: Path | None, hours: float = 24.0) -> list[Any]:
    return asyncio.run(Simulation().run(Settings(record=path), serving(), hours))


def test_the_scope_in_use_comes_first_and_the_bound_last(tmp_path: Path) -> None:
    rows = run(record(tmp_path / "day.jsonl", block_size=16))
    assert [row.scope for row in rows] == ["auto:5", "off", "auto:8", "auto:30", "auto:100", "full", "upper-bound"]
    assert {row.requests for row in rows} == {rows[0].requests}
    assert rows[0].requests > 0
    assert rows[1].restored_tokens == 0
    assert rows[-1].restored_tokens >= max(row.restored_tokens for row in rows)


def test_a_recording_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--record FILE"):
        run(None)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidRequest, match=r"^.*empty\.jsonl: it is empty[^\n]*$"):
        run(tmp_path / "empty.jsonl")


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_LIMIT_S", 0.01)
    with pytest.raises(DiskPrefixError, match="ask for fewer hours"):
        run(record(tmp_path / "day.jsonl", block_size=16))
