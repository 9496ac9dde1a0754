"""A process that is killed in the middle of a long prompt, and what the next process finds of it.

The prompt is computed by a tiny model at the pace of a machine that takes seconds for it. Both processes are forks
without memory in common.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.layout import ExactAt
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.prefill import prefill
from diskprefix.scope import parse_scope
from diskprefix.values import CacheOptions, Prompt
from tests import forked
from tests.exactness.architectures import tiny_model
from tests.runner import Runner, random_prompt, tiny_settings

AUTO = CacheOptions(scope=parse_scope("auto", param="scope"))
BLOCK = 256
MOST_TOKENS, MOST_S = 1024, 5.0
"""A kill loses at most so much computing, whichever is more."""
_SIZES = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 16384}


@dataclass(frozen=True)
class Kind:
    """A kind of model and what computes it. A token takes about 4 KiB."""

    name: str
    model_type: str
    exact_at: ExactAt | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def open(self, folder: Path) -> Runner:
        settings = tiny_settings(folder, block_size=BLOCK, kv_cache_min_tokens=64, kv_cache_budget=1 << 30)
        model = tiny_model(self.model_type, torch.bfloat16, **self.fields)
        return Runner(model, settings, self.name, exact_at=self.exact_at)


# The states of this hybrid take as many bytes as 1,500 of its tokens, as those of Qwen3.5-0.8B do.
_STATES = {"linear_num_value_heads": 24, "linear_num_key_heads": 8, "linear_key_head_dim": 128}
_HYBRID = {**_SIZES, **_STATES, "linear_value_head_dim": 128}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("dense", "llama", fields={**_SIZES, "num_hidden_layers": 4}),
        Kind("window", "gemma3", fields={**_SIZES, "sliding_window": 512}),
        Kind("hybrid", "qwen3_next", fields=_HYBRID),
        Kind("convolutions", "lfm2", fields={**_SIZES, "hidden_size": 256}),
        Kind("dense, grid", "llama", "grid", {**_SIZES, "num_hidden_layers": 4}),
        Kind("hybrid, grid", "qwen3_next", "grid", _HYBRID),
    )
}


class Progress:
    """A file to which a process appends the time and the number of computed tokens after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, num_tokens: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{time.monotonic()} {num_tokens}\n")

    def read(self) -> list[tuple[float, int]]:
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [(float(when), int(number)) for when, number in (line.split() for line in lines)]


class Loss(NamedTuple):
    """What a kill lost: of the computed tokens those that the next process does not find, and the seconds in which they
    were computed."""

    computed: int
    found: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.computed - self.found

    @property
    def is_small(self) -> bool:
        return self.tokens <= MOST_TOKENS or self.seconds <= MOST_S


@dataclass(frozen=True)
class Task:
    """A prompt of random tokens for a kind of model, and the folder of the store and of what processes say."""

    kind: Kind
    folder: Path
    num_tokens: int
    seed: int = 0
    options: CacheOptions = AUTO

    @property
    def prompt(self) -> Prompt:
        return Prompt(random_prompt(self.seed, self.num_tokens), boundaries=(self.num_tokens,))

    @property
    def progress(self) -> Progress:
        return Progress(self.folder / "progress")

    def said(self) -> dict[str, Any]:
        """What the last process that ended has said."""
        said: dict[str, Any] = json.loads((self.folder / "said").read_text())
        return said

    def say(self, **values: object) -> None:
        (self.folder / "said").write_text(json.dumps(values))


def compute(
    task: Task, after_step: Callable[[CachedRequest, KVSequence], None] = lambda _cached, _sequence: None
) -> None:
    """Computes a prompt as the engine does. `after_step` is called before the first step too. Says what was restored,
    why no more, the written bytes, and the digest of the logits at the end."""
    torch.set_num_threads(1)
    runner, prompt = task.kind.open(task.folder), task.prompt
    cached, sequence = CachedRequest(runner.cache, prompt, task.options), runner.new_sequence(task.num_tokens)
    restored = cached.restore(sequence)
    after_step(cached, sequence)

    def step_done(state: KVSequence) -> None:
        cached.after_step(state)
        after_step(cached, state)

    logits = prefill(
        *(runner.runtime, sequence, prompt.token_ids),
        start=restored.num_tokens,
        block_size=BLOCK,
        after_step=step_done,
        stops=tuple(at for at in cached.selection.checkpoints if at < task.num_tokens),
    )
    cached.publish(sequence, logits, 0.0)
    # A reply of one token, which is not run through the model.
    cached.publish_reply(sequence, prompt.token_ids)
    report = cached.close()
    runner.close()
    written, digest = runner.cache.store.meter.total_bytes, hashlib.sha256(logits.tobytes()).hexdigest()
    task.say(restored=report.restored, reason=report.miss_reason, bytes=written, logits=digest)


def compute_paced(task: Task, tokens_per_s: float) -> None:
    """Computes a prompt at a pace, and says how far it is."""

    def after_step(_: CachedRequest, sequence: KVSequence) -> None:
        task.progress.add(sequence.num_tokens)
        began_s = task.progress.read()[0][0]
        time.sleep(max(0.0, began_s + (sequence.num_tokens + BLOCK) / tokens_per_s - time.monotonic()))

    compute(task, after_step)


def found(task: Task) -> int:
    """Returns how many tokens of a prompt this process restores."""
    runner = task.kind.open(task.folder)
    cached = CachedRequest(runner.cache, task.prompt, replace(task.options, scope=parse_scope("1", param="scope")))
    num_tokens = cached.restore(runner.new_sequence(task.num_tokens)).num_tokens
    cached.leave()
    runner.close()
    return num_tokens


def kill_at(task: Task, moment: float, tokens_per_s: float) -> Loss:
    """Kills a process after a part (`moment`, 0 to 1) of its prompt, between two steps too. Returns what that lost."""
    process = forked.start(compute_paced, task, tokens_per_s)
    num_blocks, num_tokens = divmod(int(moment * task.num_tokens), BLOCK)
    while not (steps := task.progress.read()) or steps[-1][1] < num_blocks * BLOCK:
        assert process.exitcode is None, "it ended too early"
        time.sleep(0.01)
    time.sleep(num_tokens / tokens_per_s)
    process.kill()
    killed_at = time.monotonic()
    process.join()
    num_found, steps = found(task), task.progress.read()
    reached_at = next((when for when, number in steps if number >= num_found), killed_at)
    return Loss(steps[-1][1], num_found, killed_at - reached_at)
