"""What the studies of the policies say."""

from __future__ import annotations

import numpy as np

from diskprefix.extras.simulate.trace import Trace, TraceRequest
from diskprefix.nouns import Prompt
from tools.research.policy_runs import FULL, sharing

TOKENS = 40_000


def request(when: float, seed: int) -> TraceRequest:
    token_ids = np.random.default_rng(seed).integers(0, 1000, TOKENS, dtype=np.int32)
    return TraceRequest(when=when, prompt=Prompt(token_ids), output_tokens=1)


def times_smaller(*seeds: int) -> float:
    (row,) = sharing(Trace.of("made up", [request(when, seed) for when, seed in enumerate(seeds)]), [FULL])
    assert row["Mtokens"] == round(len(seeds) * TOKENS / 1e6, 2)
    smaller: float = row["times smaller"]
    return smaller


def test_a_prompt_that_comes_three_times_is_stored_once() -> None:
    assert times_smaller(1, 1, 1) == 3.0


def test_prompts_that_share_nothing_are_stored_whole() -> None:
    assert times_smaller(1, 2, 3) == 1.0
