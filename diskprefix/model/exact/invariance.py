"""Measures whether a model computes the same bits for a token however the prompt is cut. README.md says how and why."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.memo import Memo
from diskprefix.model.exact import attention, rows
from diskprefix.model.exact.invariant import as_it_was, install, uninstall
from diskprefix.model.exact.kernel_calls import MAX_ROWS, Form, digest
from diskprefix.model.exact.layer_kinds import LayerRecord, LayerSample, sample_of
from diskprefix.model.exact.patterns import NAME, NotInvariant
from diskprefix.model.exact.recurrent import has_scans, scans_on
from diskprefix.model.exact.rehearsal import interrupt, made_up_tokens, read_layout, rehearse, restore
from diskprefix.model.exact.rows import are_whole, is_curve, is_ours
from diskprefix.model.exact.runner import can_pack
from diskprefix.model.exact.structure import structure_of
from diskprefix.model.load.kernel_settings import computed_by
from diskprefix.native.library import described, operators
from diskprefix.printable import first_line
from diskprefix.progress import Report, progress_bar
from diskprefix.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

_verdicts = Memo("invariance", version=7, max_records=64)
_STARTED = secrets.token_hex(8)
"""Of this process and its forks. In a container each start has the same process id."""

# fmt: off
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "einsum"})
"""Harmless with one term only."""
_HARMLESS = frozenset({
    # Copies, views, and what is new.
    "detach", "lift_fresh", "alias", "clone", "copy", "to", "to_copy", "type_as", "contiguous", "resolve_neg",
    "resolve_conj", "unsqueeze", "squeeze", "select", "slice", "narrow", "expand", "expand_as", "unbind", "transpose",
    "t", "numpy_T", "permute", "view", "view_as", "reshape", "unsafe_view", "flatten", "unflatten", "split",
    "split_with_sizes", "chunk", "cat", "concat", "stack", "repeat", "repeat_interleave", "as_strided", "empty",
    "empty_like", "new_empty", "zero", "zeros", "zeros_like", "new_zeros", "fill", "full", "full_like", "new_full",
    "ones", "ones_like", "new_ones", "scalar_tensor", "arange", "polar", "view_as_real", "view_as_complex", "item",
    "equal", "is_nonzero", "dropout", "concatenate", "local_scalar_dense", "pad", "broadcast_tensors", "promote_types",
    # Which numbers are taken, and where they go.
    "embedding", "index", "index_select", "index_put", "index_add", "gather", "scatter", "scatter_add", "nonzero",
    "one_hot", "topk", "sort", "where", "masked_fill", "any", "max", "min", "amax", "argmax", "le", "lt", "ge", "gt",
    "greater", "eq", "ne", "and", "or", "not", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and",
    "logical_or", "logical_not", "maximum", "minimum", "clamp", "abs", "floor", "floor_divide", "remainder",
    # Number by number, each with one code.
    "add", "sub", "rsub", "mul", "multiply", "div", "true_divide", "neg", "square", "sqrt", "reciprocal", "relu", "cos",
    "sin", "tanh", "exp", "log", "log1p",
    # Number by number, with several codes in some dtypes (`rows.is_curve`).
    "sigmoid", "silu", "gelu", "softplus", "mish", "log_sigmoid", "elu", "pow", "exp2", "rsqrt",
    # Along a row.
    "sum", "mean", "softmax", "layer_norm", "native_layer_norm", "rms_norm", "linalg_vector_norm",
})
# fmt: on
"""Operators whose result for a row does not depend on the other rows. A model with any other is on the grid."""
_MEASURING = "measuring once whether this model is exact at every token"
_NUM_TOKENS = 560
"""More than a tile of keys."""
_STEPS = (256, 256, 48)
_INTERRUPTED = 150
"""At the end of the first step with so many tokens, a sequence goes on in other memory, after another one."""
_NUM_PARTS = 5
"""Of the measurement, for people: the trial, the run of transformers, and three others."""
_TRIAL_STEPS = (5, 1)
"""Several rows, and one: some layers compute these in two ways."""
_LARGE_BYTES = 1 << 13
"""The least bytes of a token that count as many. Qwen2.5 0.5B in bfloat16 has 12 kB of state: there each step of
another size shows that products are computed with as many rows as there are."""
_MAX_ERROR = 0.3
"""The largest allowed difference from transformers' own attention, relative to that of another token's logits; the
median of the tokens of the last step."""


def make_exact(
    model: PreTrainedModel, *, identity: str = "", form: str = "", report: Report = log.info
) -> tuple[Layout, str]:
    """Returns the layout of the model's state, and why it is not exact at every token ("" if it is).

    If it is, the model is changed to compute so (`model.exact.invariant`), and the measurement has shown a restore too;
    else the layout is rehearsed. Takes seconds to minutes, and `report` takes lines about the progress. Raises only
    what torch raises when memory runs out.

    That a model is exact at every token is remembered for `form`, its fingerprint without the weights, and for its
    structure (`model.exact.structure`). That it is not is remembered for `identity`, its fingerprint, and believed when
    two processes have measured it: a wrong moment of one must not make the model inexact for ever.
    """
    kernels = f"{__version__} {NAME} {attention.kernel(model.device)} {computed_by(model)}"
    own_key, process = hashlib.sha256(f"{kernels} {identity}".encode()).hexdigest(), f"{os.getpid()} {_STARTED}"
    reason, processes = _found_inexact(own_key) if identity else ("", [])
    if process in processes or len(processes) > 1:
        return _on_grid(rehearse(model, identity), reason)
    key = _key_of(model, f"{kernels} {form}") if form else ""
    found = _remembered(key)
    if found is None:
        measured = _measured(model, report)
        if isinstance(measured, str):
            layout = rehearse(model, identity)
            reason = _why_not(model, layout) or measured
            if identity:
                _verdicts.put(own_key, {"reason": reason, "processes": [*processes, process]})
            return _on_grid(layout, reason)
        found = measured
        if key:
            _verdicts.put(key, {"layout": found[0].record(), "forms": [one.describe() for one in found[1]]})
    layout, forms = found
    install(model, digest(forms))
    log.info("[model] attention: %s", described())
    return layout, ""


def _on_grid(layout: Layout, reason: str) -> tuple[Layout, str]:
    log.info("[model] exact in steps of one grid: %s", reason)
    return layout, reason


def _found_inexact(key: str) -> tuple[str, list[str]]:
    """Returns why a model was found not to be exact at every token, and the processes that found it."""
    match _verdicts.get(key):
        case {"reason": str(reason), "processes": list(processes)}:
            return reason, processes
    return "", []


def _key_of(model: PreTrainedModel, form: str) -> str:
    """Returns what a verdict depends on, "" if the model cannot be changed."""
    try:
        install(model)
        return hashlib.sha256(f"{form} {structure_of(model)}".encode()).hexdigest()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ""
    finally:
        uninstall(model)


def _remembered(key: str) -> tuple[Layout, frozenset[Form]] | None:
    """Returns what an earlier run of `_measured` returned."""
    match _verdicts.get(key) if key else None:
        case {"layout": dict(record), "forms": list(described)}:
            with suppress(AttributeError, LookupError, TypeError, ValueError):
                return Layout.of_record(record), frozenset(map(Form.parse, described))
    return None


def _measured(model: PreTrainedModel, report: Report) -> tuple[Layout, frozenset[Form]] | str:
    """Returns why the bits of a token depend on the steps of a run, or, if they do not, the layout and the forms of the
    products that the model computes.

    All is run with the sample of the layers, packed steps too: in these a layer meets the memory of several sequences,
    and layers of one kind treat it alike. The layers between them add nothing to a row.
    """
    started = time.perf_counter()
    with progress_bar(_MEASURING, _NUM_TOKENS * _NUM_PARTS, report) as advance:
        layout = read_layout(model)
        if reason := _why_not(model, layout):
            return reason
        advance(_NUM_TOKENS // 2)
        rows.forget_forms()
        layout = replace(layout, exact_at="token")
        try:
            with torch.inference_mode():
                install(model)
                sample = _sampled(model, layout)
                advance(_NUM_TOKENS)
                with sample.alone():
                    with as_it_was(model):
                        expected = _plain_logits(model, layout)
                    advance(2 * _NUM_TOKENS)
                    _rehearse(model, layout, sample, expected, lambda done: advance(2 * _NUM_TOKENS + done))
                    layout = replace(layout, packs=can_pack(model, layout))
        except Exception as error:  # a model class of any age and author may fail in any way
            if is_out_of_memory(error):
                raise
            line = first_line(error)
            return line if isinstance(error, NotInvariant) else f"{type(error).__name__}: {line}"
        finally:
            uninstall(model)
    log.info("[model] exact at every token, measured in %.1f s", time.perf_counter() - started)
    return layout, rows.forms()


def _why_not(model: PreTrainedModel, layout: Layout) -> str:
    """Returns the reasons that are known without running the model."""
    if layout.unsupported:
        return "its state is not cached"
    if model.device.type != "cpu":
        return f"the compiled operators, which make a model exact at every token, do not run on {model.device.type}"
    if operators() is None:
        return f"it needs the compiled operators: {described()}"
    kinds = {layer.kind for layer in layout.layers}
    scans = scans_on(model.device)
    if layout.states and not (scans is not None and any(has_scans(module, scans) for module in model.modules())):
        return "recurrent layers of its own"
    return "" if "position_ids" in layout.options or kinds <= {"linear", "none"} else "positions are not an argument"


def _sampled(model: PreTrainedModel, layout: Layout) -> LayerSample:
    """Returns the layers to measure. Raises `NotInvariant` if any layer calls operators that are not known."""
    token_ids = made_up_tokens(model, 4, sum(_TRIAL_STEPS))

    def run() -> None:
        _run(model, layout, token_ids, _TRIAL_STEPS)

    with _only_harmless():
        return sample_of(model, layout, run)


@contextmanager
def _only_harmless() -> Iterator[None]:
    """Gives a context to run a model in. Raises `NotInvariant` at its end if the model calls other operators than those
    that are known to be harmless."""
    with _Watch() as watch:
        yield
    if watch.found:
        raise NotInvariant(f"operators of its own: {', '.join(sorted(watch.found))}")


def _plain_logits(model: PreTrainedModel, layout: Layout) -> torch.Tensor:
    count = 1 + _STEPS[-1]
    kept = {"logits_to_keep": count} if "logits_to_keep" in layout.options else {}
    output = model(input_ids=made_up_tokens(model, 4, _NUM_TOKENS), use_cache=False, **kept)
    logits: torch.Tensor = output.logits[0, -count:].float()
    return logits


def _rehearse(
    model: PreTrainedModel,
    layout: Layout,
    sample: LayerSample,
    expected: torch.Tensor,
    advance: Callable[[float], None],
) -> None:
    """Raises `NotInvariant` if the bits of a run depend on its steps. `advance` takes the tokens computed so far."""
    token_ids = made_up_tokens(model, 4, _NUM_TOKENS)

    def run(steps: Sequence[int], number: int) -> tuple[bytes, dict[int, torch.Tensor]]:
        def advance_run(done: float) -> None:
            advance(number * _NUM_TOKENS + done)

        with sample.recorded() as record:
            state, logits = _run(model, layout, token_ids, steps, advance_run, record if number else None)
        return state + record.content(), logits

    with _only_harmless():
        whole = run(_STEPS, 0)
    last = torch.stack([whole[1][_NUM_TOKENS - _STEPS[-1] + number] for number in range(1, 1 + _STEPS[-1])]).float()
    # Of one token rounding may choose another expert.
    error = ((last - expected[1:]).abs().amax(-1) / (expected[:-1] - expected[1:]).abs().amax(-1)).median()
    if not error <= _MAX_ERROR:
        raise NotInvariant(f"its attention is another one (error {float(error):.2f})")
    for number, steps in enumerate(_other_steps(sample.token_bytes(layout))):
        found = run(steps, 1 + number)
        if found[0] != whole[0]:
            raise NotInvariant(f"its state depends on the steps ({number})")
        both = found[1].keys() & whole[1].keys()
        if not all(torch.equal(found[1][end], whole[1][end]) for end in both):
            raise NotInvariant(f"its logits depend on the steps ({number})")


def _other_steps(token_bytes: int) -> Sequence[Sequence[int]]:
    """Returns the steps of further runs, which meet `_STEPS` at their ends. Of a token so many bytes are compared.

    A kernel chooses its order of summation by the number of rows, and attention by the keys. So there are steps of
    fewer rows than a vector, of about as many, and of more than `MAX_ROWS`; large ones that begin anywhere; and single
    tokens on both sides of a tile's end, with keys that fill vectors, all but one number or one number too many.
    Another order shows in few of the rounded numbers. Where a token has many of them, one step of a size is enough.
    With few, more steps are taken.
    """
    if token_bytes >= _LARGE_BYTES:
        return (17, 1, 33, 1, 7, 2, 1, 1, 1, 100, 3, 5, 20, 64, 111, 144, 1, 1, 46, 1), (_NUM_TOKENS,)
    chosen, steps = random.Random(5), list[int]()
    for num_tokens in _STEPS:
        left = num_tokens
        while left:
            steps.append(min(left, chosen.choice((1, 2, 3, 5, 7, 17, 33, 64, 100))))
            left -= steps[-1]
    return steps, (200, 111, 201, *[1] * 12, 36), (_NUM_TOKENS,)


def _run(
    model: PreTrainedModel,
    layout: Layout,
    token_ids: torch.Tensor,
    steps: Sequence[int],
    advance: Callable[[float], None] = lambda _: None,
    interrupted: LayerRecord | None = None,
) -> tuple[bytes, dict[int, torch.Tensor]]:
    """Returns the state of all tokens with the states at the end, and next-token logits by the number of tokens: those
    after each step, and in the last one those of each token. With `interrupted`, it goes on in other memory, after
    another sequence that is not recorded, as after a restore: nothing but that memory may decide what comes then."""
    arena, logits = _arena(model, layout, token_ids.shape[1]), dict[int, torch.Tensor]()
    for part in torch.split(token_ids, list(steps), dim=1):
        end = arena.num_tokens + part.shape[1]
        is_last = end == token_ids.shape[1]
        found = arena.compute(model, part, min(part.shape[1], _STEPS[-1]) if is_last else 1)
        logits |= {end - back: found[-1 - back] for back in range(len(found))}
        if interrupted is not None and _INTERRUPTED <= end < token_ids.shape[1]:
            interrupted.is_paused = True
            interrupt(model, layout)
            interrupted.is_paused, interrupted = False, None
            other = _arena(model, layout, token_ids.shape[1])
            restore(arena, other)
            arena = other
        advance(end)
    return bytes(arena.read_tokens(0, arena.num_tokens)) + bytes(arena.read_states()), logits


def _arena(model: PreTrainedModel, layout: Layout, num_tokens: int) -> KVArena:
    """Returns memory for so many tokens, full of NaN: a model that reads behind the last token is then not exact."""
    arena = KVArena(layout, model.device)
    arena.reserve(num_tokens)
    for memory in arena.memory:
        memory.tensor.fill_(torch.nan)
    return arena


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators of a model that are not known to be harmless."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if not is_ours.get() and not _is_harmless(name, args):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _is_harmless(name: str, args: Sequence[Any]) -> bool:
    if args and all(isinstance(arg, torch.Tensor) and arg.ndim == 0 for arg in args):
        # No step changes the number of numbers.
        return True
    return _is_outer(args) if name in _PRODUCTS else name in _HARMLESS and _is_whole(name, args)


def _is_whole(name: str, args: Sequence[Any]) -> bool:
    """Returns whether all numbers are computed by one code, however many rows there are."""
    numbers = args[0] if args else None
    if not isinstance(numbers, torch.Tensor):
        return True
    if not is_curve(name, numbers.dtype):
        return True
    is_half = numbers.dtype in (torch.bfloat16, torch.float16)
    if len(args) > 1 and args[1] in ((1, 2, 3, 0.5, -1, -2) if is_half else (1, 2, 3, 0.5, -0.5, -1, -2)):
        return True
    return numbers.is_contiguous() and _is_whole_width(numbers.shape[-1], torch.get_num_threads())


@cache
def _is_whole_width(width: int, threads: int) -> bool:
    return all(are_whole(count * width, threads) for count in range(1, MAX_ROWS + 1))


def _is_outer(args: Sequence[Any]) -> bool:
    """Returns whether a product has one term only, such as positions times frequencies: it has no order."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return len(tensors) >= 2 and tensors[-2].shape[-1] == 1
