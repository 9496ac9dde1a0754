"""`tools/bench` lists all tools, quickly, each of them explains itself, and one of them runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tools.__main__ import SECTIONS, TOOLS, main

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "transformers", "rich"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_help_lists_every_tool_under_its_section() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout
    for title, tools in SECTIONS.items():
        section = shown.partition(f"{title}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(tools)


def test_the_list_appears_without_the_libraries_that_the_tools_need() -> None:
    code = "import sys, tools.__main__ as bench; bench.main(['--help'], standalone_mode=False); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not HEAVY & set(shown.stdout.splitlines()[-1].split())


def test_every_program_of_the_folders_is_listed() -> None:
    folder = ROOT / "tools"
    programs = {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if "\ndef main(" in file.read_text(encoding="utf-8")
    }
    # Commands of their own, and what they start.
    others = {"__main__", "benchmarks.demo", "faults.gpu", "connector.__main__", "connector.nursery", "real_agents.run"}
    others |= {"releasing.release", "releasing.fresh", "fuzzing.__main__", "fuzzing.atheris_worker", "fuzzing.compiled"}
    others |= {"benchmarks.llama_cpp_worker", "benchmarks.transformers_worker"}
    assert programs - others == {tool.module for tool in TOOLS.values()}


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_says_what_it_does(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.help
    assert command.help.splitlines()[0] in shown.stdout.replace("\n  ", " ")


def test_an_unknown_tool_is_one_clear_line() -> None:
    refused = bench("no-such-tool")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "Error: No such command 'no-such-tool'."


def test_missing_data_are_one_clear_line_and_no_traceback(tmp_path: Path) -> None:
    refused = bench("policy", "goals", "--workload", "mooncake", "--data", str(tmp_path))
    assert refused.returncode == 1
    assert "synthetic_trace.jsonl" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_restart_is_measured_and_shown_again_from_the_file(chat_model: Path, tmp_path: Path) -> None:
    arguments: tuple[str, ...] = ("restart", "--model", str(chat_model), "--size", "256", "--rounds", "1")
    arguments += (
        "--engine",
        "diskprefix --kv-cache-gate off",
        "--json",
        str(tmp_path / "results.json"),
        "--folder",
        str(tmp_path),
    )
    ran = bench(*arguments)
    assert ran.returncode == 0, ran.stderr
    cases = {sample["case"] for sample in json.loads((tmp_path / "results.json").read_text())["samples"]}
    assert {"first_start_s", "cold_s", "recovery_s", "exact_s", "next_s", "other_s"} <= cases
    again = bench(*arguments)
    assert again.stdout.splitlines()[:-1] == ran.stdout.splitlines()[:-1]
