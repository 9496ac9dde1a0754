"""`python -m tests.exactness.worker save|restore JOBS.json LANES`: do one half of each job, in a process of its own.

Importing torch and transformers takes seconds, so it is done once for all jobs: this process imports and does nothing
else, and each job runs in a fork of it, which has no memory in common with any other. A fork that saves dies of SIGKILL
with its store open. The two halves are run from two interpreters, started one after the other.

A line on stdout for each job that is done. LANES: so many at the same time.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.kv.layout import LayerSpec, Layout
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.plan.drafts import DraftRow
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.tokens import TokenIds, as_token_ids
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.exactness.jobs import Answer, Answers, Case, Job, Kind, MakeTokens, cases_of, read_jobs
from tests.exactness.pictures import PICTURED, load_pictured
from tests.runner import Pictures, Runner, tiny_settings
from tests.runtime.plan.tensor_weights import modules_of

LIMIT_S = 1800
"""A fork that takes longer hangs, and is killed."""
UNSAVED = "1"
"""A scope that restores what there is and saves nothing: less than a block is not worth keeping."""
TEXT = Path(__file__).parents[2] / "tools/prompts/words.txt"


def describe_layers(layers: Sequence[LayerSpec], config: PreTrainedConfig) -> str:
    """A text such as `6× linear, 2× sliding(512)`: the count of each kind, in the order of the first."""
    text_config = config.get_text_config(decoder=True)
    # A layer without state of its own uses another's, or is no attention at all.
    none = "shared" if getattr(text_config, "num_kv_shared_layers", 0) else "stateless"
    counted = Counter((none if spec.kind == "none" else spec.kind, spec.window) for spec in layers)
    return ", ".join(
        f"{count}× {kind}" + (f"({window})" if window else "") for (kind, window), count in counted.items()
    )


def kind_of(layout: Layout) -> Kind:
    if layout.unsupported:
        return "unsupported"
    return "cut" if layout.is_sliceable else "checkpoint"


def load(job: Job) -> tuple[PreTrainedModel, MakeTokens, Pictures]:
    """The model, what makes prompts for it, text for a real one, else any tokens, and the pictures in these."""
    if job.name in PICTURED:
        return load_pictured(job)
    dtype = getattr(torch, job.computes_in)
    if job.dtype in FILE_FORMS:
        model = quantised_tiny_model(job.name, job.dtype)
    elif job.model is None:
        model = tiny_model(job.name, dtype)
    elif not (Path(job.model) / "tokenizer.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
    else:
        loaded = load_model(Settings(model=job.model, device=job.device, dtype=job.computes_in), print)
        return modules_of(loaded), _text(loaded.tokenizer), {}
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return model, lambda seed, count: as_token_ids(np.random.default_rng(seed).integers(3, vocab_size, count)), {}


def _text(tokenizer: Any) -> MakeTokens:
    words = TEXT.read_text(encoding="utf-8").split()

    def make(seed: int, count: int) -> TokenIds:
        chosen = np.random.default_rng(seed).choice(words, count)
        return as_token_ids(tokenizer(" ".join(chosen), add_special_tokens=False)["input_ids"][:count])

    return make


def make_runner(job: Job, model: PreTrainedModel, pictures: Pictures) -> Runner:
    lengths = job.lengths
    settings = tiny_settings(
        job.store,
        block_size=lengths.block,
        kv_cache_min_tokens=lengths.block,
        kv_cache_interval=lengths.interval,
        kv_cache_budget=4 << 30,
        kv_type="q8" if job.dtype == "q8" else "auto",
    )
    runner = Runner(model, settings, f"{job.name} {job.dtype}", exact_at="grid" if job.at_grid else None)
    runner.pictures = pictures
    return runner


def save(job: Job, model: PreTrainedModel, make: MakeTokens, pictures: Pictures) -> tuple[Answers, Runner | None]:
    """The cold answers; the first prompt is saved. The runner has written everything, and holds its store open."""
    runner = make_runner(job, model, pictures)
    described = _described(model, runner)
    if runner.layout.unsupported:
        runner.close()
        return described, None
    for case in cases_of(job.lengths, make):
        described.cases[case.name] = ask(runner, job, case, "full" if case.name == "repeat" else "off")
    runner.flush()
    return described, runner


def restore(job: Job, model: PreTrainedModel, make: MakeTokens, pictures: Pictures) -> tuple[Answers, Runner]:
    runner = make_runner(job, model, pictures)
    described = _described(model, runner)
    cases = cases_of(job.lengths, make)
    # What the memory holds of another sequence must not show.
    ask(runner, job, Case("another", make(4, 3 * job.lengths.block + 1), 0), "off")
    for case in cases:
        described.cases[case.name] = ask(runner, job, case, UNSAVED)
    return described, runner


def ask(runner: Runner, job: Job, case: Case, scope: str) -> Answer:
    answer = runner.run(case.token_ids, scope, boundaries=(job.lengths.boundary,))
    trail, greedy, logits = hashlib.sha256(), [], answer.logits
    with torch.inference_mode():
        runner.sequence.reserve(len(case.token_ids) + job.reply)
        for _ in range(job.reply):
            greedy.append(int(logits.argmax()))
            trail.update(guess_behind(runner, greedy[-1]))
            logits = torch.from_numpy(runner.logits_behind(greedy[-1]))
            trail.update(logits.numpy().tobytes())
    report = answer.report
    return Answer(answer.logits, trail.hexdigest(), greedy, report.restored, answer.num_forwards > 0, report.source)


def guess_behind(runner: Runner, token: int) -> bytes:
    """What a draft layer computes for the next token of the reply shows the bits of its memory; empty without one."""
    sequence = runner.sequence
    if not runner.layout.has_draft_layer or not sequence.take_pages_to(sequence.num_tokens + 1):
        return b""
    return runner.runtime.draft([DraftRow(sequence, token, sequence.num_tokens)])[1].tobytes()


def _described(model: PreTrainedModel, runner: Runner) -> Answers:
    layout = runner.layout
    return Answers(
        model_class=type(model).__name__,
        model_type=model.config.get_text_config(decoder=True).model_type,
        kind=kind_of(layout),
        layers=describe_layers(layout.layers, model.config),
        unsupported=", ".join(layout.unsupported),
        exact_at=layout.exact_at,
        grid_reason=runner.grid_reason,
    )


def answered(phase: str, job: Job) -> tuple[Answers, Runner | None]:
    """One half of a job: what it says, and the runner that still holds its store open, if there is one."""
    try:
        return (save if phase == "save" else restore)(job, *load(job))
    except Exception:  # noqa: BLE001 - the row tells it
        return Answers(error=traceback.format_exc()), None


def do(phase: str, job: Job) -> None:
    """One half of a job, in a process that ends with it, by SIGKILL."""
    signal.alarm(LIMIT_S)
    torch.set_num_threads(job.threads)
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    answers, _ = answered(phase, job)
    torch.save(answers, job.out(phase))
    os.kill(os.getpid(), signal.SIGKILL)


def main(phase: str, jobs_file: str, lanes: str) -> None:
    running: dict[int, Job] = {}

    def wait() -> None:
        child, status = os.wait()
        job = running.pop(child)
        end = "" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else f" ended with status {status}"
        print(f"{job.name} {job.dtype}{end}", flush=True)

    for job in read_jobs(Path(jobs_file)):
        if len(running) == int(lanes):
            wait()
        child = os.fork()
        if not child:
            do(phase, job)
        running[child] = job
    while running:
        wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
