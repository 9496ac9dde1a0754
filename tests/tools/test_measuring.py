"""The benchmarks, as small as they can be run. Their figures mean nothing here; what they restore and compare does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.examples import thorough
from tools.__main__ import main


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """Returns what a tool prints with `--json`; it runs in a process of its own."""
    forked.run(_print_to, out, [*arguments, "--json"])
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def _print_to(out: Path, arguments: list[str]) -> None:
    with out.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        main(arguments, prog_name="tools/bench", standalone_mode=False)


@pytest.mark.slow
def test_churn_keeps_the_file_within_its_budget_and_every_restore_right(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "soak", "--budget", "64MiB", "--churn", "3", "--folder", str(tmp_path))
    assert report["written_bytes"] >= 3 * report["budget_bytes"]
    assert report["file_bytes"] <= 1.15 * report["budget_bytes"]
    assert report["evicted"] > 0
    assert report["counts"]["hits"] > 0
    assert report["counts"]["compared"] > 0
    assert report["counts"]["wrong"] == 0
    assert report["verify"]["clean"]


@pytest.mark.slow
def test_the_store_benchmark_measures_restores_lookups_and_codecs(tmp_path: Path) -> None:
    report = run(
        tmp_path / "report.json",
        "store",
        "--tokens",
        "1024",
        "--blocks",
        "500",
        "--runs",
        "1",
        "--folder",
        str(tmp_path),
    )
    assert report["codecs"].keys() == report["restore"]["codecs"].keys() == {"raw", "zstd", "planes"}
    ratios = {name: codec["ratio"] for name, codec in report["codecs"].items()}
    assert 0.999 < ratios["raw"] <= 1.0 < ratios["zstd"] < ratios["planes"]
    assert report["match"]["blocks"] >= 500
    assert all(codec["again_gb_s"] > 0 and codec["cold_gb_s"] > 0 for codec in report["restore"]["codecs"].values())


@thorough
@pytest.mark.slow
def test_after_a_restart_prompts_are_restored_with_the_texts_of_cold_runs(chat_model: Path, tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", "restart", "--model", str(chat_model), "--tokens", "700", "--runs", "1")
    assert report["texts_equal"]
    (prompt,) = report["prompts"]
    restored = {case: figures["restored"] for case, figures in prompt["cases"].items()}
    assert restored == {"cold": 0, "cold_off": 0, "exact": 700, "nearest": 700, "nearest_off": 0}
    texts = {sample["case"]: sample["text"] for sample in report["samples"]}
    assert texts["cold"] == texts["cold_off"] == texts["exact"]
    assert texts["nearest_off"] == texts["nearest"]
