"""Recurrent layers, computed token after token by the compiled operators.

In transformers such a layer calls functions that may be replaced by kernels of other packages: a causal convolution,
the gated delta rule, the scan of Mamba 2. Theirs compute a prompt in chunks, and a single token in another way. Here a
layer's forward gets other functions for these names: they take the states of a step's sequences, update them in place,
and compute one row as they compute many. A function is replaced only if ours gives the same for test rows, apart from
rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diskprefix.kv.layers import ConvolvedRows
from diskprefix.kv.step import current_step
from diskprefix.model.exact.observed import result_of
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.rows import in_whole_vectors
from diskprefix.native import scans as native
from diskprefix.native.library import Operators, operators

_LENGTH_EPSILON = 1e-6
"""That of transformers' `l2norm`."""
_MAX_ERROR = 1e-4
"""The largest allowed difference from transformers' function in float32, relative to the largest number."""

_Function = Callable[..., Any]


@dataclass(frozen=True)
class Scans:
    """The functions that compute recurrences. `native.scans` describes their arguments."""

    convolution: Callable[..., torch.Tensor]
    delta_rule: Callable[..., torch.Tensor]
    state_space: Callable[..., torch.Tensor]


def scans_on(device: torch.device) -> Scans | None:
    """Returns the functions that compute recurrences on a device, None if there are none."""
    compiled = operators() if device.type == "cpu" else None
    return None if compiled is None else _compiled(compiled)


@lru_cache
def _compiled(compiled: Operators) -> Scans:
    convolution, delta_rule = partial(native.convolution, compiled), partial(native.delta_rule, compiled)
    return Scans(convolution, delta_rule, partial(native.state_space, compiled))


def with_scans(module: nn.Module, scans: Scans | None) -> _Function | None:
    """Returns the forward of a module's class, with our functions in place of those that it calls; None without any."""
    own: _Function = type(module).forward
    ours = {} if scans is None else _replacements(own, scans)
    if not ours:
        return None
    plain = inspect.unwrap(own)
    assert isinstance(plain, FunctionType)
    names = {**plain.__globals__, **ours}
    found = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    found.__kwdefaults__ = plain.__kwdefaults__
    return found


@lru_cache
def _replacements(forward: _Function, scans: Scans) -> dict[str, _Function]:
    """Returns our functions by the names of those that a forward calls."""
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return {}
    called = {name: plain.__globals__.get(name) for name in _OURS if name in plain.__code__.co_names}
    return {
        name: partial(_OURS[name], own, scans)
        for name, own in called.items()
        if own is not None and _is_the_same(name, own, scans)
    }


