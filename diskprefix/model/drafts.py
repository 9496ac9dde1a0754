"""The layer of a model that predicts the token after the next one (MTP), over the memory of sequences.

Its input for a token is the model's last hidden state of the token before, and the token's embedding. So its keys and
values depend on the prefix alone, as those of any layer, and each step computes them for its tokens. What it predicts
is a guess: its logits are computed only when a guess is wanted, and those of rare tokens are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from diskprefix.kv.caches import StepCache
from diskprefix.kv.layers import packed
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import Run, Step, computing
from diskprefix.model.exact.fused import matrix_of
from diskprefix.model.exact.patterns import Pattern
from diskprefix.model.exact.rows import linear
from diskprefix.native import ROWS
from diskprefix.native.library import operators
from diskprefix.native.matrix import product

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpLayer

_FREQUENT, _SPECIAL = 32768, 1024
"""Tokens that are guessed: the first ones, because tokenizers number tokens by how frequent they are, and the last
ones, among which are those that end a turn or begin a call."""
_MOST_BEHIND = 32
"""The most tokens that the layer's memory may lack."""


@dataclass(frozen=True, eq=False)
class DraftRow:
    """A token to guess the next one of. It is at `position`, right behind the tokens of `state` or behind those that
    were guessed. `hidden` is what `draft` returned for the token before, [hidden_size], None for that of the model."""

    state: KVSequence
    token_id: int
    position: int
    hidden: torch.Tensor | None = None


def draft_layer_of(model: PreTrainedModel) -> MtpLayer | None:
    """Returns the draft layer of a model, None if it has none."""
    return getattr(model.get_decoder(), "draft_layer", None)


def window_of(layer: MtpLayer) -> int | None:
    """Returns the window of a draft layer in tokens, None if it sees all."""
    window: int | None = getattr(layer.mtp_block.self_attn, "sliding_window", None)
    return window


def draft(model: PreTrainedModel, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], torch.Tensor]:
    """Returns for each row the likeliest next token with its probability, which is not finite if the layer computed
    nothing finite, and the hidden states for rows that go on from there, [rows, hidden_size]. Each row needs memory
    (`KVSequence.make_room`), and a sequence of its own, whose memory of the layer is completed in the same forward. The
    lengths of the sequences stay: the next step writes there.
    """
    runs, token_ids, before = list[Run](), list[int](), list[torch.Tensor]()
    for row in rows:
        behind = row.state.undrafted if row.hidden is None else []
        runs.append(Run(row.position - len(behind), len(behind) + 1))
        token_ids += [*behind, row.token_id]
        before.append(_hidden_before(row.state, runs[-1]) if row.hidden is None else row.hidden[None])
    layers = [row.state.layers[-1] for row in rows]
    lengths = [layer.length for layer in layers]
    step = Step(tuple(runs))
    try:
        hidden = _computed(model, packed(layers, step), step, token_ids, before)
    finally:
        for layer, length in zip(layers, lengths, strict=True):
            layer.length = length
    for row in rows:
        if row.hidden is None:
            _count_complete(row.state)
    hidden = hidden[[end - 1 for end in accumulate(run.num_rows for run in runs)]]
    return _guesses(_head_of(model), hidden), hidden


@contextmanager
def keeping_up(
    model: PreTrainedModel,
    sequences: Sequence[KVSequence],
    step: Step,
    token_ids: Sequence[torch.Tensor],
    *,
    may_lag: bool,
) -> Iterator[None]:
    """Gives a context for the forward of a step, behind which it is as behind `keep_up`."""
    outputs: list[Any] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _args, output: outputs.append(output[0]))
    try:
        yield
    finally:
        hook.remove()
    keep_up(model, sequences, step.runs, token_ids, outputs[0][0], may_lag=may_lag)


def keep_up(
    model: PreTrainedModel,
    sequences: Sequence[KVSequence],
    runs: Sequence[Run],
    token_ids: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    *,
    may_lag: bool,
) -> None:
    """Puts the hidden states of a step's rows, [rows, hidden_size], into memory. `token_ids` are those of each
    sequence, int64 [1, rows].

    The memory of the draft layer is completed, too, or with `may_lag` later: many tokens at once take hardly longer
    than one. Blocks that are complete have it, because others read them.
    """
    parts = torch.split(hidden, [run.num_rows for run in runs])
    for sequence, run, rows, ids in zip(sequences, runs, parts, token_ids, strict=True):
        assert sequence.hidden is not None, "the layout has a part for it"
        sequence.hidden.put(run.start, rows[None])
        sequence.num_drafted = run.start - len(sequence.undrafted)
        sequence.undrafted += ids[0].tolist()
        sequence.complete = partial(complete, model)
        size, num_behind = sequence.pool.block_size, len(sequence.undrafted)
        may_lag = may_lag and num_behind < _MOST_BEHIND and run.end // size == sequence.num_drafted // size
    if not may_lag:
        complete(model, sequences)


def complete(model: PreTrainedModel, sequences: Sequence[KVSequence]) -> None:
    """Completes the memory of the draft layer: only its keys and values are computed."""
    step = Step(tuple(Run(sequence.num_drafted, len(sequence.undrafted)) for sequence in sequences))
    layer: Any = _Storing(packed([sequence.layers[-1] for sequence in sequences], step))
    before = [_hidden_before(sequence, run) for sequence, run in zip(sequences, step.runs, strict=True)]
    with suppress(_Stored):
        _computed(model, layer, step, [token for sequence in sequences for token in sequence.undrafted], before)
    for sequence in sequences:
        _count_complete(sequence)


