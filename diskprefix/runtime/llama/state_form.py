"""The bytes in which llama.cpp's library gives and takes the state of a sequence.

A state is a header and, one after another, a section for each memory of the model: attention to all tokens, keys that
choose tokens, attention within a window, recurrent states. A section of attention has, for each cell, its position and
sequence, then the rows of all keys, layer by layer, and of all values. A recurrent section has one cell, with the
states of convolutions of all layers and then their recurrent states. (`llama-kv-cache.cpp`,
`llama-memory-recurrent.cpp`: `state_write`; the order of the sections is in the files of the other memories.)

A `StateForm` is read from one state. With it, this module takes others apart and puts them together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Rows of bytes, [rows, row_bytes]."""

_MAGIC_BYTES = 4
_HEADER_BYTES = 8
"""A magic number and the number of the sequence."""
_NO_TOKEN = -1
_MOST_TENSORS, _MOST_KINDS = 4096, 64
_MOST_MEMORIES = 3
"""The most memories for attention: to all tokens, the keys that choose them, within a window."""


class UnknownForm(ValueError):
    """The bytes are not those of a state whose form is known. The message says which part is not."""


class TensorForm(Struct, frozen=True):
    """The form of a tensor: ggml's number of its type, and the bytes of a row. Transposed values lie number by number,
    each of `number_bytes`, with the tokens side by side; other tensors have 0 there."""

    kind: int
    row_bytes: int
    number_bytes: int = 0

    def header(self) -> Bytes:
        """Returns what a state has before the rows."""
        if self.number_bytes:
            return _packed("iII", self.kind, self.number_bytes, self.row_bytes // self.number_bytes)
        return _packed("iQ", self.kind, self.row_bytes)

    def rows(self, stored: Bytes, num_cells: int) -> Bytes:
        """Returns the rows, [cells, row_bytes], of the bytes in a state."""
        if self.number_bytes:
            stored = stored.reshape(-1, num_cells, self.number_bytes).swapaxes(0, 1)
        return stored.reshape(num_cells, self.row_bytes)

    def stored(self, rows: Bytes) -> Bytes:
        """Returns the bytes in a state, [bytes], of rows. The inverse of `rows`."""
        if self.number_bytes:
            rows = rows.reshape(len(rows), -1, self.number_bytes).swapaxes(0, 1)
        return rows.reshape(-1)


class Section(Struct, frozen=True):
    """The form of a section. `tensors` are keys before values, or states of convolutions before recurrent ones;
    `num_first` is the number of the former. `has_2d`: a cell also has a position in the plane and a token.
    `is_transposed`: values are."""

    is_recurrent: bool
    num_layers: int
    num_first: int
    tensors: tuple[TensorForm, ...]
    has_2d: bool = False
    is_transposed: bool = False

    @property
    def cell(self) -> np.dtype[np.void]:
        """The numbers of a cell of attention."""
        plane = [("x", "<i4"), ("y", "<i4"), ("token", "<i4")] if self.has_2d else []
        return np.dtype([("position", "<i4"), ("num_sequences", "<u4"), *plane, ("sequence", "<i4")])


class StateForm(Struct, frozen=True):
    """The form of the states of one context."""

    magic: bytes
    sections: tuple[Section, ...]

    @property
    def attention(self) -> list[Section]:
        return [section for section in self.sections if not section.is_recurrent]

    @property
    def recurrent(self) -> Section | None:
        return next((section for section in self.sections if section.is_recurrent), None)

    @property
    def states_alone(self) -> StateForm:
        """The form of recurrent states without the rows of attention."""
        return StateForm(self.magic, tuple(section for section in self.sections if section.is_recurrent))


class Part(Struct, frozen=True):
    """The content of a section in a state: its first position, its number of cells, and the rows of its tensors, uint8
    [cells, row_bytes]. Its cells begin at the byte `cells_at`."""

    section: Section
    position: int
    num_cells: int
    tensors: list[Bytes]
    cells_at: int


class _StateReader:
    def __init__(self, state: Bytes, at: int = 0) -> None:
        self._state, self.at = state, at

    def take(self, form: str) -> tuple[int, ...]:
        size = struct.calcsize(f"<{form}")
        if self.at + size > len(self._state):
            raise UnknownForm("it ends too early")
        values = struct.unpack(f"<{form}", self._state[self.at : self.at + size].tobytes())
        self.at += size
        return values

    def rows(self, count: int, row_bytes: int) -> Bytes:
        end = self.at + count * row_bytes
        if end > len(self._state):
            raise UnknownForm("it ends too early")
        rows = self._state[self.at : end].reshape(count, row_bytes)
        self.at = end
        return rows

    def skip_tensors(self, count: int, cells: int, *, are_transposed: bool = False) -> tuple[TensorForm, ...]:
        forms = []
        for _ in range(count):
            if are_transposed:
                kind, number_bytes, width = self.take("iII")
                form = TensorForm(kind, number_bytes * width, number_bytes)
            else:
                form = TensorForm(*self.take("iQ"))
            if not 0 <= form.kind < _MOST_KINDS:
                raise UnknownForm("a tensor has no type")
            self.rows(cells, form.row_bytes)
            forms.append(form)
        return tuple(forms)

    def tensor_rows(self, tensor: TensorForm, num_cells: int) -> Bytes:
        """Returns the rows of a tensor, [cells, row_bytes]. Raises `UnknownForm` if it has another form."""
        header = tensor.header()
        if self.rows(1, len(header)).tobytes() != header.tobytes():
            raise UnknownForm("a tensor has another type or size")
        return tensor.rows(self.rows(num_cells, tensor.row_bytes).reshape(-1), num_cells)

    @property
    def is_at_end(self) -> bool:
        return self.at == len(self._state)


def form_of(state: Bytes, *, has_states: bool) -> StateForm:
    """Returns the form of a state, uint8 [bytes], of a sequence from position 0. The model `has_states` that are
    recurrent, or not. Raises `UnknownForm`."""
    reader = _StateReader(state)
    magic = bytes(reader.rows(1, _MAGIC_BYTES)[0])
    reader.take("i")
    search = _Search(state, has_states)
    # A section of no layers has the same form with and without values.
    readings = set(search.readings(reader.at))
    if len(readings) > 1:
        raise UnknownForm("it can be read in several ways")
    if not readings:
        raise UnknownForm(search.problem)
    return StateForm(magic, readings.pop())


class _Search:
    """Reads a state in every way. Its sections may come in any order, and no state says which they are. `problem` is
    that of the reading which came furthest; of several, of the usual one."""

    def __init__(self, state: Bytes, has_states: bool) -> None:
        self._state, self._has_states = state, has_states
        self.problem, self._furthest = "", -1

    def readings(self, at: int, before: tuple[Section, ...] = ()) -> Iterator[tuple[Section, ...]]:
        """Yields the sections of each reading that fits to the last byte. It begins with those `before`, which end at
        the byte `at`."""
        lacks_states = self._has_states and all(not section.is_recurrent for section in before)
        if at == len(self._state) and before and not lacks_states:
            yield before
            return
        kinds = list[Iterator[tuple[Section, int]]]()
        if sum(not section.is_recurrent for section in before) < _MOST_MEMORIES:
            # No state says whether its cells have a place in the plane, or whether its layers keep values.
            kinds += [
                _attention(_StateReader(self._state, at), has_2d=has_2d, values_exist=values_exist)
                for has_2d, values_exist in product((False, True), (True, False))
            ]
        if lacks_states:
            kinds.append(_recurrent(_StateReader(self._state, at)))
        if not kinds:
            self._add_problem("it has further parts", at)
        for kind in kinds:
            try:
                for section, end in kind:
                    yield from self.readings(end, (*before, section))
            except UnknownForm as error:
                self._add_problem(str(error), at)

    def _add_problem(self, problem: str, at: int) -> None:
        if at > self._furthest:
            self.problem, self._furthest = problem, at


def _attention(reader: _StateReader, *, has_2d: bool, values_exist: bool) -> Iterator[tuple[Section, int]]:
    """Yields the section of attention at a reader, and the byte where it ends. Raises `UnknownForm`."""
    num_streams, num_cells = reader.take("II")
    if num_streams != 1 or not num_cells:
        raise UnknownForm("a memory has no cells, or several streams")
    empty = Section(False, 0, 0, (), has_2d)
    cells = reader.rows(num_cells, empty.cell.itemsize).view(empty.cell)[:, 0]
    if (cells["num_sequences"] != 1).any() or (np.diff(cells["position"]) != 1).any():
        raise UnknownForm("its cells are not those of consecutive tokens")
    is_transposed, num_layers = reader.take("II")
    if is_transposed > 1 or num_layers > _MOST_TENSORS:
        raise UnknownForm("its layers are not counted")
    keys = reader.skip_tensors(num_layers, num_cells)
    # Without flash attention values are transposed.
    num_values = num_layers if values_exist else 0
    values = reader.skip_tensors(num_values, num_cells, are_transposed=bool(is_transposed))
    yield Section(False, num_layers, num_layers, keys + values, has_2d, bool(is_transposed)), reader.at


def _recurrent(reader: _StateReader) -> Iterator[tuple[Section, int]]:
    """Yields the recurrent section at a reader with each number of tensors, and the byte where it ends. No state has
    the number. Raises `UnknownForm` where no further tensor is."""
    num_cells, _position, num_sequences, is_transposed, num_layers = reader.take("IiIII")
    if num_cells != 1 or num_sequences or is_transposed or num_layers > _MOST_TENSORS:
        raise UnknownForm("its recurrent states are not those of one sequence")
    tensors = list[TensorForm]()
    while len(tensors) < 2 * num_layers:
        tensors += reader.skip_tensors(1, 1)
        # Layers with states have one of a convolution and a recurrent one each; one of the two may have no bytes.
        num_first = len(tensors) // 2 if len(tensors) % 2 == 0 else len(tensors)
        yield Section(True, num_layers, num_first, tuple(tensors)), reader.at


def rows_of(state: Bytes, form: StateForm) -> list[Part]:
    """Takes a state apart, uint8 [bytes]: returns its parts of attention. Raises `UnknownForm` for a state of another
    form."""
    return [part for part in _parts(state, form) if not part.section.is_recurrent]


def states_of(state: Bytes, form: StateForm) -> list[Bytes]:
    """Takes the recurrent section alone apart, uint8 [bytes]: returns its states, uint8 [row_bytes] each. Raises
    `UnknownForm` for a state of another form."""
    (part,) = _parts(state, form.states_alone)
    return [rows[0] for rows in part.tensors]


def _parts(state: Bytes, form: StateForm) -> list[Part]:
    reader, parts = _StateReader(state), list[Part]()
    if bytes(reader.rows(1, _MAGIC_BYTES)[0]) != form.magic:
        raise UnknownForm("it begins otherwise")
    reader.take("i")
    for section in form.sections:
        if section.is_recurrent:
            cells_at = reader.at
            num_cells, position, *_ = reader.take("IiIII")
        else:
            _, num_cells = reader.take("II")
            if not num_cells:
                raise UnknownForm("a memory has no cells")
            cells_at = reader.at
            cells = reader.rows(num_cells, section.cell.itemsize).view(section.cell)[:, 0]
            position = int(cells["position"][0])
            reader.take("II")
        tensors = [reader.tensor_rows(tensor, num_cells) for tensor in section.tensors]
        parts.append(Part(section, position, num_cells, tensors, cells_at))
    if not reader.is_at_end:
        raise UnknownForm("it has further parts")
    return parts


def block_state(form: StateForm, position: int, rows: Sequence[Sequence[Bytes]], sequence: int) -> Bytes:
    """Puts together the state of consecutive tokens from `position` on, with the rows of each tensor of each section of
    attention, uint8 [tokens, row_bytes]. Its recurrent section is empty: the library takes the states separately."""
    parts = [_header(form, sequence)]
    # A memory may have no layers.
    num_cells = next(len(tensors[0]) for tensors in rows if tensors)
    of_attention = iter(rows)
    for section in form.sections:
        if section.is_recurrent:
            parts.append(_packed("III", 0, 0, section.num_layers))
            parts += [tensor.header() for tensor in section.tensors]
            continue
        cells = np.zeros(num_cells, section.cell)
        cells["position"] = np.arange(position, position + num_cells)
        cells["num_sequences"], cells["sequence"] = 1, sequence
        if section.has_2d:
            # Of text, both places in the plane are the position.
            cells["x"] = cells["y"] = cells["position"]
            cells["token"] = _NO_TOKEN
        parts += [_packed("II", 1, num_cells), cells.view(np.uint8)]
        parts.append(_packed("II", section.is_transposed, section.num_layers))
        for tensor, of_tensor in zip(section.tensors, next(of_attention), strict=True):
            parts += [tensor.header(), tensor.stored(of_tensor)]
    return np.concatenate(parts)


def checkpoint_state(form: StateForm, position: int, states: Sequence[Bytes], sequence: int) -> Bytes:
    """Puts together the recurrent section alone, as the library takes it with its flag for parts: the states after the
    token at `position`, uint8 [row_bytes] each."""
    section = form.recurrent
    assert section is not None, "the model has no recurrent states"
    parts = [_header(form, sequence), _packed("IiIII", 1, position, 0, 0, section.num_layers)]
    for tensor, state in zip(section.tensors, states, strict=True):
        parts += [tensor.header(), state.reshape(-1)]
    return np.concatenate(parts)


def without_tokens(state: Bytes, form: StateForm) -> Bytes:
    """Returns a copy of a state whose cells name no tokens: for text they change no number, and pages do not keep
    them."""
    copy = state.copy()
    for part in rows_of(state, form):
        if part.section.has_2d:
            cells = copy[part.cells_at : part.cells_at + part.num_cells * part.section.cell.itemsize]
            cells.view(part.section.cell)["token"] = _NO_TOKEN
    return copy


def _header(form: StateForm, sequence: int) -> Bytes:
    header = np.frombuffer(form.magic + struct.pack("<i", sequence), np.uint8)
    assert len(header) == _HEADER_BYTES
    return header


def _packed(form: str, *values: int) -> Bytes:
    return np.frombuffer(struct.pack(f"<{form}", *values), np.uint8)
