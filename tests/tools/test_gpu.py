"""`tools/gpu` without an accelerator: what it says, and its check on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools.measuring.live_server import Answer, LiveServer
from tools.programs import gpu

ROOT = Path(__file__).parents[2]


def answer(text: str, restored: int) -> Answer:
    times = {"sent_at": 0.0, "ttft_s": 0.1, "total_s": 0.2}
    cache = {"restored": restored}
    return Answer(text=text, text_s=[0.1], prompt_tokens=9, completion_tokens=1, cache=cache, timings={}, **times)


def test_without_an_accelerator_it_says_so_and_ends_with_0() -> None:
    command = [sys.executable, "-m", "tools.programs.gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("no accelerator: torch ")


@pytest.mark.parametrize(
    ("last", "problems"),
    [
        (answer("a", 8), []),
        (answer("b", 8), ["from the disk: another reply"]),
        (answer("a", 0), ["from the disk: nothing restored"]),
    ],
)
def test_a_reply_that_differs_or_restores_nothing_is_a_problem(last: Answer, problems: list[str]) -> None:
    assert gpu.problems_of([("computed", answer("a", 0)), ("from the disk", last)]) == problems


def test_a_daemon_replies_the_same_after_a_kill(chat_model: Path, tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--weights", "native", "--model", str(chat_model))
    with LiveServer(kv_cache_dir=tmp_path / "kv", log_path=tmp_path / "log", flags=flags) as server:
        found = gpu.replies(Console(quiet=True), server, "A careful assistant. " * 120)
    assert [title for title, answer in found if answer.restored] == ["from memory", "from the disk"]
    assert gpu.problems_of(found) == []
