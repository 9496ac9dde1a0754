"""Makes a model exact at every token, and checks that once: a token's state must have the same bits however the prompt
was cut, and after a restore. README.md says how.

What makes a token's bits independent of the step are our operators, by construction. Which architectures compute with
nothing else was verified (`model.exact.verified`); the check finds what differs in a version or a file. A model of
another architecture stays as transformers made it, and is exact on the grid if a restore is.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence, Prefix
from diskprefix.memo import Memo
from diskprefix.model.exact import attention
from diskprefix.model.exact.fused import kind_of
from diskprefix.model.exact.invariant import as_it_was, install, recognised, uninstall
from diskprefix.model.exact.patterns import NotInvariant
from diskprefix.model.exact.runner import can_pack, forward
from diskprefix.model.exact.state_layout import Unsupported, made_up_tokens, or_unsupported, read_layout
from diskprefix.model.exact.verified import is_verified
from diskprefix.model.load.draft_layer import draft_layer_of
from diskprefix.model.load.kernel_settings import computed_by
from diskprefix.model.planned import reason_without_plan
from diskprefix.native.library import REMEDY, are_missing, described, operators
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

_passed = Memo("self_checks", version=1, max_records=64)

_CUT = (5, 1, 20, 3, 11)
"""The steps of a run that is compared with a run in one step. After the first two it goes on from a copy."""
_MAX_ERROR, _MAX_FLOAT_ERROR = 0.2, 0.01
"""The largest allowed difference from transformers' own logits, relative to that of another token's; the median of the
tokens, because rounding may choose another expert for a few. That of float32 has hardly any rounding."""

_BLOCK_SIZE = 256
_STEP = 4
"""Tokens in a step of `rehearse`."""
_MAX_STATE_ERROR, _MAX_LOGITS_ERROR = 0.05, 0.3
_MAX_LOOKAHEAD = 0.005
"""The largest allowed difference between a run in two steps and a run in one pass, relative to the difference of a run
that never saw the first step. Rounding is smaller by orders of magnitude; a dropped state gives nearly 1."""


def make_exact(model: PreTrainedModel, identity: str = "") -> tuple[Layout, str]:
    """Returns the layout of the model's state, and why it is not exact at every token ("" if it is).

    If it is, the model is changed to compute so (`model.exact.invariant`). A check that was passed is remembered for
    `identity`, the model's fingerprint, if it is given; one that failed is not, so that a wrong moment of one process
    does not decide for the next. Raises only what torch raises when memory runs out.
    """
    reason = known_reason(model, model.device)
    if not reason:
        drafts = " with its draft layer" if draft_layer_of(model) is not None else ""
        key = _key(model, f"{attention.kernel(model.device)}{drafts} {identity}") if identity else ""
        layout = _remembered(key)
        try:
            layout = layout or _checked(model)
        except NotInvariant as found:
            reason = str(found)
        else:
            if key:
                _passed.put(key, layout.record())
            install(model)
            parts = recognised(model) if reason_without_plan(model) else "one plan"
            log.info("[model] kernels: %s, %s", described(), parts)
            return layout, ""
    layout = rehearse(model, identity)
    reason = "its state is not cached" if layout.unsupported else reason
    log.info("[model] exact in steps of one grid: %s", reason)
    if model.device.type == "cpu" and are_missing():
        log.warning("[model] replies are many times slower without the compiled operators: %s", REMEDY)
    if draft_layer_of(model) is not None:
        log.info("[model] its draft layer is not used: only models that have a plan use theirs")
    return layout, reason


def known_reason(model: PreTrainedModel, device: torch.device) -> str:
    """Returns why a model on a device is not exact at every token, as far as that is known without running it."""
    if device.type != "cpu":
        return f"the compiled operators, which make a model exact at every token, do not run on {device.type}"
    if operators() is None:
        return f"it needs the compiled operators: {described()}"
    return "" if is_verified(model) else "no such architecture was verified at every token"


def _key(model: PreTrainedModel, identity: str) -> str:
    return hashlib.sha256(f"{computed_by(model)} {identity}".encode()).hexdigest()


def _remembered(key: str) -> Layout | None:
    record = _passed.get(key) if key else None
    if record is not None:
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            return Layout.of_record(record)
    return None


def _checked(model: PreTrainedModel) -> Layout:
    """Returns the layout of a model that is exact at every token. Raises `NotInvariant` if it is not."""
    layout = read_layout(model, with_draft_layer=not reason_without_plan(model))
    if layout.unsupported:
        raise NotInvariant("its state is not cached")
    layout = replace(layout, exact_at="token")
    token_ids = made_up_tokens(model, 4, sum(_CUT))
    try:
        install(model)
        with torch.inference_mode(), _first_layers(model):
            with as_it_was(model):
                expected = model(input_ids=token_ids, use_cache=False).logits[0].float()
            layout = replace(layout, packs=can_pack(model, layout, _BLOCK_SIZE))
            whole = _run(model, layout, token_ids, [token_ids.shape[1]], num_logits=token_ids.shape[1])
            found = _run(model, layout, token_ids, _CUT, restored_at=sum(_CUT[:2]))
    except Exception as error:  # a model class of any age and author may fail in any way
        if is_out_of_memory(error):
            raise
        line = first_line(error)
        raise NotInvariant(line if isinstance(error, NotInvariant) else f"{type(error).__name__}: {line}") from error
    finally:
        uninstall(model)
    logits = whole[1].float()
    distance = ((logits - expected).abs().amax(-1)[1:] / (expected[:-1] - expected[1:]).abs().amax(-1)).median()
    if not distance <= (_MAX_FLOAT_ERROR if model.dtype is torch.float32 else _MAX_ERROR):
        raise NotInvariant(f"its attention is another one (error {float(distance):.2f})")
    if found[0] != whole[0]:
        raise NotInvariant("its state depends on the steps")
    if not torch.equal(found[1], whole[1][[end - 1 for end in accumulate(_CUT)]]):
        raise NotInvariant("its logits depend on the steps")
    return layout


@contextmanager
def _first_layers(model: PreTrainedModel) -> Iterator[None]:
    """Gives a context in which a model has only its first layers, up to the first one of each kind: the others compute
    with the same code, and a large model takes seconds for all of them."""
    config = model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    found = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    if len(found) != 1:
        yield
        return
    (layers,) = found
    every = layers._modules
    types = getattr(config, "layer_types", None) or [""] * num_layers
    kinds = [(name, kind_of(layer)) for name, layer in zip(types, every.values(), strict=True)]
    num_first = max(map(kinds.index, kinds)) + 1
    layers._modules = dict(islice(every.items(), num_first))
    try:
        yield
    finally:
        layers._modules = every


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
    step, [logits, vocab]. After `restored_at` tokens it goes on in other memory, after another sequence: nothing but
    that memory may decide what comes then."""
    pool = PagePool(layout, model.device, block_size=_BLOCK_SIZE)
    sequence, logits = _sequence(pool, token_ids.shape[1]), []
    for part in torch.split(token_ids, list(steps), dim=1):
        logits.append(forward(model, sequence, part, num_logits))
        if sequence.num_tokens == restored_at:
            forward(model, _sequence(pool, _STEP + 1), made_up_tokens(model, 2, _STEP + 1))
            sequence = _sequence(pool, token_ids.shape[1], sequence.prefix())
    return sequence.content(), torch.cat(logits)


