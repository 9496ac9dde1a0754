"""llama.cpp through the functions of its library: sequences that decode together, state in a file.

A file has the state of a prompt that was computed alone. A prompt with a common prefix restores it, as in llama.cpp's
own server with a slot that was saved by hand.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_bool, c_char_p, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS = 2
BATCH = 512
MOST_SEQUENCES = 5
RESERVE = 256
WITHOUT_FLASH_ATTENTION = 0
FLOAT32 = 0
"""`GGML_TYPE_F32`."""
Q8_0 = 8


class ModelSettings(Structure):
    """`llama_model_params`, as the library fills it."""

    _fields_ = (("as_they_are", ctypes.c_uint64 * 10),)


class ContextSettings(Structure):
    """`llama_context_params`, in the order of version 0.5."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("recurrent_and_outputs", c_uint32 * 3),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("kinds", c_int32 * 4),
        ("flash_attn_type", c_int32),
        ("positions", c_uint32 * 8),
        ("on_evaluation", c_void_p * 2),
        ("cache_types", c_int32 * 2),
        ("on_abort", c_void_p * 2),
        ("flags", c_bool * 5),
        ("kv_unified", c_bool),
        ("samplers", c_void_p * 3),
    )


class QuantizeSettings(Structure):
    """`llama_model_quantize_params`: its first members, and space for the rest."""

    _fields_ = (("nthread", c_int32), ("ftype", c_int32), ("as_they_are", ctypes.c_uint64 * 10))


class Batch(Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (ModelSettings, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelSettings)),
    "llama_model_quantize_default_params": (QuantizeSettings, ()),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(QuantizeSettings))),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_context_default_params": (ContextSettings, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextSettings)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(ctypes.c_float), (c_void_p, c_int32)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_state_seq_save_file": (c_size_t, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_size_t)),
    "llama_state_seq_load_file": (
        c_size_t,
        (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_size_t, POINTER(c_size_t)),
    ),
}
"""The types of each function's result and arguments."""


def loaded(folder: Path, form: str = "") -> CDLL:
    """Returns the library in a folder, with one of its forms, or the fastest that this processor can run."""
    (path,) = folder.glob("libllama.v*.so")
    library = CDLL(str(path))
    for name, (returned, taken) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, taken
    (ggml,) = folder.glob("libggml.v*.so")
    backends = CDLL(str(ggml))
    if form:
        backends.ggml_backend_load(c_char_p(bytes(folder / f"libggml-cpu-{form}.so")))
    else:
        backends.ggml_backend_load_all_from_path(c_char_p(bytes(folder)))
    return library


def quantise(library: CDLL, source: Path, file: Path, file_type: int) -> None:
    """Writes a file of the type `file_type`, a `llama_ftype`."""
    settings = library.llama_model_quantize_default_params()
    settings.ftype = file_type
    if library.llama_model_quantize(bytes(source), bytes(file), byref(settings)):
        raise RuntimeError("llama_model_quantize failed")


