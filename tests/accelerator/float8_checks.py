"""Checkpoints in FP8 as an accelerator serves them, in Triton's interpreter: `python -m tests.accelerator.float8_checks
FOLDER NAME …` (the names in `FLOAT8`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from diskprefix.model.exact.mixtures import matrices_of
from diskprefix.model.load.fingerprint import Fingerprint, weights_digest
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.settings import Settings
from tests.accelerator.checks import cancelling, require_the_same_in_any_company
from tests.model import tiny
from tests.model.quants.test_published import (
    FLOAT8,
    FP8_OF_128,
    HIDDEN,
    INNER,
    fp8,
    logits_of,
    mixture,
    published,
)


def loaded(folder: Path, weights: str) -> LoadedModel:
    return load_model(Settings(model=str(folder), weights=weights), lambda _: None)


def require_near(found: torch.Tensor, expected: torch.Tensor, most: float = 0.03) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < most, float(error)


def require_float8(matrix: QuantisedLinear, weight: torch.Tensor) -> None:
    """Raises `AssertionError` if a module does not compute with the weights of a checkpoint, kept in FP8."""
    assert matrix.grouped is not None
    assert matrix.grouped.codes.dtype is torch.float8_e4m3fn
    assert not len(matrix.packed)
    assert torch.equal(matrix.weight, weight)
    rows = torch.randn(5, matrix.in_features).bfloat16()
    require_near(matrix(rows), functional.linear(rows.float(), weight.float()))


def check_matrices(folder: Path, name: str) -> None:
    settings, write, group = FLOAT8[name]
    made, weights = published(folder / name, settings, write)
    found = loaded(made, "auto")
    plain = tiny.llama(hidden_size=HIDDEN, intermediate_size=INNER).half().bfloat16()
    for path, weight in weights.items():
        plain.get_submodule(path).weight.data = weight.bfloat16()
        matrix = found.model.get_submodule(path)
        assert isinstance(matrix, QuantisedLinear)
        require_float8(matrix, weight.bfloat16())
        assert matrix.form.group == group
    wide = found.model.get_submodule("model.layers.0.mlp.down_proj")
    require_the_same_in_any_company(wide, cancelling(37, INNER, torch.bfloat16))
    # The interpreter does not round weights to bfloat16 but cuts them off.
    require_near(logits_of(found.model), logits_of(plain), 0.05)
    if name == "blocks of 128":
        require_another_identity(made, found)


def require_another_identity(folder: Path, found: LoadedModel) -> None:
    """Raises `AssertionError` if its state may be taken for that of another form of the weights."""
    other = loaded(folder, "int8")
    fingerprints = [Fingerprint.of(one.model, one.weights_digest) for one in (found, other)]
    assert fingerprints[0] != fingerprints[1]
    assert "triton" in fingerprints[0].quantisation
    in_file = weights_digest([folder / "model.safetensors"])
    assert len({in_file, found.weights_digest, other.weights_digest}) == 3


def check_experts(folder: Path) -> None:
    made, plain = mixture(folder / "mixture", "qwen3_moe", FP8_OF_128, fp8(128, 128))
    model = loaded(made, "auto").model
    for name, experts in model.named_modules():
        if isinstance(experts, QuantisedExperts):
            require_the_same_experts(experts, plain, name)
    assert any(isinstance(module, QuantisedExperts) for module in model.modules())


def require_the_same_experts(experts: QuantisedExperts, plain: PreTrainedModel, name: str) -> None:
    module = plain.get_submodule(name)
    for part, (weight, _) in matrices_of(module).items():
        of_part = experts.parts()[part]
        assert of_part.grouped is not None
        assert of_part.grouped.codes.dtype is torch.float8_e4m3fn
        assert torch.equal(of_part.weight, weight)
    width, num_rows, num_chosen = experts.parts()["down"].weight.shape[1], 37, 2
    rows = torch.randn(num_rows, width).bfloat16()
    chosen = torch.stack([torch.randperm(experts.num_experts)[:num_chosen] for _ in range(num_rows)])
    weights = torch.rand(num_rows, num_chosen).bfloat16()
    expected = module(rows, chosen, weights)
    require_near(experts(rows, chosen, weights), expected)

    def compute(numbers: torch.Tensor) -> torch.Tensor:
        of_rows = numbers[:, 0]
        found: torch.Tensor = experts(rows[of_rows], chosen[of_rows], weights[of_rows])
        return found

    require_the_same_in_any_company(compute, torch.arange(num_rows)[:, None])


def main(folder: Path, names: Sequence[str]) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in names:
            check_matrices(folder, name)
            print(name)
        check_experts(folder)
        print("experts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
