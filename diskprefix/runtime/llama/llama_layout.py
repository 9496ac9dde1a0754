"""The layout of a model in llama.cpp's library, from the form of its states, and where each tensor of a state is in it.

The library does not say which layers a memory belongs to. Layers are numbered as its states have them, memory by
memory, and recurrent ones come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from diskprefix.prefixstore.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.prefixstore.kv.sizes import Q8_BLOCK, Q8_BLOCK_BYTES
from diskprefix.runtime.llama.state_form import Section, StateForm, TensorForm, UnknownForm

S = TypeVar("S", TensorSpec, StateSpec)

_PLAIN = {0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2)}
"""ggml's numbers of the types of plain numbers, with the bytes of a number."""
_Q8_0 = 8


class Place(Struct, frozen=True):
    """The place of a tensor in the layout: its group, and its number there."""

    group: int
    index: int


class LlamaLayout(Struct, frozen=True):
    """The layout of a model. `rows` has the place of each tensor of each section of attention, `states` those of the
    recurrent section; None for a tensor without numbers."""

    layout: Layout
    rows: tuple[tuple[Place, ...], ...]
    states: tuple[Place | None, ...]


def layout_of(form: StateForm, vocab_size: int, window: int) -> LlamaLayout:
    """Returns the layout for states of a form. With several memories for attention, the last one has the `window` of a
    model that has one. Raises `UnknownForm` for numbers of other types."""
    windows: list[int | None] = [None] * len(form.attention)
    if len(windows) > 1:
        windows[-1] = window or None
    tensors, layers = list[list[TensorSpec]](), list[LayerSpec]()
    for section, of_section in zip(form.attention, windows, strict=True):
        tensors.append(_tensors(section, len(layers), of_section))
        of_layer = LayerSpec("full") if of_section is None else LayerSpec("sliding", of_section)
        layers += [of_layer] * section.num_layers
    states = [] if form.recurrent is None else _states(form.recurrent, len(layers))
    kept = [state for state in states if state is not None]
    numbers = sorted({state.layer for state in kept})
    layers += [LayerSpec("linear", num_states=sum(state.layer == number for state in kept)) for number in numbers]
    groups, of_groups = _grouped(spec for section in tensors for spec in section), _grouped(kept)
    place = {spec: Place(n, index) for n, specs in enumerate(groups) for index, spec in enumerate(specs)}
    place_of_state = {spec: Place(n, index) for n, specs in enumerate(of_groups) for index, spec in enumerate(specs)}
    layout = Layout(
        layers=tuple(layers),
        groups=tuple(Group(tuple(specs)) for specs in groups),
        vocab_size=vocab_size,
        logits_dtype="float32",
        states=tuple(StateGroup(tuple(specs)) for specs in of_groups),
        options=(),
    )
    rows = tuple(tuple(place[spec] for spec in section) for section in tensors)
    return LlamaLayout(layout, rows, tuple(None if state is None else place_of_state[state] for state in states))


def uncached_layout(vocab_size: int, reason: str) -> Layout:
    """Returns the layout of a model whose state is not cached, for a reason."""
    return Layout((), (), vocab_size, "float32", unsupported=(reason,), options=())


def _tensors(section: Section, first_layer: int, window: int | None) -> list[TensorSpec]:
    specs = []
    for number, tensor in enumerate(section.tensors):
        part, layer = ("keys", number) if number < section.num_first else ("values", number - section.num_first)
        numbers, dtype = _numbers(tensor)
        specs.append(TensorSpec(first_layer + layer, part, 1, numbers, dtype, window))
    return specs


def _states(section: Section, first_layer: int) -> list[StateSpec | None]:
    specs = list[StateSpec | None]()
    for number, tensor in enumerate(section.tensors):
        part, layer = ("conv", number) if number < section.num_first else ("recurrent", number - section.num_first)
        if not tensor.row_bytes:
            specs.append(None)
            continue
        numbers, dtype = _numbers(tensor)
        specs.append(StateSpec(first_layer + layer, part, 0, (numbers,), dtype))
    return specs


def _numbers(tensor: TensorForm) -> tuple[int, str]:
    """Returns how many numbers a row has, and their type."""
    if tensor.kind == _Q8_0 and tensor.row_bytes % Q8_BLOCK_BYTES == 0:
        return tensor.row_bytes // Q8_BLOCK_BYTES * Q8_BLOCK, "q8"
    dtype, size = _PLAIN.get(tensor.kind, ("", 1))
    if not dtype or tensor.row_bytes % size:
        raise UnknownForm(f"its numbers are of ggml's type {tensor.kind}")
    return tensor.row_bytes // size, dtype


def _grouped(specs: Iterable[S]) -> Sequence[Sequence[S]]:
    """Returns the tensors of each form, in the order of their first ones."""
    groups: dict[object, list[S]] = {}
    for spec in specs:
        groups.setdefault(spec.form, []).append(spec)
    return list(groups.values())
