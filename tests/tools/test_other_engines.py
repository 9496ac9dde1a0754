"""Other engines of benchmarks, pretended: a `llama-bench` that prints JSON, a `llama-server` with a slot."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.runtime.plan import tiny
from tools.__main__ import main
from tools.benchmarks import engines, whole_steps
from tools.benchmarks.engines import Model, SlotServer, made
from tools.measuring import environments
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import COMPILED, NotInstalled, compiled_programs
from tools.measuring.memory import bytes_of_a_token

BENCH = """
import json, sys
values = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert (values["-p"], values["-n"], values["-o"]) == ("40", "5", "json"), values
if values.get("-rtr") == "2":
    sys.exit("error: invalid parameter")
rate = 2.0 if values.get("-rtr") == "1" else 1.0
print(json.dumps([
    {"n_prompt": 40, "n_gen": 0, "samples_ts": [100 * rate, 300 * rate, 110 * rate]},
    {"n_prompt": 0, "n_gen": 5, "samples_ts": [10 * rate, 11 * rate, 9 * rate]},
]))
"""
HANDLER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
values = dict(zip(sys.argv[1:], sys.argv[2:]))
slot = {"prompt": ""}

class Handler(BaseHTTPRequestHandler):
    def answer(self, text, code=200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer("{}")
"""
SERVER = (
    HANDLER
    + """
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/slots/0"):
            file = Path(values["--slot-save-path"], body["filename"])
            if values.get("--refuse") == "slots":
                return self.answer("no slots", 500)
            slot["requests"] = slot.get("requests", 0) + 1
            if values.get("--lose") == str(slot["requests"]):
                return None
            if self.path.endswith("=save"):
                file.write_text(slot["prompt"])
            else:
                slot["prompt"] = file.read_text()
            return self.answer("{}")
        assert body["cache_prompt"] and body["ignore_eos"]
        known, slot["prompt"] = slot["prompt"], body["prompt"]
        pieces = [{"choices": [{"text": "known " if slot["prompt"].startswith(known[:10]) and known else "new "}]}]
        self.answer("".join(f"data: {json.dumps(piece)}\\n\\n" for piece in [*pieces, {"choices": [{"text": "x"}]}]))

HTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever()
"""
)

SHORT = ("--rounds", "0", "--prefill", "40", "--decode", "5")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, source in (("llama-bench", BENCH), ("llama-server", SERVER)):
        (folder / name).write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0")


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_steps, "read_bandwidth", lambda: 20.0)


@pytest.mark.usefixtures("_short")
def test_whole_steps_are_shown_beside_the_fork(programs: Path, file: Path) -> None:
    fork, ours = f"ik_llama.cpp {programs}", "diskprefix --kernels auto --block-size 16"
    engines = [part for engine in (fork, f"{fork} -rtr 1", ours) for part in ("--engine", engine)]
    ran = CliRunner().invoke(main, ["step", *SHORT, "--model", str(file), *engines, "--json"])
    assert ran.exit_code == 0, ran.stderr
    report = json.loads(ran.stdout)
    speeds = report["whole_steps"]["speeds"]
    assert speeds[f"{fork} -rtr 1"] == {"prefill": [200, 600, 220], "decode": [20, 22, 18]}
    assert {part: len(rates) for part, rates in speeds[ours].items()} == {"prefill": 3, "decode": 3}
    assert min(speeds[ours]["decode"]) > 0
    assert report["microseconds"] == {}


@pytest.mark.usefixtures("_short")
def test_medians_ratios_and_the_share_of_the_bandwidth_are_shown(programs: Path, file: Path) -> None:
    fork = f"ik_llama.cpp {programs}"
    command = ["step", *SHORT, "--model", str(file), "--engine", f"{fork} -rtr 1", "--engine", fork]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_steps, "bytes_of_a_token", lambda _file: 500_000_000)
        patch.setenv("COLUMNS", "200")
        ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.stderr
    rows = [line.split()[-6:] for line in ran.stdout.splitlines() if line.lstrip().startswith("ik_llama.cpp")]
    assert rows == [["220", "1.00", "20.0", "1.00", "10.0", "50%"], ["110", "2.00", "10.0", "2.00", "5.0", "25%"]]
    assert "all threads read memory at 20.0 GB/s; a token reads 0.5 GB of weights" in ran.stdout


@pytest.mark.usefixtures("_short")
def test_an_engine_that_cannot_be_measured_is_left_out(programs: Path, file: Path, tmp_path: Path) -> None:
    engines = [f"ik_llama.cpp {programs} -rtr 2", f"ik_llama.cpp {tmp_path}", "diskprefix --kernels none"]
    options = [part for engine in engines for part in ("--engine", engine)]
    ran = CliRunner().invoke(main, ["step", *SHORT, "--model", str(file), *options, "--json"])
    assert ran.exit_code == 1
    left_out = json.loads(ran.stdout)["whole_steps"]["left_out"]
    assert left_out.keys() == {*engines}
    assert left_out[engines[0]].endswith("error: invalid parameter")
    assert "has no llama-bench" in left_out[engines[1]]
    assert "--kernels" in left_out[engines[2]]


def test_an_engine_that_is_not_known_is_refused() -> None:
    ran = CliRunner().invoke(main, ["step", "--engine", "other"])
    assert (ran.exit_code, "does not begin with one of diskprefix, llama-server" in ran.stderr) == (2, True)