def _sequence(pool: PagePool, num_tokens: int, prefix: Prefix | None = None) -> KVSequence:
    """Returns a sequence with room for so many tokens, full of NaN behind the prefix: a model that reads behind the
    last token is then not exact."""
    sequence = KVSequence(pool)
    has_memory = (prefix is None or sequence.begin_with(prefix)) and sequence.make_room(num_tokens)
    assert has_memory, "the pool has no limit"
    for table in sequence.tables:
        for number, page in enumerate(table.pages):
            if page is not None:
                page.tensor[:, :, max(0, sequence.num_tokens - number * pool.block_size) :] = torch.nan
    return sequence


# -- on the grid -----------------------------------------------------------------------------------------------------


def rehearse(model: PreTrainedModel, identity: str = "") -> Layout:
    """Returns the layout of a model that computes as transformers made it, after a rehearsed restore. For a model that
    cannot be cached, `unsupported` has the reasons.

    The layout of one that succeeded is remembered for `identity`, the model's fingerprint, if it is given. Raises only
    what torch raises when memory runs out.
    """
    key = _key(model, f"grid {identity}") if identity else ""
    if (remembered := _remembered(key)) is not None:
        return remembered
    layout = read_layout(model)
    found = layout if layout.unsupported else or_unsupported(model, lambda: _rehearsed(model, layout))
    if key and not found.unsupported:
        _passed.put(key, found.record())
    return found


