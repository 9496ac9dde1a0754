"""Simulates with a disturbed window of recent prompts: shuffled, reversed, duplicated, or with hostile prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from diskprefix.cache.policy.seen import Earlier, SeenPrompt, SeenPrompts, Sighting
from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.simulator import Policy, Simulator, Totals
from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import TokenIds, common_prefix_length

Disturb: TypeAlias = Callable[[list[TokenIds], TokenIds, np.random.Generator], list[TokenIds]]
"""Makes another window of the window (newest prompt first) and the prompt."""


def shuffled(window: list[TokenIds], _prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    return [window[i] for i in random.permutation(len(window))]


def backwards(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    return window[::-1]


def duplicated(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    return [window[i // 2] for i in range(len(window))]


def hostile(window: list[TokenIds], prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    """Replaces every second prompt by a beginning of this prompt, by this prompt with another end, or by noise."""

    def made_up() -> TokenIds:
        at = int(random.integers(len(prompt) + 1))
        noise = random.integers(60_000, 70_000, len(prompt), dtype=np.int32)
        return [prompt[:at], np.concatenate([prompt[:at], noise[at:]]), noise][int(random.integers(3))]

    return [made_up() if i % 2 else ids for i, ids in enumerate(window)]


DISTURBED: dict[str, Disturb] = {
    "shuffled": shuffled,
    "backwards": backwards,
    "duplicated": duplicated,
    "hostile": hostile,
}


class _DisturbedPrompts(SeenPrompts):
    """Earlier prompts whose window is disturbed."""

    def __init__(self, block_size: int, disturb: Disturb, seed: int, *, is_trusting: bool) -> None:
        super().__init__(block_size, is_trusting=is_trusting)
        self._disturb = disturb
        self._random = np.random.default_rng(seed)

    def sighting_of(self, token_ids: TokenIds, names: Sequence[bytes], window: int, group: bytes = b"") -> Sighting:
        sighting = super().sighting_of(token_ids, names, window, group)
        disturbed = self._disturb([one.prompt.token_ids for one in sighting.recent], token_ids, self._random)
        recent = (Earlier(SeenPrompt((), ids.tobytes()), common_prefix_length(token_ids, ids)) for ids in disturbed)
        return replace(sighting, recent=tuple(recent))


class _DisturbedSimulator(Simulator):
    def __init__(self, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int) -> None:
        super().__init__(policy, geometry)
        self._block_size, self._disturb, self._seed = policy.block_size, disturb, seed

    def _seen(self, request: TraceRequest) -> SeenPrompts:
        is_trusting = request.is_trusted or not request.tenant
        new = _DisturbedPrompts(self._block_size, self._disturb, self._seed, is_trusting=is_trusting)
        return self._seen_by.setdefault(request.tenant, new)


def simulate_disturbed(trace: Trace, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int = 0) -> Totals:
    simulator = _DisturbedSimulator(policy, geometry, disturb, seed)
    for request in trace:
        simulator.step(request)
    return simulator.totals
