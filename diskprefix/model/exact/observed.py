"""The result of a module for test rows, to compare it with that of a compiled operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diskprefix.kv.layout import is_out_of_memory
from diskprefix.kv.step import Run
from diskprefix.model.exact.attention import HARMLESS
from diskprefix.model.exact.patterns import Pattern
from diskprefix.native import attention_operator as native
from diskprefix.native.blocks import AttentionBlock, Norm, StepPlace
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PROBE = "diskprefix_probe"
_BEFORE = 7
"""Tokens in memory before the test rows."""
_POSITIONS = (7, 8, 100_003)
"""The positions of the test rows. They reveal a module that uses positions for more than the rotary embedding."""


class ObservedMemory:
    """The memory of a layer with a few tokens in it, which an observed module takes for its cache, keys and values."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._keys = self._values = torch.empty(0)
        self.settings: dict[str, Any] | None = None
        self.layer_idx: Any = None
        """The number by which the module asked for the memory of its layer."""
        self._run = Run(_BEFORE, len(_POSITIONS))

    def _make(self, heads: int, key_dim: int, value_dim: int) -> None:
        random = torch.Generator().manual_seed(3)
        self._keys, self._values = (
            torch.randn(1, heads, self._run.end, dim, generator=random).bfloat16() for dim in (key_dim, value_dim)
        )
        self._paged = [native.contiguous(memory[0]) for memory in (self._keys, self._values)]

    def _described(self) -> bytes:
        return native.run_of(self._run.start, self._run.num_rows, native.ONE_PAGE, *self._paged)

    def bits(self) -> torch.Tensor:
        return torch.cat([self._keys.flatten(), self._values.flatten()])

    def observe(self, module: nn.Module, width: int, dim: int) -> Any:
        """Returns what a module with attention computes for rows of that width, with angles for heads of that size."""
        out = type(module).forward(
            module,
            hidden_states=made_up_rows(torch.bfloat16, width, len(_POSITIONS)),
            position_embeddings=_angles(dim),
            attention_mask=Pattern(),
            past_key_values=self,
            position_ids=torch.tensor([_POSITIONS]),
            use_cache=True,
        )
        return out[0] if isinstance(out, tuple) and len(out) == 2 and out[1] is None else out

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: Any = None, *_: Any, **__: Any
    ) -> tuple[ObservedMemory, ObservedMemory]:
        assert not self._keys.numel(), "a layer has one memory"
        self.layer_idx = layer_idx
        self._make(keys.shape[1], keys.shape[-1], values.shape[-1])
        self._keys[:, :, _BEFORE:], self._values[:, :, _BEFORE:] = keys, values
        return self, self

    def answer(self, query: torch.Tensor, pattern: Any, settings: dict[str, Any]) -> torch.Tensor:
        """Returns the attention of the query, [1, heads, rows, key_dim]."""
        assert self.settings is None
        assert pattern == Pattern()
        given = {name: value for name, value in settings.items() if name not in HARMLESS and value is not None}
        assert given.keys() <= {"scaling", "softcap", "s_aux"}
        sinks = given.get("s_aux")
        self.settings = {
            "key_dim": query.shape[-1],
            "value_dim": self._values.shape[-1],
            "scale": float(given.get("scaling", query.shape[-1] ** -0.5)),
            "softcap": float(given.get("softcap", 0.0)),
            "sinks": None if sinks is None else sinks.detach().float().contiguous(),
        }
        options = {name: self.settings[name] for name in ("value_dim", "scale", "softcap", "sinks")}
        heads = self._keys.shape[1]
        return native.attention(self._operators, query[0], [self._described()], kv_heads=heads, **options)[None]

    def block(self, matrices: list[Matrix], norms: Sequence[Norm | None]) -> AttentionBlock | None:
        """Returns the operator that should compute the same as the module, None if there is none."""
        if self.settings is None:
            return None
        (query, key, value, last), (of_query, of_key) = matrices, norms
        key_dim, value_dim, heads = self.settings["key_dim"], self.settings["value_dim"], self._keys.shape[1]
        num_queries = query.rows // key_dim
        if (query.rows, key.rows, value.rows) != (num_queries * key_dim, heads * key_dim, heads * value_dim):
            return None
        if not query.columns == key.columns == value.columns or last.columns != num_queries * value_dim:
            return None
        if num_queries % heads or key_dim % 2 or any(norm and len(norm.weight) != key_dim for norm in norms):
            return None
        if of_query and of_key and (of_query.kind, of_query.epsilon) != (of_key.kind, of_key.epsilon):
            return None
        return AttentionBlock(query, key, value, last, query_norm=of_query, key_norm=of_key, **self.settings)

    def compute(self, block: AttentionBlock) -> torch.Tensor:
        """Returns what the operator computes."""
        self._make(block.key.rows // block.key_dim, block.key_dim, block.value_dim)
        rows = made_up_rows(torch.bfloat16, block.query.columns, len(_POSITIONS))
        return block(self._operators, rows, StepPlace(self._described(), 1, *_angles(block.key_dim)))


def _probe(
    _module: nn.Module, query: torch.Tensor, key: ObservedMemory, _value: Any, pattern: Any, **settings: Any
) -> Any:
    return key.answer(query, pattern, settings), None


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _probe)


@contextmanager
def observing(config: PreTrainedConfig) -> Iterator[None]:
    """Gives a context in which `ObservedMemory` computes the attention of modules."""
    name = "_attn_implementation_internal"
    before = getattr(config, name, None)
    setattr(config, name, _PROBE)
    try:
        with torch.inference_mode():
            yield
    finally:
        setattr(config, name, before)


def made_up_rows(dtype: torch.dtype, width: int, num_rows: int = 4) -> torch.Tensor:
    """Returns rows of several sizes, [1, num_rows, width]."""
    random = torch.Generator().manual_seed(2)
    scales = torch.tensor([1.0, 1e-3, 30.0, 0.1])[:num_rows, None]
    return (torch.randn(num_rows, width, generator=random) * scales).to(dtype)[None]


def _angles(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines, [1, rows, dim], of which no two are of one angle."""
    random = torch.Generator().manual_seed(4)
    cosines, sines = torch.randn(2, 1, len(_POSITIONS), dim, generator=random).bfloat16()
    return cosines, sines


def result_of(compute: Callable[[], Any]) -> Any:
    """Returns the result, None if the module cannot be called in this way: its class may be of any age and author."""
    try:
        return compute()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