def common(ids: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the common prefix of two prompts, in tokens or in characters."""
    differ = (at for at, (first, second) in enumerate(zip(ids, other, strict=False)) if first != second)
    return next(differ, min(len(ids), len(other)))


class Worker:
    def __init__(
        self,
        llama: CDLL,
        gguf: str,
        context: int,
        folder: str,
        *,
        flash_attention: bool,
        cache_type: int | None = None,
        sequences: int = MOST_SEQUENCES,
    ) -> None:
        self.llama = llama
        model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
        if model is None:
            sys.exit("llama_model_load_from_file failed")
        self.vocab = llama.llama_model_get_vocab(model)
        self.num_words = llama.llama_vocab_n_tokens(self.vocab)
        settings = llama.llama_context_default_params()
        settings.n_ctx = sequences * context
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = sequences
        # With separate memory for each sequence, five sequences are several times faster.
        settings.kv_unified = False
        if not flash_attention:
            settings.flash_attn_type = WITHOUT_FLASH_ATTENTION
        if cache_type is not None:
            settings.cache_types[:] = [cache_type, cache_type]
        settings.n_threads = settings.n_threads_batch = THREADS
        self.context = llama.llama_init_from_model(model, settings)
        if self.context is None:
            sys.exit("llama_init_from_model failed")
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.folder = Path(folder)

    def tokens(self, text: str) -> list[int]:
        room = (c_int32 * (len(text) + 8))()
        raw = text.encode()
        count = self.llama.llama_tokenize(self.vocab, raw, len(raw), room, len(room), False, False)
        return list(room[:count])

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = wanted
        if self.llama.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")

    def logits(self, row: int) -> NDArray[np.float32]:
        """Returns the logits of a row of the last `decode`, [vocab], in memory that the next `decode` overwrites."""
        return np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, row), (self.num_words,))

    def best(self, row: int) -> int:
        return int(self.logits(row).argmax())

    def restored(self, ids: list[int]) -> int:
        """Loads the state of the file with the longest common prefix. Returns how many of its tokens are used."""
        states = {path: json.loads(path.with_suffix(".json").read_text()) for path in self.folder.glob("*.state")}
        shared = {path: common(ids[:-1], known) for path, known in states.items()}
        path = max(shared, key=shared.__getitem__, default=None)
        if path is None or not shared[path]:
            return 0
        known = states[path]
        room, count = (c_int32 * len(known))(), c_size_t()
        if not self.llama.llama_state_seq_load_file(self.context, bytes(path), 0, room, len(room), byref(count)):
            raise RuntimeError("llama_state_seq_load_file failed")
        # The logits are not in the file, so that the last token is always computed. A state cannot be cut.
        if len(known) > shared[path] and not self.llama.llama_memory_seq_rm(self.memory, 0, shared[path], -1):
            self.llama.llama_memory_clear(self.memory, True)
            return 0
        return shared[path]

    def save(self, ids: list[int]) -> None:
        array = (c_int32 * len(ids))(*ids)
        path = self.folder / f"{len(list(self.folder.glob('*.state')))}.state"
        path.with_suffix(".json").write_text(json.dumps(ids))
        if not self.llama.llama_state_seq_save_file(self.context, bytes(path), 0, array, len(ids)):
            raise RuntimeError("llama_state_seq_save_file failed")

    def prefill(self, ids: list[int], sequence: int, begin: int) -> int:
        for at in range(begin, len(ids), BATCH):
            part = ids[at : at + BATCH]
            self.decode([(id_, at + i, sequence, at + i == len(ids) - 1) for i, id_ in enumerate(part)])
        return self.best(-1)

    def answer(self, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
        began = time.perf_counter()
        self.llama.llama_memory_clear(self.memory, True)
        all_ids = [self.tokens(prompt) for prompt in prompts]
        latest: list[int] = []
        times: list[list[float]] = [[] for _ in prompts]
        shared = next((at for at, ids in enumerate(zip(*all_ids, strict=False)) if len(set(ids)) > 1), 0)
        for sequence, ids in enumerate(all_ids):
            if sequence == 0:
                begin = self.restored(ids)
            else:
                begin = min(shared, len(ids) - 1)
                self.llama.llama_memory_seq_cp(self.memory, 0, sequence, 0, -1)
                self.llama.llama_memory_seq_rm(self.memory, sequence, begin, -1)
            latest.append(self.prefill(ids, sequence, begin))
            times[sequence].append(time.perf_counter() - began)
        if len(prompts) == 1 and 2 * begin < len(all_ids[0]):
            paused = time.perf_counter()
            self.save(all_ids[0])
            # Writing is not counted: a server would do it after the reply.
            began += time.perf_counter() - paused
        for step in range(max_tokens - 1):
            rows = [(latest[i], len(ids) + step, i, True) for i, ids in enumerate(all_ids)]
            self.decode(rows)
            latest = [self.best(i) for i in range(len(rows))]
            for of_one in times:
                of_one.append(time.perf_counter() - began)
        return [{"prompt_tokens": len(ids), "at_s": at_s} for ids, at_s in zip(all_ids, times, strict=True)]


def main() -> None:
    library, model, context, folder, *more = sys.argv[1:]
    settings = dict(zip(more[::2], more[1::2], strict=False))
    if len(more) % 2 or not settings.keys() <= {"-fa", "--form", "--sequences"} or settings.get("-fa", "off") != "off":
        sys.exit(f"not known: {' '.join(more)}")
    llama = loaded(Path(library), settings.get("--form", ""))
    sequences = int(settings.get("--sequences", MOST_SEQUENCES))
    flash_attention = "-fa" not in settings
    worker = Worker(llama, model, int(context) + RESERVE, folder, flash_attention=flash_attention, sequences=sequences)
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(worker.answer(question["prompts"], question["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
