"""`tools/vllm bench` without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.connector import bench
from tools.connector.bench import Case, Conversation, Results
from tools.connector.server import Connector, Reply

REPLY = Reply((" a", " b"), (-0.5, -0.25), 0.1, 128)


def case(connector: Connector, name: str, ttft_ms: float, *, tokens: int = 2048, equal: bool | None = True) -> Case:
    return Case(connector, name, tokens, 1, ttft_ms, REPLY.restored, REPLY, equal)


def test_ratios_are_of_medians() -> None:
    ours = [case("diskprefix", "exact", ms) for ms in (100, 300, 900)]
    conversations = [Conversation("example", 9000), Conversation("diskprefix", 1000)]
    whole = Results([case("example", "exact", 400), *ours], conversations)
    assert whole.ratios() == {
        "ttft_to_example": {"exact": {2048: 0.75}, "nearest": {2048: None}},
        "times_fewer_bytes_than_example": 9.0,
    }
    assert not whole.is_wrong


@pytest.mark.parametrize(
    "results",
    [
        Results(load_errors=1),
        Results([case("diskprefix", "exact", 1, equal=False)]),
        Results([Case("diskprefix", "nearest", 2048, 1, 1, 0, REPLY, True)]),
    ],
)
def test_a_load_that_failed_and_another_or_no_restored_reply_of_ours_are_wrong(results: Results) -> None:
    assert results.is_wrong
    assert not Results([case("diskprefix", "exact", 1), case("example", "exact", 1, equal=False)]).is_wrong


class FakeServer:
    """Answers at once, always the same."""

    def __init__(self, _model: Path, folder: Path, _report: object, connector: Connector, **_options: object) -> None:
        self.connector, self.store, self.start_s = connector, folder / "kv", 0.0
        self.store.mkdir()

    def start(self) -> None:
        (self.store / "data").write_bytes(bytes(100))

    def kill(self) -> None:
        pass

    def settle(self, _is_done: object = None) -> None:
        pass

    def ask(self, _prompt: str) -> Reply:
        with (self.store / "data").open("ab") as file:
            file.write(bytes(5 if self.connector == "diskprefix" else 45))
        return REPLY

    def metrics(self) -> dict[str, float]:
        return {}


def test_all_connectors_are_asked_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Server", FakeServer)
    monkeypatch.setattr(bench, "disk_bytes", lambda store: (store / "data").stat().st_size)
    plan = bench.Plan(tmp_path, (512, 1024), bench.KINDS, turns=3, kills=2, codec="planes")
    found = bench.measured(plan, tmp_path, lambda _line: None)
    assert [(one.connector, one.disk_bytes) for one in found.conversations] == [("example", 135), ("diskprefix", 15)]
    for kind, asked in (("none", 8), ("example", 16), ("diskprefix", 16)):
        assert sum(one.connector == kind for one in found.cases) == asked
    assert all(one.equal for one in found.cases if one.case in ("exact", "nearest"))
    assert found.ratios()["ttft_to_example"]["exact"] == {512: 1.0, 1024: 1.0}
    bench._show(found)
    shown = capsys.readouterr().out
    assert "9.0 times fewer with diskprefix" in shown
    assert "ours" in shown
