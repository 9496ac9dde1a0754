"""A plan computes what transformers' modules compute, with the same bits for a token however its prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.exact.planned import plan_of
from diskprefix.model.exact.runner import Rows, run
from diskprefix.model.exact.self_check import make_exact
from tests.exactness.architectures import VOCAB, quantised_tiny_model, tiny_model

PAGE_TOKENS = 16
NUM_TOKENS = 70
DENSE = """
    llama qwen2 qwen3 gemma gemma2 gemma3 mistral granite internlm3 iquestcoder cwm seed_oss
    qwen2_vl qwen2_5_vl qwen3_vl
"""

MIXTURES = """
    qwen3_moe
"""

RECURRENT = """
    lfm2
"""

FAMILIES = [*DENSE.split(), *MIXTURES.split(), *RECURRENT.split()]


def tokens(name: str = "one") -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(len(name)))


def exact(model: PreTrainedModel) -> Layout:
    """Makes a model exact, by its plan, and returns its layout."""
    layout, reason = make_exact(model)
    assert not reason
    assert plan_of(model, layout, PAGE_TOKENS) is not None, "the model is of no family"
    return layout


def computed(model: PreTrainedModel, layout: Layout, **cuts: Sequence[int]) -> list[tuple[torch.Tensor, bytes]]:
    """The logits and the state of sequences, which share their steps: each has the ends of its own steps. The name is
    that of its tokens."""
    pool = PagePool(layout, model.device, block_size=PAGE_TOKENS)
    sequences, logits = [KVSequence(pool) for _ in cuts], [list[torch.Tensor]() for _ in cuts]
    steps, prompts = [[*pairwise((0, *cut))] for cut in cuts.values()], [tokens(name) for name in cuts]
    with torch.inference_mode():
        for number in range(max(map(len, steps))):
            running = [i for i, of_one in enumerate(steps) if number < len(of_one)]
            rows = [
                Rows(sequences[i], prompts[i][:, slice(*steps[i][number])], steps[i][number][1] - steps[i][number][0])
                for i in running
            ]
            for i, found in zip(running, run(model, rows), strict=True):
                logits[i].append(found)
        return [(torch.cat(of_one), one.content()) for of_one, one in zip(logits, sequences, strict=True)]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, by the spread of the expected ones."""
    return float((found.float() - expected.float()).abs().max() / expected.float().std())


def oracle(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits of transformers' own modules."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_has_the_logits_of_transformers(name: str) -> None:
    model = tiny_model(name, torch.float32)
    expected = oracle(model, tokens())
    ((logits, _),) = computed(model, exact(model), one=[NUM_TOKENS])
    assert error(logits, expected) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_in_bfloat16_errs_no_more_than_transformers_does(name: str) -> None:
    expected = oracle(tiny_model(name, torch.float32), tokens())
    model = tiny_model(name, torch.bfloat16)
    of_modules = oracle(model, tokens())
    ((logits, _),) = computed(model, exact(model), one=[NUM_TOKENS])
    assert (logits.float() - expected).square().mean() < 1.2**2 * (of_modules.float() - expected).square().mean()


@pytest.mark.parametrize("form", ["float32", "bfloat16", "Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_has_the_same_bits_in_any_step(name: str, form: str) -> None:
    is_packed = form.startswith("Q")
    model = quantised_tiny_model(name, form) if is_packed else tiny_model(name, getattr(torch, form))
    layout = exact(model)
    (alone,) = computed(model, layout, one=[NUM_TOKENS])
    (other,) = computed(model, layout, other=[44])
    together = computed(model, layout, one=[33, 34, 35, 36, 40, NUM_TOKENS], other=[20, 21, 40, 44])
    for (logits, state), (expected, of_alone) in zip(together, (alone, other), strict=True):
        assert torch.equal(logits, expected)
        assert state == of_alone
