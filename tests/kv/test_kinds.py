"""Our layers answer what transformers' own would, for every kind of state; and what cannot be cached is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.model.exact.self_check import rehearse
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, Runner, random_prompt, tiny_settings

STEPS = (16, 16, 16, 7, 1, 1)
TOKENS = torch.from_numpy(random_prompt(5, sum(STEPS))).long().unsqueeze(0)
KINDS = {
    "llama": {"full"},
    "gemma3": {"sliding", "full"},
    "llama4": {"sliding", "full"},
    "gemma3n": {"sliding", "full", "none"},
    "deepseek_v3": {"full"},
    "qwen3_next": {"linear", "full"},
    "lfm2": {"linear", "full"},
    "mamba2": {"linear"},
    "falcon_h1": {"linear+full"},
    "inkling_text": {"linear+full", "linear+sliding"},
    "nemotron_h": {"linear", "full", "none"},
    "qwen3_moe": {"full"},
}


def stepwise(arena: KVArena, model: PreTrainedModel) -> list[torch.Tensor]:
    """Next-token logits after each of the steps."""
    arena.truncate(0)
    arena.reserve(TOKENS.shape[1])
    parts = torch.split(TOKENS, list(STEPS), dim=1)
    with torch.inference_mode():
        return [arena.forward(model, part) for part in parts]


def stepwise_on_transformers(model: PreTrainedModel, layout: Layout) -> list[torch.Tensor]:
    cache, logits, start = DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for part in torch.split(TOKENS, list(STEPS), dim=1):
            positions = torch.arange(start, start + part.shape[1]).unsqueeze(0)
            call: dict[str, Any] = {layout.cache_argument: cache, "use_cache": True}
            options = {"position_ids": positions, "logits_to_keep": 1}
            call |= {option: options[option] for option in layout.options}
            logits.append(model(input_ids=part, **call).logits[0, -1])
            start += part.shape[1]
    return logits


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_our_layers_answer_what_transformers_own_do(name: str, dtype: torch.dtype) -> None:
    """Windows that wrap, also within a step; states; shared layers."""
    model = tiny_model(name, dtype)
    layout = rehearse(model)
    assert {spec.kind for spec in layout.layers} == KINDS[name]
    ours, theirs = stepwise(KVArena(layout, model.device), model), stepwise_on_transformers(model, layout)
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(mine, their)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "mamba2"])
def test_an_arena_can_be_used_again(name: str) -> None:
    model = tiny_model(name, torch.float32)
    arena = KVArena(rehearse(model), model.device)
    first = stepwise(arena, model)
    assert all(map(torch.equal, first, stepwise(arena, model)))


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "falcon_h1"])
def test_an_arena_grows_in_the_middle_of_a_step(name: str) -> None:
    """As when `generate` goes on where nobody has reserved memory."""
    model = tiny_model(name, torch.float32)
    layout = rehearse(model)
    arena, small = KVArena(layout, model.device), KVArena(layout, model.device, capacity_step=1)
    expected = stepwise(arena, model)
    with torch.inference_mode():
        small.reserve(3)
        parts = torch.split(TOKENS, list(STEPS), dim=1)
        found = [small.forward(model, part) for part in parts]
    assert small.capacity < arena.capacity
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("recurrent_gemma", ("RecurrentGemmaForCausalLM keeps state outside its cache",)),
        ("deepseek_v4", ("DeepseekV4CSACache", "DeepseekV4HCACache")),
        ("deepseek_v32", ("DynamicIndexedLayer",)),
        ("minimax", ("MiniMaxForCausalLM has a cache of its own",)),
        ("rwkv", ("RwkvForCausalLM takes no past_key_values",)),
        ("mamba", ("MambaForCausalLM adds tokens to a state only one by one",)),
        ("jamba", ("JambaForCausalLM adds tokens to a state only one by one",)),
    ],
)
def test_a_model_that_cannot_be_restored_is_found_out(name: str, reasons: tuple[str, ...]) -> None:
    assert rehearse(tiny_model(name, torch.float32)).unsupported == reasons


def test_a_model_that_looks_ahead_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix has no state of its own where attention goes both ways."""
    model = tiny_model("llama", torch.float32)
    forward = model.model.embed_tokens.forward

    def with_a_glance_ahead(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = forward(ids)
        return embedded + 0.1 * embedded.mean(dim=1, keepdim=True) if ids.shape[1] > 5 else embedded

    monkeypatch.setattr(model.model.embed_tokens, "forward", with_a_glance_ahead)
    assert rehearse(model).unsupported == ("LlamaForCausalLM looks at what comes later",)


def test_a_model_that_starts_each_step_at_position_0_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    forward = model.model.rotary_emb.forward

    def from_zero(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(x, position_ids=position_ids - position_ids.min())

    monkeypatch.setattr(model.model.rotary_emb, "forward", from_zero)
    assert rehearse(model).unsupported == ("LlamaForCausalLM does not continue a sequence step by step",)


def test_a_class_that_inherits_from_a_known_one_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger(DynamicLayer):  # type: ignore[misc]
        """It may keep more."""

    from transformers import cache_utils

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Stranger)
    assert rehearse(tiny_model("llama", torch.float32)).unsupported == ("Stranger",)


def test_a_restore_loads_only_the_blocks_under_a_window(tmp_path: Path) -> None:
    """Of the layers with a window; the others need everything."""
    runner = Runner(tiny_model("gemma3", torch.float32), tiny_settings(tmp_path))
    prompt = random_prompt(1, 20 * BLOCK + 3)
    runner.run(prompt, "full")
    runner.reopen()
    runner.run(prompt[: 16 * BLOCK + 1].copy(), "full")
    (window,) = {group.window for group in runner.layout.groups if group.window}
    full = sum(group.bytes_per_token for group in runner.layout.groups if group.window is None)
    sliding = runner.layout.bytes_per_token - full
    blocks_under = -(-(window - 1) // BLOCK)
    assert runner.cache.stats()["restored_bytes"] == BLOCK * (16 * full + blocks_under * sliding)
    runner.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "deepseek_v3"])
def test_a_rehearsed_layout_is_remembered_for_the_numbers_it_was_made_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model(name, torch.float32)
    first = rehearse(model, identity="these weights")
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: None)
    assert rehearse(model, identity="these weights") == first
    assert not first.unsupported
    assert rehearse(model, identity="other weights").unsupported
    memo = tmp_path / "diskprefix" / "self_checks.json"
    memo.write_text(memo.read_text().replace("layers", "strata"))
    assert rehearse(model, identity="these weights").unsupported
