"""Each tool of `tools/bench` is listed and explains itself, and four of them run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from diskprefix.runtime.files.gguf.known_families import NAMES
from diskprefix.runtime.files.gguf.recurrent_families import RECURRENT
from tests import forked
from tests.closing import needs
from tests.runtime.files.gguf.test_gguf_models import TOKENS, require_equal
from tests.runtime.plan import small_thinker, tiny
from tools.__main__ import TOOLS, main
from tools.benchmarks import llama_cpp_worker, pictures
from tools.benchmarks.file_models import CASES
from tools.measuring import processes
from tools.measuring.environments import llama_cpp_libraries

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_says_what_it_does(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) > 5


@pytest.mark.slow
def test_a_restart_is_measured_and_shown_again_from_the_file(chat_model: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "tools", "restart", "--model", str(chat_model), "--size", "256", "--rounds", "1"]
    command += ["--engine", "diskprefix --kv-cache-gate off", "--json", str(results), "--folder", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    cases = {sample["case"] for sample in json.loads(results.read_text())["samples"]}
    assert {"first_start_s", "cold_s", "recovery_s", "exact_s", "next_s", "other_s"} <= cases
    again = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert again.stdout.splitlines()[:-1] == ran.stdout.splitlines()[:-1]


@pytest.mark.parametrize(("program", "is_quiet"), [("input()", True), ("while True: pass", False)])
def test_a_program_gets_time_for_what_it_does_when_idle(
    program: str, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_QUIET_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        try:
            # Its start is over some time before the limit.
            assert processes.wait_quiet(lambda: processes.family(process.pid), 30 if is_quiet else 1.5) == is_quiet
        finally:
            process.kill()


def test_figures_of_earlier_runs_are_printed_as_the_pages_have_them(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    values = [("ours", "cold_s", 4000, value) for value in (3.0, 2.0, 1.0)] + [("theirs", "cold_s", 4000, 5.0)]
    values += [("ours", "rate", 0, 30.0), ("theirs", "rate", 0, 60.0), ("theirs", "start_s", 0, 0.4)]
    samples = [
        {"model": "m", "engine": engine, "round": i, "case": case, "size": size, "value": value}
        for i, (engine, case, size, value) in enumerate(values)
    ]
    results.write_text(json.dumps({"samples": samples, "left_out": {}}), encoding="utf-8")
    shown = CliRunner().invoke(main, ["restart", "--rounds", "0", "--markdown", "--json", str(results)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[:7] == [
        "m; in brackets, how many times better ours is",
        "",
        "| | ours | theirs |",
        "| --- | --- | --- |",
        "| later start, s | | 0.4 |",
        "| cold: first token, s, 4000 | 2 | 5 (2.50 ×) |",
        "| decode, tokens/s | 30.0 | 60.0 (0.50 ×) |",
    ]


@pytest.mark.slow
def test_the_cost_of_pictures_is_measured(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "tools", "pictures", "--turns", "2", "--cold", "2", "--json", str(results)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = {(sample["case"], sample["size"]): sample["value"] for sample in json.loads(results.read_text())["samples"]}
    assert {case for case, _ in found} == pictures.TITLES.keys()
    wanted = {("encoded", 2): 1, ("twice", 2): 0, ("known_encoded", 0): 0, ("other_encoded", 0): 1}
    assert found | wanted == found


def test_each_architecture_of_files_has_a_model() -> None:
    """But Ling 2.0 and SmallThinker, of which transformers has no class to make one: `tests/runtime/plan/gguf_files.py`
    and
    `tests/runtime/plan/small_thinker.py` write their files."""
    assert {name.partition("/")[0] for name in CASES} == NAMES - {"bailingmoe2", "smallthinker"}


@pytest.mark.slow
@needs("npm")
def test_a_file_equals_what_transformers_or_llama_cpp_computes() -> None:
    slow = [name for name in CASES if CASES[name].is_slow]
    command = [sys.executable, "-m", "tools", "files", "qwen3/yarn", "mimo2", *slow, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr or ran.stdout
    found = json.loads(ran.stdout)
    assert found["qwen3/yarn"]["f32"]["equal_to"] == ["transformers", "llama.cpp"]
    assert found["mimo2"]["f32"]["equal_to"] == ["transformers"]
    for name in slow:
        compared = found[name]["f32"]
        assert max(compared["errors"]["llama.cpp"], compared["folder_errors"]["llama.cpp"]) < 5e-3, name


def test_each_architecture_with_recurrent_layers_has_a_slow_model() -> None:
    assert {name.partition("/")[0] for name, case in CASES.items() if case.is_slow} == RECURRENT.keys()


def test_the_time_of_a_step_is_told_by_operator_and_outside(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "made", dtype=torch.bfloat16)
    ran = CliRunner().invoke(main, ["step", "--model", str(folder), "--rounds", "2", "--json"])
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["calls"].items() >= {"Attend": tiny.LAYERS, "NormRotateStore": 3 * tiny.LAYERS, "Angles": 1}.items()
    parts = {*found["calls"], "all in one call", "Python outside"}
    assert [(name, {*of}) for name, of in found["microseconds"].items()] == [("prefill", parts), ("decode", parts)]
    assert all(of["all in one call"] > 0 and of["Attend"] > 0 for of in found["microseconds"].values())
    folder = tiny.write_folder(tmp_path / "other", hidden_act="mish")
    without = CliRunner().invoke(main, ["step", "--model", str(folder)])
    assert (without.exit_code, "no plan has the activation mish" in without.stderr) == (1, True)


def write_logits(file: Path, folder: Path) -> None:
    """Writes what llama.cpp's library computes, which ends its process where it finds fault."""
    library = llama_cpp_worker.loaded(llama_cpp_libraries(print))
    worker = llama_cpp_worker.Worker(
        *(library, str(file), len(TOKENS), str(folder)),
        flash_attention=False,
        cache_type=llama_cpp_worker.FLOAT32,
        sequences=1,
    )
    worker.decode([(token, i, 0, True) for i, token in enumerate(TOKENS.tolist())])
    np.save(folder / "logits.npy", np.stack([worker.logits(i).copy() for i in range(len(TOKENS))]))


@pytest.mark.slow
@needs("npm")
@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize("has_windows", [True, False])
def test_the_equations_of_small_thinker_are_those_of_llama_cpp(
    has_windows: bool, is_sigmoid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # llama.cpp has this window, whatever the file says.
    monkeypatch.setattr(small_thinker, "WINDOW", 4096)
    options = {"has_windows": has_windows, "is_sigmoid": is_sigmoid}
    file = small_thinker.write(tmp_path / "tiny.gguf", **options)
    assert forked.run(write_logits, file, tmp_path) == 0
    expected = small_thinker.logits(torch.from_numpy(TOKENS), **options)
    require_equal(torch.from_numpy(np.load(tmp_path / "logits.npy")), expected)
