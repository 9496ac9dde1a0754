"""An option that a type does not declare changes nothing: transformers' modules do not read it either."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from diskprefix.runtime.files.fit import state_of
from diskprefix.runtime.files.kinds import kind_of_plan, plan_config
from diskprefix.runtime.load.plan_fingerprint import options as described
from diskprefix.runtime.plan.draft_layer import has_known_draft_layer, with_one_more
from diskprefix.runtime.plan.families.declared import read_undeclared
from diskprefix.runtime.plan.families.decoder_options import padded_tokens, sees_pictures_whole, without_plan
from diskprefix.runtime.plan.families.memory_layout import layout_of
from diskprefix.runtime.plan.families.rotary import rotary_of
from diskprefix.runtime.plan.families.slot_names import SlotNames, kept_in_float32
from diskprefix.runtime.plan.families.type_table import is_declared, options_of
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.model_config import ModelConfig
from diskprefix.runtime.plan.planned import config_of
from tests.exactness.architectures import ARCHITECTURES
from tests.runtime.plan.option_table import KNOWN, WHOLES, WITHOUT_CLASS

OLDER: dict[str, str] = {
    # What the classes make other options of, whether they declare it or not: `derived_options` and `rotary_options`.
    "first_k_dense_replace": "axk1 cohere2_moe exaone_moe kimi_linear",
    "full_attention_interval": "qwen3_5_moe_text qwen3_5_text qwen3_next",
    # With these, models of the type are refused: its published code reads them.
    **dict.fromkeys(("clip_qkv", "use_sliding_window"), "iquestcoder"),
    **dict.fromkeys(("mamba_conv_bias", "mamba_d_conv", "mamba_expand", "mamba_n_groups"), "nemotron_h"),
    "layers_block_type": "bamba falcon_h1 granitemoehybrid",
    "num_nextn_predict_layers": "step3p5",
    **dict.fromkeys(("rope_scaling", "rope_theta"), " ".join(TYPES)),
    "sliding_window_pattern": "cohere2 cohere2_moe exaone4 exaone_moe gemma3_text",
}
"""Options of other types that are read as older names, and where."""
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (7.5,),
    "causal_conv": (True,),
    "norm_type": ("layer",),
    "qk_norm_type": ("per_layer", "per_head"),
    "scoring_func": ("softmax",),
    "use_qk_norm": (True, False),
    "use_rope": (False,),
}
"""Options that published configurations have and no class declares, or only those of other types."""
ODD: dict[str, tuple[Any, ...]] = {
    "b": (True, False),
    "d": ({"odd": 1}, {}),
    "f": (0.37, 3.5),
    "i": (3, 5),
    "l": ([1, 0, 1, 1], [0.5, 2.0]),
    "s": ("odd", "greedy"),
    "n": (),
}
MINIMAX: dict[str, Any] = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}


@cache
def _values() -> dict[str, tuple[Any, ...]]:
    """The options of all types, with odd values of their types."""
    found: dict[str, tuple[Any, ...]] = {}
    for kind in TYPES:
        for name, (letters, default) in options_of(kind).items():
            odd = [one for letter in letters for one in ODD[letter] if one != default or isinstance(one, bool)]
            found[name] = tuple({repr(one): one for one in (*found.get(name, ()), *odd)}.values())
    assert {"sliding_window", "num_kv_shared_layers", "rope_interleave", "use_qk_norm"} <= found.keys()
    return found | PUBLISHED


def strays(kind: str) -> Iterator[dict[str, Any]]:
    """The options that a type lacks, all at once, with one odd value after the other."""
    others = {
        name: values
        for name, values in _values().items()
        if not is_declared(kind, name)
        and name not in read_undeclared(kind)
        and kind not in OLDER.get(name, "").split()
        and values
    }
    for number in range(max(map(len, others.values()))):
        yield {name: values[number % len(values)] for name, values in others.items()}


def everything(config: Any) -> dict[str, Any]:
    """All that is made of the configuration of a model."""
    text = config.get_text_config(decoder=True)
    if reason := without_plan(config):
        return {"reason": reason}
    layouts = [layout_of(config, "bfloat16", kv_type) for kv_type in ("auto", "q8")]
    names = SlotNames.of(text)
    slots = [f"layers.{number}." for number in range(text.num_hidden_layers)]
    parts = ("self_attn.sinks", "mlp.gate.e_score_correction_bias", "self_attn.q_norm")
    found = {
        "decoder": repr(described(config_of(config, "bfloat16", layouts[0], 16))),
        "places": repr([(one.places, one.states) for one in config_of(config, "bfloat16", layouts[0], 16).layers]),
        "layouts": [(one.describe(), one.layers) for one in layouts],
        "rotary": repr(described(rotary_of(text))),
        "slots": repr((names.own, names.experts, names.epsilons, names.with_bias, names.num_experts)),
        "flags": (names.has_plain_norms, names.has_transposed_matrices, names.hidden_size),
        "tensors": [names.has(slot, part) for slot in slots for part in parts],
        "float32": kept_in_float32(config),
        "pictures": (sees_pictures_whole(config), padded_tokens(config)),
        "positions": getattr(text, "max_position_embeddings", None),
        "kind": repr(kind_of_plan(config)) if isinstance(config, ModelConfig) else "",
    }
    if has_known_draft_layer(text.model_type):
        found["draft"] = layout_of(config, "bfloat16", with_draft_layer=True).describe()
        found["more"] = repr(with_one_more(text).num_hidden_layers)
    return found


@cache
def tiny_options(kind: str) -> dict[str, Any]:
    """The configuration of a tiny model of a type, or its defaults."""
    for architecture in ARCHITECTURES.values():
        text = architecture.build().get_text_config(decoder=True)
        if text.model_type == kind:
            return {name: one for name, one in text.to_diff_dict().items() if is_declared(kind, name)}
    return {}


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", TYPES)
def test_the_options_of_all_other_types_change_nothing(kind: str) -> None:
    given = {**tiny_options(kind), "model_type": kind}
    expected = everything(ModelConfig.of(given))
    for others in strays(kind):
        assert everything(ModelConfig.of({**others, **given})) == expected
        kept = ModelConfig.of({**others, **given}).to_dict()
        assert {name: kept[name] for name in PUBLISHED if name in others} == {
            name: others[name] for name in PUBLISHED if name in others
        }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3", "gemma3_text", "mamba2", "phi3"])
def test_nor_do_they_in_a_configuration_of_transformers(kind: str) -> None:
    """Models with encoders that have no entry in the table come with one."""
    given = tiny_options(kind)
    expected = everything(plan_config(CONFIG_MAPPING[kind].from_dict(given)))
    for others in strays(kind):
        stray = CONFIG_MAPPING[kind].from_dict(given)
        for name, value in others.items():
            if not hasattr(stray, name):
                setattr(stray, name, value)
        assert everything(plan_config(stray)) == expected


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", WHOLES.split())
def test_undeclared_options_of_a_model_with_encoders_change_nothing(kind: str) -> None:
    expected: dict[str, Any] = {}
    for number, others in enumerate([{}, *strays("llama")]):
        text = {name: value for name, value in others.items() if not _is_of_text(kind, name)}
        outer = {name: value for name, value in text.items() if not is_declared(kind, name)}
        levels = {} if number and _has_levels(kind) else {"deepstack_visual_indexes": [1, 2, 3]} if number else {}
        given = {"model_type": kind, "text_config": text or {}, "vision_config": levels}
        found = everything(ModelConfig.of({**outer, **given}))
        expected = expected or found
        assert found == expected


def _is_of_text(kind: str, name: str) -> bool:
    text: str = ModelConfig.of({"model_type": kind, "text_config": {}}).get_text_config().model_type
    is_older = text in OLDER.get(name, "").split()
    return is_older or is_declared(text, name) or name in read_undeclared(text)


def _has_levels(kind: str) -> bool:
    return bool(getattr(CONFIG_MAPPING[kind]().vision_config, "deepstack_visual_indexes", None))


def test_the_norms_of_minimax_m2_are_computed_once() -> None:
    """Its published configurations have options that its class does not declare."""
    given = {**tiny_options("minimax_m2"), "model_type": "minimax_m2"}
    config = ModelConfig.of({**given, **MINIMAX})
    decoder = config_of(config, "bfloat16", layout_of(config, "bfloat16"), 16)
    assert decoder.norms.query_key == "row"
    assert everything(config) == everything(ModelConfig.of(given))


@pytest.mark.parametrize("name", ["sliding_window", "num_kv_shared_layers"])
def test_the_memory_that_is_expected_has_no_options_of_other_types(name: str) -> None:
    given = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert state_of("it", {**given, name: 2}, 2) == state_of("it", given, 2)


# What the modules read although no class declares it.


@cache
def _reads(kind: str) -> set[str]:
    """The options that the modules of a type read, by the source of transformers."""
    of = CONFIG_MAPPING[kind]
    owner = next((found[of] for found in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING) if of in found), None)
    assert owner is not None or kind == "step3p5", kind
    module = of.__module__.replace("configuration_", "modeling_") if owner is None else _first(owner).__module__
    source = inspect.getsource(import_module(module))
    attention = [part for part in re.split(r"\nclass ", source) if re.match(r"\w*Attention\b", part)]
    read = r"getattr\((?:self\.)?config, \"(\w+)\""
    # Rotary positions ask every configuration for it.
    return {name for part in attention for name in re.findall(read, part)} | {
        name for name in re.findall(read, source) if name != "head_dim"
    }


def _first(owner: Any) -> Any:
    return owner[0] if isinstance(owner, tuple) else owner


IGNORED = {"olmoe": {"sliding_window"}}
"""Its modules hand the window to kernels, with a mask that has none: transformers' plain attention does not read it."""


