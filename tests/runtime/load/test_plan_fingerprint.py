"""The root of a plan has what changes its bits: weights, options, forms and bits; no sources, versions or threads."""

from __future__ import annotations

import copy
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct, defstruct
from msgspec.structs import replace
from transformers import CONFIG_MAPPING

from diskprefix.identity import Fingerprint, is_outdated
from diskprefix.native import address_of
from diskprefix.native.library import operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.load import bits, plan_fingerprint
from diskprefix.runtime.load.plan_fingerprint import fingerprint_of_plan, options
from diskprefix.runtime.plan.config import DecoderConfig, Inputs, LayerConfig, MixtureConfig
from diskprefix.runtime.plan.families.memory_layout import layout_of as memory_layout
from diskprefix.runtime.plan.families.types import mistral
from diskprefix.runtime.plan.operands import Buffer, Gating, Location, Rotary, Router, Weight
from diskprefix.runtime.plan.part_options import Norms
from diskprefix.runtime.plan.planned import PlanRuntime, config_of, plan_layout
from diskprefix.tokens import root_hash
from tests.exactness.architectures import tiny_model
from tests.modules import layout_of, plan_runtime
from tests.runtime.plan.tensor_weights import weights_of

LAYOUT = '{"groups":[]}'
NAMED = dict.fromkeys(("configuration", "forms", "bits", "code"), "0123456789abcdef") | {
    "weights_digest": "0123456789abcdef0123456789abcdef",
    "dtype": "bfloat16",
}


def literal(mode: str = "strict", **changes: str) -> Fingerprint:
    return Fingerprint({**NAMED, "mode": mode, **changes}, frozenset({"bits" if mode == "portable" else "code"}))


CONFIG = DecoderConfig(64, (LayerConfig({}),) * 2, {"": Rotary(np.ones(4, np.float32))})


def root_of(print_: Fingerprint) -> bytes:
    return root_hash(print_.identity(256, 1, LAYOUT))


def test_the_root_of_a_given_fingerprint_never_changes() -> None:
    """A change here makes every store miss: it must be meant."""
    assert root_hash(literal().identity(256, 1, "layout", "salt")).hex() == "7741d2fe725e01d16a99240a6b96123e"


@pytest.mark.parametrize("name", ["weights_digest", "configuration", "forms", "dtype"])
def test_each_field_of_the_model_changes_the_root(name: str) -> None:
    for mode in ("strict", "portable"):
        one, other = literal(mode), literal(mode, **{name: "another"})
        assert root_of(one) != root_of(other)
        assert not is_outdated(one.identity(256, 1, LAYOUT), [other.identity(256, 1, LAYOUT)])


def test_bits_are_in_the_root_and_sources_only_where_machines_share_it() -> None:
    for name, mode, counts in (("bits", "strict", 1), ("code", "strict", 0), ("bits", "portable", 0)):
        both = literal(mode), literal(mode, **{name: "another"})
        texts = [one.identity(256, 1, LAYOUT, "a tenant") for one in both]
        assert (len({*texts}) == 2) is bool(counts)
        assert is_outdated(texts[0], [texts[1]]) is bool(counts)


@pytest.mark.parametrize(
    "changed",
    [
        replace(CONFIG, norms=Norms(epsilon=1e-5)),
        replace(CONFIG, layers=CONFIG.layers[:1]),
        replace(CONFIG, layers=(LayerConfig({}), LayerConfig({}, window=8))),
        replace(CONFIG, rotary={"": Rotary(np.full(4, 0.5, np.float32))}),
        replace(CONFIG, rotary={"": Rotary(np.ones(4, np.float32), axes=np.zeros(4, np.int64))}),
        replace(CONFIG, mixture=MixtureConfig(Router(2), Gating())),
        replace(CONFIG, multipliers=CONFIG.multipliers._replace(keys=0.5)),
    ],
)
def test_each_option_changes_the_configuration(changed: DecoderConfig) -> None:
    assert options(changed) != options(CONFIG)


def test_new_options_and_the_layout_change_no_described_configuration() -> None:
    placed = LayerConfig({"keys": Location(0, 0, 1, 8, 2, 8, 8)})
    assert options(replace(CONFIG, layers=(placed,) * 2)) == options(CONFIG)
    later: Any = defstruct("Later", [("more", bool, False)], bases=(DecoderConfig,), frozen=True)
    assert options(later(CONFIG.vocab_size, CONFIG.layers, CONFIG.rotary)) == options(CONFIG)
    assert options(later(CONFIG.vocab_size, CONFIG.layers, CONFIG.rotary, more=True)) != options(CONFIG)


def planned(dtype: torch.dtype = torch.bfloat16, change: Callable[[Any], object] = lambda _: None) -> Fingerprint:
    model = tiny_model("llama", dtype)
    with torch.no_grad():
        change(model)
    layout, _ = layout_of(model)
    plan, compiled = plan_runtime(model, layout, 64), operators()
    assert compiled is not None
    return fingerprint_of_plan(plan.config, plan.plans, compiled, weights_digest="d", dtype="")


@pytest.mark.usefixtures("cache")
def test_forms_of_weights_and_computed_vectors_count_and_sources_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned()
    assert planned() == before
    assert planned(torch.float32).named["forms"] != before.named["forms"]
    changed = planned(change=lambda model: model.model.norm.weight.mul_(2))
    assert changed.named["forms"] != before.named["forms"]
    other = tmp_path / "other.so"
    other.write_bytes(bits.LIBRARY.read_bytes() + b"\0")  # type: ignore[attr-defined]
    for module, name, value in (
        (bits, "LIBRARY", other),
        (bits, "code_digest", lambda: "another comment"),
        (plan_fingerprint, "code_digest", lambda: "another comment"),
    ):
        monkeypatch.setattr(module, name, value)
    found = planned()
    assert found.named["code"] != before.named["code"]
    assert root_of(found) == root_of(before)


