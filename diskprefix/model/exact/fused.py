"""Parts of a model that the compiled operators compute in one call: norms, gated products, attention with what is
around it.

A module is taken for such a part if it has the children of one, and if it gives what the operator gives for made-up
rows: the same bits, but for norms, whose sums have another order. Any other module computes as it did. Of the gated
products of one kind the first is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import permutations
from types import FunctionType
from typing import Any

import torch
from torch import nn

from diskprefix.kv.layers import FullAttentionLayer, SlidingWindowLayer, TokenLayer
from diskprefix.kv.step import Run, current_step
from diskprefix.model.exact.attention import HARMLESS, run_in_pages
from diskprefix.model.exact.mixtures import all_numbers, experts_of
from diskprefix.model.exact.observed import ObservedMemory, made_up_rows, result_of
from diskprefix.model.exact.patterns import NotInvariant, Pattern
from diskprefix.model.exact.rows import in_whole_vectors
from diskprefix.native import attention_operator as native
from diskprefix.native.blocks import NORM_KINDS, AttentionBlock, Gated, Norm, StepPlace
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix, fills_blocks, product

Forward = Callable[..., Any]
Curves = dict[Hashable, torch.Tensor]
"""Tables of activations, by what tells one from another."""

_PROJECTIONS, _NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
"""The children of attention, by the names that they have in transformers."""
_PLAIN = bool | int | float | str | FunctionType
"""Types of attributes by which modules are told apart."""
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


def matrix_of(module: nn.Module) -> Matrix | None:
    """Returns the matrix of a linear module, None if the compiled product does not take it."""
    found: Matrix | None = getattr(module, "matrix", None)
    if found is not None or type(module) is not nn.Linear:
        return found
    weight = module.weight
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return (
        Matrix(weight.detach(), (weight.shape[0], weight.shape[1]), bias=module.bias) if fills_blocks(weight) else None
    )


def norm_of(module: nn.Module, operators: Operators) -> Norm | None:
    """Returns the norm that a module computes, None if it computes something else."""
    parameters = [*module.parameters(recurse=False)]
    epsilon = next((vars(module)[name] for name in _EPSILONS if isinstance(vars(module).get(name), float)), None)
    if len(parameters) != 1 or any(True for _ in module.children()) or epsilon is None:
        return None
    (weight,) = parameters
    if weight.ndim != 1 or weight.dtype not in native.DTYPES:
        return None
    rows = made_up_rows(weight.dtype, len(weight)).to(weight.device)
    expected = result_of(lambda: type(module).forward(module, rows))
    for kind in NORM_KINDS:
        norm = Norm(weight.detach(), kind, epsilon)
        if isinstance(expected, torch.Tensor) and _is_near(norm(operators, rows), expected):
            return norm
    return None


def gated_of(
    module: nn.Module, operators: Operators, curves: Curves, order: Sequence[int] | None = None
) -> tuple[Gated, Sequence[int]] | None:
    """Returns the gated products that a module computes, and which of its products are gate, up and down. `curves` are
    those of other modules, `order` is that of another module of the same kind, which makes a comparison needless."""
    linears = [child for child in module.children() if hasattr(child, "in_features")]
    others = [child for child in module.children() if not hasattr(child, "in_features")]
    found = [matrix_of(linear) for linear in linears]
    matrices = [matrix for matrix in found if matrix is not None]
    curve = others[0] if others else next((act for name, act in vars(module).items() if name.startswith("act")), None)
    if not len(found) == len(matrices) == 3 or len(others) > 1 or not callable(curve):
        return None
    if list(module.parameters(recurse=False)):
        return None
    table = result_of(lambda: _table(curve, curves))
    if not isinstance(table, torch.Tensor):
        return None
    rows = None
    for numbers in [order] if order else permutations(range(3)):
        gate, up, down = (matrices[number] for number in numbers)
        if gate.columns != up.columns or not gate.rows == up.rows == down.columns or gate.columns != down.rows:
            continue
        rows = made_up_rows(torch.bfloat16, gate.columns) if rows is None else rows
        gated = Gated(gate, up, down, table)
        if order or _is_equal(result_of(partial(type(module).forward, module, rows)), gated(operators, rows)):
            return gated, numbers
    return None


def attention_of(module: nn.Module, operators: Operators, parts: dict[nn.Module, Any]) -> AttentionBlock | None:
    """Returns the attention of a module with the products and norms around it. `parts` are the known modules."""
    children = dict(module.named_children())
    if not {*_PROJECTIONS} <= children.keys() <= {*_PROJECTIONS, *_NORMS} or list(module.buffers(recurse=False)):
        return None
    matrices = [matrix for name in _PROJECTIONS if (matrix := matrix_of(children[name])) is not None]
    of_heads = [parts.get(children[name]) for name in _NORMS if name in children]
    if len(matrices) != len(_PROJECTIONS) or None in of_heads or len(of_heads) == 1:
        return None
    made_up = ObservedMemory(operators)
    observed = result_of(lambda: made_up.observe(module, matrices[0].columns, int(vars(module)["head_dim"])))
    block = made_up.block(matrices, of_heads or [None, None])
    # `_in_place` finds the memory of the layer by this number.
    if block is None or made_up.layer_idx is None or made_up.layer_idx != vars(module).get("layer_idx"):
        return None
    memory = ObservedMemory(operators)
    found = memory.compute(block)
    return block if _is_equal(observed, found) and torch.equal(memory.bits(), made_up.bits()) else None


class Parts:
    """Finds the parts of a model that compiled operators compute."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._found: dict[nn.Module, Any] = {}
        self._kinds: dict[Hashable, Any] = {}
        """What was found for a kind of module: others of it are not compared again."""
        self._curves: Curves = {}

    def smallest(self, module: nn.Module) -> Forward | None:
        """Returns a replacement for the forward of a product, a norm or experts, None for other modules."""
        matrix = matrix_of(module) if type(module) is nn.Linear else None
        if matrix is not None:
            return partial(product, self._operators, matrix=matrix)
        experts = experts_of(module)
        if experts is not None:
            return partial(experts, self._operators)
        norm = norm_of(module, self._operators)
        return None if norm is None else self._forward(module, norm, _norm)

    def larger(self, module: nn.Module) -> Forward | None:
        """Returns a replacement for the forward of gated products or attention, whose parts have theirs already."""
        if any(hasattr(child, "in_features") for child in module.children()):
            kind = kind_of(module)
            found = gated_of(module, self._operators, self._curves, self._kinds.get(kind))
            if found is not None:
                self._found[module], self._kinds[kind] = found
                return partial(found[0], self._operators)
        block = attention_of(module, self._operators, self._found)
        return None if block is None else self._forward(module, block, _in_place, module)

    def _forward(self, module: nn.Module, part: Any, forward: Forward, *others: Any) -> Forward:
        self._found[module] = part
        return partial(forward, partial(type(module).forward, module), part, self._operators, *others)


