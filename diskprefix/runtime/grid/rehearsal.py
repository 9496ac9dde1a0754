"""Checks a model that runs transformers' own modules: a restored run must equal an uninterrupted run bit for bit, two
steps must equal one pass apart from rounding, and no token may depend on later tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from diskprefix.memo import Memo
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.grid.state_layout import Unsupported, made_up_tokens, or_unsupported, read_layout
from diskprefix.runtime.load.code_digest import computed_by
from diskprefix.runtime.load.self_check import sequence_with_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_passed = Memo("rehearsals", version=1, max_records=64)

_BLOCK_SIZE = 256
_STEP = 4
"""Tokens in a step of `rehearse`."""
_LONG_CONTEXT, _NUM_REPEATED = 4096, 32
"""Tokens that a device computes twice, the last ones row by row."""
_MAX_STATE_ERROR, _MAX_LOGITS_ERROR = 0.05, 0.3
_MAX_LOOKAHEAD = 0.005
"""The largest allowed difference between a run in two steps and a run in one pass, relative to the difference of a run
that never saw the first step. Rounding is smaller by orders of magnitude; a dropped state gives nearly 1."""


def rehearse(model: PreTrainedModel, identity: str = "") -> Layout:
    """Returns the layout of a model that runs transformers' own modules, after a rehearsed restore. For a model that
    cannot be cached, `unsupported` has the reasons.

    After a success the layout is remembered under `identity`, the model's fingerprint, if it is given. Raises only
    torch's out-of-memory errors.
    """
    key = hashlib.sha256(f"{computed_by(model)} {identity}".encode()).hexdigest() if identity else ""
    if (remembered := _remembered(key)) is not None:
        return remembered
    layout = read_layout(model)
    rehearsed = layout if layout.unsupported else or_unsupported(model, lambda: _rehearsed(model, layout))
    if key and not rehearsed.unsupported:
        _passed.put(key, rehearsed.as_record())
    return rehearsed


def _remembered(key: str) -> Layout | None:
    record = _passed.get(key) if key else None
    if record is not None:
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            return Layout.of_record(record)
    return None


def _rehearsed(model: PreTrainedModel, layout: Layout) -> Layout:
    """Returns the layout if a restore gives the bits of the uninterrupted run. Raises `Unsupported` if it does not, if
    the model ignores the earlier state when it adds several tokens to it, or if a token depends on later tokens."""
    name, token_ids = type(model).__name__, made_up_tokens(model, 1, 2 * _STEP + 1)
    steps, both = (_STEP, _STEP, 1), token_ids[:, : 2 * _STEP]
    cold, restored = (_run(model, layout, token_ids, steps, restored_at=end) for end in (0, _STEP))
    if not torch.equal(restored[1], cold[1]):
        raise Unsupported(f"{name} keeps state outside its cache")
    continued, alone = _run(model, layout, both, steps[:2]), _run(model, layout, both[:, _STEP:], [_STEP])
    if layout.states:
        ends = [continued, _run(model, layout, both, [2 * _STEP]), alone]
        if _error(*(_first_recurrent(layout, state) for state, _ in ends)) > _MAX_STATE_ERROR:
            raise Unsupported(f"{name} adds tokens to a state only one by one")
    one_pass = model(input_ids=both, use_cache=False).logits[0].cpu()
    if _error(continued[1][-1], one_pass[-1], alone[1][-1]) > _MAX_LOGITS_ERROR:
        raise Unsupported(f"{name} does not continue a sequence step by step")
    other_end = torch.cat([both[:, :_STEP], made_up_tokens(model, 3, _STEP)], dim=1)
    beginning, again = one_pass[:_STEP], model(input_ids=other_end, use_cache=False).logits[0, :_STEP].cpu()
    if _error(again, beginning, beginning.roll(1, dims=0)) > _MAX_LOOKAHEAD:
        raise Unsupported(f"{name} looks at what comes later")
    if model.device.type != "cpu":
        _check_repeats(model, layout)
    return layout


def _check_repeats(model: PreTrainedModel, layout: Layout) -> None:
    """Raises `Unsupported` if rows after a long context have other bits when they are computed again. Kernels of GPUs
    that split a long context may add its parts in any order."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _LONG_CONTEXT
    token_ids = made_up_tokens(model, 4, min(_LONG_CONTEXT, most))
    last = token_ids.shape[1] - _NUM_REPEATED
    blocks = [min(_BLOCK_SIZE, last - start) for start in range(0, last, _BLOCK_SIZE)]
    steps = [*blocks, *[1] * _NUM_REPEATED]
    if not torch.equal(_run(model, layout, token_ids, steps)[1], _run(model, layout, token_ids, steps)[1]):
        raise Unsupported(f"kernels of {model.device.type} give the same rows other bits from run to run")


def _error(computed: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Returns the distance of `computed` from `right`, divided by that of `wrong`; 0 if `wrong` equals `right`."""
    scale = (wrong.float() - right.float()).abs().max()
    return float((computed.float() - right.float()).abs().max() / scale) if scale else 0.0


def _first_recurrent(layout: Layout, state: bytes) -> torch.Tensor:
    """Returns the recurrent state of the first layer that has one, or else the first state of a convolution: there two
    runs have nearly the same input. States are at the end of `state`."""
    specs = [spec for group in layout.states for spec in group.specs]
    starts = accumulate((spec.num_bytes for spec in specs), initial=len(state) - sum(spec.num_bytes for spec in specs))
    *_, start, spec = min(
        (spec.part != "recurrent", spec.layer, spec.index, start, spec)
        for spec, start in zip(specs, starts, strict=False)
    )
    return torch.frombuffer(bytearray(state[start : start + spec.num_bytes]), dtype=getattr(torch, spec.dtype))


def _run(
    model: PreTrainedModel,
    layout: Layout,
    token_ids: torch.Tensor,
    steps: Sequence[int],
    *,
    num_logits: int = 1,
    restored_at: int = 0,
) -> tuple[bytes, torch.Tensor]:
    """Returns the state of all tokens with the states at the end, and the last `num_logits` next-token logits of each
    step, [logits, vocab]. After `restored_at` tokens, another sequence is computed, and this one continues from a copy
    in other pages: only these pages may decide the rest."""
    pool, runtime = PagePool(layout, block_size=_BLOCK_SIZE), GridRuntime(model, layout)
    sequence, logits = sequence_with_room(pool, token_ids.shape[1]), []
    for part in torch.split(token_ids[0].cpu(), list(steps)):
        logits += runtime.run([Rows(sequence, part.numpy(), num_logits)]).logits
        if sequence.num_tokens == restored_at:
            other = made_up_tokens(model, 2, _STEP + 1)[0].cpu().numpy()
            runtime.run([Rows(sequence_with_room(pool, _STEP + 1), other)])
            sequence = sequence_with_room(pool, token_ids.shape[1], sequence.prefix())
    return sequence.content(), torch.from_numpy(np.concatenate(logits))
