"""A stand-in for `llama_cpp.llama_cpp` that computes: a model of hashes, in cells and states as llama.cpp has them.

Each logit depends on every byte of every row and state that a token attends to, and on the cell of each row. A restore
of other bytes, of another order or to another place has other logits. Its numbers are integers, so they have no
rounding errors. States are written as llama.cpp writes them (`llama-kv-cache.cpp`, `llama-memory-recurrent.cpp`).
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.runtime.llama.llama_context import LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_layout import LlamaLayout, layout_of
from diskprefix.runtime.llama.llama_library import Device, Library
from diskprefix.runtime.llama.llama_rehearsal import Rehearsed, _rehearsed
from diskprefix.runtime.llama.state_form import Bytes, StateForm

VOCAB, POSITIONS, NUMBERS = 64, 512, 32
ROW_BYTES = {1: 2 * NUMBERS, 8: 34}
"""The bytes of a row of 32 numbers, by ggml's number of the type: float16 and q8_0."""
FLOAT32 = 0
MAGIC = 0xAF143CD8
_ALL, _END = (1 << 64) - 1, 1 << 30
_ODD: npt.NDArray[np.uint64] = np.random.default_rng(7).integers(0, _ALL, 512, dtype=np.uint64) | np.uint64(1)
_SHIFT = np.uint64(56)


class Kind(Struct, frozen=True):
    """The memories of a model. `windows`: of each memory for attention, None without a window. `num_layers` are those
    of each memory. `states`: the float32 numbers of the states of a convolution and a recurrence, for each of two
    layers; in a state, they follow on the first `states_behind` memories. The memories `in_plane` have cells with
    positions in the plane, as for M-RoPE; those in `keys_alone` have no values. `is_transposed`: values are, as without
    flash attention."""

    windows: tuple[int | None, ...] = (None,)
    num_layers: tuple[int, ...] = (2, 1, 2)
    states: tuple[int, int] | None = None
    states_behind: int = 3
    in_plane: tuple[int, ...] = ()
    keys_alone: tuple[int, ...] = ()
    q8: bool = False
    is_transposed: bool = False

    def num_tensors(self, memory: int) -> int:
        return self.num_layers[memory] * (1 if memory in self.keys_alone else 2)


KINDS = {
    "dense": Kind(),
    "q8": Kind(q8=True),
    "latent": Kind(keys_alone=(0,)),
    "plane": Kind(in_plane=(0,)),
    "short window": Kind(windows=(None, 12)),
    "long window": Kind(windows=(None, 80)),
    "windows alone": Kind(windows=(None, 12), num_layers=(0, 2)),
    "hybrid": Kind(states=(6, 10)),
    "hybrid in a plane": Kind(states=(6, 10), in_plane=(0,)),
    "hybrid with a window": Kind(windows=(None, 12), states=(6, 10)),
    "convolutions": Kind(states=(6, 0)),
    "recurrent": Kind(windows=(), states=(6, 10)),
    "transposed": Kind(is_transposed=True),
    "transposed latent": Kind(keys_alone=(0,), is_transposed=True),
    "transposed window": Kind(windows=(None, 12), is_transposed=True),
    "transposed hybrid": Kind(states=(6, 10), is_transposed=True),
    # The keys that choose tokens are a memory of their own.
    "sparse": Kind(windows=(None, None), keys_alone=(0, 1)),
    "sparse with values": Kind(windows=(None, None), keys_alone=(1,), is_transposed=True),
    "sparse in a plane": Kind(windows=(None, None), keys_alone=(0, 1), in_plane=(0,)),
    "sparse with a window": Kind(windows=(None, None, 12), keys_alone=(0, 1, 2)),
    "sparse hybrid": Kind(windows=(None, None), keys_alone=(0, 1), states=(6, 10), states_behind=1),
}


def mixed(number: int) -> int:
    number = (number ^ (number >> 29)) * 0x9E3779B97F4A7C15 & _ALL
    return number ^ (number >> 32)


def expanded(number: int, num_bytes: int) -> Bytes:
    return (np.full(num_bytes, number, np.uint64) * _ODD[:num_bytes] >> _SHIFT).astype(np.uint8)


def folded(rows: Bytes) -> npt.NDArray[np.uint64]:
    """Returns one number for each row of bytes. For zeros it is 0."""
    found: npt.NDArray[np.uint64] = rows.astype(np.uint64) @ _ODD[: rows.shape[-1]]
    return found