def slot_server(programs: Path, file: Path, tmp_path: Path, more: str = "") -> SlotServer:
    engine = made(f"ik_llama.cpp {programs} {more}", Model("tiny", file, None, 512), tmp_path, print)
    assert isinstance(engine, SlotServer)
    return engine


def test_a_slot_is_restored_after_kill_from_the_file_with_most_in_common(
    programs: Path, file: Path, tmp_path: Path
) -> None:
    engine = slot_server(programs, file, tmp_path)
    first, second = "first prompt " * 10, "second prompt " * 10
    try:
        engine.start()
        assert [engine.ask([prompt], 2)[0].text for prompt in (first, second, f"{second}and more")] == [
            *("new x", "new x", "known x")
        ]
        for prompt in (first, f"{second}and more"):
            engine.kill()
            engine.start()
            (reply,) = engine.ask([prompt], 2)
            assert (reply.text, len(reply.at_s)) == ("known x", 2)
    finally:
        engine.kill()
    assert [file.read_text() for file in sorted((tmp_path / "slots").iterdir())] == [first, second]


def test_a_lost_answer_about_a_slot_is_asked_for_again(programs: Path, file: Path, tmp_path: Path) -> None:
    engine = slot_server(programs, file, tmp_path, "--lose 1")
    try:
        engine.start()
        engine.ask(["prompt"], 2)
    finally:
        engine.kill()
    assert [saved.read_text() for saved in (tmp_path / "slots").iterdir()] == ["prompt"]


def test_a_slot_that_cannot_be_saved_is_an_error(programs: Path, file: Path, tmp_path: Path) -> None:
    engine = slot_server(programs, file, tmp_path, "--refuse slots")
    try:
        engine.start()
        with pytest.raises(LiveServerError, match="the slot was not saved: no slots"):
            engine.ask(["prompt"], 2)
    finally:
        engine.kill()


HEARTH = (
    HANDLER
    + """
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = " | ".join(message["content"] for message in body["messages"])
        piece = {"choices": [{"delta": {"content": said}}]}
        self.answer(f"data: {json.dumps(piece)}\\n\\n" * 2)

HTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever()
"""
)


def test_a_prompt_that_goes_on_is_a_turn_more_of_a_chat(
    programs: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "modules" / "hearth"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(HEARTH, encoding="utf-8")
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(engines, "python_of", lambda _name, _report: python)
    engine = made(f"hearth {programs}", Model("tiny", file, None, 512), tmp_path, print)
    try:
        engine.start()
        assert [engine.ask([prompt], 2)[0].text for prompt in ("one", "one", "one and two", "other")] == [
            *("oneone", "oneone", "one | oneone |  and twoone | oneone |  and two", "otherother")
        ]
    finally:
        engine.kill()


@pytest.mark.parametrize("name", COMPILED)
def test_programs_are_compiled_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")

    def run_installer(*command: str) -> None:
        commands.append([*command])
        if "download" in command:
            folder = tmp_path / "package" / "vendor" / name.replace("llama-server", "llama.cpp") / "common"
            folder.mkdir(parents=True)
            (folder / "build-info.cpp.in").write_text('int NUMBER = @BUILD_NUMBER@; char *COMMIT = "@BUILD_COMMIT@";')
            with tarfile.open(Path(command[command.index("--dest") + 1], "a.tar.gz"), "w:gz") as archive:
                archive.add(tmp_path / "package", "package")

    monkeypatch.setattr(environments, "run_installer", run_installer)
    monkeypatch.setattr(environments, "run_compiler", lambda command, *_others: commands.append(command))
    folder = compiled_programs(name, lambda _line: None)
    assert compiled_programs(name, lambda _line: None) == folder
    assert [command[0] for command in commands] == [sys.executable, "cmake", "cmake"]
    assert commands[-1][-2:] == ["llama-bench", "llama-server"]
    written = [file.read_text() for file in (tmp_path / "cache").rglob("build-info.cpp")]
    assert written == (['int NUMBER = 0; char *COMMIT = "0";'] if name == "ik_llama.cpp" else [])


def test_without_a_compiler_the_fork_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: None if name == "cmake" else f"/bin/{name}")
    with pytest.raises(NotInstalled, match="cannot be compiled without cmake"):
        compiled_programs("ik_llama.cpp", lambda _line: None)


@pytest.mark.parametrize(
    ("options", "of_a_layer"),
    [
        ({}, 3 * tiny.INNER * tiny.HIDDEN),
        ({"without": "output.weight"}, 3 * tiny.INNER * tiny.HIDDEN),
        ({"experts": 8, "expert_width": 48}, 2 * 3 * 48 * tiny.HIDDEN + 8 * tiny.HIDDEN + 2 * 8),
    ],
)
def test_a_token_reads_all_weights_but_unused_experts_and_embeddings(
    options: dict[str, Any], of_a_layer: int, tmp_path: Path
) -> None:
    hidden, of_keys = tiny.HIDDEN, tiny.KV_HEADS * tiny.HIDDEN // tiny.HEADS
    layer = 2 * hidden + 2 * hidden * (hidden + of_keys) + of_a_layer
    numbers = tiny.LAYERS * layer + hidden + len(tiny.tokens()) * hidden
    assert bytes_of_a_token(tiny.write_gguf(tmp_path / "tiny.gguf", **options)) == 4 * numbers
