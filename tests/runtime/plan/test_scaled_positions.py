"""Positions with factors for long and for short texts, and those with a fixed alpha, have a plan. The longest sequence
that is served decides which factors count."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.daemon.engine.loop import Engine
from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.decoder_options import without_plan
from diskprefix.runtime.plan.families.rotary import rotary_of
from diskprefix.runtime.plan.model_config import ModelConfig
from tests.daemon.engine.driving import done, load, run, tokens, tokens_of
from tests.exactness.architectures import POSITIONS, SCALED, tiny_model
from tests.runtime.plan import tiny
from tests.runtime.plan.test_plan import computed, exact, require_logits

ORIGINAL = 32
BLOCK = 16


@pytest.mark.parametrize("name", SCALED)
def test_a_plan_has_the_logits_of_transformers(name: str) -> None:
    require_logits(tiny_model(name, torch.float32))


@pytest.mark.parametrize("name", SCALED)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    layout = exact(model)
    ((whole, state),) = computed(model, layout, one=[70])
    ((cut, of_cut),) = computed(model, layout, one=[ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 70])
    assert torch.equal(whole, cut)
    assert state == of_cut


def options(name: str, **fields: Any) -> dict[str, Any]:
    return {**tiny_model(name, torch.float32).config.to_dict(), **fields}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("phi3+long", {}),
        ("phi3+long", {"partial_rotary_factor": 0.75}),
        ("phi3+long", {"attention_factor": 1.7}),
        ("phi3+long", {"factor": 3.0}),
        ("minicpm3", {}),
    ],
)
def test_the_context_decides_which_factors_count(name: str, fields: dict[str, Any]) -> None:
    """As in llama.cpp: those for long texts above the original length. transformers computes both, by the length of a
    request."""
    size = {"phi3+long": 8, "minicpm3": 4}[name] * fields.get("partial_rotary_factor", 1)
    rope = {**SCALED["phi3+long"]["rope_parameters"], "original_max_position_embeddings": ORIGINAL, **fields}
    rope |= {one: rope[one][: int(size)] for one in ("short_factor", "long_factor")}
    model = tiny_model(name, torch.float32)
    theirs = type(model.config).from_dict({**model.config.to_dict(), "rope_parameters": copy.deepcopy(rope)})
    theirs.head_dim = 8 if name == "minicpm3" else 16
    found = {}
    for context in (1, ORIGINAL, ORIGINAL + 1, POSITIONS, 2 * POSITIONS, None):
        config: Any = ModelConfig.of({**theirs.to_dict(), "rope_parameters": copy.deepcopy(rope)})
        config.context = context
        assert without_plan(config) == ""
        found[context] = rotary_of(config)[""]
        length = POSITIONS if context is None else context
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), length)
        np.testing.assert_array_max_ulp(found[context].frequencies, expected.numpy(), maxulp=4)
        assert found[context].factor == pytest.approx(factor)
    assert not np.array_equal(found[ORIGINAL].frequencies, found[ORIGINAL + 1].frequencies)


def test_phi_3_5_moe_has_a_factor_of_cosines_for_long_texts() -> None:
    """As its published code has it. transformers takes the frequencies for short texts there."""
    for context, name in ((ORIGINAL, "short"), (None, "long")):
        rope = {**SCALED["phi3+long"]["rope_parameters"], "original_max_position_embeddings": ORIGINAL}
        config: Any = ModelConfig.of(options("phimoe+short", rope_parameters=rope))
        config.context = context
        found = rotary_of(config)[""]
        plain = 10000.0 ** -(np.arange(8) / 8)
        np.testing.assert_allclose(found.frequencies, plain / rope[f"{name}_factor"], rtol=1e-6)
        assert found.factor == rope[f"{name}_mscale"]


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("phi3", {"long_factor": None}, "lack long_factor"),
        ("phi3", {"short_factor": [1.0] * 7 + [0.0]}, "short_factor of the rope_parameters is .*, not positive"),
        ("phi3", {"long_factor": "many"}, "long_factor of the rope_parameters is 'many', not positive"),
        ("phimoe", {"long_mscale": None}, "lack long_mscale"),
        ("phimoe", {"short_mscale": -1}, "short_mscale of the rope_parameters is -1, not positive"),
    ],
)
def test_factors_that_are_missing_or_no_numbers_are_refused(name: str, fields: dict[str, Any], problem: str) -> None:
    rope = {**SCALED["phi3+long"]["rope_parameters"], "original_max_position_embeddings": ORIGINAL, **fields}
    rope = {key: value for key, value in rope.items() if value is not None}
    with pytest.raises(ModelError, match=problem):
        ModelConfig.of(options(f"{name}+short", rope_parameters=rope))


def test_factors_of_another_number_are_refused() -> None:
    rope = {**SCALED["phi3+long"]["rope_parameters"], "long_factor": [2.0] * 5}
    config = ModelConfig.of(options("phi3+long", rope_parameters=rope))
    with pytest.raises(ModelError, match=r"^the rope_parameters have 5 numbers in long_factor, and 8 pairs rotate$"):
        rotary_of(config)


def test_alpha_counts_for_the_types_that_have_it_alone() -> None:
    for name, reason in (("hunyuan_v1_dense", ""), ("hunyuan_v1_moe", ""), ("llama", "no plan has dynamic RoPE")):
        rope = {**SCALED["hunyuan_v1_dense+alpha"]["rope_parameters"]}
        assert without_plan(ModelConfig.of(options(name, rope_parameters=rope))) == reason
        assert without_plan(ModelConfig.of(options(name, rope_parameters={**rope, "alpha": None}))) != ""


# A server with a context.


def folder_of(path: Path) -> Path:
    tiny_model("phi3+long", torch.bfloat16).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def reply(engine: Engine, num_tokens: int) -> tuple[Any, int]:
    events = run(engine, tokens(num_tokens), max_tokens=4)
    return tokens_of(events), done(events).usage.cached_tokens


def test_each_set_of_factors_has_its_own_cache_and_no_sequence_outgrows_it(tmp_path: Path) -> None:
    folder, kv, roots, replies = folder_of(tmp_path / "phi"), tmp_path / "kv", [], []
    for context, restored in ((ORIGINAL, 0), (None, 0), (ORIGINAL, 19), (POSITIONS, 19), (ORIGINAL + 8, 19)):
        engine = load(folder, kv, block_size=BLOCK, context=context)
        assert engine.max_positions == (context or POSITIONS)
        roots.append(engine.cache.root)
        replies.append(reply(engine, BLOCK + 3))
        assert replies[-1][1] == restored
        assert engine.close()
    assert roots[0] == roots[2] != roots[1] == roots[3] == roots[4]
    assert replies[0][0] == replies[2][0]
    assert replies[1][0] == replies[3][0] == replies[4][0]