class Cells:
    """A memory for attention, of which all sequences share the cells."""

    def __init__(self, kind: Kind, number: int, num_cells: int, type_k: int) -> None:
        self.window, self.has_2d, self.ggml_type = kind.windows[number], number in kind.in_plane, type_k
        self.num_layers, self.is_transposed = kind.num_layers[number], kind.is_transposed
        self.skips_cell = False
        self.position = np.full(num_cells, -1)
        self.owned = np.zeros((num_cells, 2), np.bool_)
        self.plane = np.zeros((num_cells, 3), np.int32)
        self.rows = np.zeros((kind.num_tensors(number), num_cells, ROW_BYTES[type_k]), np.uint8)
        self.head = 0

    def place(self, count: int) -> npt.NDArray[np.int64]:
        """Returns free cells, from the head on."""
        if self.head > np.count_nonzero(self.position >= 0) + 2 * count:
            self.head = 0
        order = (self.head + np.arange(len(self.position))) % len(self.position)
        free = order[self.position[order] < 0][:count]
        if len(free) < count:
            raise ValueError("not enough cells in kv cache")
        self.head = int(free[-1]) + 1
        return free

    def put(self, cells: npt.NDArray[np.int64], positions: Any, plane: Any, sequence: int) -> None:
        self.position[cells], self.plane[cells] = positions, plane
        self.owned[cells] = False
        self.owned[cells, sequence] = True

    def remove(self, sequence: int, start: int, stop: int) -> None:
        within = self.owned[:, sequence] & (self.position >= start) & (self.position < stop)
        self.owned[within, sequence] = False
        freed = np.flatnonzero(within & ~self.owned.any(1))
        self.position[freed] = -1
        self.head = min([self.head, *freed[:1].tolist()])

    def share(self, source: int, target: int, start: int, stop: int) -> None:
        within = self.owned[:, source] & (self.position >= start) & (self.position < stop)
        self.owned[within, target] = True

    def last(self, sequence: int) -> int:
        return int(self.position[self.owned[:, sequence]].max(initial=-1))

    def seen_from(self, position: int, sequence: int) -> npt.NDArray[np.int64]:
        seen = self.owned[:, sequence] & (self.position <= position)
        if self.window is not None:
            seen &= position - self.position < self.window
        return np.flatnonzero(seen)

    def attend(self, hidden: int, cell: int, position: int, sequence: int) -> int:
        seen = self.seen_from(position, sequence)
        place = seen + self.plane[seen, 0] + 3 * self.plane[seen, 1] + 1
        for layer in range(self.num_layers):
            of_layer = self.rows[layer :: self.num_layers]
            for number, rows in enumerate(of_layer):
                rows[cell] = expanded(hidden + number, rows.shape[1])
                hidden = mixed(hidden + int((folded(rows[seen]) * place.astype(np.uint64)).sum()) & _ALL)
        return hidden

    def write(self, sequence: int) -> bytes:
        cells = self.seen_from(self.last(sequence), sequence)
        parts = [struct.pack("<II", 1, len(cells))]
        if not len(cells):
            return parts[0]
        for cell in cells:
            parts.append(struct.pack("<iI", self.position[cell], 1))
            parts.append(self.plane[cell].tobytes() if self.has_2d else b"")
            parts.append(struct.pack("<i", sequence))
        parts.append(struct.pack("<II", self.is_transposed, self.num_layers))
        for number, rows in enumerate(self.rows):
            if number >= self.num_layers and self.is_transposed:
                numbers = rows[cells].view(np.uint16)
                parts.append(struct.pack("<iII", self.ggml_type, 2, numbers.shape[1]) + numbers.T.tobytes())
            else:
                parts.append(struct.pack("<iQ", self.ggml_type, rows.shape[1]) + rows[cells].tobytes())
        return b"".join(parts)

    def read(self, state: _State, sequence: int) -> None:
        _, count = state.take("II")
        if not count:
            return
        self.remove(sequence, 0, _END)
        of_cells = [state.take("iI3ii" if self.has_2d else "iIi") for _ in range(count)]
        if self.skips_cell:
            self.head += 1
        cells = self.place(count)
        planes = [of_cell[2:5] if self.has_2d else (0, 0, 0) for of_cell in of_cells]
        self.put(cells, [of_cell[0] for of_cell in of_cells], planes, sequence)
        if state.take("II") != (self.is_transposed, self.num_layers):
            raise ValueError("mismatched layer count")
        for number, rows in enumerate(self.rows):
            is_transposed = number >= self.num_layers and self.is_transposed
            expected = (self.ggml_type, 2, rows.shape[1] // 2) if is_transposed else (self.ggml_type, rows.shape[1])
            if state.take("iII" if is_transposed else "iQ") != expected:
                raise ValueError("mismatched key type")
            stored = state.bytes(count * rows.shape[1])
            rows[cells] = (
                np.ascontiguousarray(stored.view(np.uint16).reshape(-1, count).T).view(np.uint8)
                if is_transposed
                else stored.reshape(count, -1)
            )


class States:
    """A memory for recurrent states: one cell a sequence, which a copy shares until one of both goes on."""

    def __init__(self, kind: Kind) -> None:
        assert kind.states is not None
        # Those of convolutions before recurrent ones, each of two layers.
        self.sizes = [4 * numbers for numbers in kind.states for _ in range(2)]
        self.num_layers = 2 + sum(kind.num_layers[: len(kind.windows)])
        self.of: dict[int, tuple[int, list[Bytes]]] = {}

    def attend(self, hidden: int, position: int, sequence: int) -> int:
        _, before = self.of.get(sequence, (-1, [np.zeros(size, np.uint8) for size in self.sizes]))
        after = list[Bytes]()
        for state in before:
            hidden = mixed(hidden + int(folded(state)) + len(after) & _ALL)
            after.append(expanded(hidden, len(state)))
        self.of[sequence] = position, after
        return hidden

    def remove(self, sequence: int, start: int, stop: int) -> bool:
        if start <= self.last(sequence) < stop:
            if start > 0:
                return False
            self.of.pop(sequence, None)
        return True

    def share(self, source: int, target: int) -> None:
        self.of.pop(target, None)
        if source in self.of:
            self.of[target] = self.of[source]

    def last(self, sequence: int) -> int:
        return self.of.get(sequence, (-1,))[0]

    def write(self, sequence: int) -> bytes:
        position, states = self.of.get(sequence, (-1, [np.empty(0, np.uint8) for _ in self.sizes]))
        head = struct.pack("<Iii", 1, position, 0) if sequence in self.of else struct.pack("<I", 0)
        tensors = [struct.pack("<iQ", FLOAT32, size) + state.tobytes() for size, state in zip(self.sizes, states)]  # noqa: B905
        return head + struct.pack("<II", 0, self.num_layers) + b"".join(tensors)

    def read(self, state: _State, sequence: int) -> None:
        (count,) = state.take("I")
        position, _ = state.take("iI") if count else (-1, 0)
        self.of.pop(sequence, None)
        if state.take("II") != (0, self.num_layers):
            raise ValueError("mismatched layer count")
        found = []
        for size in self.sizes:
            if state.take("iQ") != (FLOAT32, size):
                raise ValueError("mismatched r type")
            found.append(state.bytes(count * size))
        if count:
            self.of[sequence] = position, found


class _State:
    """Reads a state."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def bytes(self, count: int) -> Bytes:
        if self.at + count > len(self.data):
            raise ValueError("unexpectedly reached end of buffer")
        self.at += count
        return np.frombuffer(self.data, np.uint8, count, self.at - count).copy()


class Context:
    """The memories of a context. `in_state` are those of a state, in its order."""

    def __init__(self, model: Any, num_cells: int, ggml_type: int) -> None:
        kind = model.kind
        self.model = model
        self.attention = [Cells(kind, number, num_cells, ggml_type) for number in range(len(kind.windows))]
        self.states = [] if kind.states is None else [States(kind)]
        behind = kind.states_behind
        self.in_state: list[Cells | States] = [*self.attention[:behind], *self.states, *self.attention[behind:]]
        self.logits: list[npt.NDArray[np.float32]] = []

    def memories(self, flags: int) -> Sequence[Cells | States]:
        """Returns those that a state with these flags has."""
        return self.states if flags else self.in_state

    def clear(self) -> None:
        for cells in self.attention:
            cells.position[:], cells.owned[:], cells.head = -1, False, 0
        for states in self.states:
            states.of.clear()

    def last(self, sequence: int) -> int:
        return min(memory.last(sequence) for memory in self.in_state)

    def decode(self, batch: Any, noise: Callable[[], int]) -> None:
        count, sequence = batch.n_tokens, batch.seq_id[0][0]
        places = [cells.place(count) for cells in self.attention]
        self.logits = []
        for row, (token, position) in enumerate(zip(batch.token[:count], batch.pos[:count], strict=True)):
            hidden = mixed(token + self.model.seed + noise())
            for cells, place in zip(self.attention, places, strict=True):
                plane = (position, position, token) if cells.has_2d else (0, 0, 0)
                cells.put(place[row : row + 1], position, plane, sequence)
                hidden = cells.attend(hidden, int(place[row]), position, sequence)
            for states in self.states:
                hidden = states.attend(hidden, position, sequence)
            logits = np.full(VOCAB, hidden, np.uint64) * _ODD[-VOCAB:] >> np.uint64(40)
            self.logits.append(
                (logits / (1 << 24)).astype(np.float32) if batch.logits[row] else np.empty(0, np.float32)
            )


class ScriptedLlama:
    """The functions of the library, with a model of a `kind` in every file.

    Faults: `load_error` is the reason why no file is loaded, `most_contexts` the number of contexts that have memory,
    `statuses` the results of the next decodes (then 0), `noise` the numbers that are added to the next tokens (then 0)
    on a device. `further` is at the end of each state, as of an unknown memory. With `skips_cell`, a state leaves a
    cell free.
    """

    def __init__(self, kind: str = "dense", *, seed: int = 0, further: bytes = b"") -> None:
        self.kind, self.seed, self.further = KINDS[kind], seed, further
        self.load_error, self.most_contexts, self.skips_cell, self.has_encoder = "", 99, False, False
        self.statuses = deque[int]()
        self.noise: Iterator[int] = iter(())
        self.contexts: list[Context] = []
        """The contexts that are open."""
        self.made: list[int] = []
        """The number of cells of each context that was made."""
        self.loaded: list[Any] = []
        """The parameters of each model that was loaded."""
        self.num_open_models = 0
        self.gpus: dict[str, tuple[int, int]] = {}
        """The devices beside the CPU: ggml's number of the kind, and the free bytes."""
        self.__file__ = str(Path(__file__))
        self.model_defaults = SimpleNamespace(
            vocab_only=False, check_tensors=False, use_extra_bufts=True, n_gpu_layers=-1, devices=None
        )
        self.context_defaults = SimpleNamespace(
            **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
            **dict.fromkeys(("kv_unified", "embeddings"), False),
            defrag_thold=-1.0,
            n_samplers=0,
        )
        self._log: Callable[[int, bytes, object], None] = lambda *_: None

    def load_shared_library(self, name: str, _folder: Path) -> Any:
        if name != "ggml-base":
            return SimpleNamespace()
        devices = [("CPU", 0, 0), *((name, *of) for name, of in self.gpus.items())]

        def memory(handle: int, free: Any, total: Any) -> None:
            free._obj.value = total._obj.value = devices[handle - 1][2]

        return SimpleNamespace(
            ggml_backend_dev_count=lambda: len(devices),
            ggml_backend_dev_get=lambda index: index + 1,
            ggml_backend_dev_name=lambda handle: devices[handle - 1][0].encode(),
            ggml_backend_dev_description=lambda handle: f"a {devices[handle - 1][0]}".encode(),
            ggml_backend_dev_type=lambda handle: devices[handle - 1][1],
            ggml_backend_dev_memory=memory,
        )

    def llama_backend_init(self) -> None:
        pass

    def llama_log_callback(self, callback: Any) -> Any:
        return callback

    def llama_log_set(self, callback: Any, _data: Any) -> None:
        self._log = callback

    def say(self, text: str, level: int = 4) -> None:
        self._log(level, text.encode(), None)

    def llama_print_system_info(self) -> bytes:
        return b"AVX = 1"

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(**vars(self.model_defaults))

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace(**vars(self.context_defaults))

    def llama_model_load_from_file(self, _path: bytes, parameters: Any) -> Any:
        if self.load_error:
            self.say(f"llama_model_load: {self.load_error}\n")
            return None
        self.loaded.append(parameters)
        self.num_open_models += 1
        first = ctypes.cast(parameters.devices, ctypes.POINTER(ctypes.c_void_p))[0]
        return SimpleNamespace(kind=self.kind, seed=self.seed, is_on_device=first is not None)

    def llama_model_free(self, _model: Any) -> None:
        self.num_open_models -= 1

    def llama_model_get_vocab(self, model: Any) -> Any:
        return model

    def llama_vocab_n_tokens(self, _model: Any) -> int:
        return VOCAB

    def llama_model_n_ctx_train(self, _model: Any) -> int:
        return POSITIONS

    def llama_model_n_swa(self, model: Any) -> int:
        return next((window for window in model.kind.windows if window), 0)

    def llama_model_is_recurrent(self, model: Any) -> bool:
        return not model.kind.windows

    def llama_model_is_hybrid(self, model: Any) -> bool:
        return model.kind.states is not None and bool(model.kind.windows)

    def llama_model_has_encoder(self, _model: Any) -> bool:
        return self.has_encoder

    def llama_init_from_model(self, model: Any, parameters: Any) -> Any:
        assert parameters.n_seq_max == 2
        assert parameters.swa_full, "a ring would have another order"
        if len(self.contexts) >= self.most_contexts:
            self.say("ggml_backend_alloc: out of memory")
            return None
        context = Context(model, -(-parameters.n_ctx // 256) * 256, parameters.type_k)
        for cells in context.attention:
            cells.skips_cell = self.skips_cell
        self.contexts.append(context)
        self.made.append(parameters.n_ctx)
        return context

    def llama_free(self, context: Context) -> None:
        self.contexts.remove(context)

    def llama_get_memory(self, context: Context) -> Context:
        return context

    def llama_batch_init(self, count: int, _embd: int, _sequences: int) -> Any:
        columns = {name: [0] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(count)], **columns)

    def llama_batch_free(self, _batch: Any) -> None:
        pass

    def llama_decode(self, context: Context, batch: Any) -> int:
        if self.statuses and (status := self.statuses.popleft()):
            self.say("decode: failed to compute")
            return status
        assert batch.pos[0] == context.last(0) + 1, "positions are consecutive"
        try:
            context.decode(batch, lambda: next(self.noise, 0) if context.model.is_on_device else 0)
        except ValueError as error:
            self.say(f"decode: {error}")
            return 1
        return 0

    def llama_get_logits_ith(self, context: Context, row: int) -> Any:
        return context.logits[row].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, context: Context, sequence: int, start: int, stop: int) -> bool:
        start, stop = max(0, start), stop if stop >= 0 else _END
        # The states first: if they cannot be cut, nothing is removed.
        if not all(states.remove(sequence, start, stop) for states in context.states):
            return False
        for cells in context.attention:
            cells.remove(sequence, start, stop)
        return True

    def llama_memory_seq_cp(self, context: Context, source: int, target: int, start: int, stop: int) -> None:
        for cells in context.attention:
            cells.share(source, target, max(0, start), stop if stop >= 0 else _END)
        for states in context.states:
            states.share(source, target)

    def llama_memory_clear(self, context: Context, _data: bool) -> None:
        context.clear()

    def llama_memory_seq_pos_max(self, context: Context, sequence: int) -> int:
        return context.last(sequence)

    def llama_state_seq_get_size_ext(self, context: Context, sequence: int, flags: int) -> int:
        return len(_written(context, sequence, flags) + self.further)

    def llama_state_seq_get_data_ext(self, context: Context, data: Any, size: int, sequence: int, flags: int) -> int:
        state = _written(context, sequence, flags) + self.further
        assert size >= len(state)
        ctypes.memmove(data, state, len(state))
        return len(state)

    def llama_state_seq_set_data_ext(self, context: Context, data: Any, size: int, sequence: int, flags: int) -> int:
        state = _State(ctypes.string_at(data, size))
        try:
            if state.take("Ii")[0] != MAGIC:
                raise ValueError("wrong sequence state magic")
            for memory in context.memories(flags):
                memory.read(state, sequence)
        except (ValueError, struct.error) as error:
            self.say(f"state_seq_set_data: error loading state: {error}")
            self.llama_memory_seq_rm(context, sequence, -1, -1)
            return 0
        return state.at


def _written(context: Context, sequence: int, flags: int) -> bytes:
    memories = context.memories(flags)
    return struct.pack("<Ii", MAGIC, sequence) + b"".join(memory.write(sequence) for memory in memories)


def model_of(api: ScriptedLlama, *, step: int = 32, device: str = "CPU") -> LlamaModel:
    """Returns a model of the library with steps of some tokens."""
    library = Library(api)
    found: Device | None = next((one for one in library.devices() if one.name == device and device != "CPU"), None)
    options = LlamaOptions(step=step, kv_type="q8" if api.kind.q8 else "auto", device=device)
    return LlamaModel(library, Path("made-up.gguf"), options, found)


def rehearsed_form(model: LlamaModel) -> tuple[StateForm, LlamaLayout]:
    """Returns the form of the states of a model, which passes its rehearsal."""
    found: Rehearsed = _rehearsed(model)
    assert found.form is not None, found.reason
    return found.form, layout_of(found.form, model.vocab_size, model.window)