def _rehearsed(model: PreTrainedModel, layout: Layout) -> Layout:
    """Returns the layout if a restore gives the bits of the uninterrupted run. Raises `Unsupported` if it does not, if
    the model ignores the earlier state when it adds several tokens to it, or if a token depends on later tokens."""
    name, token_ids = type(model).__name__, made_up_tokens(model, 1, 2 * _STEP + 1)
    steps, both = (_STEP, _STEP, 1), token_ids[:, : 2 * _STEP]
    cold, found = (_run(model, layout, token_ids, steps, restored_at=end) for end in (0, _STEP))
    if not torch.equal(found[1], cold[1]):
        raise Unsupported(f"{name} keeps state outside its cache")
    continued, alone = _run(model, layout, both, steps[:2]), _run(model, layout, both[:, _STEP:], [_STEP])
    if layout.states:
        ends = [continued, _run(model, layout, both, [2 * _STEP]), alone]
        if _error(*(_first_recurrent(layout, state) for state, _ in ends)) > _MAX_STATE_ERROR:
            raise Unsupported(f"{name} adds tokens to a state only one by one")
    one_pass = model(input_ids=both, use_cache=False).logits[0]
    if _error(continued[1][-1], one_pass[-1], alone[1][-1]) > _MAX_LOGITS_ERROR:
        raise Unsupported(f"{name} does not continue a sequence step by step")
    other_end = torch.cat([both[:, :_STEP], made_up_tokens(model, 3, _STEP)], dim=1)
    beginning, again = one_pass[:_STEP], model(input_ids=other_end, use_cache=False).logits[0, :_STEP]
    if _error(again, beginning, beginning.roll(1, dims=0)) > _MAX_LOOKAHEAD:
        raise Unsupported(f"{name} looks at what comes later")
    return layout


def _error(found: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Returns the distance of `found` from `right`, relative to that of `wrong`; 0 if `wrong` equals `right`."""
    scale = (wrong.float() - right.float()).abs().max()
    return float((found.float() - right.float()).abs().max() / scale) if scale else 0.0


def _first_recurrent(layout: Layout, state: bytes) -> torch.Tensor:
    """Returns the recurrent state of the first layer that has one, or else the first state of a convolution: there two
    runs have nearly the same input. States are at the end of `state`."""
    specs = [spec for group in layout.states for spec in group.specs]
    starts = accumulate((spec.num_bytes for spec in specs), initial=len(state) - sum(spec.num_bytes for spec in specs))
    *_, start, spec = min(
        (spec.part != "recurrent", spec.layer, spec.index, start, spec)
        for spec, start in zip(specs, starts, strict=False)
    )
    return torch.frombuffer(bytearray(state[start : start + spec.num_bytes]), dtype=spec.dtype)
