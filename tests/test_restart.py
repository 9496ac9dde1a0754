"""The promise, across real processes that die of SIGKILL: bit for bit the answer of a cold run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.daemon_process import DaemonProcess, serve_flags
from tests.tiny import BLOCK

Request = dict[str, Any]


def random_requests(seed: int, count: int) -> list[Request]:
    """Prompts that share, branch and repeat: a few anchors cut at random points, each with its own tail."""
    rng = random.Random(seed)
    anchors = [(1000 + i, rng.randint(2 * BLOCK, 8 * BLOCK)) for i in range(4)]
    requests = []
    for i in range(count):
        anchor, length = rng.choice(anchors)
        seeds = [[anchor, length]]
        if rng.random() < 0.8:
            seeds.append([rng.choice([i, 7]), rng.randint(1, 3 * BLOCK)])
        scope = rng.choice(["full", "auto", "auto:2", str(rng.randint(1, 9 * BLOCK))])
        requests.append({"seeds": seeds, "scope": scope})
    return requests


def run_in_a_process(folder: Path, dtype: str, requests: list[Request], name: str) -> Any:
    plan, out = folder / f"{name}.json", folder / f"{name}.npz"
    plan.write_text(json.dumps({"folder": str(folder / "kv"), "dtype": dtype, "requests": requests}))
    command = [sys.executable, "-m", "tests.restart_worker", str(plan), str(out)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    assert process.returncode == -signal.SIGKILL, process.stderr
    return np.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_after_a_kill_equal_a_cold_run_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    first, second = random_requests(1, 60), random_requests(2, 150)
    run_in_a_process(tmp_path, dtype, first, "first")
    restored = run_in_a_process(tmp_path, dtype, second, "second")
    cold = run_in_a_process(tmp_path, dtype, [r | {"scope": "off"} for r in second], "cold")
    assert restored["logits"].tobytes() == cold["logits"].tobytes()
    assert restored["greedy"].tolist() == cold["greedy"].tolist()
    assert (restored["restored"] > 0).sum() > 100
    assert not cold["restored"].any()


@pytest.mark.slow
def test_the_daemon_says_the_same_after_kill_minus_nine(chat_model: Path, tmp_path: Path) -> None:
    """Text and log probabilities over HTTP: cold, then from disk in another process, for every kind of scope."""
    bodies = [
        {
            "model": chat_model.name,
            "messages": [
                {"role": "system", "content": "You are patient. " * 30},
                {"role": "user", "content": f"Tell me about {topic}."},
            ],
            "temperature": 0,
            "max_tokens": 12,
            "logprobs": True,
            "top_logprobs": 5,
            "prefix_cache": {"scope": scope},
        }
        for topic in ("rivers", "cities")
        for scope in ("full", "auto:8", 300)
    ]
    answers = []
    for _ in range(2):
        daemon = DaemonProcess(*serve_flags(chat_model, tmp_path / "kv"))
        with daemon, daemon.wait_ready().client() as client:
            answers.append([client.post("/v1/chat/completions", json=body).json() for body in bodies])
            daemon.wait_saved()
            daemon.stop(signal.SIGKILL)
    cold, warm = ([reply["choices"] for reply in replies] for replies in answers)
    assert cold == warm
    assert answers[0][0]["prefix_cache"]["miss_reason"] == "first_request"
    assert all(reply["prefix_cache"]["source"] == "disk" for reply in answers[1])
    assert all(reply["prefix_cache"]["restored"] >= 256 for reply in answers[1])
