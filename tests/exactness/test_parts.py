"""A restore that ends inside a block gives the cold run's logits and reply bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.tokens import TokenIds, as_token_ids
from tests.exactness import pictures, worker
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.exactness.jobs import Job
from tests.runner import Runner, random_prompt, same, tiny_settings

BLOCK = 32


def of_a_conversation(rng: random.Random, stored: list[TokenIds]) -> TokenIds:
    """A prompt that leaves an earlier one or its reply somewhere, goes on behind its end, or shares nothing."""
    more = random_prompt(rng.randrange(2**30), rng.randint(1, 3 * BLOCK))
    if not stored or rng.random() < 0.1:
        return np.concatenate([random_prompt(rng.randrange(2**30), rng.randint(BLOCK, 4 * BLOCK)), more])
    before = rng.choice(stored)
    cut = rng.choice([len(before), rng.randint(1, len(before))])
    return np.concatenate([before[:cut], more])[: 8 * BLOCK]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        pytest.param("gpt_oss", torch.float32, marks=pytest.mark.slow),
        ("deepseek_v3", torch.bfloat16),
        ("qwen3_moe", torch.bfloat16),
        ("qwen3_moe", "Q4_1"),
        ("gpt_oss", "Q8_0"),
    ],
    ids=str,
)
def test_conversations_that_part_anywhere_are_the_cold_runs_bit_for_bit(
    name: str, dtype: torch.dtype | str, tmp_path: Path
) -> None:
    """Scopes that keep much and little, and restarts in between."""
    rng = random.Random(f"{name} {dtype}")
    model = quantised_tiny_model(name, dtype) if isinstance(dtype, str) else tiny_model(name, dtype)
    runner = Runner(model, tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="token")
    assert runner.layout.exact_at == "token"
    stored: list[TokenIds] = []
    num_inside = 0
    for number in range(18):
        if number % 5 == 4:
            runner.reopen()
        prompt = of_a_conversation(rng, stored)
        warm = runner.run(prompt, rng.choice(["full", "full", "auto:4", "39"]), reply=19)
        runner.flush()
        cold = runner.run(prompt, "off", reply=19)
        assert torch.equal(warm.logits, cold.logits), (number, warm.report.restored)
        assert warm.greedy == cold.greedy
        num_inside += bool(warm.report.restored % BLOCK)
        stored += [prompt, np.concatenate([prompt, as_token_ids(warm.greedy)])]
    assert num_inside > 5
    runner.close()


def different_inside(name: str, folder: Path) -> list[int]:
    """The places within pictures of a prompt at which a restore ends that gives other bits."""
    job = Job(name=f"{name} with pictures", dtype="bfloat16", folder=str(folder), lengths=pictures.LENGTHS)
    model, make, shown = worker.load(job)
    runner, prompt, found = worker.make_runner(job, model, shown), make(1, job.lengths.prompt), []
    cold, _ = (runner.run(prompt, scope, reply=4) for scope in ("off", "full"))
    runner.flush()
    restorable = Matcher.restorable
    places = np.flatnonzero((prompt[1:] < 0) & (prompt[:-1] < 0)) + 1
    for at in places[:: max(1, len(places) // 8)].tolist():

        def up_to(self: Any, end: int = at) -> tuple[list[Any], int]:
            return [node for node in restorable(self)[0] if node.position < end], end

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Matcher, "restorable", up_to)
            warm = runner.run(prompt, worker.UNSAVED, reply=4)
        assert warm.report.restored == at
        found += [] if same(cold, warm) else [at]
    runner.close()
    return found


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_vl"])
def test_a_restore_that_ends_inside_a_picture_is_the_cold_run(name: str, tmp_path: Path) -> None:
    """Also where the picture is longer than a window."""
    assert different_inside(name, tmp_path) == []


@pytest.mark.slow
def test_it_is_found_that_the_rest_of_a_picture_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PromptPictures.rows

    def without_what_began_before(self: PromptPictures, start: int, end: int) -> Any:
        found = rows(self, start, end)
        return replace(found, spans=tuple(span for span in found.spans if span[0] >= start))

    monkeypatch.setattr(PromptPictures, "rows", without_what_began_before)
    assert different_inside("gemma4", tmp_path)
