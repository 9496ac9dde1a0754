"""The lines of `--record` about requests that were not cached are enough to tell what caching would have done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.cache_utils import DynamicSlidingWindowLayer

from diskprefix.engine.request import DoneEvent
from diskprefix.extras.simulate.geometry import SLICEABLE
from diskprefix.extras.simulate.simulator import Policy, simulate
from diskprefix.extras.simulate.trace import RecordedDaemon, Trace
from diskprefix.extras.simulate.trace_formats import read_trace
from diskprefix.model.exact import state_layout
from diskprefix.nouns import Scope
from tests.engine.driving import Cancelled, load, recorded_requests, request, run_request, tokens
from tests.model import tiny

BLOCK = 16


def recorded(model: Path, at: Path, *, scope: str = "off", cancelled: bool = False) -> Trace:
    """Returns what a daemon recorded of a prompt that was sent twice with the daemon's own scope."""
    record = at / "trace.jsonl"
    engine = load(model, at / "kv", block_size=BLOCK, disk_prefix_cache=scope, record=record)
    engine.max_rows = BLOCK
    for _ in range(2):
        try:
            run_request(engine, request(tokens(100), scope=scope, max_tokens=3), steps=2 if cancelled else None)
        except Cancelled:
            assert cancelled
    engine.close()
    return read_trace(record)


def test_a_request_that_is_computed_because_restoring_would_be_slower_is_recorded_with_that_reason(
    folder: Path, tmp_path: Path
) -> None:
    record = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"kv_memory_entries": 0, "kv_cache_gate": "auto", "record": record}
    engine = load(folder, tmp_path / "kv", block_size=BLOCK, **options)
    one = request(tokens(100), max_tokens=3)
    first = run_request(engine, one)
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    again = run_request(engine, one)
    for _ in range(32):
        engine.cache.cost_model.record_prefill(1000, 1e-3)
        engine.cache.cost_model.record_restore(1 << 20, 10.0)
    assert not engine.cache.cost_model.allows(100)
    closed = run_request(engine, one)
    engine.close()
    assert closed[:-1] == again[:-1] == first[:-1]
    noted = [(line.restored, line.source, line.miss_reason) for line in recorded_requests(record)]
    assert noted == [(0, "none", "new"), (100, "disk", None), (0, "none", "faster_to_compute")]
    reports = [events[-1].cache for events in (first, again, closed) if isinstance(events[-1], DoneEvent)]
    assert [(report.restored, report.source, report.miss_reason) for report in reports] == noted


def restored(trace: Trace) -> int:
    policy = Policy(scope=Scope("full"), block_size=BLOCK, min_tokens=BLOCK)
    return simulate(trace, policy, SLICEABLE).restored_tokens


@pytest.mark.parametrize("scope", ["off", "full"])
def test_what_was_recorded_without_a_cache_tells_what_one_would_do(folder: Path, tmp_path: Path, scope: str) -> None:
    trace = recorded(folder, tmp_path, scope=scope)
    assert [(request.scope, request.remembered) for request in trace] == [(None, True)] * 2
    assert restored(trace) == 100
    daemon = trace.daemon
    assert isinstance(daemon, RecordedDaemon)
    assert daemon.geometry is not None
    assert (daemon.block_size, daemon.min_tokens, daemon.geometry.state_bytes) == (BLOCK, BLOCK, 0)
    assert min(daemon.geometry.bytes_per_token, daemon.geometry.logits_bytes, daemon.tokens_per_s) > 0


def test_what_was_cancelled_before_its_end_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    trace = recorded(folder, tmp_path, scope="full", cancelled=True)
    assert [request.remembered for request in trace] == [False, False]
    assert restored(trace) == 0


def test_a_model_that_cannot_be_cached_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(state_layout.KINDS, DynamicSlidingWindowLayer)
    tiny.write_sliding(tmp_path / "model")
    trace = recorded(tmp_path / "model", tmp_path, scope="full")
    assert "DynamicSlidingWindowLayer" in caplog.text, "it says why it bypasses the cache"
    assert restored(trace) == 100
    assert trace.daemon is not None
    assert trace.daemon.geometry is None, "nobody knows"
