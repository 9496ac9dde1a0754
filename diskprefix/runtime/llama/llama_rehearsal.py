"""Checks a model in llama.cpp's library before it is served: a restore must give the bits of an uninterrupted run.

It runs in a process of its own, because a library that was built with mistakes ends the process: the daemon says so in
one line. What was checked is remembered for the library, the model, the options and the device.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diskprefix.errors import DiskPrefixError, ModelError
from diskprefix.memo import Memo
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.progress import Report
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.llama.llama_context import CPU, Failed, LlamaContext, LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_layout import LlamaLayout, layout_of, uncached_layout
from diskprefix.runtime.llama.llama_library import INSTALL, Library, open_library
from diskprefix.runtime.llama.llama_runtime import LlamaRuntime
from diskprefix.runtime.llama.state_form import (
    Bytes,
    StateForm,
    UnknownForm,
    block_state,
    checkpoint_state,
    form_of,
    rows_of,
    states_of,
    without_tokens,
)
from diskprefix.runtime.load.self_check import sequence_with_room
from diskprefix.tokens import Logits

log = logging.getLogger("diskprefix")

_passed = Memo("llama-rehearsals", version=2, max_records=64)

_TAIL, _REPLY, _OTHER = 44, 8, 9
"""The tokens after the first block: a step of several rows, then steps of one. `_OTHER` tokens of another sequence are
computed in between."""
_LONG_CONTEXT = 4096
"""The tokens that a device computes twice."""
_FORM_TOKENS = 5
_TIMEOUT_S = 1800.0
_AMX = "-mno-amx-int8 -mno-amx-bf16 -mno-amx-tile"


class Rehearsed(Struct, frozen=True):
    """The result of a rehearsal. `golden` is the digest of the logits and the state that the library computed for some
    tokens, 32 hex digits. `form` is the form of states; None, with a `reason`, if the state cannot be cached."""

    golden: str
    form: StateForm | None
    reason: str = ""

    def placed(self, model: LlamaModel) -> LlamaLayout | Layout:
        """Returns the layout of the model that was rehearsed."""
        if self.form is None:
            return uncached_layout(model.vocab_size, self.reason)
        return layout_of(self.form, model.vocab_size, model.window)


class _Task(Struct, frozen=True):
    path: str
    options: LlamaOptions


def rehearsed(path: Path, options: LlamaOptions, key: str, report: Report) -> Rehearsed:
    """Returns what a rehearsal of the model in a file finds, in a process of its own. `key` is everything that its
    result depends on; a result is remembered for it. Raises `ModelError` if the library cannot compute the model."""
    name = hashlib.sha256(key.encode()).hexdigest()
    with suppress(msgspec.ValidationError):
        if (record := _passed.get(name)) is not None:
            return msgspec.convert(record, Rehearsed)
    report("comparing a restore with a run that is not interrupted, once for this model and llama.cpp")
    began = time.monotonic()
    task = msgspec.json.encode(_Task(str(path), options)).decode()
    command = [sys.executable, "-P", "-m", "diskprefix.runtime.llama.llama_rehearsal", task]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"llama.cpp computed no first prompt of {path.name} within {_TIMEOUT_S:.0f} s") from error
    if ended.returncode < 0:
        raise ModelError(_crash(path, -ended.returncode))
    try:
        result = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Rehearsed | str)
    except (msgspec.DecodeError, IndexError) as error:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ModelError(f"llama.cpp failed with {path.name}: {' '.join(last) or ended.returncode}") from error
    if isinstance(result, str):
        raise ModelError(result)
    log.info("[llama] compared in %.0f s: %s", time.monotonic() - began, result.reason or "the bits are equal")
    _passed.put(name, msgspec.to_builtins(result))
    return result


def _crash(path: Path, number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    advice = "choose another --device, or --runtime plan"
    with suppress(OSError):
        if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            # What gcc 12 makes of the loads of AMX's configuration.
            flags = f"CMAKE_ARGS=\"-DCMAKE_C_FLAGS='{_AMX}' -DCMAKE_CXX_FLAGS='{_AMX}'\""
            advice = f"if gcc before 13 compiled it, compile it again without AMX: {flags} {INSTALL} --force-reinstall"
            advice += " --no-cache-dir"
    return f"llama.cpp's library ended with {name} while it computed a prompt of {path.name}; {advice}"


def rehearse(library: Library, path: Path, options: LlamaOptions) -> Rehearsed:
    """Computes, restores and compares. Raises `ModelError` if the library cannot compute the model."""
    device = next((device for device in library.devices() if device.name == options.device), None)
    if device is None and options.device != CPU:
        raise ModelError(f"llama.cpp's library has no device {options.device} any more; start again")
    model = LlamaModel(library, path, options, None if device is None or device.kind == "cpu" else device)
    try:
        return _rehearsed(model)
    except (Failed, MemoryError) as error:
        raise ModelError(f"llama.cpp cannot compute {path.name}: {error}") from error
    finally:
        model.close()


def _rehearsed(model: LlamaModel) -> Rehearsed:
    form = None
    try:
        form = _form(model)
        placed = layout_of(form, model.vocab_size, model.window)
        _require_equal_bytes(model, form)
    except UnknownForm as error:
        reason = f"its state in llama.cpp is not known: {error}"
        return Rehearsed(_golden_of_uncached(model, reason), None, reason)
    step = model.options.step
    token_ids = made_up_tokens(model, 1, min(step + _TAIL + _REPLY, model.num_positions - 1))
    steps = _steps(len(token_ids), step)
    cold = _run(model, form, placed, token_ids, steps)
    golden = _digest(*cold)
    # At the end of a block, and at the end of a prompt.
    for end in [end for count, end in zip(steps, accumulate(steps), strict=True) if count > 1]:
        if _digest(*_run(model, form, placed, token_ids, steps, restored_at=end)) != golden:
            return Rehearsed(golden, None, "a restored run has other bits than one that is not interrupted")
    if model.options.device != CPU:
        long = made_up_tokens(model, 3, min(_LONG_CONTEXT, model.num_positions - 1))
        first, second = (_digest(*_run(model, form, placed, long, _steps(len(long), step))) for _ in range(2))
        if first != second:
            return Rehearsed(golden, None, f"{model.options.device} gives the same rows other bits from run to run")
        golden = hashlib.sha256((golden + first).encode()).hexdigest()[:32]
    return Rehearsed(golden, form)


def _steps(num_tokens: int, step: int) -> list[int]:
    """Returns the steps of a prompt, and of a reply after it, whose steps are single tokens."""
    num_single = min(_REPLY, num_tokens - 1)
    prompt = num_tokens - num_single
    return [*(min(step, prompt - start) for start in range(0, prompt, step)), *[1] * num_single]


def made_up_tokens(model: LlamaModel, seed: int, num_tokens: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, model.vocab_size, num_tokens)


def _form(model: LlamaModel) -> StateForm:
    context = LlamaContext(model, 2 * model.options.step)
    try:
        context.compute(made_up_tokens(model, 0, _FORM_TOKENS), 0, 1)
        return form_of(context.take_all(), has_states=model.has_states)
    finally:
        context.close()


def _require_equal_bytes(model: LlamaModel, form: StateForm) -> None:
    """Raises `UnknownForm` if the library gives other bytes of a state that was taken apart and put together."""
    context = LlamaContext(model, 2 * model.options.step)
    count = min(_FORM_TOKENS, model.window or _FORM_TOKENS)
    try:
        context.compute(made_up_tokens(model, 0, count), 0, 1)
        before = _taken(context, form, count)
        state, states = before
        context.clear()
        if form.attention:
            context.put(block_state(form, 0, [part.tensors for part in rows_of(state, form)], 1))
        if form.recurrent is not None:
            context.put_states(checkpoint_state(form, count - 1, states_of(states, form), 0))
        after = _taken(context, form, count)
    finally:
        context.close()
    if any(taken.tobytes() != again.tobytes() for taken, again in zip(before, after, strict=True)):
        raise UnknownForm("put together again, it has other bytes")


def _taken(context: LlamaContext, form: StateForm, count: int) -> tuple[Bytes, Bytes]:
    """Returns the state of the first tokens, and the recurrent states alone; each empty if there is none."""
    none = np.empty(0, np.uint8)
    state = without_tokens(context.take(0, count), form) if form.attention else none
    return state, none if form.recurrent is None else context.take_states()


def _run(
    model: LlamaModel,
    form: StateForm,
    placed: LlamaLayout,
    token_ids: npt.NDArray[np.int64],
    steps: Sequence[int],
    *,
    restored_at: int = 0,
) -> tuple[bytes, list[Logits]]:
    """Returns the state of all tokens and the logits after each step. After `restored_at` tokens, another sequence is
    computed, and this one continues from a copy in other pages: only these pages may decide the rest."""
    runtime = LlamaRuntime(model, form, placed)
    pool = PagePool(placed.layout, block_size=model.options.step)
    try:
        sequence, logits = sequence_with_room(pool, len(token_ids)), list[Logits]()
        for part in np.split(token_ids, np.cumsum(steps)[:-1]):
            logits += runtime.run([Rows(sequence, part, may_lag=len(part) == 1)]).logits
            if sequence.num_tokens == restored_at:
                other = made_up_tokens(model, 2, _OTHER)
                runtime.run([Rows(sequence_with_room(pool, _OTHER), other)])
                sequence = sequence_with_room(pool, len(token_ids), sequence.prefix())
        sequence.complete_pages()
        first = max((group.first_needed(sequence.num_tokens) for group in placed.layout.groups), default=0)
        return sequence.content(first), logits
    finally:
        runtime.close()


def _golden_of_uncached(model: LlamaModel, reason: str) -> str:
    runtime = LlamaRuntime(model, None, uncached_layout(model.vocab_size, reason))
    try:
        token_ids, state = made_up_tokens(model, 1, _TAIL), runtime.new_state()
        return _digest(b"", runtime.run([Rows(state, token_ids)]).logits)
    finally:
        runtime.close()


def _digest(state: bytes, logits: Sequence[Logits]) -> str:
    digest = hashlib.sha256(state)
    for rows in logits:
        digest.update(rows.tobytes())
    return digest.hexdigest()[:32]


def main(task: str) -> None:
    """Prints what the rehearsal of a task finds, as JSON, or the message of an error."""
    asked = msgspec.json.decode(task, type=_Task)
    result: Any
    try:
        result = rehearse(open_library(), Path(asked.path), asked.options)
    except DiskPrefixError as error:
        result = error.message
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
