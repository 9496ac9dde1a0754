"""Attention whose result for a token does not depend on the rest of the batch, nor on the steps of the prompt, bit for
bit. `model.exact.invariant` gives it to a model.

The compiled operator (`native`) computes all sequences of a `Step` in one call.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import torch

from diskprefix.kv.page_table import LayerRows
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
_OTHER_FORM = "attention with memory of another form than the queries"
_NOT_KEPT = "attention to tokens that the cache does not keep"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: list[LayerRows] | torch.Tensor | LatentMemory,
    value: list[LayerRows] | torch.Tensor | LatentMemory,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention's output, shape [1, rows, heads, value_dim], and None for the weights.

    `query` has shape [1, heads, rows, key_dim]; `key` and `value` are a layer's rows in the pages of each sequence, or
    those of one sequence side by side, [1, kv_heads, tokens, dim], up to its last row. For latent attention both are a
    `LatentMemory`. `attention_mask` is a `Pattern`. `s_aux` holds a sink for each head. Raises `NotInvariant` for
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
        step = Step((replace(run, start=run.end - count, num_rows=count),))
    if module.training or query.shape[0] != 1 or query.shape[2] != step.num_rows:
        raise NotInvariant("attention over other rows than those of the step")
    compiled = operators()
    if compiled is None or query.dtype not in native.DTYPES:
        raise NotInvariant(f"attention in {query.dtype}")
    # The compiled operator does not check the memory.
    if isinstance(key, list) and isinstance(value, list):
        pairs = list(zip(step.runs, key, value, strict=True))
        if not all(_is_like(query, *memory) for _, *memory in pairs):
            raise NotInvariant(_OTHER_FORM)
        runs = [run_in_pages(run, attention_mask, *memory) for run, *memory in pairs]
        kv_heads, value_dim = key[0].heads, value[0].dim
    else:
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        (run,) = step.runs
        first = _check_side_by_side(run, attention_mask, query, key, value)
        whole = [native.contiguous(memory[0].contiguous(), first) for memory in (key, value)]
        runs = [native.run_of(run.start, run.num_rows, native.ONE_PAGE, *whole, spans=_spans(run, attention_mask))]
        kv_heads, value_dim = key.shape[1], value.shape[3]
    out = native.attention(
        compiled,
        query[0],
        runs,
        kv_heads=kv_heads,
        value_dim=value_dim,
        scale=scale,
        window=attention_mask.window or 0,
        chunk=attention_mask.chunk or 0,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.unsqueeze(0), None


def _is_like(query: torch.Tensor, key: LayerRows, value: LayerRows) -> bool:
    is_same = key.dtype is value.dtype is query.dtype and key.heads == value.heads and key.dim == query.shape[-1]
    return is_same and query.shape[1] % key.heads == 0


def run_in_pages(run: Run, pattern: Pattern, key: LayerRows, value: LayerRows) -> bytes:
    """Returns a run of rows that are in memory, in the operator's form."""
    first = pattern.first_visible(run.start)
    if not (key.holds(first, run.end) and value.holds(first, run.end)):
        raise NotInvariant(_NOT_KEPT)
    memory = key.described(), value.described()
    return native.run_of(run.start, run.num_rows, key.table.block_size, *memory, spans=_spans(run, pattern))


def _spans(run: Run, pattern: Pattern) -> array[int]:
    return run.flat_spans if pattern.whole_pictures else native.NO_SPANS


def _check_side_by_side(run: Run, pattern: Pattern, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns the position with which memory begins that ends with a run."""
    is_same = key.dtype is value.dtype is query.dtype and key.shape[:3] == value.shape[:3] and key.shape[0] == 1
    if not is_same or key.shape[3] != query.shape[3] or query.shape[1] % key.shape[1]:
        raise NotInvariant(_OTHER_FORM)
    first = run.end - key.shape[2]
    if first > pattern.first_visible(run.start):
        raise NotInvariant(_NOT_KEPT)
    return first


def kernel(device: torch.device) -> str:
    """Returns the kernel that computes attention on a device, for the identity: "" for torch's."""
    found = operators() if device.type == "cpu" else None
    return found.identity if found else ""
