"""A plan computes what transformers' modules compute, with the same bits for a token however its prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

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
    llama qwen2 qwen3 gemma gemma2 gemma3 gemma3n gemma4 mistral granite internlm3 iquestcoder cwm seed_oss
    qwen2_vl qwen2_5_vl qwen3_vl gemma4_unified olmo2 olmo3 exaone4 hunyuan_v1_dense ernie4_5 smollm3 ministral3
"""

MIXTURES = """
    qwen3_moe qwen2_moe mixtral gpt_oss minimax_m2 granitemoe granitemoeshared granitemoe_swa hunyuan_v1_moe dots1
    glm4_moe ernie4_5_moe olmoe flex_olmo mimo_v2_flash llama4 exaone_moe afmoe hy_v3 solar_open laguna mellum
"""

LATENT = "youtu minicpm3 deepseek_v2 deepseek_v3 glm4_moe_lite"

FAMILIES = [*DENSE.split(), *MIXTURES.split(), *LATENT.split()]


def tokens(name: str = "one") -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(len(name)))


def exact(model: PreTrainedModel) -> Layout:
    """Makes a model exact, by its plan, and returns its layout."""
    layout, reason = make_exact(model)
    assert not reason
    assert plan_of(model, layout, PAGE_TOKENS) is not None, "the model is of no family"
    return layout


def computed(
    model: PreTrainedModel, layout: Layout, *, num_logits: int = NUM_TOKENS, **cuts: Sequence[int]
) -> list[tuple[torch.Tensor, bytes]]:
    """The logits and the state of sequences, which share their steps: each has the ends of its own steps, of which so
    many rows at most get logits. The name is that of its tokens."""
    pool = PagePool(layout, model.device, block_size=PAGE_TOKENS)
    sequences, logits = [KVSequence(pool) for _ in cuts], [list[torch.Tensor]() for _ in cuts]
    steps, prompts = [[*pairwise((0, *cut))] for cut in cuts.values()], [tokens(name) for name in cuts]
    with torch.inference_mode():
        for number in range(max(map(len, steps))):
            running = [i for i, of_one in enumerate(steps) if number < len(of_one)]
            rows = [
                Rows(sequences[i], prompts[i][:, begin:end], min(end - begin, num_logits))
                for i, (begin, end) in ((i, steps[i][number]) for i in running)
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


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": YARN}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("gemma4", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 2}),
    ],
)
def test_a_plan_has_what_a_configuration_says_besides(name: str, fields: dict[str, Any]) -> None:
    model = tiny_model(name, torch.float32, **fields)
    expected = oracle(model, tokens())
    ((logits, _),) = computed(model, exact(model), one=[NUM_TOKENS])
    assert error(logits, expected) < 1e-4


def test_an_activation_that_plans_lack_is_computed_by_the_modules() -> None:
    model = tiny_model("llama", torch.float32, hidden_act="mish")
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("token", "")
    assert plan_of(model, layout, PAGE_TOKENS) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_in_bfloat16_errs_no_more_than_transformers_does(name: str) -> None:
    expected = oracle(tiny_model(name, torch.float32), tokens())
    model = tiny_model(name, torch.bfloat16)
    of_modules = oracle(model, tokens())
    ((logits, _),) = computed(model, exact(model), one=[NUM_TOKENS])
    # That of the median token: the router of a mixture may choose another expert for some.
    of_plan, of_modules = ((found.float() - expected).square().mean(-1).median() for found in (logits, of_modules))
    assert of_plan < 1.2**2 * of_modules


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


@pytest.mark.parametrize("name", ["llama", "gemma3n", "gemma4"])
def test_rows_without_logits_change_none(name: str) -> None:
    """Layers that only read memory leave them out."""
    model = tiny_model(name, torch.bfloat16)
    layout = exact(model)
    ((expected, of_alone),) = computed(model, layout, one=[NUM_TOKENS])
    (logits, state), _ = computed(model, layout, num_logits=2, one=[33, 34, NUM_TOKENS], other=[20, 44])
    assert torch.equal(logits, expected[[31, 32, 33, -2, -1]])
    assert state == of_alone


@pytest.mark.parametrize(("name", "option"), [("olmoe", {"clip_qkv": 8.0}), ("hunyuan_v1_moe", {"moe_topk": [1, 2]})])
def test_a_model_with_an_option_that_plans_lack_has_none(name: str, option: dict[str, Any]) -> None:
    model = tiny_model(name, torch.float32, **option)
    layout, _ = make_exact(model)
    assert plan_of(model, layout, PAGE_TOKENS) is None
