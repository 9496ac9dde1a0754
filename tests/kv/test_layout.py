"""Which models are cached, and that those which are not say why; and what the state of a layout weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from diskprefix.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.model.exact.self_check import rehearse
from tests.runner import BLOCK, VOCAB, tiny_llama

ORIGINAL = 4 * BLOCK
"""Positions that the scaled kinds of RoPE start from."""
HEAD = 16
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
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
