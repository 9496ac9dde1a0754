"""What is asked of one model in one dtype: a prompt that is saved, and the prompts that share its beginning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch

from diskprefix.tokens import TokenIds, floor_to_grid

Kind: TypeAlias = Literal["cut", "checkpoint", "unsupported"]
"""Where a prefix is restored: at every grid point, at checkpoints, never."""
MakeTokens: TypeAlias = Callable[[int, int], TokenIds]
"""(seed, number of tokens) → token ids."""

BRANCH_TOKENS = 45
"""What a branch has of its own."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """All in tokens. `prompt` is saved; one prompt continues it by `more`, one leaves it at `branch`, `shorter` and
    `on_grid` are prefixes of it. A checkpoint is asked for each `interval`, and at `boundary`."""

    block: int = 16
    interval: int = 80
    boundary: int = 100
    prompt: int = 309
    more: int = 40
    branch: int = 205
    shorter: int = 150
    on_grid: int = 160

    def checkpoints(self, exact_at: str) -> list[int]:
        """Where the states are saved that cannot be cut."""
        asked = [*range(self.interval, self.prompt, self.interval), self.boundary, self.prompt]
        return sorted({floor_to_grid(position, 1 if exact_at == "token" else self.block) for position in asked})

    @classmethod
    def scaled(cls, prompt: int, *, block: int) -> Lengths:
        """The same proportions for a prompt of another length."""
        return cls(
            block=block,
            interval=floor_to_grid(prompt // 4, block),
            boundary=prompt // 3,
            prompt=prompt,
            branch=prompt * 2 // 3,
            shorter=prompt // 2,
            on_grid=floor_to_grid(prompt // 2, block),
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model in one dtype; q8 is bfloat16 with keys and values in 8 bits, Q4_1 with weights in these quants.
    `model`: the folder of a real one, None for the tiny one of that name. `device`: where a real one is computed.
    `folder` is the job's own: the store and the answers of both processes. `reply`: greedy tokens after each prompt.
    `at_grid`: on the grid, even if the model is exact at every token."""

    name: str
    dtype: str
    folder: str
    reply: int = 64
    model: str | None = None
    device: str = "cpu"
    threads: int = 1
    lengths: Lengths = Lengths()
    at_grid: bool = False

    @property
    def computes_in(self) -> str:
        return self.dtype if self.dtype == "float32" else "bfloat16"

    @property
    def store(self) -> Path:
        return Path(self.folder) / "kv"

    def out(self, phase: str) -> Path:
        return Path(self.folder) / f"{phase}.pt"


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt that shares its first `shared` tokens with the one that was saved."""

    name: str
    token_ids: TokenIds
    shared: int


@dataclass(frozen=True)
class Answer:
    """`logits`: the next-token logits at the prompt's end, shape [vocab]. `trail`: a digest of those after each token
    of the `greedy` reply. `computed`: whether the model ran for the prompt."""

    logits: torch.Tensor
    trail: str
    greedy: list[int]
    restored: int
    computed: bool
    source: str


@dataclass(frozen=True)
class Answers:
    """What one process says of one job; `error` is a traceback if it failed."""

    model_class: str = ""
    model_type: str = ""
    kind: Kind = "unsupported"
    layers: str = ""
    unsupported: str = ""
    exact_at: str = "grid"
    grid_reason: str = ""
    error: str = ""
    cases: dict[str, Answer] = field(default_factory=dict)


def cases_of(lengths: Lengths, make: MakeTokens) -> list[Case]:
    """The first one is what is saved, word for word."""
    prompt = make(1, lengths.prompt)
    other = make(3, BRANCH_TOKENS)
    # Else the branch might go on as the prompt does, by chance.
    other[0] = (prompt[lengths.branch] + 1) % (int(prompt.max()) + 1)
    return [
        Case("repeat", prompt, lengths.prompt),
        Case("longer", np.concatenate([prompt, make(2, lengths.more)]), lengths.prompt),
        Case("branch", np.concatenate([prompt[: lengths.branch], other]), lengths.branch),
        Case("shorter", prompt[: lengths.shorter], lengths.shorter),
        Case("shorter, on the grid", prompt[: lengths.on_grid], lengths.on_grid),
    ]


def expected(case: Case, kind: Kind, lengths: Lengths, exact_at: str = "grid") -> int:
    """How many tokens must be restored, no more and no less."""
    if case.name == "repeat":
        return len(case.token_ids)
    # One token at least is computed, for the next-token logits.
    most = min(case.shared, len(case.token_ids) - 1)
    if kind == "cut" and exact_at == "token":
        return most
    if kind == "cut":
        return floor_to_grid(most, lengths.block)
    return max((p for p in lengths.checkpoints(exact_at) if p <= most), default=0) if kind == "checkpoint" else 0


def write_jobs(jobs: Iterable[Job], path: Path) -> None:
    path.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")


def read_jobs(path: Path) -> list[Job]:
    listed = json.loads(path.read_text(encoding="utf-8"))
    return [Job(**(job | {"lengths": Lengths(**job["lengths"])})) for job in listed]
