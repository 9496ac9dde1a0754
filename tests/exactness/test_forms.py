"""Several architectures behind one front answer, save and restore what each of them does alone, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.exactness.forms import Alone, Answered, Comparison, SeveralRow, several_rows
from tests.exactness.jobs import Lengths
from tools.faults import exactness

LENGTHS = Lengths.scaled(165, block=16)
ARCHITECTURES = ["gemma3", "qwen3_next"]
"""With windows, and with states that cannot be cut. `tools/bench exactness --form several` runs all."""


@pytest.mark.slow
def test_models_that_are_swapped_unloaded_and_killed_answer_and_save_what_they_do_alone(tmp_path: Path) -> None:
    rows = several_rows(ARCHITECTURES, "bfloat16", tmp_path, LENGTHS, 4)
    assert [(row.architecture, row.different) for row in rows] == [(name, []) for name in ARCHITECTURES]
    assert all(row.comparisons > 100 for row in rows)
    assert all(min(row.restored.values()) > 0 for row in rows)


def test_other_bits_other_tokens_and_lost_state_are_found() -> None:
    cold, restored = {"repeat": Answered("a", 0, "none")}, {"repeat": Answered("a", 9, "disk")}
    alone = Alone(cold, restored, {b"k": b"1"})
    same, other = Comparison("llama", alone), Comparison("llama", alone)
    same.compare_restored("again", restored)
    same.compare_saved({b"k": b"1", b"of another model": b"2"})
    same.require_restored(9)
    assert (same.different, same.comparisons) == ([], 6)
    other.compare_restored("again", {"repeat": Answered("b", 8, "disk")})
    other.compare_saved({b"k": b"2"})
    other.require_restored(9)
    assert len(other.different) == 5


def test_the_tool_goes_on_without_what_fails_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of(names: Sequence[str], dtype: str, *_: Any) -> list[SeveralRow]:
        if "gemma3" in names:
            raise ValueError("it breaks")
        return [SeveralRow(name, dtype, 7, [], {"repeat": 9}) for name in names]

    monkeypatch.setattr(exactness, "several_rows", rows_of)
    arguments = ["--form", "several", "--dtype", "bf16", "--json", "--only"]
    assert CliRunner().invoke(exactness.main, [*arguments, "llama,mamba2"]).exit_code == 0
    failed = CliRunner().invoke(exactness.main, [*arguments, "llama,gemma3"])
    assert failed.exit_code == 1
    llama, gemma3 = json.loads(failed.stdout)
    assert (llama["comparisons"], llama["different"]) == (7, [])
    assert gemma3["different"] == ["ValueError: it breaks"]
    assert "    gemma3, bfloat16: ValueError: it breaks\n" in failed.stderr
    assert CliRunner().invoke(exactness.main, [*arguments, "smollm2"]).exit_code == 2
