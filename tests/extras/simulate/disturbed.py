"""Simulates with a disturbed window of recent prompts: shuffled, reversed, duplicated, or with hostile prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from diskprefix.cache.choosing import SeenPrompts
from diskprefix.cache.policy.history import History
from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.simulator import Policy, Simulator, Totals
from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import MAX_VALUE
from diskprefix.store.schema import HISTORY_TOKENS
from diskprefix.tokens import TokenIds

Disturb: TypeAlias = Callable[[list[TokenIds], TokenIds, np.random.Generator], list[TokenIds]]
"""Makes another window of the window (newest prompt first) and the prompt."""


def shuffled(window: list[TokenIds], _prompt: TokenIds, random: np.random.Generator) -> list[TokenIds]:
    return [window[i] for i in random.permutation(len(window))]


def backwards(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    return window[::-1]


def duplicated(window: list[TokenIds], _prompt: TokenIds, _random: np.random.Generator) -> list[TokenIds]:
    """Returns each prompt twice, so that half as many are left."""
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


class _DisturbedHistory(History):
    """A history whose window is disturbed. `prompt` is the prompt that is being looked up."""

    def __init__(self, disturb: Disturb, seed: int) -> None:
        super().__init__(max_prompts=MAX_VALUE, max_tokens=HISTORY_TOKENS)
        self.prompt: TokenIds = np.empty(0, np.int32)
        self._disturb = disturb
        self._random = np.random.default_rng(seed)

    def recent(self, n: int, group: bytes = b"") -> tuple[TokenIds, ...]:
        return tuple(self._disturb(list(super().recent(n, group)), self.prompt, self._random))


class _DisturbedSimulator(Simulator):
    def __init__(self, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int) -> None:
        super().__init__(policy, geometry)
        self._histories: dict[str, _DisturbedHistory] = {}
        self._disturb, self._seed = disturb, seed

    def _seen(self, request: TraceRequest) -> SeenPrompts:
        seen = super()._seen(request)
        seen.history = history = self._histories.setdefault(
            request.tenant, _DisturbedHistory(self._disturb, self._seed)
        )
        history.prompt = request.prompt.token_ids
        return seen


def simulate_disturbed(trace: Trace, policy: Policy, geometry: Geometry, disturb: Disturb, seed: int = 0) -> Totals:
    """As `simulate`, with windows that `disturb` has changed."""
    simulator = _DisturbedSimulator(policy, geometry, disturb, seed)
    for request in trace:
        simulator.step(request)
    return simulator.totals