def _convolution(
    own: _Function,
    scans: Scans,
    hidden_states: torch.Tensor | ConvolvedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Returns [1, channels, rows] for the rows of a step."""
    if not isinstance(hidden_states, ConvolvedRows):
        out: torch.Tensor = own(hidden_states, weight, bias, activation=activation, **others)
        return out
    if activation not in (None, "silu", "swish"):
        raise NotInvariant(f"a convolution with {activation}")
    rows = hidden_states.rows.transpose(1, 2)
    runs, has_silu = _runs(hidden_states.states), activation is not None
    return scans.convolution(rows, weight, bias, runs, has_silu=has_silu).transpose(1, 2)


def _delta_rule(
    own: _Function,
    scans: Scans,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, Any]:
    """Returns [1, rows, heads, value_dim], and the state of the first sequence: all are updated in place."""
    states = _taken_states()
    if states is None:
        out: tuple[torch.Tensor, Any] = own(
            query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others
        )
        return out
    epsilon = _LENGTH_EPSILON if use_qk_l2norm_in_kernel else 0.0
    return scans.delta_rule(query, key, value, g, beta, _runs(states), epsilon), states[0]


def _state_space(
    own: _Function,
    scans: Scans,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Any:
    """Returns float32 [1, rows, heads, dim], and the state of the first sequence: all are updated in place."""
    states = _taken_states()
    if states is None:
        return own(
            *(hidden_states, dt, A, B, C),
            **(others | {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}),
        )
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        steps = in_whole_vectors(functional.softplus, steps)
    steps = torch.clamp(steps, min=dt_limit[0], max=dt_limit[1])
    return scans.state_space(hidden_states, steps, A, B, C, D, _runs(states)), states[0]


def _taken_states() -> list[torch.Tensor] | None:
    """Returns the states that the layer asked for, for the sequences of the step; None outside a step."""
    step = current_step()
    return step.states.pop() if step is not None and step.states else None


def _runs(states: Sequence[torch.Tensor]) -> Any:
    step = current_step()
    assert step is not None
    return [(run.num_rows, state) for run, state in zip(step.runs, states, strict=True)]


_OURS: dict[str, _Function] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""Our functions by the names that they have in transformers."""


@lru_cache
def _is_the_same(name: str, own: _Function, scans: Scans) -> bool:
    """Returns whether our function gives what another one gives for test rows, apart from rounding."""
    with torch.inference_mode():
        pairs = result_of(lambda: _CHECKS[name](own, scans))
    return pairs is not None and all(
        found.shape == expected.shape
        and float((found.float() - expected.float()).abs().max()) <= _MAX_ERROR * float(expected.float().abs().max())
        for found, expected in pairs
    )


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Ours and theirs."""
_ROWS, _HEADS, _DIM = 7, 4, 8
"""The sizes of test rows."""


def _made_up(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(6)
    return [torch.randn(shape, generator=random, device="cpu") for shape in shapes]


def _check_convolution(own: _Function, scans: Scans) -> _Pairs:
    pairs = []
    for kernel, activation in ((3, None), (4, "silu")):
        rows, weight, bias = _made_up((1, _DIM, _ROWS), (_DIM, kernel), (_DIM,))
        runs = [(_ROWS, rows.new_zeros(1, _DIM, kernel))]
        found = scans.convolution(rows.mT, weight, bias, runs, has_silu=activation is not None)
        pairs.append((found.mT, own(rows, weight, bias, activation=activation)))
    return pairs


def _check_delta_rule(own: _Function, scans: Scans, *, of_keys: bool = False) -> _Pairs:
    key_heads = _HEADS if of_keys else _HEADS // 2
    of_values, of_heads = (1, _ROWS, _HEADS, _DIM), (1, _ROWS, _HEADS)
    query, key, value, decay, beta, state = _made_up(
        *[(1, _ROWS, key_heads, _DIM)] * 2,
        of_values,
        of_values if of_keys else of_heads,
        of_heads,
        (1, _HEADS, _DIM, _DIM),
    )
    decay, beta, pairs = -decay.abs(), beta.sigmoid(), _Pairs()
    for has_length in (True, False):
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": has_length}
        expected = own(query, key / 4, value, g=decay, beta=beta, initial_state=state.clone(), **options)
        ours, epsilon = state.clone(), _LENGTH_EPSILON if has_length else 0.0
        found = scans.delta_rule(query, key / 4, value, decay, beta, [(_ROWS, ours)], epsilon)
        pairs += [(found, expected[0]), (ours, expected[1])]
    return pairs


def _check_state_space(own: _Function, scans: Scans) -> _Pairs:
    of_groups = (1, _ROWS, _HEADS // 2, _DIM)
    rows, into, out_of, steps, decay, skip, state = _made_up(
        *((1, _ROWS, _HEADS, _DIM), of_groups, of_groups, (1, _ROWS, _HEADS), (_HEADS,), (_HEADS,)),
        (1, _HEADS, _DIM, _DIM),
    )
    decay = -decay.abs()
    expected = own(
        *(rows, steps, decay, into, out_of),
        chunk_size=4, D=skip, dt_bias=skip, dt_softplus=True, initial_states=state.clone(), return_final_states=True,
    )  # fmt: skip
    steps = functional.softplus(steps + skip)
    found = scans.state_space(rows, steps, decay, into, out_of, skip, [(_ROWS, state)])
    return [(found, expected[0]), (state, expected[1])]


_CHECKS: dict[str, Callable[[_Function, Scans], _Pairs]] = {
    "causal_conv1d_fn": _check_convolution,
    "torch_chunk_gated_delta_rule": _check_delta_rule,
    "chunk_kimi_delta_attention": partial(_check_delta_rule, of_keys=True),
    "mamba2_chunk_scan": _check_state_space,
}
