"""Latent attention (MLA) over memory that stays compressed, for all sequences of a step.

A token's keys and values of all heads are products of its *latent* with a matrix, beside a rotary key that all heads
share. The memory holds latent and rotary key. transformers' modules make keys and values of the whole memory in each
step (`expand_kv`). Here the matrix goes to the other side: a query times the part that gives keys is a query for
latents, and attention to latents times the part that gives values is the output. So a step reads the memory once for
all heads, with any sequences, and a token costs the same products in a prefill and alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from diskprefix.kv.page_table import LayerRows
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.native import attention_operator as native
from diskprefix.native.dense import head_products
from diskprefix.native.library import operators

_SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
"""Names that transformers' modules have for heads, latent_dim, key_dim and value_dim."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """The matrices that make keys (but for the rotary part) and values of latents, [heads, dim, latent_dim]."""

    of_keys: torch.Tensor
    of_values: torch.Tensor

    @property
    def latent_dim(self) -> int:
        return self.of_keys.shape[2]

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Returns queries for rows of the memory, [1, heads, rows, latent_dim + rotary_dim], for those of keys."""
        _, heads, rows, dim = query.shape
        key_dim = self.of_keys.shape[1]
        out = query.new_empty(rows, heads, self.latent_dim + dim - key_dim).transpose(0, 1)
        _multiply(query[0, :, :, :key_dim], self.of_keys, out[:, :, : self.latent_dim], is_turned=False)
        out[:, :, self.latent_dim :] = query[0, :, :, key_dim:]
        return out[None]

    def outputs(self, attended: torch.Tensor) -> torch.Tensor:
        """Returns [1, rows, heads, value_dim] for what attention gives of latents, [1, rows, heads, latent_dim]."""
        _, rows, heads, _ = attended.shape
        out = attended.new_empty(rows, heads, self.of_values.shape[1])
        _multiply(attended[0].transpose(0, 1), self.of_values, out.transpose(0, 1), is_turned=True)
        return out[None]


@dataclass(frozen=True, eq=False)
class LatentMemory:
    """The rows of each sequence, latents with rotary keys behind them, for keys; the `latents` alone are for values."""

    rows: list[LayerRows]
    latents: list[LayerRows]
    expansion: Expansion


def expansion_of(module: nn.Module) -> Expansion | None:
    """Returns the expansion that a module with latent attention computes, None if it has none. The method `expand_kv`
    is the same in all of transformers' modules."""
    matrix = getattr(module, "kv_b_proj", None)
    sizes = [size for name in _SIZES if isinstance(size := vars(module).get(name), int)]
    if not hasattr(module, "expand_kv") or not isinstance(matrix, nn.Module) or len(sizes) != len(_SIZES):
        return None
    (heads, latent_dim, key_dim, value_dim), weight = sizes, matrix.weight
    if not isinstance(weight, torch.Tensor) or getattr(matrix, "bias", None) is not None:
        return None
    if weight.shape != (heads * (key_dim + value_dim), latent_dim) or weight.device.type != "cpu":
        return None
    parts = weight.detach().view(heads, key_dim + value_dim, latent_dim).tensor_split([key_dim], dim=1)
    return Expansion(*parts)


def remember(expansion: Expansion, latents: Any, rotary: Any) -> tuple[LatentMemory, LatentMemory]:
    """Replaces `expand_kv` of a module. Raises `NotInvariant` if it is not given the rows of pages."""
    if not isinstance(latents, list) or not isinstance(rotary, list):
        raise NotInvariant("latents that are not those of pages")
    rows = [replace(latent, end=turned.end) for latent, turned in zip(latents, rotary, strict=True)]
    memory = LatentMemory(rows, latents, expansion)
    return memory, memory


def _multiply(rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, *, is_turned: bool) -> None:
    """Writes rows × matrix of each head to `out`; see `native.dense`."""
    if rows.dtype is not matrices.dtype:
        raise NotInvariant("latent attention in another dtype than its matrix")
    compiled = operators()
    if compiled is None or rows.dtype not in native.DTYPES:
        raise NotInvariant(f"latent attention in {rows.dtype}")
    head_products(compiled, rows, matrices, out, is_turned=is_turned)
