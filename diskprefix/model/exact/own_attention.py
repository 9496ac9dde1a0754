"""Attention of modules that compute it themselves, outside transformers' interface, in a method `_attn` of queries,
keys, values and a mask (GPT-J, CodeGen, GPT-Neo, Japanese GPT-NeoX). Ours replaces the method of a module if textbook
attention with one of a few scales and windows gives what the method gives for test rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from diskprefix.kv.layout import is_out_of_memory
from diskprefix.model.exact.attention import attend
from diskprefix.model.exact.patterns import NotInvariant, Pattern

_MAX_ERROR = 0.02
"""The largest difference that rounding makes, relative to the largest number."""
_BEHIND = 8
"""Test rows behind the window."""


def replacement(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what replaces `_attn` of a module, None if it has none or computes something else there."""
    sizes = [
        next((size for name in names if isinstance(size := getattr(module, name, None), int)), 0)
        for names in (("num_attention_heads", "num_heads"), ("head_dim", "head_size"))
    ]
    if not hasattr(module, "_attn") or not all(sizes):
        return None
    heads, dim = sizes
    window = getattr(getattr(module, "config", None), "window_size", None)
    window = window if isinstance(window, int) else None
    random = torch.Generator().manual_seed(8)
    parts = torch.randn(3, 1, heads, _BEHIND + (window or 0), dim, generator=random)
    found = _result_of(module, parts)
    if found is None:
        return None
    for scale in (dim**-0.5, 1.0):
        for pattern in (Pattern(), Pattern(window=window)):
            expected = _textbook(parts, scale, pattern)
            if found.shape == expected.shape and (found - expected).abs().max() <= _MAX_ERROR * expected.abs().max():
                return partial(_attn, module, scale, pattern)
    return None


def _result_of(module: nn.Module, parts: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.inference_mode():
            found = cast(Any, type(module))._attn(module, *parts, _mask(parts.shape[3], Pattern()))
    except Exception as error:  # a model class of any age and author may fail in any way
        if is_out_of_memory(error):
            raise
        return None
    return found[0] if isinstance(found, tuple) and isinstance(found[0], torch.Tensor) else None


def _textbook(parts: torch.Tensor, scale: float, pattern: Pattern) -> torch.Tensor:
    queries, keys, values = parts
    weights = (queries @ keys.mT * scale + _mask(parts.shape[3], pattern)).softmax(-1)
    return torch.matmul(weights, values)


def _mask(num_tokens: int, pattern: Pattern) -> torch.Tensor:
    """Returns what is added to scores, [1, 1, num_tokens, num_tokens]: 0 or the lowest number."""
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if pattern.window is not None:
        seen = seen.triu(1 - pattern.window)
    return torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]


def _attn(
    module: nn.Module,
    scale: float,
    pattern: Pattern,
    query: torch.Tensor,
    key: torch.Tensor | list[torch.Tensor],
    value: torch.Tensor | list[torch.Tensor],
    attention_mask: Any = None,
) -> tuple[torch.Tensor, None]:
    """Returns the attention's output, [1, heads, rows, value_dim]; see `attend`. Raises `NotInvariant`."""
    if attention_mask != Pattern():
        raise NotInvariant("a mask of its own")
    dtype = key.dtype if isinstance(key, torch.Tensor) else key[0].dtype
    out, _ = attend(module, query.to(dtype), key, value, pattern, scaling=scale)
    return out.transpose(1, 2), None