def kind_of(module: nn.Module) -> Hashable:
    """Returns a value that is equal for modules that compute the same from their tensors: with the same classes and
    attributes, and tensors of the same forms. The number of the layer counts where a forward computes with it."""
    return tuple(
        (
            *(name, type(one), str(vars(one).get("form", ""))),
            *(
                (key, value)
                for key, value in vars(one).items()
                if isinstance(value, _PLAIN) and (key != "layer_idx" or _computes_with_number(type(one).forward))
            ),
            *((key, part.dtype, part.shape) for key, part in one.named_parameters(recurse=False)),
        )
        for name, one in module.named_modules()
    )


@cache
def _computes_with_number(forward: Callable[..., Any]) -> bool:
    """Returns whether a forward uses the number of its layer otherwise than to find its place in the cache."""
    names = names_in(forward)
    return "layer_idx" in names and not any(name.startswith(("update", "get_")) for name in names)


def names_in(function: Any) -> set[str]:
    """Returns the names of functions and attributes in the code of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return set() if code is None else set(code.co_names)


def _norm(own: Forward, norm: Norm, operators: Operators, rows: torch.Tensor, *gate: Any) -> Any:
    return own(rows, *gate) if gate or rows.dtype is not norm.weight.dtype else norm(operators, rows)


def _in_place(
    own: Forward,
    block: AttentionBlock,
    operators: Operators,
    attention: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> Any:
    """Replaces the forward of attention over a step. `attention` knows the number of the layer."""
    step = current_step()
    layer: Any = (
        past_key_values.layers[attention.layer_idx] if step is not None and past_key_values is not None else None
    )
    is_known = type(layer) in (FullAttentionLayer, SlidingWindowLayer) and isinstance(attention_mask, Pattern)
    if (
        step is None
        or not is_known
        or position_embeddings is None
        or not others.keys() <= HARMLESS
        or attention_mask.last is not None
        or position_embeddings[0].shape[-1] != block.key_dim
        or position_embeddings[0].dtype is not torch.bfloat16
    ):
        return own(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **others,
        )
    if hidden_states.shape[1] != step.num_rows:
        raise NotInvariant("attention over other rows than those of the step")
    runs = [
        _extended(one, run, attention_mask, block)
        for one, run in zip(layer.sequences or (layer,), step.runs, strict=True)
    ]
    cosines, sines = (angles.contiguous() for angles in position_embeddings)
    window, chunk = attention_mask.window or 0, attention_mask.chunk or 0
    out = block(operators, hidden_states, StepPlace(b"".join(runs), len(runs), cosines, sines, window, chunk))
    return out, None


def _extended(layer: TokenLayer, run: Run, pattern: Pattern, block: AttentionBlock) -> bytes:
    """Extends a layer by the rows of a run, and returns the run in the operator's form. Raises `NotInvariant` if the
    pages have other heads than the block writes, or if another module has written this step."""
    keys, values = layer.keys, layer.values
    if not (
        keys.dtype is values.dtype is torch.bfloat16
        and (keys.dim, values.dim) == (block.key_dim, block.value_dim)
        and (keys.heads * keys.dim, values.heads * values.dim) == (block.key.rows, block.value.rows)
    ):
        raise NotInvariant("attention with memory of another form than its products")
    if layer.length != run.start:
        raise NotInvariant("attention that shares the number of its layer")
    layer.length = run.end
    return run_in_pages(run, pattern, keys, values)


def _table(curve: Callable[[torch.Tensor], torch.Tensor], known: Curves) -> torch.Tensor:
    """Returns the curve as bfloat16 [65 537], see `Gated`. Layers with the same share it."""
    functions = [str(value) for value in vars(curve).values() if callable(value)] if hasattr(curve, "__dict__") else []
    key = (kind_of(curve), *functions) if isinstance(curve, nn.Module) else curve
    if key not in known:
        known[key] = nn.functional.pad(in_whole_vectors(curve, all_numbers()), (0, 1))
    return known[key]


def _is_equal(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two norms differ by the order of a sum only: seldom, where numbers are rounded after it."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    error = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1e-30)
    if found.dtype is torch.float32:
        return bool(error.max() < 1e-5)
    return bool(error.max() <= torch.finfo(found.dtype).eps and (error > 0).float().mean() < 0.01)
