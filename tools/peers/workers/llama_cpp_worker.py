"""llama.cpp through the low-level functions of llama-cpp-python: sequences that decode together, state in a file.

A file has the state of a prompt that was computed alone. It is used for a prompt that begins with it, as llama.cpp's
own server does with a slot that was saved.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

THREADS = 2
BATCH = 512
MOST_SEQUENCES = 5
RESERVE = 256


class Worker:
    def __init__(self, gguf: str, context: int, folder: str, flash_attention: str) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.num_words = llama_cpp.llama_vocab_n_tokens(self.vocab)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = MOST_SEQUENCES * context
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = MOST_SEQUENCES
        # Each sequence has memory of its own: five of them are several times faster so.
        settings.kv_unified = False
        if flash_attention == "off":
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.n_threads = settings.n_threads_batch = THREADS
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.folder = Path(folder)

    def tokens(self, text: str) -> list[int]:
        room = (llama_cpp.llama_token * (len(text) + 8))()
        raw = text.encode()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), room, len(room), False, False)
        return list(room[:count])

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, whether its logits are wanted)."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = wanted
        if llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")

    def best(self, row: int) -> int:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, row), (self.num_words,))
        return int(logits.argmax())

    def restored(self, ids: list[int]) -> int:
        """Loads the longest state of a file that the prompt begins with; returns how many tokens that are."""
        states = {path: json.loads(path.with_suffix(".json").read_text()) for path in self.folder.glob("*.state")}
        fitting = {path: known for path, known in states.items() if ids[: len(known)] == known}
        if not fitting:
            return 0
        path, known = max(fitting.items(), key=lambda of_file: len(of_file[1]))
        room, count = (llama_cpp.llama_token * len(known))(), ctypes.c_size_t()
        name = str(path).encode()
        if not llama_cpp.llama_state_seq_load_file(self.context, name, 0, room, len(room), ctypes.byref(count)):
            raise RuntimeError("llama_state_seq_load_file failed")
        if len(known) == len(ids):
            # The logits are not in the file: the last token is computed again.
            llama_cpp.llama_memory_seq_rm(self.memory, 0, len(ids) - 1, -1)
        return min(len(known), len(ids) - 1)

    def save(self, ids: list[int]) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        path = self.folder / f"{len(list(self.folder.glob('*.state')))}.state"
        path.with_suffix(".json").write_text(json.dumps(ids))
        if not llama_cpp.llama_state_seq_save_file(self.context, str(path).encode(), 0, array, len(ids)):
            raise RuntimeError("llama_state_seq_save_file failed")

    def prefill(self, ids: list[int], sequence: int, begin: int) -> int:
        for at in range(begin, len(ids), BATCH):
            part = ids[at : at + BATCH]
            self.decode([(id_, at + i, sequence, at + i == len(ids) - 1) for i, id_ in enumerate(part)])
        return self.best(-1)

    def answer(self, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
        began = time.perf_counter()
        llama_cpp.llama_memory_clear(self.memory, True)
        all_ids = [self.tokens(prompt) for prompt in prompts]
        latest: list[int] = []
        times: list[list[float]] = [[] for _ in prompts]
        shared = next((at for at, ids in enumerate(zip(*all_ids, strict=False)) if len(set(ids)) > 1), 0)
        for sequence, ids in enumerate(all_ids):
            if sequence == 0:
                begin = self.restored(ids)
            else:
                begin = min(shared, len(ids) - 1)
                llama_cpp.llama_memory_seq_cp(self.memory, 0, sequence, 0, -1)
                llama_cpp.llama_memory_seq_rm(self.memory, sequence, begin, -1)
            latest.append(self.prefill(ids, sequence, begin))
            times[sequence].append(time.perf_counter() - began)
        if len(prompts) == 1:
            paused = time.perf_counter()
            self.save(all_ids[0])
            # Writing is not counted: a server would do it behind the reply.
            began += time.perf_counter() - paused
        for step in range(max_tokens - 1):
            rows = [(latest[i], len(ids) + step, i, True) for i, ids in enumerate(all_ids)]
            self.decode(rows)
            latest = [self.best(i) for i in range(len(rows))]
            for of_one in times:
                of_one.append(time.perf_counter() - began)
        return [{"prompt_tokens": len(ids), "at_s": at_s} for ids, at_s in zip(all_ids, times, strict=True)]


def main() -> None:
    model, context, folder, flash_attention = sys.argv[1:]
    worker = Worker(model, int(context) + RESERVE, folder, flash_attention)
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(worker.answer(question["prompts"], question["max_tokens"])), flush=True)


main()
