"""A model that llama.cpp's library has loaded, and its contexts. All calls of the library with them are here.

A context computes one conversation: sequence 0 with its tokens in the cells 0, 1, 2, … The bits of a row follow the
order of the cells. Through the scratch sequence 1, the state of a range of tokens is taken and put back.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.runtime.llama.llama_library import Device, Library
from diskprefix.runtime.llama.state_form import Bytes
from diskprefix.tokens import Logits

_OWN, _SCRATCH = 0, 1
_SEQUENCES = 2
_STATES_ALONE = 1
"""The library's flag that leaves out what can be cut: only recurrent states are given and taken."""
CPU = "CPU"
"""The name of the device that is none: the library computes on the processor."""
KV_KINDS = {"auto": 1, "q8": 8}
"""ggml's number of the type of keys and values, by `--kv-type`: float16, and 8 bits with a scale for 32 numbers."""


class LlamaOptions(Struct, frozen=True):
    """The options that change a context's numbers. `step` is the largest number of tokens of a step, `num_layers` the
    number of layers on the device. A context has at least `least_cells`, and with `most_cells` no more than these."""

    step: int = 256
    kv_type: str = "auto"
    num_threads: int = 1
    num_layers: int = 0
    device: str = CPU
    least_cells: int = 0
    most_cells: int = 0

    @property
    def has_flash_attention(self) -> bool:
        """On CPUs replies are twice as fast without it. Values of 8 bits need it."""
        return self.device != CPU or self.kv_type != "auto"


class Failed(RuntimeError):
    """A call of the library failed; its message has the library's reason."""


class NoMemory(MemoryError):
    """The library could not make a context."""


class LlamaModel:
    """A `.gguf` file in the library. `device` computes its layers, or the first of several devices does."""

    def __init__(self, library: Library, path: Path, options: LlamaOptions, device: Device | None = None) -> None:
        """Raises `ModelError` for a file that the library does not load."""
        self.library, self.options, self.path = library, options, path
        api = library.api
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = options.num_layers if device is not None else 0
        # Devices that are not named are not used: the library would share the layers out between all of them.
        self._devices = (ctypes.c_void_p * 2)(None if device is None else device.handle, None)
        parameters.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        library.forget_reason()
        self.handle = api.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.handle:
            raise ModelError(f"llama.cpp cannot load {path}: {library.reason}")
        self.vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle)))
        self.num_positions = int(api.llama_model_n_ctx_train(self.handle))
        self.window = int(api.llama_model_n_swa(self.handle))
        self.has_states = bool(api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle))
        if api.llama_model_has_encoder(self.handle):
            self.close()
            raise ModelError(f"{path}: llama.cpp reads it as a model with an encoder, which is not served")

    def close(self) -> None:
        if self.handle:
            self.library.api.llama_model_free(self.handle)
            self.handle = None


class LlamaContext:
    """The memory of one conversation with room for `num_cells` tokens. For one thread at a time."""

    def __init__(self, model: LlamaModel, num_cells: int) -> None:
        """Raises `NoMemory`."""
        api, options = model.library.api, model.options
        self.num_cells, self._model, self._api = num_cells, model, api
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = max(num_cells, options.least_cells), _SEQUENCES
        parameters.n_batch = parameters.n_ubatch = options.step
        parameters.n_threads = parameters.n_threads_batch = options.num_threads
        parameters.type_k = parameters.type_v = KV_KINDS[options.kv_type]
        # The whole memory of windows: in a ring, cells lie in another order after a restore.
        parameters.swa_full = parameters.kv_unified = True
        parameters.flash_attn_type = int(options.has_flash_attention)
        model.library.forget_reason()
        self._handle = api.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise NoMemory(f"llama.cpp makes no context of {num_cells:,} tokens: {model.library.reason}")
        self._memory = api.llama_get_memory(self._handle)
        self._batch = api.llama_batch_init(options.step, 0, 1)

    @property
    def end(self) -> int:
        """The number of tokens of which it has the state; 0 for states that are not whole."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, _OWN)) + 1

    def compute(self, token_ids: npt.NDArray[np.int64], position: int, num_logits: int) -> Logits:
        """Computes the tokens from `position` on, int64 [tokens], in one step. Returns the logits of the last rows,
        float32 [num_logits, vocab]. Raises `Failed`; then the state is lost."""
        batch, count = self._batch, len(token_ids)
        assert count <= self._model.options.step, "the batch has memory for one step"
        batch.n_tokens = count
        for row, token in enumerate(token_ids.tolist()):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, _OWN
            batch.logits[row] = row >= count - num_logits
        self._model.library.forget_reason()
        status = self._api.llama_decode(self._handle, batch)
        if status:
            self.clear()
            raise Failed(f"llama.cpp computed nothing (status {status}): {self._model.library.reason}")
        size = self._model.vocab_size
        rows = np.empty((num_logits, size), np.float32)
        for index in range(num_logits):
            logits = self._api.llama_get_logits_ith(self._handle, count - num_logits + index)
            rows[index] = np.ctypeslib.as_array(logits, (size,))
        return rows

    def take(self, start: int, stop: int) -> Bytes:
        """Returns the state of a range of tokens, uint8 [bytes]. Recurrent states in it are those of now."""
        # Whatever is left of an earlier call that failed.
        self._remove(_SCRATCH)
        self._api.llama_memory_seq_cp(self._memory, _OWN, _SCRATCH, start, stop)
        try:
            return self._get(_SCRATCH, 0)
        finally:
            self._remove(_SCRATCH)

    def take_all(self) -> Bytes:
        """Returns the state of all tokens, uint8 [bytes]. Every memory can give it: one that cannot be cut ends the
        process when a range is asked for."""
        return self._get(_OWN, 0)

    def put(self, state: Bytes) -> None:
        """Adds the state of a range of tokens, which follows on what the context has."""
        self._remove(_SCRATCH)
        self._set(state, _SCRATCH, 0)
        self._api.llama_memory_seq_cp(self._memory, _SCRATCH, _OWN, -1, -1)
        self._remove(_SCRATCH)

    def take_states(self) -> Bytes:
        """Returns the recurrent states after the last token, uint8 [bytes]."""
        return self._get(_OWN, _STATES_ALONE)

    def put_states(self, state: Bytes) -> None:
        """Sets the recurrent states: what is computed before has other bits, without an error."""
        self._set(state, _OWN, _STATES_ALONE)

    def clear(self) -> None:
        """Forgets all tokens."""
        # With their numbers: recurrent states begin with zeros.
        self._api.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        if self._handle:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._handle)
            self._handle = None

    def _remove(self, sequence: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _get(self, sequence: int, flags: int) -> Bytes:
        size = self._api.llama_state_seq_get_size_ext(self._handle, sequence, flags)
        state = np.empty(size, np.uint8)
        written = self._api.llama_state_seq_get_data_ext(self._handle, _pointer(state), size, sequence, flags)
        if written != size:
            raise Failed(f"llama.cpp gave {written} of {size} bytes of a state: {self._model.library.reason}")
        return state

    def _set(self, state: Bytes, sequence: int, flags: int) -> None:
        self._model.library.forget_reason()
        size = len(state)
        if self._api.llama_state_seq_set_data_ext(self._handle, _pointer(state), size, sequence, flags) != size:
            raise Failed(f"llama.cpp took no state of {size} bytes: {self._model.library.reason}")


def _pointer(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
