"""A loaded model and how long its steps take. The memory of its sequences is filled with random numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.model.exact.invariance import make_exact
from diskprefix.model.exact.rehearsal import rehearse
from diskprefix.model.exact.runner import Rows, run
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.model.load.loader import load_model
from diskprefix.native import attention_operator as native
from diskprefix.native import library
from diskprefix.settings import Settings

STEP = 256
"""Rows of a step of prefill."""


@dataclass
class Model:
    """A loaded model that is exact at every token."""

    model: Any
    layout: Layout

    @classmethod
    def of(cls, source: Path, weights: str = "auto") -> Model:
        """`source` is a model's folder or .gguf file, `weights` as for `diskprefix serve`."""
        loaded = load_model(Settings(model=str(source), weights=weights), lambda _: None)
        identity = str(Fingerprint.of(loaded.model, loaded.weights_digest))
        layout, reason = make_exact(loaded.model, rehearse(loaded.model, identity=identity), identity=identity)
        if reason:
            raise click.ClickException(f"this model is not exact at every token: {reason}")
        return cls(loaded.model, layout)

    def arena(self, num_tokens: int) -> KVArena:
        arena = KVArena(self.layout, torch.device("cpu"))
        arena.reserve(num_tokens + STEP)
        for memory in arena.memory:
            memory.tensor.normal_()
        arena.truncate(num_tokens)
        return arena

    def step_ms(self, arenas: Sequence[KVArena], num_rows: int) -> float:
        """Returns the time of one step, after which the sequences are as they were."""
        starts = [arena.num_tokens for arena in arenas]
        rows = [Rows(arena, torch.arange(10, 10 + num_rows).unsqueeze(0)) for arena in arenas]
        took = _ms(lambda: run(self.model, rows))
        for arena, start in zip(arenas, starts, strict=True):
            arena.take_back(start)
        return took

    def attention_ms(self, arenas: Sequence[KVArena], num_rows: int) -> float:
        """Returns the time of the compiled attention of one layer, all of which are as large as the first."""
        memory, heads = arenas[0].memory[0], self.model.config.get_text_config(decoder=True).num_attention_heads
        operators = library.operators()
        assert operators is not None
        query = torch.randn(heads, num_rows * len(arenas), memory.group.head_dim).to(memory.group.dtype)
        layers = [
            [
                (arena.num_tokens, num_rows, 0, arena.memory[0].tensor[2 * n, 0], arena.memory[0].tensor[2 * n + 1, 0])
                for arena in arenas
            ]
            for n in range(len(memory.group.specs) // 2)
        ]
        times = [_ms(partial(native.attention, operators, query, runs, scale=0.1)) for runs in layers]
        return statistics.median(times)


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def limits() -> dict[str, float]:
    """Returns what this machine reads from memory and multiplies in bfloat16, the best of several runs."""
    numbers = torch.ones(1 << 26)
    matrix = torch.randn(2048, 2048).bfloat16()
    read_s = min(_ms(numbers.sum) for _ in range(10)) / 1e3
    product_s = min(_ms(lambda: matrix @ matrix) for _ in range(10)) / 1e3
    return {"read_gb_s": numbers.numel() * 4 / read_s / 1e9, "bf16_tflops": 2 * 2048**3 / product_s / 1e12}