@pytest.mark.parametrize("kind", sorted(TYPES.keys() - WITHOUT_CLASS))
def test_undeclared_options_that_modules_read_are_listed(kind: str) -> None:
    declared = {one.name for one in fields(CONFIG_MAPPING[kind])} | {*CONFIG_MAPPING[kind].attribute_map}
    lacking = _reads(kind) - declared - set(OPTIONS_MADE.get(kind, "").split())
    assert (lacking & KNOWN) - IGNORED.get(kind, set()) == {*read_undeclared(kind)} & {"head_dim"}


OPTIONS_MADE = {"axk1": "head_dim", "cohere2": "head_dim", "cohere_compass_text": "head_dim"}
"""What the classes make of others, and whose own value they do not take."""


def test_a_head_of_another_size_is_that_of_the_modules() -> None:
    for kind in (one for one in TYPES if "head_dim" in read_undeclared(one)):
        theirs = CONFIG_MAPPING[kind].from_dict({**tiny_options(kind), "head_dim": 32})
        ours = ModelConfig.of({**tiny_options(kind), "head_dim": 32, "model_type": kind})
        with torch.device("meta"):
            modules = _first(MODEL_MAPPING[CONFIG_MAPPING[kind]])(theirs)
        assert {32} == {one.head_dim for one in modules.modules() if type(one).__name__.endswith("Attention")}, kind
        assert everything(ours) == everything(theirs) | {"kind": everything(ours)["kind"]}
