"""The architectures whose tokens have the same bits in every step, with our operators.

`tools/bench exactness` verifies each of them in bfloat16 and in float32. Their modules in transformers compute a row
from that row alone, but for attention and recurrences, which are ours. A model of any other architecture is exact on
the grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = """
    afmoe apertus arcee aria_text axk1 bailing_hybrid bamba beam biogpt bitnet cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama
    llama4_text longcat_flash mamba2 mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral
    mistral4 mixtral modernbert-decoder nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 step3p5
    vaultgemma youtu zamba2
"""
"""By the `model_type` of their text decoder in transformers."""

_VERIFIED = frozenset(MODEL_TYPES.split())


def is_verified(model: PreTrainedModel) -> bool:
    """Returns whether the model is of a verified architecture, and its class that of transformers."""
    model_type = model.config.get_text_config(decoder=True).model_type
    return model_type in _VERIFIED and type(model).__module__.startswith("transformers.")
