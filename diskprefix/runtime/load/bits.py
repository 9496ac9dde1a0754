"""The bits of a build: the results of its operators for fixed inputs, by the plans of tiny models of each family.

Two builds with equal bits share their stored state, whatever their sources. Neither the number of threads nor the cut
into steps changes bits. For code that these models do not reach, `engine.idle.recheck` compares stored state with a new
computation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np

from diskprefix.kernel_settings import processor
from diskprefix.memo import Memo
from diskprefix.model_identity import remembered_digest
from diskprefix.native import address_of, calls
from diskprefix.native.build import LIBRARY
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators
from diskprefix.prefixstore.kv.sizes import Q8_BLOCK_BYTES
from diskprefix.runtime.load.code_digest import code_digest
from diskprefix.runtime.load.tiny_models import (
    MODELS,
    NAMES,
    PAGE_TOKENS,
    VOCAB,
    TinyModel,
    TinyWeights,
    below,
    in_dtype,
    made_up,
)
from diskprefix.runtime.plan.families.decoder import decoder
from diskprefix.runtime.plan.families.draft_decoder import draft
from diskprefix.runtime.plan.operands import PlannedRun
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.runtime.plan.slots import Slots

_START = 270
STEPS = 37, 1
"""The first token that is computed comes after a tile of attention. Steps of few rows have other kernels."""
FORMS = {"float32": calls.FLOAT32, "bfloat16": calls.BFLOAT16, "quants": calls.BFLOAT16, "q8": calls.BFLOAT16}
"""The type of numbers. With quants, matrices are quantised; with q8, keys and values are."""

_measured = Memo("bits", version=1, max_records=64)


def build_of(operators: Operators) -> str:
    """Returns the digest of a build, 16 hex digits: the library, our own code, and the kind of CPU."""
    library = remembered_digest(LIBRARY), operators.variant, operators.rows
    return _digest(f"{library} {code_digest()} {np.__version__} {processor()}".encode())


def bits_of_build(operators: Operators) -> str:
    """Returns the digest of a build's bits, 16 hex digits. They are measured once."""
    build = build_of(operators)
    bits = _measured.get(build)
    if not isinstance(bits, str):
        bits = _digest(*(f"{name} {digest}".encode() for name, digest in measured_bits(operators).items()))
        _measured.put(build, bits)
    return bits


def measured_bits(operators: Operators, forms: Iterable[str] = FORMS) -> dict[str, str]:
    """Returns digests of what each tiny model gives in each form, by both."""
    return {
        f"{name} in {form}": _digest(*chain(*computed(operators, model, form)))
        for name, model in MODELS.items()
        for form in forms
    }


def computed(
    operators: Operators, model: TinyModel, form: str, steps: Sequence[int] = STEPS, threads: int = 0
) -> tuple[list[bytes], list[bytes]]:
    """Returns the logits and hidden states of some steps, row after row, and the memory after them."""
    dtype = FORMS[form]
    item_bytes = 4 if dtype == calls.FLOAT32 else 2
    config, of_tables, of_states = model.placed(item_bytes, "q8" if form == "q8" else "auto")
    plan, drafts = (ComputePlan(dtype, max(steps), VOCAB) for _ in range(2))
    runner, draft_runner = (PlanRunner(operators, written, PAGE_TOKENS) for written in (plan, drafts))
    weights = TinyWeights(operators, model, dtype, has_quants=form == "quants")
    slots = Slots(weights, config.norms, NAMES)
    decoder(plan, config, slots, with_hidden=True)
    num_pages = -(-(_START + sum(steps)) // PAGE_TOKENS)
    of_indexers = {layer.places["index"].table for layer in config.layers if "index" in layer.places}
    kinds = ["bfloat16" if form == "q8" and n in of_indexers else form for n in range(len(of_tables))]
    tables = [_memory(num_pages, size, n, kinds[n]) for n, size in enumerate(of_tables)]
    pages = [np.array([address_of(page) for page in table], np.uint64) for table in tables]
    states = [np.zeros(size, np.uint8) for size in of_states]
    at_states, ids, rows = [address_of(state) for state in states], below(VOCAB, sum(steps), 4), list[bytes]()
    before = None
    if config.draft_layer is not None:
        before, _ = draft(drafts, config, slots)
    for end, count in zip(accumulate(steps), steps, strict=True):
        start = _START + end - count
        run = PlannedRun(
            start, count, count, [address_of(addresses) for addresses in pages], array("q"), at_states, at_states
        )
        step = [run], ids[end - count : end], np.arange(start, start + count)[None], threads or num_threads()
        runner.run(*step)
        outs = [runner.copied(out, count) for out in (plan.logits, plan.hidden)]
        if before is not None:
            draft_runner.put(before, outs[1])
            draft_runner.run(*step)
            outs = [draft_runner.copied(out, count) for out in (drafts.logits, drafts.hidden)]
        rows += [row.tobytes() for of_row in zip(*outs, strict=True) for row in of_row]
    return rows, [memory.tobytes() for memory in (*tables, *states)]


def _memory(num_pages: int, page_bytes: int, seed: int, form: str) -> np.ndarray:
    """Returns made-up keys and values of the tokens before the first step, [pages, ..]."""
    dtype = FORMS[form]
    if form != "q8":
        return made_up((num_pages, page_bytes // (4 if dtype == calls.FLOAT32 else 2)), seed, dtype).copy()
    memory = made_up((num_pages, page_bytes), seed, None).copy()
    scales = in_dtype(made_up((memory.size // Q8_BLOCK_BYTES, 1), seed) * 2.0**-7, dtype)
    memory.reshape(-1, Q8_BLOCK_BYTES)[:, :2] = scales.view(np.uint8)
    return memory


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
