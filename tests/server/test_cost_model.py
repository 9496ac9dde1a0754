"""The gate in `/props` and `/metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diskprefix.cache.cost_model import CostModel
from tests.server.scripted import ScriptedEngine, scripted_app

BYTES_PER_TOKEN = 1000


def loaded_bytes(num_tokens: int) -> int:
    return BYTES_PER_TOKEN * num_tokens


def closed_gate() -> CostModel:
    """Computing takes 1 ms a token; restoring 10 ms, and 2 ms a token. 20 restores and 3 savings were asked for."""
    worth = CostModel("auto", loaded_bytes)
    for num_tokens in (100, 300, 900, 2700):
        worth.record_prefill(num_tokens, 1e-3 * num_tokens)
        worth.record_restore(loaded_bytes(num_tokens), 1e-2 + 2e-3 * num_tokens)
    for _ in range(20):
        worth.allows(5000)
    for _ in range(3):
        worth.allows(5000, use="save")
    return worth


def answers_for(model: Path, worth: CostModel) -> tuple[dict[str, Any], str]:
    """`/props` and `/metrics` of a daemon with this gate."""
    engine = ScriptedEngine()
    engine.stats["gate"] = worth.as_dict()
    with scripted_app(model, engine) as server, server.client() as client:
        return client.get("/props").json(), client.get("/metrics").text


def values_of(metrics: str) -> dict[str, float]:
    """The gate's samples, by name and label."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith("diskprefix_gate")
    }


def test_props_show_the_decision_and_its_numbers(chat_model: Path) -> None:
    worth = closed_gate()
    props, _ = answers_for(chat_model, worth)
    assert props["full_cache"]["gate"] == worth.as_dict()
    assert props["full_cache"]["gate"]["state"] == "closed"
    assert "gate" not in props["full_cache"]["state"]


def test_metrics_show_the_speeds_and_what_was_left_out(chat_model: Path) -> None:
    _, metrics = answers_for(chat_model, closed_gate())
    assert values_of(metrics) == {
        "diskprefix_gate_prefill_seconds_per_token": pytest.approx(1e-3),
        "diskprefix_gate_restore_seconds_per_byte": pytest.approx(2e-6),
        "diskprefix_gate_restore_fixed_seconds": pytest.approx(1e-2),
        "diskprefix_gate_skipped_total fetch": 0,
        "diskprefix_gate_skipped_total restore": 19,
        "diskprefix_gate_skipped_total save": 3,
    }


def test_a_speed_that_is_not_known_yet_is_null_and_no_sample(chat_model: Path) -> None:
    props, metrics = answers_for(chat_model, CostModel("auto", loaded_bytes))
    gate = props["full_cache"]["gate"]
    assert gate["state"] == "measuring"
    assert gate["prefill_s_per_token"] is gate["restore_s_per_byte"] is None
    assert values_of(metrics) == {
        "diskprefix_gate_skipped_total fetch": 0,
        "diskprefix_gate_skipped_total restore": 0,
        "diskprefix_gate_skipped_total save": 0,
    }
