"""A plan has the biases, sinks and corrections of transformers' modules, and refuses weights that lack one of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.optional_weights import _BY_OPTION
from diskprefix.runtime.plan.planned import PlanRuntime, plan_layout
from tests.exactness.architectures import ARCHITECTURES, tiny_model
from tests.runtime.plan.tensor_weights import TensorWeights, tensors_of
from tests.runtime.plan.test_plan import FAMILIES, require_logits

TOGETHER = {"internlm3": {"attention_bias": True, "mlp_bias": True}}
"""Options that a class takes together."""


def other_options(name: str) -> list[dict[str, bool]]:
    """The options about biases that an architecture has, each with the value that it does not usually have."""
    if name in TOGETHER:
        return [TOGETHER[name]]
    config = ARCHITECTURES[name].build().get_text_config(decoder=True)
    return [{one: not getattr(config, one)} for one in _BY_OPTION if hasattr(type(config), one)]


def require_each(model: PreTrainedModel, seen: set[str]) -> None:
    """Requires that a plan refuses weights that lack a bias, of each kind that was not seen before."""
    tensors = tensors_of(model)
    for left_out in dict(tensors._parameters):
        kind = re.sub(r"\d+", "", left_out)
        if not re.search(r"bias$|sinks$", kind) or kind in seen:
            continue
        seen.add(kind)
        weights = TensorWeights(
            {name: one for name, one in tensors._parameters.items() if name != left_out}, model.dtype
        )
        with pytest.raises(ModelError, match=re.escape(left_out)):
            PlanRuntime(weights, model.config, plan_layout(weights, model.config), 16).prepare()


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_options_decide_about_biases_as_in_transformers(name: str) -> None:
    seen, options = set[str](), list[dict[str, Any]]([{}, *other_options(name)])
    for fields in options:
        model = tiny_model(name, torch.float32, **fields)
        if fields:
            require_logits(model)
        require_each(model, seen)