def _count_complete(sequence: KVSequence) -> None:
    sequence.num_drafted += len(sequence.undrafted)
    sequence.undrafted.clear()


def _computed(
    model: PreTrainedModel, memory: Any, step: Step, token_ids: list[int], before: list[torch.Tensor]
) -> torch.Tensor:
    """Returns the layer's hidden states for the rows of a step, [rows, hidden_size]."""
    ids = torch.tensor([token_ids], device=model.device)
    positions = torch.cat([torch.arange(run.start, run.end) for run in step.runs])[None].to(model.device)
    with computing(step):
        return compute(model, memory, ids, torch.cat(before)[None], positions)[0]


def compute(
    model: PreTrainedModel,
    memory: Any,
    token_ids: torch.Tensor,
    before: torch.Tensor,
    positions: torch.Tensor,
    *,
    is_ours: bool = True,
) -> torch.Tensor:
    """Returns the layer's hidden states for tokens, [1, rows, hidden_size]. `memory` is its layer of a cache. `before`
    are the hidden states of the tokens before, [1, rows, hidden_size]. `is_ours`: attention is that of `install`."""
    decoder, layer = model.get_decoder(), draft_layer_of(model)
    assert layer is not None
    embedded, window = model.get_input_embeddings()(token_ids), window_of(layer)
    # One kind of RoPE for the whole model, or one for each kind of layer.
    by_kind = isinstance(decoder.rotary_emb.rope_type, dict)
    kind = ("full_attention" if window is None else "sliding_attention",) if by_kind else ()
    hidden: torch.Tensor = layer(
        embedded,
        before,
        position_embeddings=decoder.rotary_emb(embedded, positions, *kind),
        attention_mask=Pattern(window) if is_ours else None,
        position_ids=positions,
        past_key_values=StepCache([memory] * (layer.mtp_block.self_attn.layer_idx + 1), lambda: 0),
        use_cache=True,
    )
    return hidden


def _hidden_before(sequence: KVSequence, run: Run) -> torch.Tensor:
    """Returns the model's last hidden state of the token before each one of a run, [rows, hidden_size]; zeros before
    the first token."""
    assert sequence.hidden is not None, "the layout has a part for it"
    none = torch.zeros(0 if run.start else 1, sequence.hidden.dim, dtype=sequence.hidden.dtype, device=sequence.device)
    if run.end == 1:
        return none
    return torch.cat([none, sequence.hidden.gathered(max(0, run.start - 1), run.end - 1)[0, 0]])


class _Stored(Exception):
    """Keys and values are in memory, and the rest of the layer is not needed."""


class _Storing:
    """A layer of a cache that ends the forward when it has its keys and values. Compiled operators that compute a whole
    layer do not know it, so the module's own forward computes these, with the same bits."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        self._memory.update(keys, values)
        raise _Stored


# -- the tokens that are guessed -------------------------------------------------------------------------------------

_Head = list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
"""Parts of the matrix of the logits: the token of the first row, and the product with rows."""
_heads: WeakKeyDictionary[PreTrainedModel, _Head] = WeakKeyDictionary()


def _head_of(model: PreTrainedModel) -> _Head:
    """Returns the parts of the matrix of the logits that are computed, which take no memory of their own."""
    if model not in _heads:
        _heads[model] = _parts_of(model.get_output_embeddings())
    return _heads[model]


def _parts_of(module: Any) -> _Head:
    matrix, num_rows = matrix_of(module), module.out_features
    last = (num_rows - _SPECIAL) // ROWS * ROWS
    ranges = [(0, _FREQUENT), (last, num_rows)] if last > _FREQUENT else [(0, num_rows)]
    if matrix is not None:
        compiled = operators()
        assert compiled is not None, "the model is exact at every token"
        return [(first, partial(product, compiled, matrix=matrix.part(first, end))) for first, end in ranges]
    parts = [(first, module.weight[first:end]) for first, end in ranges]
    return [(first, partial(linear, weight=weight)) for first, weight in parts]


def likeliest(scores: torch.Tensor) -> list[tuple[int, float]]:
    """Returns the place of the highest of each row of scores, [rows, tokens], and its probability, which is not finite
    if the scores are not. Waits for the device once: whether another guess pays depends on the probabilities."""
    scores = scores.float()
    best, places = scores.max(dim=-1)
    probabilities = 1 / (scores - best[:, None]).exp().sum(dim=-1)
    # One copy for both: float32 has all integers up to 2**24.
    found = torch.stack([places.float(), probabilities]).T.cpu().tolist()
    return [(int(place), probability) for place, probability in found]


def _guesses(head: _Head, hidden: torch.Tensor) -> list[tuple[int, float]]:
    """Returns the likeliest token of each row of hidden states, [rows, hidden_size], and its probability among those
    that are guessed."""
    found = likeliest(torch.cat([multiply(hidden) for _, multiply in head], dim=-1))
    gap = head[-1][0] - _FREQUENT if len(head) > 1 else 0
    return [(place + gap * (place >= _FREQUENT), probability) for place, probability in found]
