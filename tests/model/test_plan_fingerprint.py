"""The root of a plan has what changes its bits: weights, options, forms and bits; no sources, versions or threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import defstruct
from msgspec.structs import replace

from diskprefix.identity import Fingerprint, is_outdated
from diskprefix.model import bits, plan_fingerprint
from diskprefix.model.config import DecoderConfig, LayerConfig, MixtureConfig
from diskprefix.model.operands import Gating, Location, Rotary, Router
from diskprefix.model.plan_fingerprint import fingerprint_of_plan, options
from diskprefix.native.library import operators
from diskprefix.tokens import root_hash
from tests.exactness.architectures import tiny_model
from tests.modules import layout_of, plan_runtime

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
        replace(CONFIG, epsilon=1e-5),
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


def test_what_a_later_version_adds_or_the_layout_says_changes_no_configuration() -> None:
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
    return fingerprint_of_plan(plan.config, plan.plan, compiled, weights_digest="d", dtype="")


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