# Every leaf counts.

IN_MEMORY = {"address", "kept", "places", "states"}
"""Where something is, which the layout says or which changes with each start."""


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 7.5 if value == math.inf else value + 1
    if isinstance(value, str):
        return f"{value}?"
    if isinstance(value, np.ndarray):
        other = value.copy()
        other.reshape(-1).view(np.uint8)[0] ^= 1
        return other
    return 1.5


def variants(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The same value with another leaf, for each of its leaves."""
    if isinstance(value, Matrix):
        for name in ("rows", "form", "bias"):
            other = copy.copy(value)
            setattr(other, name, changed(getattr(value, name)))
            if name != "bias" or value.bias is not None:
                yield f"{path}.{name}", other
    elif isinstance(value, Weight):
        yield f"{path}.shape", Weight(value.address, (value.shape[0] - 1, *value.shape[1:]), value.kept)
        other = changed(value.kept)
        offset = value.address - address_of(value.kept)
        yield f"{path}.kept", Weight(address_of(other) + offset, value.shape, other) if not offset else None
    elif isinstance(value, Struct) and not isinstance(value, Buffer):
        for name in value.__struct_fields__:
            if name not in IN_MEMORY:
                for inner, one in variants(getattr(value, name), f"{path}.{type(value).__name__}.{name}"):
                    yield inner, None if one is None else replace(value, **{name: one})
    elif isinstance(value, Mapping):
        for key in value:
            for inner, one in variants(value[key], f"{path}[{key}]"):
                yield inner, None if one is None else {**value, key: one}
    elif isinstance(value, tuple | list):
        for at, part in enumerate(value):
            for inner, one in variants(part, f"{path}[{at}]"):
                parts = [*value[:at], one, *value[at + 1 :]]
                made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
                yield inner, None if one is None else made
    elif not isinstance(value, array | Buffer):
        yield path, changed(value)


def leaves_of(kept: Any) -> Iterator[Any]:
    if isinstance(kept, Struct) and not isinstance(kept, Weight):
        for name in kept.__struct_fields__:
            yield from leaves_of(getattr(kept, name))
    elif isinstance(kept, tuple | list):
        for one in kept:
            yield from leaves_of(one)
    else:
        yield kept


LARGEST = "llama gemma3n gemma4 gpt_oss mimo_v2_flash deepseek_v3+draft qwen3_next falcon_h1 kimi_linear nemotron_h"
"""Those that have all fields of a configuration and all that calls keep between them."""


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", LARGEST.split())
def test_each_leaf_of_a_configuration_changes_the_identity(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    weights = weights_of(model)
    runtime = PlanRuntime(weights, model.config, plan_layout(weights, model.config), 16)
    config = replace(runtime.config, inputs=Inputs(padded_tokens=(1, 2)))
    own, seen = options(config), set[str]()
    for path, other in variants(config):
        assert options(other) != own, path
        seen.add(path)
    fields_of = ("inputs.Inputs.padded_tokens[1]", "norms.Norms.epsilon", "layers[0].LayerConfig.window")
    assert {f".DecoderConfig.{one}" for one in fields_of} <= seen


@pytest.mark.cases(7)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LARGEST.split())
def test_each_leaf_of_what_the_calls_keep_changes_the_identity(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype)
    weights = weights_of(model)
    runtime = PlanRuntime(weights, model.config, plan_layout(weights, model.config), 16)
    seen: set[str] = set()
    for plan in runtime.plans:
        for _, _, _, kept in plan.operations:
            own = plan_fingerprint._described(kept)
            for path, other in variants(kept):
                if other is not None and (kind := re.sub(r"\[\d+\]", "", path)) not in seen:
                    assert plan_fingerprint._described(other) != own, path
                    seen.add(kind)
    assert any("WeightedNorm.epsilon" in path for path in seen)
    assert any("WeightedNorm.kind" in path for path in seen)


@pytest.mark.usefixtures("cache")
def test_an_epsilon_of_one_norm_and_the_draft_layer_count() -> None:
    """No configuration has the epsilons of the norms of latents."""

    def forms(name: str, epsilon: float | None) -> str:
        model = tiny_model(name, torch.bfloat16)
        weights, compiled = weights_of(model), operators()
        assert compiled is not None
        with pytest.MonkeyPatch.context() as patch:
            if epsilon is not None:
                patch.setitem(mistral.LATENT_EPSILONS, "self_attn.kv_a_layernorm", epsilon)
            runtime = PlanRuntime(weights, model.config, plan_layout(weights, model.config), 16)
            found = fingerprint_of_plan(runtime.config, runtime.plans, compiled, weights_digest="d", dtype="")
        return found.named["forms"]

    assert forms("deepseek_v3", None) == forms("deepseek_v3", None)
    assert len({forms("deepseek_v3", None), forms("deepseek_v3", 1e-5), forms("deepseek_v3+draft", None)}) == 3


def test_the_token_that_stands_for_pictures_counts() -> None:
    whole = CONFIG_MAPPING["gemma4"]()
    for text in (whole.get_text_config(), whole):
        text.get_text_config().layer_types = text.get_text_config().layer_types[:6]
        text.get_text_config().num_hidden_layers = 6
    found = []
    for pad in (0, 1):
        whole.get_text_config().pad_token_id = pad
        found.append(options(config_of(whole, "bfloat16", memory_layout(whole, "bfloat16"), 16)))
    assert found[0] != found[1]
