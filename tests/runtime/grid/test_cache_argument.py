"""The cache reaches a forward under the name that the forward has for it, whichever transformers is installed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import diskprefix
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.grid.cache_argument import CACHE_ARGUMENTS, cache_argument
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.grid.uncached import TransformersState
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, random_prompt

STEPS = (BLOCK, BLOCK, 5, 1)


def with_name(name: str | None) -> PreTrainedModel:
    """A llama whose forward has that argument for the cache, and swallows the others, as those of published code do."""
    model = tiny_model("llama", torch.float32)
    theirs = cache_argument(LlamaForCausalLM.forward)
    assert theirs is not None

    def forward(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        cache = given.get(name) if name else None
        others = {key: value for key, value in given.items() if key not in CACHE_ARGUMENTS}
        return LlamaForCausalLM.forward(self, input_ids=input_ids, **{theirs: cache}, **others)

    taken = [parameter for parameter in ("self", "input_ids", name, "logits_to_keep") if parameter]
    kinds = dict.fromkeys(taken, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    members = [inspect.Parameter(parameter, kind) for parameter, kind in kinds.items()]
    rest = inspect.Parameter("given", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([*members, rest])  # type: ignore[attr-defined]
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"forward": forward})
    return model


def ids() -> list[np.ndarray]:
    return np.split(random_prompt(1, sum(STEPS)).astype(np.int64), np.cumsum(STEPS)[:-1])


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_the_grid_gives_the_cache_under_any_of_its_names(name: str) -> None:
    found = []
    for model in (tiny_model("llama", torch.float32), with_name(name)):
        layout = rehearse(model)
        assert layout.unsupported == ()
        sequence = KVSequence(PagePool(layout, block_size=BLOCK))
        runtime = GridRuntime(model, layout)
        found.append([runtime.run([Rows(sequence, part)]).logits[0] for part in ids()])
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_transformers_own_state_reaches_a_forward_under_any_of_its_names(name: str) -> None:
    found = []
    for model in (tiny_model("llama", torch.float32), with_name(name)):
        state = TransformersState(model)
        with torch.inference_mode():
            found.append([state.forward(part).numpy() for part in ids()])
    assert all(map(np.array_equal, *found))


def test_a_forward_that_ignores_every_cache_is_an_error() -> None:
    model = with_name(None)
    assert rehearse(model).unsupported == ("LlamaForCausalLM takes no cache",)
    state = TransformersState(model)
    first, then, *_ = ids()
    with torch.inference_mode():
        state.forward(first)
        with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM takes no cache$"):
            state.forward(then)


def test_no_other_module_spells_the_name_of_the_cache() -> None:
    """An argument that a forward does not know may be ignored without a word."""
    package = Path(diskprefix.__file__).parent
    spelled = re.compile(r"""past_key_values\s*=|cache_params\s*=|["'](past_key_values|cache_params)["']""")
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if spelled.search(path.read_text())}
    assert files == {"runtime/grid/cache_argument.py"}
