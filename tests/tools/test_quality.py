"""The figures of `tools/bench quality`, its emulated rows, and the models of `tools/bench trained`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tools.__main__ import main
from tools.benchmarks.quality import Samples, add_window, figures_of, settings_of
from tools.benchmarks.rounded_rows import ROUNDINGS, Products, in_8_bits, in_15_bits, outliers_of
from tools.models import trained

TEXT = "Name three rivers and tell me where each of them begins. " * 80


def test_perplexity_and_divergence_are_those_of_torch() -> None:
    first, second, third = torch.randn(3, 100, 50, generator=torch.Generator().manual_seed(0))
    ids = list(range(50)) * 2
    of_first, of_other = Samples(), Samples()
    expected = add_window(of_first, [first.numpy()], ids, None)
    for logits in (second, third):
        add_window(of_other, [logits[:64].numpy(), logits[64:].numpy()], ids, expected)
    target, found = torch.log_softmax(first, -1), torch.log_softmax(third, -1)
    divergence = torch.nn.functional.kl_div(found, target, reduction="batchmean", log_target=True)
    assert of_other.divergences[1] == pytest.approx(float(divergence), rel=1e-5)
    loss = torch.nn.functional.cross_entropy(third[:-1], torch.tensor(ids[1:]))
    assert of_other.losses[1] == pytest.approx(float(loss), rel=1e-5)
    assert of_other.agreements[1] == pytest.approx(float((found.argmax(-1) == target.argmax(-1)).float().mean()))
    assert (of_first.divergences, of_first.agreements) == ([0.0], [1.0])


def test_the_errors_are_of_differences_between_windows() -> None:
    first = Samples(losses=[1.0, 2.0, 3.0], divergences=[0.0] * 3, agreements=[1.0] * 3)
    other = Samples(losses=[1.1, 2.1, 3.1], divergences=[0.1, 0.2, 0.3], agreements=[0.5] * 3)
    figures = figures_of(other, first)
    assert figures["perplexity"] == pytest.approx(math.exp(2.1))
    assert figures["change_percent"] == pytest.approx(100 * (math.exp(0.1) - 1))
    assert figures["change_error"] == pytest.approx(0.0, abs=1e-9)
    assert figures["divergence_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert figures_of(first, first)["change_percent"] == 0.0


def test_settings_are_a_form_too() -> None:
    assert settings_of("auto") == {}
    assert settings_of("kernels=avx2,kv_type=q8") == {"kernels": "avx2", "kv_type": "q8"}
    with pytest.raises(ValueError, match="no such setting: colour"):
        settings_of("colour=red")


def test_rows_are_rounded_by_blocks() -> None:
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    rows[0, 3], rows[1, 40:] = 1000.0, 0.0
    rounded = in_8_bits(rows)
    for at in range(0, 100, 32):
        block, of = rounded[:, at : at + 32], rows[:, at : at + 32]
        scale = of.abs().amax(-1, keepdim=True) / 127
        assert ((block - of).abs() <= 0.501 * scale).all()
    integers = torch.randint(-64, 65, (3, 64)).float()
    integers[:, ::32] = 64.0
    assert torch.equal(in_15_bits(integers / 64), integers / 64)
    assert torch.equal(in_15_bits(rows)[1, 64:], rows[1, 64:])
    assert (in_15_bits(rows) - rows).abs().max() <= 1000 * 2**-8


@pytest.mark.parametrize("change", ROUNDINGS.values())
def test_the_rows_of_every_larger_product_are_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows, matrix = torch.randn(4, 64), torch.randn(16, 64)
    with Products(lambda found, _: change(found)):
        found = torch.nn.functional.linear(rows, matrix)
        other = torch.nn.functional.linear(rows, matrix[:8])
    assert torch.equal(found, change(rows) @ matrix.T)
    assert torch.equal(other, rows @ matrix[:8].T)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models and steps."""
    monkeypatch.setattr(trained, "ROWS", 2)
    monkeypatch.setattr(trained, "TOKENS", 32)
    for name, (kind, sizes) in trained.SIZES.items():
        smaller = {"vocab_size": 64, "num_hidden_layers": 2, "layer_types": sizes.get("layer_types", [])[2:] or None}
        monkeypatch.setitem(trained.SIZES, name, (kind, sizes | {of: it for of, it in smaller.items() if it}))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", trained.SIZES)
def test_outliers_do_not_change_what_a_trained_model_computes(name: str) -> None:
    model, ids = trained.made(name), torch.arange(400) % 40
    trained.train(model, ids, 2)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for values in model.parameters():
            values += 0.1 * torch.randn(values.shape, generator=torch.Generator().manual_seed(0)) * (values.ndim == 1)
        before = model(input_ids=ids[None, :40]).logits
        ratios = outliers_of(model, ids[:40].tolist())
        trained.add_outliers(model)
        after = model(input_ids=ids[None, :40]).logits
    assert torch.allclose(after, before, rtol=1e-3, atol=1e-4)
    assert float((after - before).abs().max()) < 1e-3 * float(before.std())
    with_outliers = outliers_of(model, ids[:40].tolist())
    assert ratios.keys() == with_outliers.keys()
    for reader in ("self_attn.q_proj", "mlp."):
        names = [of for of in ratios if reader in of and "down" not in of]
        assert names
        assert all(with_outliers[of]["ratio"] > 1.5 * ratios[of]["ratio"] for of in names)


@pytest.mark.usefixtures("small")
def test_training_lowers_perplexity_and_is_the_same_each_time() -> None:
    ids = torch.arange(400) % 40
    models = [trained.made("mixture") for _ in range(2)]
    found = [trained.train(model, ids, 6) for model in models]
    assert found[0] == found[1] < 64
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def test_forms_of_a_folder_are_compared(chat_model: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(TEXT[number:], encoding="utf-8")
    options = ["--text", str(tmp_path), "--windows", "3", "--tokens", "100", "--json", "--model", str(chat_model)]
    forms = ["--form", "torch", "--form", "torch 8", "--form", "torch 15", "--form", "auto"]
    ran = CliRunner().invoke(main, ["quality", *options, *forms, "--outliers"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    (by_form,), (matrices,) = report["models"].values(), report["outliers"].values()
    assert by_form["torch"]["change_percent"] == by_form["torch"]["divergence"] == 0
    assert abs(by_form["auto"]["divergence"]) < 1e-7 < by_form["torch 8"]["divergence"] < 1e-2
    assert by_form["torch 15"]["losses"] != by_form["torch"]["losses"]
    assert np.mean(by_form["torch 8"]["divergences"]) == pytest.approx(by_form["torch 8"]["divergence"])
    assert len(by_form["torch"]["losses"]) == 3
    assert matrices["lm_head.weight"]["ratio"] > 1
    refused = CliRunner().invoke(main, ["quality", *options, "--form", "colour=red"])
    assert (refused.exit_code, "no such setting: colour" in refused.output) == (2, True)
    refused = CliRunner().invoke(main, ["quality", *options, "--model", "none"])
    assert (refused.exit_code, "none is neither a file" in refused.output) == (2, True)
