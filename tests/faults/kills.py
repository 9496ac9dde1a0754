"""A process that is killed in the middle of a long prompt, and what the next process finds of it.

The prompt is computed by a tiny model at the pace of a machine that takes seconds for it. Both processes are forks
without memory in common.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.forward import prefill
from diskprefix.kv.layout import ExactAt
from diskprefix.kv.sequence import KVSequence
from diskprefix.values import CacheOptions, Prompt
from tests import forked
from tests.exactness.architectures import tiny_model
from tests.runner import Runner, random_prompt, tiny_settings

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


def compute(
    kind: Kind, folder: Path, num_tokens: int, seed: int, scope: str, after_step: Callable[[KVSequence], None]
) -> dict[str, Any]:
    """Computes a prompt as the engine does. Returns the written bytes, the restored tokens and the seconds."""
    runner = kind.open(folder)
    prompt = Prompt(random_prompt(seed, num_tokens), boundaries=(num_tokens,))
    cached = CachedRequest(runner.cache, prompt, CacheOptions(scope=parse_scope(scope, param="scope")))
    sequence, began_s = runner.new_sequence(num_tokens), time.monotonic()
    restored = cached.restore(sequence)

    def step_done(state: KVSequence) -> None:
        cached.after_step(state)
        after_step(state)

    logits = prefill(
        *(runner.runtime, sequence, prompt.token_ids),
        start=restored.num_tokens,
        block_size=BLOCK,
        after_step=step_done,
        stops=tuple(at for at in cached.selection.checkpoints if at < num_tokens),
    )
    seconds = time.monotonic() - began_s
    cached.publish(sequence, logits, seconds)
    report = cached.close()
    runner.close()
    written = runner.cache.store.meter.total_bytes
    return {"bytes": written, "restored": report.restored, "seconds": seconds, "reason": report.miss_reason}


def compute_paced(kind: Kind, folder: Path, num_tokens: int, seed: int, scope: str, tokens_per_s: float) -> None:
    """Computes a prompt at a pace, and says how far it is. At the end, writes what `compute` returns to `ended`."""
    torch.set_num_threads(1)
    progress, began_s = Progress(folder / "progress"), time.monotonic()
    progress.add(0)

    def after_step(sequence: KVSequence) -> None:
        progress.add(sequence.num_tokens)
        time.sleep(max(0.0, began_s + (sequence.num_tokens + BLOCK) / tokens_per_s - time.monotonic()))

    ended = compute(kind, folder, num_tokens, seed, scope, after_step)
    (folder / "ended").write_text(json.dumps(ended))


def find(kind: Kind, folder: Path, num_tokens: int, seed: int) -> None:
    """Writes to `found` how many tokens of a prompt are restored."""
    torch.set_num_threads(1)
    runner, prompt = kind.open(folder), Prompt(random_prompt(seed, num_tokens))
    cached = CachedRequest(runner.cache, prompt, CacheOptions(scope=parse_scope("1", param="scope")))
    (folder / "found").write_text(str(cached.restore(runner.new_sequence(num_tokens)).num_tokens))
    cached.leave()
    runner.close()


def killed(kind: Kind, folder: Path, moment: float, *, num_tokens: int, seed: int, tokens_per_s: float) -> Loss:
    """Kills a process after a part (`moment`, 0 to 1) of the time that its prompt takes. Returns what that lost."""
    process = forked.start(compute_paced, kind, folder, num_tokens, seed, "auto", tokens_per_s)
    progress = Progress(folder / "progress")
    while not progress.read():
        assert process.exitcode is None, "it ended before it began"
        time.sleep(0.01)
    time.sleep(moment * num_tokens / tokens_per_s)
    os.kill(process.pid or 0, signal.SIGKILL)
    killed_at = time.monotonic()
    process.join()
    assert forked.run(find, kind, folder, num_tokens, seed) == 0
    steps, found = progress.read(), int((folder / "found").read_text())
    return Loss(steps[-1][1], found, killed_at - next((when for when, number in steps if number >= found), killed_at))


def bytes_of_whole(kinds: Sequence[Kind], folder: Path, num_tokens: int, tokens_per_s: float) -> dict[str, int]:
    """Returns the bytes that a prompt that ends writes, for each kind."""
    written: dict[str, int] = {}
    for kind in kinds:
        own = folder / kind.name.replace(" ", "-")
        own.mkdir()
        assert forked.run(compute_paced, kind, own, num_tokens, 0, "auto", tokens_per_s) == 0
        written[kind.name] = json.loads((own / "ended").read_text())["bytes"]
    return written
