"""What a file means that lacks a key is what llama.cpp takes it for."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diskprefix.runtime.files.gguf.known_families import MODEL_TYPES
from tests.cache_folder import USERS
from tests.runtime.files.gguf.llama_cpp_defaults import TABLE, Table, table_of
from tests.runtime.files.gguf.test_odd_metadata import is_served, keys_of, outcome, sound

_MARKS = "[]{},"
SOURCE = USERS / "diskprefix/environments/llama.cpp-converter/src"
DEFAULTS: Table = json.loads(TABLE.read_text(encoding="utf-8"))
DISTINCT: dict[str, Any] = {"rope.freq_base": 500000.0}
"""Values unlike any default, so that a key that follows another one shows."""
ALSO: dict[str, dict[str, Any]] = {"olmo2": {"attention.sliding_window": 16}}
"""Keys with which an architecture reads further ones."""
FACTORS = (
    *("expert_weights_scale", "residual_scale", "embedding_scale", "logit_scale"),
    *("expert_group_count", "expert_group_used_count"),
)
"""Numbers whose default 0 means there what 1 means."""
OF_SHAPES = (
    *("expert_count", "expert_shared_count", "expert_shared_feed_forward_length", "feed_forward_length"),
    *("expert_feed_forward_length", "moe_latent_size"),
)
"""Sizes. Without them the model has the sizes of its class, and a file whose tensors have others is refused."""
OTHERWISE = {
    ("exaone4", "attention.sliding_window"): "only the model with 64 layers has this window: see the test below",
    ("llama4", "attention.sliding_window"): "llama.cpp sets the model's chunks if the key is missing, and none for 0",
    ("mistral4", "attention.temperature_scale"): "files lack it, all models have it, and llama.cpp ignores it",
}


def value_of(default: str, values: dict[str, Any]) -> Any:
    """Returns a default as the value of a key: a number, or what the key that it names has."""
    if default in ("true", "false"):
        return default == "true"
    if default[0].isdecimal() or default[0] == "-":
        return int(default) if float(default).is_integer() else float(default)
    return values.get(default)


def same(one: str, other: str) -> bool:
    """Returns whether two outcomes are equal, whatever the types of their numbers are."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    return len(one.split()) == len(other.split()) and all(a == b or _is_same_number(a, b) for a, b in pairs)


def _is_same_number(one: str, other: str) -> bool:
    try:
        return math.isclose(float(one.strip(_MARKS)), float(other.strip(_MARKS)))
    except ValueError:
        # What is off may be 0 or None.
        return {one.strip(_MARKS), other.strip(_MARKS)} <= {"None", "0", "0.0"}


@pytest.mark.cases(20)
@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_a_missing_key_has_llama_cpps_default(architecture: str) -> None:
    base = sound(architecture) | DISTINCT | ALSO.get(architecture, {})
    read, different = set[str](), list[tuple[str, str]]()
    outcome(architecture, base, read)
    defaults = DEFAULTS["of all"] | DEFAULTS[architecture]
    for key, default in defaults.items():
        if key not in read | keys_of(architecture) or key in OF_SHAPES or (architecture, key) in OTHERWISE:
            continue
        rest = {name: value for name, value in base.items() if name != key}
        value = value_of("1" if default == "0" and key in FACTORS else default, rest) if default else None
        without = outcome(architecture, rest)
        if value is not None and is_served(without) and not same(without, outcome(architecture, rest | {key: value})):
            different.append((key, default))
    assert different == []
    assert len(read & defaults.keys()) > 3


def test_the_largest_exaone_4_has_a_window_that_its_file_need_not_name() -> None:
    for layers, window in ((64, "'sliding_window': 4096"), (30, "'sliding_window': None")):
        assert window in outcome("exaone4", sound("exaone4") | {"block_count": layers})


def test_the_table_has_each_architecture_and_is_that_of_the_source() -> None:
    assert DEFAULTS.keys() == MODEL_TYPES.keys() | {"of all"}
    if not SOURCE.is_dir():
        pytest.skip("needs converter: `tools/bench sources` fetches it")
    assert table_of(SOURCE, sorted(MODEL_TYPES)) == DEFAULTS
