"""The models of Meta."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import CHUNKED, FULL, first_of_each, rotary_layers, unless_set
from diskprefix.runtime.plan.families.types.model_type import NORMS, Experts, ModelType, Options, Rotation
from diskprefix.runtime.plan.part_options import ExpertsForm, Norms


def _rotary_and_mixtures(own: Options, _: Options) -> None:
    step, count = own["interleave_moe_layer_step"], own["num_hidden_layers"]
    own["no_rope_layers"] = own["no_rope_layers"] or rotary_layers(own)
    if own["moe_layers"] is None:
        own["moe_layers"] = [*range(step - 1, count, step)]


def _chunks_with_rotary(own: Options, _: Options) -> list[str]:
    return [CHUNKED if has_rotary else FULL for has_rotary in own["no_rope_layers"]]


LLAMA = ModelType()
LLAMA4 = ModelType(
    norms=Norms(after_rotary=True),
    query_key_norms="without_weights",
    rotary=Rotation(interleaved=True),
    experts=Experts(scores="sigmoid_of_chosen", shared="plain", weighs_rows=True, form=ExpertsForm(is_transposed=True)),
    names={
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.router",
        "mlp.shared_experts": "feed_forward.shared_expert",
    },
    derive=_rotary_and_mixtures,
    layer_types=_chunks_with_rotary,
)
CWM = ModelType(
    rotary=Rotation(
        defaults={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        }
    ),
    layer_types=first_of_each(4),
)
OPT_NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
OPT = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    position_offset=2,
    names={"norm": "final_layer_norm", **OPT_NAMES},
    biases=NORMS,
    derive=unless_set("word_embed_proj_dim", lambda own: own["hidden_size"]),
)
TYPES: Mapping[str, ModelType] = {"llama": LLAMA, "llama4_text": LLAMA4, "cwm": CWM, "opt": OPT}
