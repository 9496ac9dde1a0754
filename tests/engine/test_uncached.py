"""Models that bypass the cache answer as transformers' own `generate` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from diskprefix.engine.loop import Engine
from diskprefix.engine.sampler import Sampler
from diskprefix.errors import ModelError
from tests.engine.driving import Cancelled, tokens, tokens_of
from tests.engine.test_engine import done, load, run
from tests.model import tiny

NUM_TOKENS = 37
"""Two steps of the grid and a bit."""
REPLY = 8
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_XLSTM: dict[str, Any] = {"hidden_size": 64, "num_blocks": 2, "num_heads": 2, "qk_dim_factor": 0.5}
"""Sizes that transformers itself fails with."""
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": NUM_TOKENS + 3,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "recurrent_gemma": ("RecurrentGemmaConfig", _SIZES | {"num_hidden_layers": 3, "lru_width": 32}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    "rwkv": ("RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 2}),
    "minimax": ("MiniMaxConfig", _SIZES | {"num_local_experts": 4}),
    "deepseek_v32": (
        "DeepseekV32Config",
        _SIZES
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16}
        | {"index_topk": 16},
    ),
    "dynamic": (
        "LlamaConfig",
        _SIZES
        | {
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "longrope": (
        "Phi3Config",
        _SIZES
        | {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": NUM_TOKENS + 3,
            "rope_parameters": _LONGROPE,
        },
    ),
}


def write_folder(path: Path, kind: str) -> Path:
    """A model of that kind with random weights in float32."""
    name, sizes = (MODELS | {"xlstm": ("xLSTMConfig", _XLSTM)})[kind]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, name)(**(sizes | special | {"vocab_size": len(tiny.tokens())}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = load(write_folder(tmp_path / "model", request.param), tmp_path / "kv")
    yield engine
    engine.close()


def one_pass(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    keeps = model._supports_logits_to_keep()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, **({"logits_to_keep": 1} if keeps else {})).logits[0, -1]
    return logits


def test_the_reply_is_what_generate_gives(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    sample = Sampler.sample

    def spied(self: Sampler, logits: torch.Tensor, *given: Any) -> int:
        seen.append(logits.clone())
        return sample(self, logits, *given)

    monkeypatch.setattr(Sampler, "sample", spied)
    token_ids = tokens(NUM_TOKENS)
    ids = torch.from_numpy(token_ids).long().unsqueeze(0)
    # Without the tokens that would end a reply.
    special = range(len(tiny.SPECIAL_TOKENS))
    unwanted = dict.fromkeys(special, -100.0)
    events = run(engine, token_ids, max_tokens=REPLY, n=2, logit_bias=unwanted)
    expected = engine.model.generate(ids, max_new_tokens=REPLY, do_sample=False, bad_words_ids=[[t] for t in special])
    assert tokens_of(events) == tokens_of(events, 1) == expected[0, NUM_TOKENS:].tolist()
    assert torch.equal(seen[0], one_pass(engine.model, ids))
    assert (done(events).cache.miss_reason, done(events).usage.cached_tokens) == ("unsupported", 0)
    assert engine.cache.stats()["state"] == "unsupported"
    assert tokens_of(run(engine, token_ids, max_tokens=REPLY, logit_bias=unwanted)) == tokens_of(events)


def test_a_reply_can_be_cancelled_between_its_steps(tmp_path: Path) -> None:
    engine = load(write_folder(tmp_path / "model", "recurrent_gemma"), tmp_path / "kv")
    with pytest.raises(Cancelled):
        run(engine, tokens(NUM_TOKENS), steps=2)
    engine.close()


def test_a_model_that_transformers_cannot_run_step_by_step_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "xlstm")
    with pytest.raises(ModelError, match=r"^transformers cannot run xLSTMForCausalLM step by step: [^\n]+$"):
        load(folder, tmp_path / "kv")
    # The store was closed: it can be opened again.
    load(tiny.write_folder(tmp_path / "llama"), tmp_path / "kv").close()
