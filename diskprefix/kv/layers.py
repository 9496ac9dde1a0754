"""Cache layers for transformers over the memory of a `kv.sequence.KVSequence`, one class for each kind of state.

Each class inherits from transformers' own class, in whose place it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from diskprefix.kv.layout import LayerSpec
from diskprefix.kv.page_table import LayerRows
from diskprefix.kv.step import Run, Step, current_step


class TokenLayer:
    """The keys and values of a layer in the pages of a sequence, up to position `length`. `window` is in tokens.

    Our own attention (`model.exact.attention`) reads the pages of all sequences of a step, whose rows `update` returns.
    Any other attention gets a copy side by side of the tokens that it may look at.
    """

    keys: LayerRows
    """With latent attention (MLA), a row of memory is a latent in place of the key, and a rotary key in place of the
    value."""
    values: LayerRows
    length = 0
    window: int | None = None
    sequences: Sequence[TokenLayer] = ()
    """The layers of the sequences of a step, for which this layer stands, in the order of the step's runs."""

    def bind(self, keys: LayerRows, values: LayerRows, device: torch.device) -> None:
        self.keys, self.values, self.dtype, self.device = keys, values, keys.dtype, device
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the sequence binds the layer before its first use."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        """Appends [1, heads, n, head_dim]. Returns all keys and values that the n tokens may look at."""
        step = current_step()
        run = Run(self.length, keys.shape[-2]) if step is None else step.runs[0]
        self.put(keys, values, run)
        if step is not None and not step.gathers:
            return [self.keys], [self.values]
        first = 0 if self.window is None else max(0, run.start - self.window + 1)
        return self.keys.gathered(first, run.end), self.values.gathered(first, run.end)

    def put(self, keys: torch.Tensor, values: torch.Tensor, run: Run) -> None:
        """Writes the rows of `run`, [1, heads, num_rows, head_dim]."""
        self.keys.put(run.start, keys[0])
        self.values.put(run.start, values[0])
        self.length = run.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = 0 if self.window is None else max(0, self.length - self.window + 1)
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        return self.length


class FullAttentionLayer(TokenLayer, DynamicLayer):  # type: ignore[misc]
    """A layer whose tokens look at all tokens before them."""


class SlidingWindowLayer(TokenLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer whose tokens look at the last `window` tokens, themselves included. Chunked attention keeps as many."""

    def __init__(self, window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self.window = window


@dataclass(frozen=True, eq=False)
class ConvolvedRows:
    """The inputs of a convolution, [1, channels, rows], and the result of `StateLayer.states_in`."""

    rows: torch.Tensor
    states: list[tuple[torch.Tensor, torch.Tensor]]


class StateLayer:
    """A layer with convolution and recurrent states, each in memory of its own that is updated in place. In a step with
    guesses, `spares` keep the states from before the step.

    In a step, the functions of `model.exact.recurrent` update the states of all its sequences.
    """

    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]
    spares: dict[tuple[str, int], torch.Tensor | None]
    """States by part and index."""
    sequences: Sequence[StateLayer] = ()
    """See `TokenLayer`."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **others: Any) -> Any:
        """Returns the argument of the convolution for the inputs `conv_states`, [1, channels, n]."""
        step = current_step()
        if step is None:
            return super().update_conv_state(conv_states, state_idx, **others)  # type: ignore[misc]
        return ConvolvedRows(conv_states, self.states_in(step, "conv", state_idx))

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **others: Any) -> Any:
        if current_step() is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **others)  # type: ignore[misc]
        if recurrent_states is not self.recurrent_states[state_idx]:
            raise ValueError("a recurrence that does not update its state in place")
        return recurrent_states

    def states_in(self, step: Step, part: str, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns for each sequence of the step the state before its rows, which is zero at the beginning of a
        sequence, and the memory for the state behind them."""
        states = []
        for layer, run in zip(self.sequences or (self,), step.runs, strict=True):
            state = layer._states(part)[index]
            before = state if run.replays is None else layer.spares[part, index]
            assert state is not None, "the sequence binds all states"
            assert before is not None, "and the spares before a step with guesses"
            states.append((before if run.start else before.zero_(), state))
        return states

    def swap_states(self) -> None:
        """Exchanges the states with the spares."""
        for (part, index), spare in self.spares.items():
            states = self._states(part)
            states[index], self.spares[part, index] = spare, states[index]

    def _states(self, part: str) -> dict[int, torch.Tensor | None]:
        return self.conv_states if part == "conv" else self.recurrent_states

    def bind_state(self, part: str, index: int, tensor: torch.Tensor) -> None:
        if part == "conv":
            self.conv_states[index] = tensor
            self.is_conv_states_initialized[index] = True  # type: ignore[attr-defined]
            self.conv_kernel_size[index] = tensor.shape[-1]  # type: ignore[attr-defined]
        else:
            self.recurrent_states[index] = tensor
            self.is_recurrent_states_initialized[index] = True  # type: ignore[attr-defined]
        self.dtype, self.device = tensor.dtype, tensor.device

    def set_has_state(self, has_state: bool) -> None:
        self.has_previous_state = dict.fromkeys(self.conv_states, has_state)


class LinearLayer(StateLayer, LinearAttentionLayer):  # type: ignore[misc]
    """A layer with linear attention, a state-space model (Mamba), or a short convolution."""


class LinearAndFullLayer(StateLayer, TokenLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with linear and full attention."""


class LinearAndSlidingLayer(StateLayer, TokenLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    """A layer with linear attention and attention with a window."""

    def __init__(self, window: int, number_of_states: int) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(
            self, sliding_window=window, number_of_states=number_of_states
        )
        self.window = window


def make_layer(spec: LayerSpec) -> Any:
    """Returns an empty layer without memory."""
    match spec.kind:
        case "full":
            return FullAttentionLayer()
        case "sliding":
            assert spec.window is not None
            return SlidingWindowLayer(spec.window)
        case "linear":
            return LinearLayer(number_of_states=spec.num_states)
        case "linear+full":
            return LinearAndFullLayer(number_of_states=spec.num_states)
        case "linear+sliding":
            assert spec.window is not None
            return LinearAndSlidingLayer(spec.window, spec.num_states)
        case "none":
            return DummyLayer()


def packed(layers: Sequence[Any], step: Step) -> Any:
    """Returns one layer for several sequences that share a forward. The rows of each sequence go to its own memory, and
    `update` returns the memory of all for our own attention. All else is taken from the first layer."""
    layer = copy.copy(layers[0])
    vars(layer)["sequences"] = layers
    sizes = [run.num_rows for run in step.runs]

    def update(keys: torch.Tensor, values: torch.Tensor, *_: Any, **_named: Any) -> tuple[Any, Any]:
        parts = zip(layers, torch.split(keys, sizes, 2), torch.split(values, sizes, 2), step.runs, strict=True)
        for each, key, value, run in parts:
            each.put(key, value, run)
        return [each.keys for each in layers], [each.values for each in layers]

    if isinstance(layer, TokenLayer):
        vars(layer)["update"] = update
    return layer
