"""Turns that go on from replies and from boundaries inside blocks have the bits of the conversation computed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.tokens import as_token_ids
from tests.exactness.architectures import tiny_model
from tests.runner import Runner, random_prompt, tiny_settings

BLOCK = 32


@pytest.mark.parametrize("scope", ["full", "auto:4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_every_turn_has_the_bits_of_the_conversation_computed_alone(name: str, scope: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.bfloat16)
    runner = Runner(model, tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="token")
    prompt, reached = random_prompt(1, 2 * BLOCK + 7), 0
    for seed in range(4):
        warm = runner.run(prompt, scope, reply=19 + seed)
        assert warm.report.restored == reached
        assert warm.report.exact
        cold = runner.run(prompt, "off", reply=19 + seed)
        assert torch.equal(warm.logits, cold.logits)
        assert warm.greedy == cold.greedy
        reached = len(prompt) + len(warm.greedy) - 1
        prompt = np.concatenate([prompt, as_token_ids(warm.greedy), random_prompt(seed, 11)])
        runner.reopen()
    runner.close()
