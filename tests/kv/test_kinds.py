"""Our layers answer what transformers' own would, for every kind of state; what cannot be cached is found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.model.exact.self_check import rehearse
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, SIZES, VOCAB, Runner, random_prompt, tiny_llama, tiny_settings

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


ORIGINAL = 4 * BLOCK
"""Positions that the scaled kinds of RoPE start from."""
HEAD = 16
STATIC: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "proportional": {},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
MOVING: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [2.0] * (HEAD // 2),
        "original_max_position_embeddings": ORIGINAL,
    },
}


def llama_with(rope_type: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | (STATIC | MOVING)[rope_type]
    positions = ORIGINAL if rope_type == "dynamic" else 4 * ORIGINAL
    config = LlamaConfig(**SIZES, max_position_embeddings=positions, rope_parameters=rope)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("rope_type", [*STATIC, *MOVING])
def test_a_rope_that_depends_on_the_run_is_not_cached(rope_type: str) -> None:
    """A static one gives each position its own angles, so a prefix is the same in each run."""
    reasons = (f"{rope_type} RoPE",) if rope_type in MOVING else ()
    assert rehearse(llama_with(rope_type)).unsupported == reasons


def test_every_kind_of_rope_that_transformers_knows_was_looked_at() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {"default", *ROPE_INIT_FUNCTIONS} == STATIC.keys() | MOVING.keys()


def test_a_rope_of_one_kind_of_layer_counts() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=HEAD,
        layer_types=["full_attention", "full_attention"],
        max_position_embeddings=ORIGINAL,
        rope_parameters={"full_attention": plain | {"rope_type": "dynamic", "factor": 4.0}, "sliding_attention": plain},
    )
    assert rehearse(Gemma3ForCausalLM(config).eval()).unsupported == ("dynamic RoPE",)


def test_a_model_without_rope_is_cached() -> None:
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=100)).eval()
    layout = rehearse(model)
    assert (layout.unsupported, len(layout.layers), layout.vocab_size) == ((), 2, 100)


def test_a_model_that_fails_when_it_is_asked_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(model.model, "forward", broken)
    assert rehearse(model).unsupported == ("LlamaForCausalLM: ValueError: no such thing",)


def test_a_model_that_leaves_its_cache_empty_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    forward = model.model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **(kwargs | {"past_key_values": None}))

    monkeypatch.setattr(model.model, "forward", forgetful)
    assert rehearse(model).unsupported == ("LlamaForCausalLM leaves layers of its cache empty",)


def test_running_out_of_memory_is_not_taken_for_an_unknown_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()

    def starved(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.model, "forward", starved)
    with pytest.raises(torch.OutOfMemoryError):
        rehearse(model)


def layout_of(*windows: int | None, state: int = 0) -> Layout:
    """Of each layer 8 bytes for each token, of those with a window only under it, and in all so many bytes of states,
    a multiple of 4."""
    tensors = [TensorSpec(i, "keys", 1, 4, torch.bfloat16, window) for i, window in enumerate(windows)]
    states = (StateGroup((StateSpec(0, "recurrent", 0, (state // 4,), torch.float32),)),) if state else ()
    layers = tuple(LayerSpec("full" if window is None else "sliding", window) for window in windows)
    return Layout(layers, tuple(Group((spec,)) for spec in tensors), VOCAB, torch.bfloat16, states=states)


def test_a_prefix_is_restorable_at_any_token_or_block_or_at_checkpoints() -> None:
    assert layout_of(None).state_kind == "sliceable"
    assert layout_of(None, 4).state_kind == "sliceable"
    assert replace(layout_of(None), exact_at="token").state_kind == "token"
    assert layout_of(None, state=16).state_kind == "checkpoints"
    assert replace(layout_of(None, state=16), exact_at="token").state_kind == "token_checkpoints"
    assert layout_of(state=16).state_kind == "checkpoints"


@pytest.mark.parametrize(
    ("windows", "num_tokens", "num_bytes"),
    [
        ((None,), 10, 80),
        ((None, None), 10, 160),
        # The token that is computed next is under the window too.
        ((None, 4), 10, 80 + 3 * 8),
        ((None, 4), 3, 24 + 24),
        ((None, 4), 2, 16 + 16),
        ((4,), 1000, 3 * 8),
        ((1,), 10, 0),
        ((None, 4), 0, 0),
        ((), 10, 0),
    ],
)
def test_what_is_loaded_for_a_token_is_what_lies_under_the_windows(
    windows: tuple[int | None, ...], num_tokens: int, num_bytes: int
) -> None:
    assert layout_of(*windows).loaded_bytes(num_tokens) == num_bytes
