"""Parts of a model that compiled operators compute: found by what they compute, with the bits of their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.exact import fused, invariant
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.runner import run
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.quants.quantised import prepare
from diskprefix.model.runtime import Rows
from diskprefix.native import library
from diskprefix.native.blocks import AttentionBlock, Gated, Norm
from tests.closing import TESTED
from tests.exactness.architectures import tiny_model
from tests.model.quantising_in_place import quantise
from tests.native.variants import of_this_cpu

pytestmark = pytest.mark.usefixtures("by_modules")


@pytest.fixture(autouse=True, params=of_this_cpu())
def compiled(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record_property(TESTED, request.param)
    library.choose(request.param)


NAMES = {Norm: "norm", Gated: "gated", AttentionBlock: "attention"}


def quantised_model(name: str = "llama") -> PreTrainedModel:
    """All operators take such a model, those of an old CPU too."""
    model = tiny_model(name, torch.bfloat16)
    random = torch.Generator().manual_seed(1)
    for module in model.modules():
        # Weights of norms that are all 1 would hide how they are taken.
        if "Norm" in type(module).__name__ and hasattr(module, "weight"):
            module.weight.data += torch.randn(module.weight.shape, generator=random) * 0.3
    quantise(model, "Q8_0")
    prepare(model)
    return model


def parts_of(model: PreTrainedModel) -> Counter[str]:
    invariant.install(model)
    invariant.uninstall(model)
    forwards: list[Any] = [method for _, _, method in invariant._methods[model][library.described()]]
    parts = [part for forward in forwards for part in (forward.func, *forward.args) if type(part) in NAMES]
    return Counter(NAMES[type(part)] for part in parts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"norm": 5, "gated": 2, "attention": 2}),
        ("qwen2", {"norm": 5, "gated": 2, "attention": 2}),
        ("qwen3", {"norm": 9, "gated": 2, "attention": 2}),
        ("gemma3", {"norm": 25, "gated": 4, "attention": 4}),
        ("olmo2", {"norm": 9, "gated": 2}),
        ("cohere", {"gated": 2}),
        ("mixtral", {"norm": 5, "attention": 2}),
    ],
)
def test_parts_are_found_by_what_they_compute(name: str, expected: dict[str, int]) -> None:
    assert parts_of(quantised_model(name)) == Counter(expected)


def layout_of(model: PreTrainedModel) -> Layout:
    layout, reason = make_exact(model)
    assert not reason
    return layout


def computed(
    model: PreTrainedModel, layout: Layout, steps: list[list[int]], sequences: Sequence[int] = (0, 1, 2)
) -> list[tuple[bytes, torch.Tensor]]:
    """Each step takes the next tokens of the `sequences`, one number of them each. Returns states and last logits."""
    ids = torch.randint(0, 64, (3, 1, 600), generator=torch.Generator().manual_seed(5))
    pool = PagePool(layout, model.device, block_size=256)
    states = [KVSequence(pool) for _ in sequences]
    for step in steps:
        rows = [
            Rows(state, ids[number, 0, state.num_tokens : state.num_tokens + step[number]].numpy())
            for number, state in zip(sequences, states, strict=True)
        ]
        with torch.inference_mode():
            logits = run(model, rows)
    return [(state.content(), one) for state, one in zip(states, logits, strict=True)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_parts_have_the_bits_of_their_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [[300, 1, 4], [20, 7, 40], [1, 1, 1]]
    model = quantised_model(name)
    found = computed(model, layout_of(model), steps)
    monkeypatch.setattr(fused.Parts, "larger", lambda *_: None)
    other = quantised_model(name)
    assert not parts_of(other).keys() & {"gated", "attention"}
    for (state, logits), (expected_state, expected_logits) in zip(
        found, computed(other, layout_of(other), steps), strict=True
    ):
        assert state == expected_state
        assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama", "one plan"),
        ("longcat_flash", "0 attention blocks, 4 gated products, 17 norms"),
    ],
)
def test_the_log_says_what_was_recognised(name: str, parts: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    layout_of(quantised_model(name))
    assert f"kernels: {library.described()}, {parts}" in caplog.text


def changed(model: PreTrainedModel, path: str, change: Callable[..., Any]) -> PreTrainedModel:
    """Gives modules of that path a class whose forward is changed by `change(forward, module, *args, **kwargs)`."""
    for layer in model.model.layers:
        module = layer.get_submodule(path)
        kind = type(module)
        forward = kind.forward
        module.__class__ = type(
            kind.__name__, (kind,), {"forward": lambda self, *a, forward=forward, **k: change(forward, self, *a, **k)}
        )
    return model


def scaled_by_position(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out, weights = forward(module, *args, **kwargs)
    return out * (1 + 0.5 * (kwargs["position_ids"] > 100_000)).to(out.dtype).unsqueeze(-1), weights


def clamped(forward: Any, module: nn.Module, rows: torch.Tensor) -> Any:
    return forward(module, rows.clamp(-50, 50))


def moved(forward: Any, module: nn.Module, rows: torch.Tensor) -> Any:
    return forward(module, rows) * 1.01


@pytest.mark.parametrize(
    ("path", "change", "lost"),
    [
        ("self_attn", scaled_by_position, "attention"),
        ("mlp", clamped, "gated"),
        ("mlp", moved, "gated"),
        ("input_layernorm", moved, "norm"),
    ],
)
def test_a_module_that_does_something_more_computes_as_it_did(path: str, change: Any, lost: str) -> None:
    parts = parts_of(changed(quantised_model(), path, change))
    assert parts[lost] == {"norm": 3}.get(lost, 0)


def test_attention_that_finds_its_memory_by_another_number_computes_as_it_did() -> None:
    model = quantised_model()
    kind = type(model.model.layers[0].self_attn)

    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, past_key_values: Any, **kwargs: Any) -> Any:
            class Shifted:
                def update(self, keys: Any, values: Any, layer_idx: int) -> Any:
                    return past_key_values.update(keys, values, 1 - layer_idx)

            return super().forward(*args, past_key_values=Shifted(), **kwargs)

    model.model.layers[0].self_attn.__class__ = Other
    assert parts_of(model)["attention"] == 1


def test_two_modules_with_one_number_do_not_overwrite_each_others_memory() -> None:
    model = quantised_model()
    layout = layout_of(model)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(NotInvariant, match="shares the number"):
        computed(model, layout, [[3, 1, 2]])


def test_layers_whose_code_uses_their_number_are_compared_one_by_one() -> None:
    model = quantised_model()
    kind = type(model.model.layers[0].mlp)

    class Later(kind):  # type: ignore[misc, valid-type]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(rows)
            return out * 2 if self.layer_idx else out

    for number, layer in enumerate(model.model.layers):
        layer.mlp.__class__, layer.mlp.layer_idx = Later, number
    assert parts_of(model) == {"norm": 5, "gated": 1, "attention": 2}
