"""Each declared option of each family, changed alone, is computed as transformers computes it, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from diskprefix.runtime.load.self_check import known_reason
from diskprefix.runtime.plan.families.type_table import options_of
from tests.exactness.architectures import ARCHITECTURES, tiny_model
from tests.faults.seeds import part_of
from tests.runtime.plan.test_plan import FAMILIES, NUM_TOKENS, computed, error, exact, oracle, tokens

Change = tuple[str, str, Any]
"""A family, an option and its value."""

SIZES = {"hidden_size", "vocab_size", "pad_token_id", "max_position_embeddings", "vocab_size_per_layer_input"}
"""Options that change what the tests' prompts may be, or other options."""
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")
MOST_ERROR = 1e-2
"""An option that is ignored changes more. With some values, rounding shows more than usual."""
REFUSED = [
    *((name, "hidden_act", "gelu") for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid")),
    *((name, "hidden_act", "gelu") for name in ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "aria_text")),
    ("deepseek_v2", "norm_topk_prob", True),
    ("phimoe", "num_experts_per_tok", 1),
    ("gemma3", "attn_logit_softcapping", 5.0),
]
"""Options whose other values plans do not compute."""


@cache
def changes() -> list[Change]:
    return [change for name in FAMILIES for change in _changes_of(name)]


def _changes_of(name: str) -> Iterator[Change]:
    config = ARCHITECTURES[name].build().get_text_config(decoder=True)
    for option, (letters, _) in options_of(config.model_type).items():
        if option in (config.per_layer_attributes or ()):
            continue
        usual = getattr(config, option, None)
        values: list[Any] = []
        if option in ACTIVATIONS:
            values = ["gelu", "relu", "gelu_pytorch_tanh", "silu"]
        elif option not in SIZES:
            values += [True, False] if "b" in letters else []
            values += [0.37, 2.5] if "f" in letters else []
            values += [None] if "n" in letters else []
            if "i" in letters:
                is_number = isinstance(usual, int) and not isinstance(usual, bool)
                number: Any = usual
                values += [2 * number, max(1, number // 2), number + 1] if is_number else [2, 12]
        yield from ((name, option, value) for value in values if value is not usual and value != usual)


def outcome(change: Change) -> str:
    """Returns "equal", why the plan refuses, "no model" if transformers makes none, or the error."""
    name, option, value = change
    try:
        model = tiny_model(name, torch.float32, **{option: value})
        expected = oracle(model, tokens())
    except Exception:  # noqa: BLE001 (whatever transformers says of a model that cannot be)
        return "no model"
    if not bool(torch.isfinite(expected).all()):
        return "no model"
    if reason := known_reason(model.config, "float32", "cpu"):
        return reason
    ((logits, _),) = computed(model, exact(model), one=[NUM_TOKENS])
    found = error(logits, expected)
    return "equal" if found < MOST_ERROR else f"an error of {found:.2g}"


def test_this_commits_options_are_computed_as_in_transformers_or_refused() -> None:
    found = {change: outcome(change) for change in part_of("options", changes(), 16)}
    assert {change: said for change, said in found.items() if said.startswith("an error")} == {}
    assert len(changes()) > 2000


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "option", "value"), REFUSED)
def test_a_value_that_plans_do_not_compute_is_refused_by_its_option(name: str, option: str, value: Any) -> None:
    assert option in outcome((name, option, value))
