"""Recurrent layers, computed token after token by the compiled operators.

In transformers such a layer calls functions that may be replaced by kernels of other packages: a causal convolution,
the gated delta rule, the scan of Mamba 2. Theirs compute a prompt in chunks, and a single token in another way. Here a
layer's forward gets other functions for these names: they take the states of a step's sequences, update them, and
compute one row as they compute many. Tests compare them with transformers' functions; the self-check compares the
logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diskprefix.kv.layers import ConvolvedRows
from diskprefix.kv.step import Step, current_step
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.rows import in_whole_vectors
from diskprefix.native import scans as native
from diskprefix.native.library import Operators

_LENGTH_EPSILON = 1e-6
"""That of transformers' `l2norm`."""

_Function = Callable[..., Any]
_States = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""See `StateLayer.states_in`."""


def with_scans(module: nn.Module, compiled: Operators) -> _Function | None:
    """Returns the forward of a module's class, with our functions in place of those that it calls; None without any."""
    plain = inspect.unwrap(type(module).forward)
    if not isinstance(plain, FunctionType):
        return None
    own = {name: plain.__globals__.get(name) for name in _OURS if name in plain.__code__.co_names}
    ours = {name: partial(_OURS[name], function, compiled) for name, function in own.items() if function is not None}
    if not ours:
        return None
    names = {**plain.__globals__, **ours}
    found = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    found.__kwdefaults__ = plain.__kwdefaults__
    return found


def _convolution(
    own: _Function,
    compiled: Operators,
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
    operator = partial(native.convolution, compiled, weight=weight, bias=bias, has_silu=activation is not None)
    return _computed(operator, hidden_states.states, hidden_states.rows.transpose(1, 2)).transpose(1, 2)


def _delta_rule(
    compiled: Operators,
    states: _States,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, Any]:
    """Returns [1, rows, heads, value_dim], and the state of the first sequence: all are in their places."""
    operator = partial(native.delta_rule, compiled, epsilon=_LENGTH_EPSILON if use_qk_l2norm_in_kernel else 0.0)
    return _computed(operator, states, query, key, value, g, beta), states[0][1]


def _state_space(
    compiled: Operators,
    states: _States,
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
    **_: Any,
) -> Any:
    """Returns float32 [1, rows, heads, dim], and the state of the first sequence: all are in their places."""
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        steps = in_whole_vectors(functional.softplus, steps)
    steps = torch.clamp(steps, min=dt_limit[0], max=dt_limit[1])

    def operator(
        rows: torch.Tensor, steps: torch.Tensor, into: torch.Tensor, out_of: torch.Tensor, runs: native.Runs
    ) -> torch.Tensor:
        return native.state_space(compiled, rows, steps, A, into, out_of, D, runs)

    return _computed(operator, states, hidden_states, steps, B, C), states[0][1]


def _with_states(ours: _Function, own: _Function, compiled: Operators, *args: Any, **kwargs: Any) -> Any:
    """Calls our function with the states that the layer asked for, for the sequences of the step; outside a step their
    own."""
    step = current_step()
    if step is None or not step.states:
        return own(*args, **kwargs)
    return ours(compiled, step.states.pop(), *args, **kwargs)


def _computed(operator: Callable[..., torch.Tensor], states: _States, *rows: torch.Tensor) -> torch.Tensor:
    """Returns what an operator computes for the rows of a step, each [1, rows, ..]. Runs with guesses keep theirs."""
    step = current_step()
    assert step is not None
    first = 0
    for run, of_run in zip(step.runs, states, strict=True):
        if run.replays is not None:
            # A view would keep the rows of all sequences of the step.
            part = slice(first, first + run.num_rows)
            kept = rows if len(step.runs) == 1 else [numbers[:, part].clone() for numbers in rows]
            run.replays.append(partial(_replay, operator, of_run, kept))
        first += run.num_rows
    return operator(*rows, runs=_runs(step, states))


def _runs(step: Step, states: _States) -> native.Runs:
    return [(run.num_rows, *of_run) for run, of_run in zip(step.runs, states, strict=True)]


def _replay(
    operator: Callable[..., torch.Tensor],
    states: tuple[torch.Tensor, torch.Tensor],
    rows: Sequence[torch.Tensor],
    num_rows: int,
) -> None:
    """Computes a state behind the first `num_rows` rows of a step again."""
    operator(*(numbers[:, :num_rows] for numbers in rows), runs=[(num_rows, *states)])


_OURS: dict[str, _Function] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": partial(_with_states, _delta_rule),
    "chunk_kimi_delta_attention": partial(_with_states, _delta_rule),
    "mamba2_chunk_scan": partial(_with_states, _state_space),
}
"""Our functions by the names that they have in transformers."""
