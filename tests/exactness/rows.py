"""Runs the suite and says of each model in each dtype whether a restored run is the cold run, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.exactness.jobs import Answer, Answers, Case, Job, Kind, cases_of, expected, write_jobs

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float32")
UNSUPPORTED = frozenset({
    "axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "falcon_mamba", "glm_moe_dsa", "hy_v4", "jamba", "mamba",
    "minimax", "minimax_m3_vl_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
})  # fmt: skip
"""What need not be exact, as its state is not cached: its rows say why. All else must be."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """One prompt. `expected`: the tokens that had to be restored."""

    case: str
    prompt_tokens: int
    expected: int
    restored: int
    logits: bool
    greedy: bool
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """`bitwise`: in every case what had to be restored was, in another process, and the next-token logits, the greedy
    text and the logits after each of its tokens are those of a cold run. `reason` says why not. `exact_at`: `token` if
    that holds however a prompt is cut, `grid` if it does in steps of the grid, and `grid_reason` why not everywhere.
    `restored`: tokens by case. `model_type`: of the text decoder's configuration."""

    architecture: str
    model_class: str
    model_type: str
    layers: str
    kind: Kind
    dtype: str
    bitwise: bool
    reason: str | None
    exact_at: str
    grid_reason: str
    restored: dict[str, int]
    reply_tokens: int
    cases: tuple[CaseRow, ...] = ()

    @property
    def is_as_it_should_be(self) -> bool:
        return self.bitwise or (self.kind == "unsupported" and self.architecture in UNSUPPORTED)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_jobs(jobs: list[Job], folder: Path, lanes: int, tell: Tell) -> list[Row]:
    """Both halves of every job, each in another process. `tell` gets a line as each half of a job is done."""
    _run_phase("save", jobs, folder, lanes, tell)
    saved = {job: answers_of(job, "save") for job in jobs}
    restorable = [job for job in jobs if not saved[job].error and not saved[job].unsupported]
    _run_phase("restore", restorable, folder, lanes, tell)
    return [judged(job, saved[job], answers_of(job, "restore") if job in restorable else saved[job]) for job in jobs]


def _run_phase(phase: Literal["save", "restore"], jobs: Iterable[Job], folder: Path, lanes: int, tell: Tell) -> None:
    plan = folder / f"{phase}.json"
    write_jobs(jobs, plan)
    command = [sys.executable, "-m", "tests.exactness.worker", phase, str(plan), str(lanes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} if lanes > 1 else None
    log = folder / f"{phase}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as worker,
    ):
        assert worker.stdout is not None
        for line in worker.stdout:
            tell(f"{phase}: {line.strip()}")
    if worker.returncode:
        raise RuntimeError(f"the process that runs the jobs failed: {log.read_text(errors='replace')[-2000:]}")


def answers_of(job: Job, phase: str) -> Answers:
    """What the process that did a half of a job left of it."""
    out = job.out(phase)
    if not out.is_file():
        return Answers(error=f"the process that was to {phase} died")
    answers: Answers = torch.load(out, weights_only=False)
    return answers


def judged(job: Job, saved: Answers, restored: Answers) -> Row:
    """The row of a job, from what its two processes said."""
    reason = (saved.unsupported and f"unsupported: {saved.unsupported}") or _failure(saved) or _failure(restored)
    cases: tuple[CaseRow, ...] = ()
    if not reason:
        cases = tuple(_case_row(job, case, saved, restored) for case in cases_of(job.lengths, _any_tokens))
        reason = "; ".join(f"{row.case}: {row.reason}" for row in cases if row.reason)
    return Row(
        architecture=job.name,
        model_class=saved.model_class,
        model_type=saved.model_type,
        layers=saved.layers,
        kind=saved.kind,
        dtype=job.dtype,
        bitwise=not reason,
        reason=reason or None,
        exact_at=saved.exact_at,
        grid_reason=saved.grid_reason,
        restored={row.case: row.restored for row in cases},
        reply_tokens=job.reply,
        cases=cases,
    )


def _failure(answers: Answers) -> str:
    """The last line of a traceback: what was raised."""
    return answers.error.strip().splitlines()[-1] if answers.error else ""


def _any_tokens(_seed: int, count: int) -> Any:
    return torch.zeros(count, dtype=torch.int32).numpy()


def _case_row(job: Job, case: Case, saved: Answers, restored: Answers) -> CaseRow:
    cold, warm = saved.cases[case.name], restored.cases[case.name]
    wanted = expected(case, saved.kind, job.lengths, saved.exact_at)
    logits, greedy = _same_bits(cold.logits, warm.logits), cold.greedy == warm.greedy
    return CaseRow(
        case=case.name,
        prompt_tokens=len(case.token_ids),
        expected=wanted,
        restored=warm.restored,
        logits=logits,
        greedy=greedy and cold.trail == warm.trail,
        reason=_why_not(case, wanted, cold, warm) or None,
    )


def _why_not(case: Case, wanted: int, cold: Answer, warm: Answer) -> str:
    if cold.restored:
        return f"{cold.restored} tokens were restored where nothing could have been saved"
    if warm.restored != wanted:
        return f"{warm.restored} tokens were restored, not {wanted}"
    if wanted and warm.source != "disk":
        return f"restored from {warm.source}"
    if case.name == "repeat" and warm.computed:
        return "the model ran, though nothing was left to compute"
    if not _same_bits(cold.logits, warm.logits):
        return f"logits differ by up to {float((cold.logits.float() - warm.logits.float()).abs().max()):.2g}"
    if cold.greedy != warm.greedy:
        same = next(i for i, pair in enumerate(zip(cold.greedy, warm.greedy, strict=True)) if pair[0] != pair[1])
        return f"the greedy text differs after {same} tokens"
    return "" if cold.trail == warm.trail else "the logits of the reply differ"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Not `torch.equal`: -0.0 is not 0.0 here, and NaN is itself."""
    return (one.dtype, one.shape, _raw(one)) == (other.dtype, other.shape, _raw(other))


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
