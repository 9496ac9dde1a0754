"""`tools/gpu` without an accelerator: each part on the CPU; what is said of one that hangs, crashes or cannot run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.kv.arena import KVArena
from tests import forked
from tests.forked import ForkedCommand
from tests.tools.test_connector_bench import FakeServer
from tools.accelerator import __main__ as command
from tools.accelerator import parts, random_weights
from tools.accelerator.__main__ import PARTS, missing_packages, parsed, rows_of
from tools.accelerator.parts import Row, Task
from tools.connector import bench, restarts
from tools.connector.restarts import Restart
from tools.measuring import live_server
from tools.measuring.live_server import Answer, LiveServerError

ROOT = Path(__file__).parents[2]


def gpu(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tools/gpu"), "--python", python, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_without_an_accelerator_it_says_so_and_ends_with_0(tmp_path: Path) -> None:
    said = gpu("--json", str(tmp_path / "found.json"))
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("no accelerator: torch ")
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rows"] == []


def test_the_table_and_the_file_have_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    said = gpu("--interpreter", "--part", "connector", "--json", str(file), "--folder", str(tmp_path))
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (said.returncode, said.stderr) == (0, "")
    assert [(row["part"], row["state"]) for row in rows] == [("connector, tiny", "pass")] * 3
    table = said.stdout.partition("\n\n")[2].splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == [row["case"] for row in rows]
    assert list(tmp_path.iterdir()) == [file]


def in_fork(command: list[str], **_options: Any) -> None:
    forked.run(random_weights.run, *command[3:])


@pytest.mark.slow
def test_what_another_process_restores_is_what_one_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", in_fork)
    (row,) = parts.rows_of(Task("exactness", "tiny", "cpu", str(tmp_path)))
    assert row.state == "pass", row.result
    assert "exact at: grid; restored 165 of 165, 160 of 205" in row.result


def test_other_weights_after_the_restart_are_not_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_seed_of_its_own(command: list[str], **_options: Any) -> None:
        forked.run(_run_with_seed, command[3], *command[3:])

    monkeypatch.setattr(subprocess, "run", with_a_seed_of_its_own)
    (row,) = parts.rows_of(Task("exactness", "tiny", "cpu", str(tmp_path)))
    assert row.state == "fail"
    assert "logits differ" in row.result


def _run_with_seed(seed: str, *arguments: str) -> None:
    random_weights.SEED = len(seed)
    random_weights.run(*arguments)


@pytest.mark.slow
def test_a_daemon_that_was_killed_answers_from_disk_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def popen(command: list[str], env: dict[str, str], **_options: Any) -> ForkedCommand:
        process = ForkedCommand(command[3:], env, module=command[2])
        said.append(process.stderr)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    start, *cold, one, other = parts.rows_of(Task("first token", "tiny", "cpu", str(tmp_path)))
    for errors in said:
        assert errors is not None
        errors.close()
    assert [row.state for row in (start, *cold, one, other)] == [*["measured"] * 3, *["pass"] * 2]
    assert [row.case for row in cold] == ["512 tokens, cold", "768 tokens, cold"]
    assert (one.figures["restored"], other.figures["restored"]) == (512, 768)


class FakeDaemon:
    """Refuses prompts of more than 100 000 tokens, and says of the others that they were restored."""

    def __init__(self, **_options: Any) -> None:
        pass

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def start(self) -> float:
        return 1.0

    restart = start

    def wait_until_saved(self) -> float:
        return 0.5

    def cache_stats(self) -> dict[str, int]:
        return {"bytes_per_token": 32_768}

    def complete(self, prompt: list[int], **_options: Any) -> Answer:
        if len(prompt) > 100_000:
            raise LiveServerError("the server answered 400: 131072 tokens need 16 GiB of KV memory")
        return Answer(
            text=str(sum(prompt)),
            sent_at=0.0,
            text_s=[0.1],
            ttft_s=0.1,
            total_s=1.1,
            prompt_tokens=len(prompt),
            completion_tokens=33,
            cache={"restored": len(prompt)},
            timings={"restore_ms": 8.0},
        )


@pytest.mark.parametrize(
    ("free_bytes", "skipped", "reason"),
    [
        (1 << 40, ["131 072 tokens"], "need 16 GiB of KV memory"),
        (2 << 30, ["32 768 tokens", "131 072 tokens"], "2.0 GiB are free; see --folder"),
    ],
)
def test_prompts_that_do_not_fit_are_skipped_and_the_others_measured(
    free_bytes: int, skipped: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_server, "LiveServer", FakeDaemon)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=free_bytes))
    _, *rows = parts.rows_of(Task("first token", "1B", "cpu", str(tmp_path)))
    assert [row.case for row in rows if row.state == "skipped"] == skipped
    assert all(reason in row.result for row in rows if row.state == "skipped")
    measured = [size for size in ("2 048 tokens", "8 192 tokens", "32 768 tokens") if size not in skipped]
    assert [row.case for row in rows if row.state == "measured"] == [f"{size}, cold" for size in measured]
    assert [row.case for row in rows if row.state == "pass"] == [f"{size}, after kill -9" for size in measured]
    cold = "first token 100 ms, 32.0 tok/s; without saving 100 ms, 32.0 tok/s; "
    cold += "saving costs 0.0%; saved 500 ms after the reply"
    assert rows[0].result == cold


def test_a_python_that_cannot_be_used_is_one_clear_line() -> None:
    refused = gpu(python="/no/such/python")
    assert refused.returncode == 2
    assert refused.stderr == "tools/gpu: --python: /no/such/python is not a Python 3.11 or newer\n"


def test_what_is_missing_or_too_old_is_said_in_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages() == []

    def version(name: str) -> str:
        if name == "lmdb":
            raise PackageNotFoundError(name)
        return "5.9.1+cu128" if name == "transformers" else "9999.0"

    monkeypatch.setattr(command, "version", version)
    lmdb, transformers = missing_packages()
    assert lmdb.startswith("lmdb is missing: ")
    assert transformers.startswith("transformers 5.9.1+cu128 is too old: ")
    assert transformers.endswith("-m pip install 'transformers>=5.23', or on PYTHONPATH (see --help)")


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("sleep 600 & wait", Row("the rest", "cut off", "not done within 1 s")),
        ("trap '' TERM; while :; do sleep 600; done", Row("the rest", "cut off", "not done within 1 s")),
        ("echo boom >&2; exit 3", Row("the rest", "crash", "boom")),
        ("kill -9 $$", Row("the rest", "crash", "ended with -9")),
    ],
    ids=["hangs", "does not listen", "fails", "is killed"],
)
def test_rows_and_logs_stay_of_a_part_that_does_not_end_well(
    ending: str, expected: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("a case", "pass", "a result")
    (pretender := tmp_path / "python").write_text(f"#!/bin/sh\necho '{json.dumps(asdict(row))}'\n{ending}\n")
    pretender.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pretender))
    monkeypatch.setattr(command, "GRACE_S", 0.2)
    task = Task("exactness", "tiny", "cpu", str(tmp_path / "part"))
    assert list(rows_of(task, 1)) == [row, expected]
    assert f"part.log of exactness, tiny:\n{'boom' if 'boom' in ending else ''}" in capsys.readouterr().err


def run_with(monkeypatch: pytest.MonkeyPatch, *states: parts.State) -> tuple[int, list[tuple[str, float]]]:
    """Runs all with parts that end at once: the first of them in these states. Returns the exit status and limits."""
    limits: list[tuple[str, float]] = []
    left = iter(states)

    def rows(task: Task, limit_s: float) -> Iterator[Row]:
        limits.append((f"{task.part} {task.shape}", limit_s))
        found = {"torch": "9.9", "free_bytes": 1, "count": 1}
        yield Row("cuda", "measured", "", found) if task.part == "probe" else Row("a", next(left, "pass"), "")

    monkeypatch.setattr(command, "rows_of", rows)
    return command.main([]), limits


@pytest.mark.parametrize(
    ("states", "status"),
    [(("measured", "skipped", "cut off"), 0), (("fail",), 1), (("pass", "crash", "pass"), 1)],
    ids=repr,
)
def test_only_what_is_not_exact_or_crashes_is_an_error(
    states: tuple[parts.State, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(monkeypatch, *states)[0] == status


def test_each_part_has_a_share_of_nine_minutes_and_the_last_has_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    _, (_, *limits) = run_with(monkeypatch)
    assert [name for name, _ in limits] == [f"{part} {shape}" for part, shape, _ in PARTS]
    least = [540 * share / sum(share for *_, share in PARTS) for *_, share in PARTS]
    # No time goes by here, so none is used up.
    whole_s = 540 - 2 * command.GRACE_S
    assert all(0.9 * seconds < limit_s <= whole_s for (_, limit_s), seconds in zip(limits, least, strict=True))
    assert limits[-1][1] == whole_s


def test_a_device_that_is_too_small_is_skipped(tmp_path: Path) -> None:
    (row,) = parts.rows_of(Task("exactness", "8B", "cuda", str(tmp_path), free_bytes=8 << 30))
    assert (row.state, row.result) == ("skipped", "needs 19.4 GiB of the device, 8.0 GiB are free")


def test_tiny_models_say_where_they_are_exact(tmp_path: Path) -> None:
    task = Task("models", "tiny", "cpu", str(tmp_path))
    (plain, quantised) = parts.models(task, ("bloom", "llama int4"))
    assert plain.result == "positions are not an argument"
    assert quantised.result == "exact at: token, several sequences in a step"


def test_a_kernel_that_is_wrong_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.accelerator import checks

    def check() -> None:
        raise AssertionError("alone")

    monkeypatch.setattr(checks, "CHECKS", {"products": [check]})
    (row,) = parts.rows_of(Task("kernels", "tiny", "cpu", str(tmp_path)))
    assert (row.case, row.state, row.result) == ("products", "fail", "alone")


def test_a_part_whose_libraries_are_missing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tools.measuring.live_server", None)
    (row,) = parts.rows_of(Task("first token", "tiny", "cpu", str(tmp_path)))
    assert row.state == "skipped"
    assert "live_server" in row.result


def test_vllm_is_skipped_where_it_is_not_installed(tmp_path: Path) -> None:
    (row,) = parts.rows_of(Task("vLLM", "tiny", "cpu", str(tmp_path)))
    assert row.state == "skipped"
    assert row.result.endswith("-m pip install 'vllm==0.32.*'")


@pytest.mark.parametrize(("same_bits", "state"), [(99, "fail"), (100, "pass")])
def test_the_tier_passes_only_with_every_bit_of_every_reply(
    same_bits: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "restarted", lambda _server, number: Restart(number, number, same_bits, 70_000))
    (row,) = parts._tier_in_vllm(Task("vLLM", "tiny", "cpu", str(tmp_path)))
    assert row.state == state
    assert row.result.startswith(f"{same_bits} of 100 replies are those before SIGKILL bit for bit, 100 have the same")


@pytest.mark.parametrize(("count", "second"), [(1, "skipped"), (2, "measured")])
def test_vllm_computes_with_two_ranks_where_there_are_two_accelerators(
    count: int, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    class Server(FakeServer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            asked.append(options)

    monkeypatch.setattr(bench, "Server", Server)
    monkeypatch.setattr(bench, "stored_blocks", lambda _store: 10_000)
    monkeypatch.setattr(parts, "find_spec", lambda _name: object())
    monkeypatch.setattr(restarts, "restarted", lambda _server, number: Restart(number, number, number, 70_000))
    rows = list(parts.rows_of(Task("vLLM", "tiny", "cpu", str(tmp_path), count=count)))
    assert [row.state for row in rows] == ["pass", "measured", second]
    assert [options["arguments"][-1] for options in asked] == ["1", "2"][:count]
    assert all(options["python"] == Path(sys.executable) for options in asked)


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--folder", "/no/such"], ["--json", "/no/such/file"]])
def test_options_that_cannot_be_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed(arguments)
    assert refused.value.code == 2
    assert f"tools/gpu: error: {arguments[0]}: " in capsys.readouterr().err


def test_restores_and_captures_are_measured_beside_plain_copies_and_their_bytes_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(parts.rows_of(Task("copies", "tiny", "cpu", str(tmp_path / "right"))))
    assert [row.state for row in rows if row.state != "skipped"][:3] == ["measured", "pass", "pass"]
    assert all(row.state in ("measured", "pass", "skipped") for row in rows)
    assert [row.case.partition(" ")[0] for row in rows] == ["plain", "restore,", "capture", "restore,"]
    read_tokens = KVArena.read_tokens
    monkeypatch.setattr(KVArena, "read_tokens", lambda *given: bytes(reversed(read_tokens(*given))))
    rows = list(parts.rows_of(Task("copies", "tiny", "cpu", str(tmp_path / "wrong"))))
    assert {row.state for row in rows} <= {"measured", "fail", "skipped"}
    assert "what came back differs" in rows[1].result
