"""SIGKILL of vLLM's processes at random moments: every answer must be the right one, and the store whole."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import click
from rich.console import Console

from tools.connector.nursery import NUM_PROMPTS, Life
from tools.connector.small_models import DTYPES, Kind
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import python_of
from tools.measuring.options import FOLDER
from tools.measuring.workspace import measuring

_ROOT = Path(__file__).parents[2]
_CLOSE = 0.02
"""The difference of log-probabilities that rounding explains: a restored prompt is computed in other steps."""
_LONGEST_START_S = 5.0
_IN_START = 0.15
"""The share of kills that meet vLLM while it starts."""


Live: TypeAlias = Callable[[Life], dict[str, Any]]
"""Runs one life of vLLM and returns its answers."""


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--life", "longest_s", type=float, default=6.0, show_default=True, help="Most seconds from ready to killed."
)
@click.option("--through", type=click.Choice(["connector", "tier"]), default="connector", show_default=True)
@click.option("--model", "kind", type=click.Choice(list(DTYPES)), default="llama", show_default=True)
@FOLDER
def kill(
    kills: int, seed: int, longest_s: float, through: Literal["connector", "tier"], kind: Kind, folder: Path | None
) -> None:
    """SIGKILL vLLM's client, its scheduler or its worker at random moments, each time in a vLLM that was just started.

    The model is a small one, made up. Its answers are compared with those of a vLLM without our store. Ends with 1 if
    one is wrong, if the store is damaged, or if the last vLLM does not answer all.
    """
    progress, choose = Console(stderr=True), random.Random(seed)
    victims: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    problems: list[str] = []
    with measuring(folder, progress) as workspace, nursery(workspace, progress, kind) as live:
        store = workspace / "kv"
        wanted = {number: answer for number, *answer in live(Life(seed))["answers"]}
        if len(wanted) < NUM_PROMPTS:
            raise LiveServerError(f"vLLM without the connector answered {len(wanted)} of {NUM_PROMPTS} prompts")

        def judge(life: Life) -> dict[str, Any]:
            found = live(life)
            for number, tokens, logprobs, restored in found["answers"]:
                is_right = tokens == wanted[number][0] and all(
                    abs(one - other) < _CLOSE for one, other in zip(logprobs, wanted[number][1], strict=True)
                )
                judged["right" if is_right else "wrong"] += 1
                judged["restored"] += restored > 0
            if problem := damage(store) if store.exists() else "":
                problems.append(f"{life}: {problem}")
            return found

        for number in range(1, kills + 1):
            in_start = choose.random() < _IN_START
            after_s = choose.uniform(0, _LONGEST_START_S if in_start else longest_s)
            life = Life(seed + number, str(store), through, kill_after_s=after_s, kill_in_start=in_start)
            found = judge(replace(life, victim=choose.randrange(3)))
            if not (in_start or found["ready_s"]):
                problems.append(f"vLLM did not start after kill {number - 1}")
            victims[f"{found['killed']}{'' if found['ready_s'] else ' in the start'}"] += 1
            progress.print(
                f"{number}: {found['ready_s'] or 0:.1f} s to start; killed the {found['killed']}; {dict(judged)}",
                highlight=False,
            )
            if problems:
                break
        last = judge(Life(seed, str(store), through))
        if len(last["answers"]) < NUM_PROMPTS or last["code"]:
            problems.append(f"the last one answered {len(last['answers'])} of {NUM_PROMPTS}, code {last['code']}")
    who = ", ".join(f"{name} {number}" for name, number in sorted(victims.items()))
    print(f"{kills} kills ({who}): {judged['right']} right answers, {judged['restored']} of them with tokens from the")
    print(f"store, {judged['wrong']} wrong; {'; '.join(problems) or 'the store is clean after each'}")
    sys.exit(bool(judged["wrong"] or problems))


def damage(store: Path) -> str:
    """Returns the faults that `diskprefix verify` finds in a store; empty if it is clean."""
    line = [sys.executable, "-P", "-m", "diskprefix", "verify", "--kv-cache-dir", str(store)]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else (ended.stdout + ended.stderr).strip()


@contextmanager
def nursery(workspace: Path, progress: Console, kind: Kind) -> Iterator[Live]:
    """Runs the nursery in vLLM's environment, and gives the function that starts a life."""
    command = [str(python_of("vllm", progress.print)), "-P", "-m", "tools.connector.nursery"]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(_ROOT)}
    # One GiB of pages, and all cores of this process.
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_RPC_BASE_PATH": str(workspace)}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    with (workspace / "nursery.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, kind, str(workspace / kind)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def live(life: Life) -> dict[str, Any]:
        print(json.dumps(asdict(life)), file=stdin, flush=True)
        if not (line := stdout.readline()):
            raise LiveServerError("vLLM's environment ended: " + (workspace / "nursery.log").read_text("utf-8")[-2000:])
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        yield live
    finally:
        stdin.close()
        process.wait()
