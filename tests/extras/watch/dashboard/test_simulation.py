"""A simulation of other scopes from a recording of the daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.extras.watch.dashboard import simulation
from diskprefix.extras.watch.dashboard.simulation import Simulation
from diskprefix.server.serving import Serving
from diskprefix.settings import Settings
from tests.cli.test_simulate import record

LAYOUT = SimpleNamespace(state_bytes=0, exact_at="token")


def serving() -> Serving:
    memory = {"limit_bytes": 3 << 20, "max_entries": 5}
    engine = SimpleNamespace(cache=SimpleNamespace(layout=LAYOUT), memory_stats=lambda: memory)
    return cast("Serving", SimpleNamespace(engine=engine, scope=parse_scope("auto:5", param="scope")))


def run(path: Path | None, hours: float = 24.0) -> list[Any]:
    return asyncio.run(Simulation().run(Settings(record=path), serving(), hours))


def test_the_scope_in_use_comes_first_and_the_bound_last(tmp_path: Path) -> None:
    rows = run(record(tmp_path / "day.jsonl", block_size=16))
    assert [row["scope"] for row in rows] == ["auto:5", "off", "auto:8", "auto:30", "auto:100", "full", "upper-bound"]
    assert {row["requests"] for row in rows} == {rows[0]["requests"]}
    assert rows[0]["requests"] > 0
    assert rows[1]["restored_tokens"] == 0
    assert rows[-1]["restored_tokens"] >= max(row["restored_tokens"] for row in rows)


def test_a_recording_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--record FILE"):
        run(None)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidRequest, match=r"^.*empty\.jsonl: it is empty[^\n]*$"):
        run(tmp_path / "empty.jsonl")


def test_an_only_model_finds_itself_in_a_recording_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def output(arguments: Any) -> list[Any]:
        asked.extend(arguments)
        return [{"trace": f"day: {model}", "scope": "whole-snapshots"} for model in ("", "ash")]

    monkeypatch.setattr(simulation, "_output", output)
    assert run(Path("day.jsonl")) == []
    assert "--kv-memory 3145728 --kv-memory-entries 5" in " ".join(asked), "the memory of the daemon"


def test_one_that_takes_too_long_or_that_nobody_waits_for_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_RUN", "import time; time.sleep(600)")
    monkeypatch.setattr(simulation, "_LIMIT_S", 0.01)
    begin, begun = asyncio.create_subprocess_exec, []

    async def noted(*command: Any, **how: Any) -> Any:
        begun.append(await begin(*command, **how))
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with pytest.raises(DiskPrefixError, match="ask for fewer hours"):
        asyncio.run(simulation._output([]))
    monkeypatch.setattr(simulation, "_LIMIT_S", 600.0)

    async def leave() -> None:
        waiting = asyncio.create_task(simulation._output([]))
        while len(begun) < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(leave())
    assert [process.returncode for process in begun] == [-9, -9]


def test_it_runs_with_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_RUN", simulation._RUN.partition("from diskprefix")[0] + "print(os.nice(0))")
    assert asyncio.run(simulation._output([])) == 19


def test_one_runs_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running, most = [0], [0]

    async def output(_arguments: Any) -> list[Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0)
        running[0] -= 1
        return []

    monkeypatch.setattr(simulation, "_output", output)

    async def both() -> None:
        alone = Simulation()
        await asyncio.gather(*(alone.run(Settings(record=tmp_path), serving(), 1.0) for _ in range(2)))

    asyncio.run(both())
    assert most == [1]


@pytest.mark.parametrize(
    ("state_bytes", "exact_at", "regime"),
    [(0, "token", "token"), (0, "grid", "sliceable"), (9, "token", "checkpoints"), (9, "grid", "checkpoints")],
)
def test_the_kind_of_model_is_that_of_the_daemon(state_bytes: int, exact_at: str, regime: str) -> None:
    layout = SimpleNamespace(state_bytes=state_bytes, exact_at=exact_at)
    engine = SimpleNamespace(cache=SimpleNamespace(layout=layout))
    assert simulation._regime(cast("Serving", SimpleNamespace(engine=engine))) == regime
