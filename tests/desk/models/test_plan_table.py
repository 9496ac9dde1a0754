"""`diskprefix show NAME --plan`: what a step of a model computes, as its plan says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diskprefix.daemon.settings import Settings
from diskprefix.desk.models.plan_table import parts_of, step_of
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.plan.planned import PlanRuntime, plan_layout
from tests.cache_folder import USERS
from tests.desk.conftest import Run
from tests.desk.conftest import run as run
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.runtime.plan import tiny
from tests.runtime.plan.tensor_weights import tensors_of

pytestmark = pytest.mark.usefixtures("own_places")

EMBEDDED_FILES = [*(USERS / "diskprefix/models" / EMBEDDED.requirement).glob("*.gguf")]


@pytest.mark.skipif(not EMBEDDED_FILES, reason="the embedded model is not on this machine")
def test_the_embedded_model_has_layers_of_thirteen_operations_and_a_last_one(run: Run) -> None:
    _, first, layers, last_layer, end = run("show", EMBEDDED_FILES[0], "--plan").stdout.split("\nplan, ")
    assert layers.startswith("layers 0-28\n")
    assert last_layer.startswith("layers 29\n"), "it leaves out rows without logits"
    operators = "Norm Product " + "NormRotateStore " * 3 + "Attend Product Sum Norm Product Gate Product Sum"
    assert " ".join(line.split()[0] for line in layers.splitlines()[1:] if line) == operators
    for line in (
        "input_layernorm → q_proj, k_proj, v_proj; q_proj [576, 576] Q4_1; k_proj [192, 576] Q4_1; v_proj",
        "NormRotateStore k_proj, angles, angles_2 → k_proj, memory 0; num_heads 3, dim 64, half 32\n",
        "q_proj, memory 0 → attend; num_heads 9, num_kv_heads 3, key_dim 64, value_dim 64, scale 0.125\n",
        "Gate            gate_proj, up_proj, curve → gate; width 1536, function silu\n",
        "Sum             embed_tokens, down_proj → embed_tokens; width 576\n",
    ):
        assert line in layers
    assert "ids → embed_tokens; embed_tokens [49152, 576] Q8_0" in first
    assert "hidden → logits; embed_tokens [49152, 576] Q8_0" in end


def written(folder: Path, name: str, **fields: Any) -> Path:
    """A folder with a tiny model of an architecture, in bfloat16."""
    tiny_model(name, torch.bfloat16, **fields).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_weights_that_do_not_fit_together_are_refused(run: Run, tmp_path: Path) -> None:
    folder = written(tmp_path / "made", "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": torch.zeros(7)}, file, {"format": "pt"})
    ended = run("show", folder, "--plan")
    assert ended.exit_code == 3
    assert "error: the weights do not fit together (a norm of 7 numbers" in ended.stderr


def test_a_mixture_is_shown_with_one_layer_of_each_kind(run: Run, tmp_path: Path) -> None:
    found = run("show", written(tmp_path / "made", "glm4_moe"), "--plan", "--json").json["plan"]
    assert found["reason"] == ""
    assert [part["of"] for part in found["parts"]] == ["before layer 0", "layers 0", "layers 1", "after the layers"]
    dense, mixture = ({one["operator"]: one for one in part["operations"]} for part in found["parts"][1:3])
    assert mixture.keys() - dense.keys() == {"Widening", "Router", "Experts", "DenseProduct", "Pick"}
    expected = {"num_experts": 8, "num_chosen": 2, "scores": "sigmoid", "is_normed": 1, "dtype": "float32"}
    assert expected.items() <= mixture["Router"]["numbers"].items()
    assert mixture["Experts"]["reads"][1:3] == mixture["Router"]["writes"]
    experts = [([8, 32, 64], ["bfloat16"]), ([8, 32, 64], ["bfloat16"]), ([8, 64, 32], ["bfloat16"])]
    assert [(weight["shape"], weight["forms"]) for weight in mixture["Experts"]["weights"]] == experts


def test_layers_that_differ_in_the_forms_of_weights_alone_are_one_kind() -> None:
    model = quantised_tiny_model("llama", "Q8_0")
    weights, other = (tensors_of(one) for one in (model, quantised_tiny_model("llama", "Q4_0")))
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert other.quants(f"layers.1.mlp.{name}.weight") is not None
    weights.made |= other.made
    plan = (
        PlanRuntime(weights, model.config, plan_layout(weights, model.config), 16)._runner_for(1, with_hidden=True).plan
    )
    _, layers, _ = parts_of(plan, weights)
    assert layers["layers"] == [0, 1]
    forms = {weight["name"]: weight["forms"] for one in layers["operations"] for weight in one["weights"]}
    assert forms["q_proj"] == ["Q8_0"]
    assert forms["down_proj"] == ["Q8_0", "Q4_0"]


def test_a_plan_of_unread_weights_is_that_of_the_loaded_model(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_0")
    for path in (tmp_path / "tiny.gguf", written(tmp_path / "made", "gpt_oss")):
        settings = Settings(model=str(path))
        loaded = load_model(settings, lambda _line: None)
        weights = loaded.weights
        assert weights is not None
        plan = PlanRuntime(weights, loaded.config, plan_layout(weights, loaded.config), settings.block_size).runner.plan
        assert step_of(settings) == {"reason": "", "parts": parts_of(plan, weights)}


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("beam", {}, "no family has beam"),
        ("llama", {"hidden_act": "mish"}, "no plan has the activation mish"),
        ("bloom", {}, "no family has bloom"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "no plan has another number of experts in some layers"),
    ],
)
def test_a_model_without_a_plan_is_shown_with_the_reason(
    name: str, fields: dict[str, Any], reason: str, run: Run, tmp_path: Path
) -> None:
    folder = written(tmp_path / "made", name, **fields)
    assert run("show", folder, "--plan", "--json").json["plan"] == {"reason": reason, "parts": []}
    line = f"plan      none, transformers' modules compute a step: {reason}\n"
    assert line in run("show", folder, "--plan").stdout
