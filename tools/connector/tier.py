"""Our tier in a real vLLM: what is restored after a restart, how large the file becomes, a hybrid model, two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import Console

from tools.connector.faults import damage
from tools.connector.kills import Live, nursery
from tools.connector.nursery import Life
from tools.connector.small_models import Kind
from tools.measuring.options import FOLDER
from tools.measuring.workspace import measuring

_BOUND_BYTES = 16 * 2**20

Answer: TypeAlias = tuple[list[int], list[float], int]
"""Tokens, their log-probabilities, restored prompt tokens."""


@dataclass
class Part:
    """One part, with a store of its own. `problems` are what was wrong."""

    name: str
    live: Live
    store: Path
    problems: list[str] = field(default_factory=list)

    def report(self, line: str) -> None:
        print(f"{self.name}: {line}", flush=True)

    def answers(self, num_prompts: int, rounds: int = 1, **life: Any) -> list[Mapping[int, Answer]]:
        """Runs a life that ends with SIGKILL of all processes. Returns its answers to the prompts, by round."""
        # A reply's rounding depends on what is computed beside it.
        whole = Life(1, str(self.store), "tier", num_prompts=num_prompts, rounds=rounds, at_once=1)
        found = self.live(replace(whole, **life))
        answers = [(number, (tokens, logprobs, restored)) for number, tokens, logprobs, restored in found["answers"]]
        if len(answers) != num_prompts * rounds or found["code"]:
            self.problems.append(f"{len(answers)} of {num_prompts * rounds} answers, code {found['code']}")
        if problem := damage(self.store):
            self.problems.append(problem)
        return [dict(answers[start : start + num_prompts]) for start in range(0, len(answers), num_prompts)]

    def compare(self, before: Mapping[int, Answer], after: Mapping[int, Answer], what: str) -> None:
        """All tokens must be equal. Reports how many replies have the same log-probabilities, bit for bit."""
        same = sum(before[number][0] == after[number][0] for number in before)
        bits = sum(before[number][:2] == after[number][:2] for number in before)
        self.report(
            f"{what}: {same} of {len(before)} replies have the same tokens, {bits} every bit of the numbers too"
        )
        if same < len(before):
            self.problems.append(f"{what}: {len(before) - same} replies differ")

    def restart(self, num_prompts: int, **life: Any) -> None:
        """Each prompt twice, SIGKILL, and once more."""
        before, last = self.answers(num_prompts, 2, **life), self.answers(num_prompts, **life)
        if self.problems:
            return
        (cold, again), (after,) = before, last
        restored = sum(tokens > 0 for _, _, tokens in after.values())
        self.report(f"after SIGKILL: {sum(one[2] for one in after.values())} tokens of {restored} prompts restored")
        if not restored:
            self.problems.append("nothing was restored")
        self.compare(cold, again, "the same process, from its own caches or ours, and computed")
        self.compare(cold, after, "restored after SIGKILL, and computed before it")
        self.compare(again, after, "restored after SIGKILL, and from a cache before it")


def _restart(part: Part, replies: int) -> None:
    part.restart(replies, budget="256MiB")


def _bounded(part: Part, replies: int) -> None:
    part.answers(replies, budget=str(_BOUND_BYTES))
    size = (part.store / "data.mdb").stat().st_size
    part.report(f"the file has {size / 2**20:.1f} MiB of {_BOUND_BYTES / 2**20:.0f}")
    if size > _BOUND_BYTES:
        part.problems.append(f"the file has {size} bytes")


def _ranks(part: Part, replies: int) -> None:
    part.restart(min(replies, 16), budget="256MiB", ranks=2)


_PARTS: Mapping[str, tuple[Kind, Callable[[Part, int], None]]] = {
    "restart": ("llama", _restart),
    "bounded": ("llama", _bounded),
    "hybrid": ("hybrid", _restart),
    "ranks": ("llama", _ranks),
}


@click.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(list(_PARTS)), default=list(_PARTS), show_default=True
)
@click.option("--replies", type=click.IntRange(min=1), default=100, show_default=True)
@FOLDER
def tier(parts: Sequence[str], replies: int, folder: Path | None) -> None:
    """Replies before and after SIGKILL, with the tier under vLLM's offloading; a file that stays in its budget; a
    hybrid model; two ranks. `kill --through tier` has the random kills.

    Tokens must be the same as before. Log-probabilities are compared too, bit for bit. Ends with 1 if a token
    differs.
    """
    progress, problems = Console(stderr=True, highlight=False), []
    with measuring(folder, progress) as workspace:
        for name in parts:
            kind, run = _PARTS[name]
            (workspace / name).mkdir()
            with nursery(workspace / name, progress, kind) as live:
                part = Part(name, live, workspace / name / "kv")
                run(part, replies)
            problems += [f"{name}: {problem}" for problem in part.problems]
    print("; ".join(problems) or "no problem")
    sys.exit(bool(problems))
