"""Our layers answer what transformers' own would, for every kind of state; what cannot be cached is found out."""

from __future__ import annotations

from collections.abc import Callable
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
    cache_utils,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.prefixstore.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.grid.cache_argument import CACHE_ARGUMENTS, cache_argument
from diskprefix.runtime.grid.rehearsal import rehearse
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, SIZES, VOCAB, Runner, random_prompt, tiny_llama, tiny_settings
from tests.steps import forward

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


def stepwise(sequence: KVSequence, model: PreTrainedModel) -> list[torch.Tensor]:
    """Next-token logits after each of the steps."""
    return [forward(model, sequence, part)[-1] for part in torch.split(TOKENS, list(STEPS), dim=1)]


def stepwise_on_transformers(model: PreTrainedModel, layout: Layout) -> list[torch.Tensor]:
    cache, logits, start = DynamicCache(config=model.config), [], 0
    argument = cache_argument(type(model).forward)
    assert argument is not None
    with torch.inference_mode():
        for part in torch.split(TOKENS, list(STEPS), dim=1):
            positions = torch.arange(start, start + part.shape[1]).unsqueeze(0)
            call: dict[str, Any] = {argument: cache, "use_cache": True}
            options = {"position_ids": positions, "logits_to_keep": 1}
            call |= {option: options[option] for option in layout.options}
            logits.append(model(input_ids=part, **call).logits[0, -1])
            start += part.shape[1]
    return logits


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_our_layers_answer_what_transformers_own_do(name: str, dtype: torch.dtype) -> None:
    """Windows that slide, also within a step; states; shared layers. In fresh memory, and in memory used before."""
    model = tiny_model(name, dtype)
    layout = rehearse(model)
    assert {spec.kind for spec in layout.layers} == KINDS[name]
    theirs = stepwise_on_transformers(model, layout)
    pool = PagePool(layout, block_size=BLOCK)
    for _ in range(2):
        sequence = KVSequence(pool)
        assert all(map(torch.equal, stepwise(sequence, model), theirs))
        sequence.close()
    assert pool.used_bytes == 0


Patch = pytest.MonkeyPatch


def looking_ahead(patch: Patch) -> PreTrainedModel:
    """A prefix has no state of its own where attention goes both ways."""
    model = tiny_model("llama", torch.float32)
    forward = model.model.embed_tokens.forward

    def with_a_glance_ahead(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = forward(ids)
        return embedded + 0.1 * embedded.mean(dim=1, keepdim=True) if ids.shape[1] > 5 else embedded

    patch.setattr(model.model.embed_tokens, "forward", with_a_glance_ahead)
    return model


def from_position_0(patch: Patch) -> PreTrainedModel:
    """Each step begins there."""
    model = tiny_model("llama", torch.float32)
    forward = model.model.rotary_emb.forward

    def from_zero(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(x, position_ids=position_ids - position_ids.min())

    patch.setattr(model.model.rotary_emb, "forward", from_zero)
    return model


def with_a_stranger(patch: Patch) -> PreTrainedModel:
    """A class that inherits from a known one may keep more."""
    stranger = type("Stranger", (DynamicLayer,), {})
    patch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", stranger)
    return tiny_model("llama", torch.float32)


def failing(patch: Patch) -> PreTrainedModel:
    model = tiny_llama()

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError("no such thing\nand more")

    patch.setattr(model.model, "forward", broken)
    return model


def forgetful(patch: Patch) -> PreTrainedModel:
    model = tiny_llama()
    forward = model.model.forward
    patch.setattr(
        model.model,
        "forward",
        lambda *args, **more: forward(*args, **(more | dict.fromkeys(CACHE_ARGUMENTS & more.keys()))),
    )
    return model


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        ("recurrent_gemma", ("RecurrentGemmaForCausalLM keeps state outside its cache",)),
        ("deepseek_v4", ("DeepseekV4CSACache", "DeepseekV4HCACache")),
        ("deepseek_v32", ("DynamicIndexedLayer",)),
        ("minimax", ("MiniMaxForCausalLM has a cache of its own",)),
        ("rwkv", ("RwkvForCausalLM takes no cache",)),
        ("mamba", ("MambaForCausalLM adds tokens to a state only one by one",)),
        ("jamba", ("JambaForCausalLM adds tokens to a state only one by one",)),
        (looking_ahead, ("LlamaForCausalLM looks at what comes later",)),
        (from_position_0, ("LlamaForCausalLM does not continue a sequence step by step",)),
        (with_a_stranger, ("Stranger",)),
        (failing, ("LlamaForCausalLM: ValueError: no such thing",)),
        (forgetful, ("LlamaForCausalLM leaves layers of its cache empty",)),
    ],
)
def test_a_model_that_cannot_be_restored_is_found_out(
    model: str | Callable[[Patch], PreTrainedModel], reasons: tuple[str, ...], monkeypatch: Patch
) -> None:
    made = tiny_model(model, torch.float32) if isinstance(model, str) else model(monkeypatch)
    assert rehearse(made).unsupported == reasons


def test_running_out_of_memory_is_not_taken_for_an_unknown_model(monkeypatch: Patch) -> None:
    model = tiny_llama()

    def starved(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.model, "forward", starved)
    with pytest.raises(torch.OutOfMemoryError):
        rehearse(model)


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
    memo = tmp_path / "diskprefix" / "rehearsals.json"
    memo.write_text(memo.read_text().replace("layers", "strata"))
    assert rehearse(model, identity="these weights").unsupported


ORIGINAL = 4 * BLOCK
"""Positions that the scaled kinds of RoPE start from."""
HEAD = 16
OPTIONS: dict[str, Any] = {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [2.0] * (HEAD // 2), "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
MOVING = ("dynamic", "longrope")


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_rope_that_depends_on_the_run_is_not_cached(rope_type: str) -> None:
    """A static one gives each position its own angles, so a prefix is the same in each run."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | OPTIONS
    if rope_type == "dynamic":
        del rope["original_max_position_embeddings"]
    config = LlamaConfig(**SIZES, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    reasons = (f"{rope_type} RoPE",) if rope_type in MOVING else ()
    assert rehearse(LlamaForCausalLM(config).eval()).unsupported == reasons


def test_every_kind_of_rope_that_transformers_knows_was_looked_at() -> None:
    assert ROPE_INIT_FUNCTIONS.keys() == {"linear", "proportional", "yarn", "llama3", *MOVING}


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


def layout_of(*windows: int | None, state: int = 0) -> Layout:
    """Of each layer 8 bytes for each token, of those with a window only under it, and in all so many bytes of states,
    a multiple of 4."""
    tensors = [TensorSpec(i, "keys", 1, 4, "bfloat16", window) for i, window in enumerate(windows)]
    states = (StateGroup((StateSpec(0, "recurrent", 0, (state // 4,), "float32"),)),) if state else ()
    layers = tuple(LayerSpec("full" if window is None else "sliding", window) for window in windows)
    return Layout(layers, tuple(Group((spec,)) for spec in tensors), VOCAB, "bfloat16", states=states)


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
