"""States of llama.cpp's library are taken apart and put together again without a change of a byte."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from diskprefix.runtime.llama.llama_context import LlamaContext, LlamaModel
from diskprefix.runtime.llama.llama_layout import layout_of
from diskprefix.runtime.llama.state_form import (
    Bytes,
    Section,
    StateForm,
    TensorForm,
    UnknownForm,
    block_state,
    checkpoint_state,
    form_of,
    rows_of,
    states_of,
    without_tokens,
)
from tests.runtime.llama.scripted_library import FLOAT32, KINDS, MAGIC, ROW_BYTES, ScriptedLlama, model_of

COUNT = 7
ROWS_ALONE = [name for name, kind in KINDS.items() if not kind.states]
WITH_STATES = [name for name, kind in KINDS.items() if kind.states]


def tokens(count: int, seed: int = 1) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 64, count)


def computed(model: LlamaModel, count: int = COUNT) -> LlamaContext:
    context = LlamaContext(model, 256)
    context.compute(tokens(count), 0, 1)
    return context


def state_of(name: str) -> tuple[Bytes, StateForm]:
    """Returns the state of some tokens and its form."""
    state = computed(model_of(ScriptedLlama(name))).take_all()
    return state, form_of(state, has_states=KINDS[name].states is not None)


@pytest.mark.parametrize("name", KINDS)
def test_the_form_has_every_tensor_of_the_model(name: str) -> None:
    kind, (_, form) = KINDS[name], state_of(name)
    row = TensorForm(8 if kind.q8 else 1, ROW_BYTES[8 if kind.q8 else 1])
    value = TensorForm(row.kind, row.row_bytes, 2 if kind.is_transposed else 0)
    of_attention = [
        Section(
            *(False, layers, layers, (row,) * layers + (value,) * (kind.num_tensors(number) - layers)),
            *(number in kind.in_plane, kind.is_transposed),
        )
        for number, layers in enumerate(kind.num_layers[: len(kind.windows)])
    ]
    assert form.attention == of_attention
    assert [section.is_recurrent for section in form.sections[: kind.states_behind]].count(True) == (
        kind.states is not None and len(kind.windows) < kind.states_behind
    )
    if kind.states is None:
        assert form.recurrent is None
    else:
        assert form.recurrent is not None
        assert form.recurrent.num_first == 2
        assert form.recurrent.tensors == tuple(TensorForm(FLOAT32, 4 * n) for n in kind.states for _ in range(2))


@pytest.mark.parametrize("name", ROWS_ALONE)
def test_rows_that_are_taken_apart_make_the_same_state_again(name: str) -> None:
    state, form = state_of(name)
    parts = rows_of(state, form)
    assert [(part.position, part.num_cells) for part in parts] == [(0, COUNT)] * len(form.sections)
    again = block_state(form, 0, [part.tensors for part in parts], 0)
    assert again.tobytes() == without_tokens(state, form).tobytes()
    assert (again.tobytes() == state.tobytes()) is (not KINDS[name].in_plane)


@pytest.mark.parametrize("name", WITH_STATES)
def test_states_that_are_taken_apart_make_the_same_state_again(name: str) -> None:
    context = computed(model_of(ScriptedLlama(name)))
    _, form = state_of(name)
    state = context.take_states()
    assert checkpoint_state(form, COUNT - 1, states_of(state, form), 0).tobytes() == state.tobytes()


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_put_into_another_context_has_the_same_bytes_there(name: str) -> None:
    """In pieces, and states behind rows."""
    model = model_of(ScriptedLlama(name))
    (_, form), one, other = state_of(name), computed(model), LlamaContext(model, 256)
    for start, stop in ((0, 3), (3, 4), (4, COUNT)) if form.attention else ():
        parts = rows_of(one.take(start, stop), form)
        assert {(part.position, part.num_cells) for part in parts} == {(start, stop - start)}
        other.put(block_state(form, start, [part.tensors for part in parts], 1))
    if form.recurrent is not None:
        # Until then, the state is not whole.
        assert other.end == 0
        other.put_states(checkpoint_state(form, COUNT - 1, states_of(one.take_states(), form), 0))
        assert other.take_states().tobytes() == one.take_states().tobytes()
    assert other.end == COUNT
    if form.attention:
        states_of_both = [without_tokens(context.take(0, COUNT), form).tobytes() for context in (one, other)]
        assert states_of_both[0] == states_of_both[1]


@pytest.mark.parametrize(("name", "num_whole"), [("short window", 1), ("sparse with a window", 2)])
def test_a_windowed_section_has_only_the_tokens_that_the_last_one_sees(name: str, num_whole: int) -> None:
    """So the runtime takes no more of them at once."""
    context = computed(model_of(ScriptedLlama(name)), 20)
    form = form_of(context.take(0, 5), has_states=False)
    found = [(part.position, part.num_cells) for part in rows_of(context.take(0, 20), form)]
    assert found == [*[(0, 20)] * num_whole, (8, 12)]


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", KINDS)
def test_a_cut_state_is_refused(name: str) -> None:
    state, form = state_of(name)
    for size in range(len(state)):
        with pytest.raises(UnknownForm, match="ends too early"):
            rows_of(state[:size], form)
    with pytest.raises(UnknownForm, match="further parts"):
        rows_of(np.append(state, np.uint8(0)), form)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["dense", "plane", "short window", "sparse hybrid"])
def test_no_changed_byte_of_a_state_is_an_error_of_another_kind(name: str) -> None:
    """Rows may have any bytes. A number of a header that is not possible is named."""
    state, form = state_of(name)
    num_refused = 0
    for at in range(len(state)):
        damaged = state.copy()
        damaged[at] ^= 0xFF
        try:
            assert form_of(damaged, has_states=KINDS[name].states is not None)
            rows_of(damaged, form)
        except UnknownForm:
            num_refused += 1
    assert num_refused > 12 * sum(len(section.tensors) for section in form.sections)


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (ScriptedLlama(further=bytes(12)), "no cells, or several streams"),
        (ScriptedLlama(further=bytes(3)), "ends too early"),
        (ScriptedLlama("sparse with a window", further=bytes(12)), "further parts"),
        # A recurrent section is not expected.
        (ScriptedLlama("hybrid"), "not those of consecutive tokens"),
    ],
)
def test_a_state_of_another_form_is_refused_with_a_reason(faulty: Any, reason: str) -> None:
    state = computed(model_of(faulty)).take_all()
    with pytest.raises(UnknownForm, match=reason):
        form_of(state, has_states=False)


def test_a_state_without_the_recurrent_section_of_its_model_is_refused() -> None:
    state, _ = state_of("dense")
    with pytest.raises(UnknownForm, match="ends too early"):
        form_of(state, has_states=True)


def test_a_state_that_can_be_read_in_two_ways_is_refused() -> None:
    """Behind keys, a section with rows of 3 bytes for 16 cells looks like the values of the section before."""
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(16))
    section = struct.pack("<II", 1, 16) + cells + struct.pack("<IIiQ", 0, 1, 1, 3) + bytes(16 * 3)
    state = np.frombuffer(struct.pack("<Ii", MAGIC, 0) + 2 * section, np.uint8)
    with pytest.raises(UnknownForm, match="in several ways"):
        form_of(state, has_states=False)


def test_cells_that_are_not_of_consecutive_tokens_are_refused() -> None:
    context = computed(model_of(ScriptedLlama()))
    context._memory.attention[0].position[2] = 9
    with pytest.raises(UnknownForm, match="consecutive tokens"):
        form_of(context.take_all(), has_states=False)
    context.clear()
    with pytest.raises(UnknownForm, match="no cells"):
        form_of(context.take_all(), has_states=False)


def test_a_state_of_the_model_before_is_refused() -> None:
    state, _ = state_of("dense")
    _, other = state_of("q8")
    with pytest.raises(UnknownForm, match="another type or size"):
        rows_of(state, other)
    state[0] ^= 1
    with pytest.raises(UnknownForm, match="begins otherwise"):
        rows_of(state, other)


@pytest.mark.parametrize("name", KINDS)
def test_the_layout_has_a_place_for_every_byte_of_the_rows(name: str) -> None:
    kind, (_, form) = KINDS[name], state_of(name)
    placed = layout_of(form, 64, next((window for window in kind.windows if window), 0))
    layout = placed.layout
    assert layout.bytes_per_token == sum(tensor.row_bytes for section in form.attention for tensor in section.tensors)
    assert layout.state_bytes == sum(4 * numbers for numbers in kind.states or ()) * 2
    with_layers = zip(kind.windows, kind.num_layers, strict=False)
    assert {group.window for group in layout.groups} == {window for window, layers in with_layers if layers}
    assert layout.is_sliceable is (kind.states is None)
    assert layout.exact_at == "grid"
    assert not layout.unsupported
    places = [place for section in placed.rows for place in section] + [place for place in placed.states if place]
    specs = [(number, index) for number, group in enumerate(layout.groups) for index in range(len(group.specs))]
    specs += [(number, index) for number, group in enumerate(layout.states) for index in range(len(group.specs))]
    assert sorted((place.group, place.index) for place in places) == sorted(specs)


def test_numbers_of_an_unknown_type_are_refused() -> None:
    form = StateForm(b"ggsq", (Section(False, 1, 1, (TensorForm(2, 18), TensorForm(2, 18))),))
    with pytest.raises(UnknownForm, match="of ggml's type 2"):
        layout_of(form, 64, 0)
