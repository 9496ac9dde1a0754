"""Computes a prompt and a reply by llama.cpp's library, cold or from saved pages. Runs in a process of its own:

    python -P -m tools.llama_engine.restored_run TASK

`TASK` is a `RunTask` as JSON. A cold run saves the pages at the ends of blocks, as a store has them: without the rows
that a window has passed. A restored run fills all other memory with NaN. Both save the logits and the state at the end,
and print the result for a model without a difference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.llama import llama_runtime
from diskprefix.runtime.llama.llama_context import LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_layout import LlamaLayout
from diskprefix.runtime.llama.llama_library import open_library
from diskprefix.runtime.llama.llama_rehearsal import Rehearsed, made_up_tokens
from diskprefix.runtime.llama.llama_runtime import LlamaRuntime
from diskprefix.runtime.load.self_check import sequence_with_room

PROMPT, REPLY = 600, 8
CACHED = ("exact by block", "exact, windows", "exact with checkpoints")
"""The result for a model without a difference, by how it is cached."""
RESTORES = (256, 512)
"""The numbers of tokens at which a cold run saves its pages."""
_OTHER = 200
"""The tokens of another sequence that a used context computes before."""
_LARGER_CELLS = 8192


class RunTask(Struct, frozen=True):
    """A run of the model in the file `path`. `folder` gets the pages and the results. A run from `start` restores the
    pages of that many tokens; `is_used` lets its context compute another sequence before, and `is_larger` gives it
    more cells than the cold run had."""

    path: str
    options: LlamaOptions
    rehearsal: Rehearsed
    folder: str
    start: int = 0
    is_used: bool = False
    is_larger: bool = False

    @property
    def name(self) -> str:
        """The name of the run in a report."""
        if not self.start:
            return "cold"
        more = [text for text, is_so in (("in used memory", self.is_used), ("in more memory", self.is_larger)) if is_so]
        return " ".join([f"restored at {self.start}", *more])

    @property
    def results(self) -> Path:
        """The file of the results."""
        return Path(self.folder) / f"{self.name.replace(' ', '-')}.npz"


def run(task: RunTask) -> str:
    """Computes the run, and writes its pages and results. Returns one of `CACHED`."""
    library = open_library()
    device = next((device for device in library.devices() if device.name == task.options.device), None)
    model = LlamaModel(library, Path(task.path), task.options, None if task.options.device == "CPU" else device)
    placed = task.rehearsal.placed(model)
    assert isinstance(placed, LlamaLayout), "the model is cached"
    if task.is_larger:
        llama_runtime._LEAST_CELLS = _LARGER_CELLS
    runtime = LlamaRuntime(model, task.rehearsal.form, placed)
    pool = PagePool(placed.layout, block_size=task.options.step)
    if task.is_used:
        runtime.run([Rows(sequence_with_room(pool, _OTHER), made_up_tokens(model, 6, _OTHER))])
    sequence = sequence_with_room(pool, PROMPT + REPLY)
    if task.start:
        _restore(sequence, task.start, Path(task.folder))
    prompt, results, logits = made_up_tokens(model, 5, PROMPT), dict[str, Any](), np.empty((0, 0), np.float32)
    # Bound: the steps of a prompt and of a reply.
    while (start := sequence.num_tokens) < PROMPT + REPLY:
        of_prompt = prompt[start : start + task.options.step]
        part = of_prompt if len(of_prompt) else logits[-1:].argmax(axis=1)
        # Of every token, although the daemon needs one of a prompt: the rehearsal asks for one.
        (logits,) = runtime.run([Rows(sequence, part, len(part), num_guesses=0)]).logits
        results[f"logits {start}"] = logits
        if not task.start and sequence.num_tokens in RESTORES:
            sequence.complete_pages()
            np.savez(_pages_file(sequence.num_tokens, Path(task.folder)), **_pages(sequence))
    sequence.complete_pages()
    np.savez(task.results, **results, **_state(sequence))
    runtime.close()
    model.close()
    has_window = any(group.window is not None for group in runtime.layout.groups)
    return CACHED[2 if runtime.layout.states else has_window]


def _pages(sequence: KVSequence) -> dict[str, Any]:
    """Returns the rows that later tokens need, by group, and the states."""
    parts: dict[str, Any] = {f"states {number}": page.tensor for number, page in enumerate(sequence.states)}
    for number, table in enumerate(sequence.tables):
        first = table.group.first_needed(sequence.num_tokens)
        parts[f"rows {number} {first}"] = table.gathered(first, sequence.num_tokens)
    return parts


def _state(sequence: KVSequence) -> dict[str, Any]:
    """Returns the rows of each tensor, [tokens, bytes], from the first one that later tokens need, and each state."""
    parts = dict[str, Any]()
    for table in sequence.tables:
        first = table.group.first_needed(sequence.num_tokens)
        rows = table.gathered(first, sequence.num_tokens)
        for spec, tensor in zip(table.group.specs, rows, strict=True):
            parts[f"{spec.part} of layer {spec.layer} from {first}"] = (
                tensor[0].view(np.uint8).reshape(len(tensor[0]), -1)
            )
    for group, page in zip(sequence.layout.states, sequence.states, strict=True):
        for state, tensor in zip(group.specs, page.tensor, strict=True):
            parts[f"{state.part} state of layer {state.layer}"] = tensor.view(np.uint8).reshape(1, -1)
    return parts


def _pages_file(num_tokens: int, folder: Path) -> Path:
    return folder / f"pages-{num_tokens}.npz"


def _restore(sequence: KVSequence, num_tokens: int, folder: Path) -> None:
    """Puts saved pages into a sequence that has none of the tokens."""
    with np.load(_pages_file(num_tokens, folder)) as saved:
        for name, part in saved.items():
            kind, number, *first = name.split()
            if kind == "states":
                sequence.states[int(number)].tensor[:] = part
            else:
                sequence.tables[int(number)].write_rows(int(first[0]), part)
    sequence.truncate(num_tokens)


if __name__ == "__main__":
    print(run(msgspec.json.decode(sys.argv[1], type=RunTask)))
