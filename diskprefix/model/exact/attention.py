"""Attention whose result for a token does not depend on the rest of the batch, nor on the steps of the prompt, bit for
bit. `model.exact.invariant` gives it to a model.

The compiled operator (`native`) computes all sequences of a `Step` in one call.
"""

from __future__ import annotations

from typing import Any

import torch

from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import Run, Step, current_step
from diskprefix.model.exact.latent import LatentMemory
from diskprefix.model.exact.patterns import NotInvariant, Pattern
from diskprefix.native import attention_operator as native
from diskprefix.native.library import operators

HARMLESS = frozenset({
    "position_ids", "use_cache", "cache_position", "is_causal", "dropout", "sliding_window", "position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "past_key_values",
})  # fmt: skip
"""Arguments that change nothing here. The mask says what is visible, not `sliding_window`."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | list[torch.Tensor] | LatentMemory,
    value: torch.Tensor | list[torch.Tensor] | LatentMemory,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention's output, shape [1, rows, heads, value_dim], and None for the weights.

    `query` has shape [1, heads, rows, key_dim]; `key` and `value` are a layer's memory, [1, kv_heads, tokens, dim], or
    a list of it for several sequences. It ends with the last tile of the step (`kv.layers`). For latent attention both
    are a `LatentMemory`. `attention_mask` is a `Pattern`. `s_aux` holds a sink for each head. Raises `NotInvariant` for
    what it cannot do.
    """
    if isinstance(key, LatentMemory):
        options = {"scaling": scaling or query.shape[-1] ** -0.5, "softcap": softcap, "s_aux": s_aux, **others}
        queries = key.expansion.queries(query)
        attended, _ = attend(module, queries, key.rows, key.latents, attention_mask, **options)
        return key.expansion.outputs(attended), None
    assert not isinstance(value, LatentMemory)
    if found := [name for name in sorted(others.keys() - HARMLESS) if others[name] is not None]:
        raise NotInvariant(f"attention with {', '.join(found)}")
    step = current_step()
    if step is None or not isinstance(attention_mask, Pattern):
        raise NotInvariant("attention without a step or with a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask.last is not None:
        # A model that drops the other rows has one sequence.
        (run,) = step.runs
        count = min(attention_mask.last, run.num_rows)
        step = Step((Run(run.end - count, count),))
    if module.training or query.shape[0] != 1 or query.shape[2] != step.num_rows:
        raise NotInvariant("attention over other rows than those of the step")
    keys, values = ([memory] if isinstance(memory, torch.Tensor) else memory for memory in (key, value))
    _check_memory(step, attention_mask, query, keys, values)
    compiled = operators()
    if compiled is None or query.dtype not in native.DTYPES:
        raise NotInvariant(f"attention in {query.dtype}")
    paged = [
        [native.contiguous(memory[0], _first(run.end, memory)) for memory in of_run]
        for run, *of_run in zip(step.runs, keys, values, strict=True)
    ]
    out = native.attention(
        compiled,
        query[0],
        [
            native.run_of(run.start, run.num_rows, native.ONE_PAGE, *of_run)
            for run, of_run in zip(step.runs, paged, strict=True)
        ],
        kv_heads=keys[0].shape[1],
        value_dim=values[0].shape[-1],
        scale=scale,
        window=attention_mask.window or 0,
        chunk=attention_mask.chunk or 0,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.unsqueeze(0), None


def _check_memory(
    step: Step, pattern: Pattern, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> None:
    expected = query.dtype, keys[0].shape[1], query.shape[-1]
    for run, memory, of_values in zip(step.runs, keys, values, strict=True):
        is_same = (memory.dtype, memory.shape[1], memory.shape[-1]) == expected and memory.shape[0] == 1
        is_same &= of_values.dtype == query.dtype and of_values.shape[:3] == memory.shape[:3]
        if not is_same or query.shape[1] % memory.shape[1]:
            # The compiled operator does not check the memory.
            raise NotInvariant("attention with memory of another form than the queries")
        if _first(run.end, memory) > pattern.first_visible(run.start) // TILE * TILE:
            raise NotInvariant("attention to tokens that the cache does not keep")


def _first(end: int, memory: torch.Tensor) -> int:
    """Returns the position with which memory begins that ends with the tile of the last token before `end`."""
    return -(-end // TILE) * TILE - memory.shape[2]


def kernel(device: torch.device) -> str:
    """Returns the kernel that computes attention on a device, for the identity: "" for torch's."""
    found = operators() if device.type == "cpu" else None
    return found.identity if found else ""
