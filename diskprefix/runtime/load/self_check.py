"""Checks once that the bits of a token do not depend on the cut of its prompt, a restore, or other sequences.

The operators make a token's bits independent of the step by construction. The check finds faults of a version, a
machine or a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from diskprefix.memo import Memo
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import described, operators
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence, Prefix
from diskprefix.printable import first_line
from diskprefix.runtime.contract import Rows, Runtime
from diskprefix.runtime.plan.families.decoder_options import without_plan
from diskprefix.runtime.plan.planned import DTYPES, NotExact, PlanRuntime
from diskprefix.runtime.plan.weights import Weights
from diskprefix.tokens import Logits

_passed = Memo("self_checks", version=3, max_records=64)

_CUT = (5, 1, 20, 3, 11)
"""The steps of a run that is compared with a run in one step. After the first two it goes on from a copy."""
_STEPS = tuple(pairwise((0, *accumulate(_CUT))))
_NUM_GUESSES = 2
_ROOM = sum(_CUT) + _NUM_GUESSES
_PAGE_TOKENS = 256

TokenIds64 = npt.NDArray[np.int64]


def known_reason(config: Any, dtype: str, device: str) -> str:
    """Returns why a model has no plan on a kind of device, "" if it has one. `config` is the configuration of the whole
    model."""
    if device != "cpu":
        return f"the compiled operators, which make a model exact at every token, do not run on {device}"
    if operators() is None:
        return f"it needs the compiled operators: {described()}"
    if dtype not in DTYPES:
        return f"no plan computes in {dtype}"
    return without_plan(config)


def check(
    weights: Weights, config: Any, layout: Layout, identity: str = "", finish: Callable[[], None] = lambda: None
) -> None:
    """Raises `NotExact` if the plan of a model is not exact at every token, and `MemoryError`. `finish` is called
    before a check: it returns when all weights are in memory.

    A check that passed is remembered for `identity`, the model's fingerprint, if it is given. One that failed is not,
    so that a wrong moment of one process does not decide for the next.
    """
    compiled = operators()
    assert compiled is not None, "the model has a plan"
    named = f"{compiled.identity} {np.__version__} {num_threads()} {identity}"
    key = hashlib.sha256(named.encode()).hexdigest() if identity else ""
    if key and _passed.get(key) is True:
        return
    finish()
    try:
        _check(PlanRuntime(weights, config, layout, _PAGE_TOKENS, is_of_first=True))
    except MemoryError:
        raise
    except Exception as error:
        line = first_line(error)
        raise NotExact(line if isinstance(error, NotExact) else f"{type(error).__name__}: {line}") from error
    if key:
        _passed.put(key, True)


def _check(runtime: Runtime) -> None:
    """Raises `NotExact` for other bits."""
    pool = PagePool(runtime.layout, block_size=_PAGE_TOKENS)
    token_ids = _made_up(runtime, 4, sum(_CUT))
    whole = sequence_with_room(pool, _ROOM)
    (logits,) = runtime.run([Rows(whole, token_ids, len(token_ids))]).logits
    if not np.isfinite(logits).all():
        raise NotExact("its logits are not finite")
    cut, in_cuts = _in_cuts(runtime, pool, token_ids)
    if cut.content() != whole.content():
        raise NotExact("its state depends on the steps")
    if not np.array_equal(in_cuts, logits[[end - 1 for end in accumulate(_CUT)]]):
        raise NotExact("its logits depend on the steps")
    packed, in_company = _packed(runtime, pool, token_ids)
    if packed.content() != whole.content() or not np.array_equal(in_company, logits[-1:]):
        raise NotExact("it depends on other sequences, or on guesses that were taken back")


def _in_cuts(runtime: Runtime, pool: PagePool, token_ids: TokenIds64) -> tuple[KVSequence, Logits]:
    """Returns a sequence that was computed in several steps, the later ones in other memory and after another sequence,
    and the logits at their ends: nothing but that memory may decide what comes then."""
    sequence, logits = sequence_with_room(pool, _ROOM), list[Logits]()
    for number, (start, stop) in enumerate(_STEPS):
        if number == 2:
            runtime.run([Rows(sequence_with_room(pool, _ROOM), _made_up(runtime, 2, 5))])
            sequence = sequence_with_room(pool, _ROOM, sequence.prefix())
        logits += runtime.run([Rows(sequence, token_ids[start:stop])]).logits
    return sequence, np.concatenate(logits)


def _packed(runtime: Runtime, pool: PagePool, token_ids: TokenIds64) -> tuple[KVSequence, Logits]:
    """Returns a sequence that shared its steps with another one and took back draft tokens, and its last logits."""
    sequence, other, logits = sequence_with_room(pool, _ROOM), sequence_with_room(pool, _ROOM), np.empty(0, np.float32)
    wrong, beside = _made_up(runtime, 3, _NUM_GUESSES), _made_up(runtime, 1, 3)
    for start, stop in _STEPS:
        guessed = Rows(sequence, np.concatenate([token_ids[start:stop], wrong]), 1 + _NUM_GUESSES)
        _, logits = runtime.run([Rows(other, beside), guessed]).logits
        sequence.take_back(stop)
    return sequence, logits[:1]


def _made_up(runtime: Runtime, seed: int, num_tokens: int) -> TokenIds64:
    return np.random.default_rng(seed).integers(0, runtime.vocab_size, num_tokens)


def sequence_with_room(pool: PagePool, num_tokens: int, prefix: Prefix | None = None) -> KVSequence:
    """Returns a sequence with room for a number of tokens. After the prefix it is full of NaN (all bits are set), so an
    operator that reads after the last token is not exact."""
    sequence = KVSequence(pool)
    has_memory = (prefix is None or sequence.begin_with(prefix)) and sequence.take_pages_to(num_tokens)
    assert has_memory, "the pool has no limit"
    for table in sequence.tables:
        for number, page in enumerate(table.pages):
            if page is not None:
                page.tensor[:, :, max(0, sequence.num_tokens - number * pool.block_size) :].view(np.uint8)[:] = 0xFF
    return sequence
