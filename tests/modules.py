"""The plans and layouts of models that are modules of transformers."""

from __future__ import annotations

from transformers import PreTrainedModel

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.runtime.contract import Runtime
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.load.self_check import check, known_reason
from diskprefix.runtime.plan.planned import NotExact, PlanRuntime, plan_layout
from tests.runtime.plan.tensor_weights import weights_of


def layout_of(model: PreTrainedModel, identity: str = "", kv_type: str = "auto") -> tuple[Layout, str]:
    """Returns the layout of a model, and why it is not exact at every token, "" if it is."""
    reason = known_reason(model.config, str(model.dtype).removeprefix("torch."), model.device.type)
    if not reason:
        weights = weights_of(model)
        layout = plan_layout(weights, model.config, kv_type)
        try:
            check(weights, model.config, layout, identity)
        except NotExact as found:
            reason = str(found)
        else:
            return layout, ""
    layout = rehearse(model, identity)
    return layout, "its state is not cached" if layout.unsupported else reason


def plan_runtime(model: PreTrainedModel, layout: Layout, page_tokens: int, *, is_of_first: bool = False) -> PlanRuntime:
    """Returns the plan of a model; see `PlanRuntime`."""
    return PlanRuntime(weights_of(model), model.config, layout, page_tokens, is_of_first=is_of_first)


def runtime_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> Runtime:
    """Returns what computes a model with a layout."""
    is_plan = layout.exact_at == "token"
    return plan_runtime(model, layout, page_tokens) if is_plan else GridRuntime(model, layout)
