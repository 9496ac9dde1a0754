"""The layer that predicts further tokens has the numbers of the checkpoint, from a folder and from a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForConditionalGeneration
from transformers.modeling_layers import MtpModel

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.native.library import operators
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.planned import plan_layout
from diskprefix.runtime.plan.weights import Weights
from tests.arrays import tensor_of
from tests.runtime.plan import tiny
from tests.runtime.plan.gguf_files import stored, written
from tests.runtime.plan.tensor_weights import require_numbers
from tools.benchmarks.file_models import CASES, DENSE

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(operators() is None, reason="only models that are exact at every token use the layer"),
]

LAYERS, HEADS, KV_HEADS, WIDTH, ROTARY, LATENT = 2, 4, 2, 32, 8, 32
LAYER = "draft_layer."
State = dict[str, torch.Tensor]
Values = dict[str, Any]
SMALL: Values = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": LAYERS,
    "vocab_size": len(tiny.tokens()),
}  # fmt: skip
ROPE: Values = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": ROTARY / WIDTH}
HYBRID: Values = {
    "head_dim": WIDTH, "layer_types": ["full_attention"] * LAYERS, "shared_expert_intermediate_size": 64,
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
LATENT_SIZES: Values = {
    "q_lora_rank": LATENT, "kv_lora_rank": LATENT, "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": WIDTH,
    "v_head_dim": WIDTH, "num_key_value_heads": HEADS, "rope_parameters": {"rope_type": "default"},
}  # fmt: skip
MIMO: Values = {
    "head_dim": WIDTH, "v_head_dim": WIDTH, "num_key_value_heads": 1, "sliding_window": 17,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
}  # fmt: skip
MIXTURE: Values = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
SIGMOIDS: Values = MIXTURE | {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
SHARED: Values = {"expert_shared_count": 1, "leading_dense_block_count": 1}
DELTA: Values = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
    "attention.recurrent_layers": [False] * (LAYERS + 1), "rope.dimension_count": ROTARY,
}  # fmt: skip
SECTIONS: Values = {"rope.dimension_sections": [2, 1, 1, 0]}
SHARED_BESIDE: Values = {"expert_shared_feed_forward_length": 64}
LATENTS: Values = {
    "attention.q_lora_rank": LATENT, "attention.kv_lora_rank": LATENT, "attention.head_count_kv": 1,
    "attention.key_length": LATENT + WIDTH, "attention.value_length": LATENT, "rope.dimension_count": WIDTH,
    "attention.key_length_mla": 2 * WIDTH, "attention.value_length_mla": WIDTH,
}  # fmt: skip
WINDOWS: Values = {
    "rope.dimension_count": ROTARY, "rope.freq_base_swa": 10000.0, "attention.value_scale": 0.707,
    "attention.sliding_window": 16, "attention.head_count_kv": [1, 2, 2, 2, 2],
    "attention.sliding_window_pattern": [0, 1, 1, 1, 1], "nextn_predict_layers": 3, "block_count": LAYERS + 3,
}  # fmt: skip
FAMILIES: dict[str, tuple[Values, Values]] = {
    "qwen35": (HYBRID, DELTA | SECTIONS),
    "qwen35moe": (HYBRID, DELTA | SECTIONS | MIXTURE | SHARED_BESIDE),
    "qwen3next": (HYBRID | {"rope_parameters": ROPE}, DELTA | MIXTURE | SHARED_BESIDE),
    "deepseek2/v3": (
        LATENT_SIZES,
        LATENTS | SIGMOIDS | SHARED | {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "deepseek2/glm-4.7-flash": (LATENT_SIZES, LATENTS | SIGMOIDS | SHARED | {"expert_weights_scale": 1.8}),
    "glm4moe": (
        {"head_dim": WIDTH, "rope_parameters": ROPE},
        SIGMOIDS | SHARED | {"rope.dimension_count": ROTARY},
    ),
    "mimo2": (MIMO, SIGMOIDS | WINDOWS | {"expert_weights_scale": 1.0}),
}
"""By the names of `CASES`: what configurations have beside `SMALL`, and the metadata of files."""
OWN = {
    "fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm", "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "final_layernorm": "layer_output_norm",
    "embed_tokens": "nextn.embed_tokens", "shared_head.head": "nextn.shared_head_head",
}  # fmt: skip
"""Names of the hub and of files (llama.cpp's converter)."""


def write_folder(path: Path, family: str) -> Path:
    case, sizes = CASES[family], FAMILIES[family][0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.kind, **(DENSE | case.sizes | SMALL | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    state = case.change(load_file(path / "model.safetensors"))
    if case.change.__name__ == "further_layer":
        state |= {f"model.layers.{LAYERS}.embed_tokens.weight": state["model.embed_tokens.weight"].clone()}
        state |= {f"model.layers.{LAYERS}.shared_head.head.weight": state["lm_head.weight"].clone()}
    rounded = {name: torch.randn_like(tensor).bfloat16().float() for name, tensor in state.items()}
    save_file(rounded, path / "model.safetensors", {"format": "pt"})
    return path


def blocks_of(state: State) -> State:
    """The tensors of a checkpoint as those of blocks, without the ending of the name."""
    found = State()
    for name, tensor in state.items():
        name = re.sub(r"model\.mtp\.layers\.(\d+)", lambda one: f"model.layers.{LAYERS + int(one[1])}", name)
        name = re.sub(r"^mtp\.(layers\.0\.)?", f"model.layers.{LAYERS}.", name)
        found[name] = tensor
    return found


def tensors_in(folder: Path, architecture: str) -> State:
    own, usual = State(), State()
    for name, tensor in sorted(blocks_of(load_file(folder / "model.safetensors")).items()):
        stem, _, end = name.rpartition(".")
        _, _, layer, part = [*stem.split(".", 3), "", "", ""][:4]
        if part not in OWN:
            usual[name] = tensor
            continue
        # llama.cpp's converter adds one to these norms.
        is_less = architecture.startswith("qwen3") and "norm" in part
        own[f"blk.{layer}.{OWN[part]}.{end}"] = tensor + 1 if is_less else tensor
    return stored(usual, architecture, LAYERS + 3) | own


def write_file(
    path: Path, folder: Path, family: str, quantised: str = "", changes: Mapping[str, torch.Tensor | None] | None = None
) -> Path:
    """`changes` are tensors, or None for those that the file lacks."""
    architecture, config = family.partition("/")[0], AutoConfig.from_pretrained(folder)
    values = {
        "block_count": LAYERS + 1, "nextn_predict_layers": 1, "rope.freq_base": 10000.0,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": WIDTH, "attention.value_length": WIDTH,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    tensors = tensors_in(folder, architecture) | dict(changes or {})
    # llama.cpp writes no matrix of one row.
    kept = {name: one[0] if len(one) == 1 else one for name, one in tensors.items() if one is not None}
    kind = gguf.GGMLQuantizationType[quantised or "F32"]
    return written(path, architecture, config, values | FAMILIES[family][1], kept, kind)


def loaded(path: Path, lines: list[str] | None = None, **settings: Any) -> LoadedModel:
    return load_model(Settings(model=str(path), **settings), ([] if lines is None else lines).append)


def weights_in(loaded: LoadedModel) -> Weights:
    assert loaded.weights is not None
    return loaded.weights


def draft_layer(loaded: LoadedModel) -> State:
    """The weights of the layer that a plan has: parameters, and packed quants."""
    return {name.removeprefix(LAYER): tensor for name, tensor in tensors_of(loaded).items() if name.startswith(LAYER)}


def tensors_of(loaded: LoadedModel) -> State:
    return {name: tensor_of(array) for name, array in weights_in(loaded).named()}


def require_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].squeeze().float(), tensor.squeeze().float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_a_file_give_the_same_layer(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", family)
    file = write_file(tmp_path / "tiny.gguf", folder, family)
    of_folder, of_file = loaded(folder), loaded(file, weights="native", dtype="float32")
    require_equal(draft_layer(of_file), draft_layer(of_folder))
    joining = (one for name, one in load_file(folder / "model.safetensors").items() if re.search(r"eh_proj|fc\.", name))
    assert torch.equal(draft_layer(of_folder)["eh_proj.weight"], next(joining))
    for one in (of_folder, of_file):
        taken = sum({part.ctypes.data: part.nbytes for _, part in weights_in(one).named()}.values())
        assert one.fit.needs.weights_bytes == pytest.approx(taken, rel=0.01)


@pytest.mark.cases(7)
@pytest.mark.parametrize("weights", ["auto", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_last_norm_replaces_a_missing_norm_of_the_draft_layer(
    family: str, weights: str, tmp_path: Path
) -> None:
    """As llama.cpp does."""
    folder = write_folder(tmp_path / "tiny", family)
    norm = "layer_output_norm" if family == "mimo2" else "nextn.shared_head_norm"
    lacking: dict[str, torch.Tensor | None] = {f"blk.{LAYERS}.{norm}.weight": None}
    assert lacking.keys() <= tensors_in(folder, family.partition("/")[0]).keys()
    file = write_file(tmp_path / "tiny.gguf", folder, family, "Q8_0", lacking)
    found, whole = tensors_of(loaded(file, weights=weights)), tensors_of(loaded(folder))
    expected = found["norm.weight"]
    assert torch.equal(found[f"{LAYER}post_norm.weight"], expected)
    assert not torch.equal(expected, whole[f"{LAYER}post_norm.weight"].to(expected.dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_quants_of_the_layer_stay_as_the_file_has_them(family: str, tmp_path: Path) -> None:
    file = write_file(tmp_path / "tiny.gguf", write_folder(tmp_path / "tiny", family), family, "Q8_0")
    weights, plain = weights_in(loaded(file)), weights_in(loaded(file, weights="native"))
    assert isinstance(weights, GgufWeights)
    kept = {name: one for name, one in weights._quants.items() if name.startswith(LAYER)}
    assert {*kept} >= {f"{LAYER}eh_proj", f"{LAYER}mtp_block.self_attn.o_proj"}
    kept = {name: one for name, one in kept.items() if ".kv_b_proj." not in name}  # no parameter has one half
    require_numbers(kept, plain.tensor, ExpertsForm())


@pytest.mark.parametrize("family", ["deepseek2/v3", "glm4moe"])
def test_the_draft_layer_has_the_weights_that_transformers_loads(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", family)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # transformers knows the layer by its number in the models of the hub.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    expected = MtpModel.from_pretrained(main).layers[0].state_dict()
    require_equal(draft_layer(loaded(folder)), expected)


@pytest.mark.parametrize("name", ["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])
def test_the_layer_of_a_model_with_pictures_is_a_part_of_its_decoder(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", "qwen35")
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=sizes)
    whole = Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.float32)
    state = load_file(folder / "model.safetensors")
    parts = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    whole.save_pretrained(tmp_path / "whole")
    tiny.tokenizer().save_pretrained(tmp_path / "whole")
    save_file(whole.state_dict() | parts, tmp_path / "whole/model.safetensors", {"format": "pt"})
    (tmp_path / "whole/config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    require_equal(draft_layer(loaded(tmp_path / "whole")), draft_layer(loaded(folder)))


@pytest.mark.parametrize("family", ["qwen35moe", "deepseek2/v3", "mimo2"])
def test_an_unused_draft_layer_takes_no_memory(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "tiny", family)
    file = write_file(tmp_path / "tiny.gguf", folder, family)
    wanted = [loaded(one, dtype="float32") for one in (folder, file)]
    monkeypatch.setattr(Settings, "uses_draft_layer", False)
    lines = list[str]()
    for one, other in zip(wanted, (folder, file), strict=True):
        plain = loaded(other, lines, dtype="float32")
        assert plain.fit.needs.weights_bytes < one.fit.needs.weights_bytes
        others = {name: tensor for name, tensor in tensors_of(one).items() if not name.startswith(LAYER)}
        require_equal(tensors_of(plain), others)
        for found in (one, plain):
            pool = PagePool(plan_layout(weights_in(found), found.config), block_size=256)
            state = found.fit.needs.state
            for num_tokens in (100, 1000, 5000):
                assert pool.sequence_bytes(num_tokens) == state.num_bytes(num_tokens)
    assert any("of its blocks predict further tokens, which is not used" in line for line in lines)


def changed(folder: Path, change: Callable[[State], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_a_checkpoint_that_counts_a_draft_layer_but_lacks_it_is_served_without_drafts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", "glm4moe")
    changed(folder, lambda state: [state.pop(name) for name in [*state] if f"layers.{LAYERS}." in name])
    lines = list[str]()
    for one in (folder, write_file(tmp_path / "tiny.gguf", folder, "glm4moe")):
        assert not weights_in(loaded(one, lines)).has_draft_layer
    assert "tiny.gguf: 1 of its blocks predict further tokens, which is not used" in lines


def test_on_the_grid_it_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = write_folder(tmp_path / "tiny", "glm4moe")
    for one in (folder, write_file(tmp_path / "tiny.gguf", folder, "glm4moe")):
        caplog.clear()
        assert loaded(one, dtype="float16").weights is None
        assert "its draft layer is not used" in caplog.text


DAMAGED = ("eh_proj.weight", "hnorm.weight", "self_attn.q_proj.bias", "mlp.experts.3.up_proj.weight", "mlp.gate.weight")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_folder_with_a_part_of_the_layer_is_refused(name: str, tmp_path: Path) -> None:
    folder, name = write_folder(tmp_path / "tiny", "glm4moe"), f"model.layers.{LAYERS}.{name}"
    changed(folder, lambda state: state.update({name: state[name][1:].clone()}))
    with pytest.raises(ModelError, match=r"draft_layer|layers\.2\.") as refused:
        loaded(folder)
    assert "\n" not in refused.value.message
    changed(folder, lambda state: state.pop(name))
    with pytest.raises(ModelError, match=r"draft_layer|layers\.2\.") as refused:
        loaded(folder)
    assert "\n" not in refused.value.message


IN_FILES = ("nextn.eh_proj.weight", "nextn.hnorm.weight", "attn_q.bias", "ffn_down_exps.weight", "ffn_gate_inp.weight")


@pytest.mark.cases(3)
@pytest.mark.parametrize("weights", ["auto", "native"])
@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_with_a_part_of_the_layer_is_refused(name: str, weights: str, tmp_path: Path) -> None:
    folder, name = write_folder(tmp_path / "tiny", "glm4moe"), f"blk.{LAYERS}.{name}"
    cut = tensors_in(folder, "glm4moe")[name][1:]
    for tensor, said in ((None, f"the file lacks the tensor {name}"), (cut, r"draft_layer|layers\.2\.")):
        file = write_file(tmp_path / "tiny.gguf", folder, "glm4moe", "Q8_0", {name: tensor})
        with pytest.raises(ModelError, match=said) as refused:
            loaded(file, weights=weights)
        assert "\n" not in refused.value.message
    file = write_file(tmp_path / "tiny.gguf", folder, "glm4moe", "", {f"blk.{LAYERS}.of_tomorrow.weight": cut})
    with pytest.raises(ModelError, match=r"nothing in the model takes these tensors of the file: blk\.2\.of_tomorrow"):
        loaded(file, weights=weights)
