"""The plan of a loaded model, and a step of sequences by it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import Run
from diskprefix.model.config import DecoderConfig
from diskprefix.model.exact.patterns import NotInvariant, sees_pictures_whole
from diskprefix.model.exact.vision_encoder import PictureRows, encoded_rows
from diskprefix.model.families.decoder import decoder
from diskprefix.model.families.model_types import (
    NAMES,
    SECTIONS_IN_ORDER,
    has_plan,
    of_model,
    padded_tokens,
    pairing_of,
)
from diskprefix.model.plan import ComputePlan, EncodedRows, Location, PlannedRun, Rotary
from diskprefix.model.slots import Slots, decoder_of
from diskprefix.native import calls
from diskprefix.native.library import operators

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 256
"""The rows that a plan is made for. A step of more makes a larger one."""
_DTYPES = {torch.float32: calls.FLOAT32, torch.bfloat16: calls.BFLOAT16}
_NORMS = {"rms": calls.ROUNDED, "rms_unrounded": calls.UNROUNDED, "rms_plus_one": calls.ONE_MORE}


class ModelPlan:
    """The plan of a model over memory of a layout."""

    def __init__(self, model: PreTrainedModel, layout: Layout, page_tokens: int) -> None:
        self._config = config_of(model, layout, page_tokens)
        self._padded = padded_tokens(model.config)
        # A plan is kept as long as its model.
        self._model, self._dtype, self._page_tokens = ref(model), model.dtype, page_tokens
        self._plan = self._make(_ROWS)

    def _make(self, max_rows: int) -> ComputePlan:
        compiled, model = operators(), self._model()
        assert compiled is not None, "a model of a plan is exact at every token"
        assert model is not None, "it runs"
        plan = ComputePlan(compiled, _DTYPES[self._dtype], max_rows, self._config.vocab_size, self._page_tokens)
        names = NAMES.get(model.config.get_text_config(decoder=True).model_type, {})
        decoder(plan, self._config, Slots(model, _NORMS[self._config.norm], self._config.epsilon, names))
        return plan

    def run(
        self,
        sequences: Sequence[KVSequence],
        runs: Sequence[Run],
        ids: np.ndarray,
        num_logits: Sequence[int],
        pictures: Sequence[PictureRows | None],
        *,
        needs_hidden: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes a step of token ids, int64 [rows]. Returns the logits of the last rows of each sequence, so many as
        `num_logits` says, [logits, vocab], and if needed the hidden states behind the last norm, [rows, hidden_size].
        `pictures` are those of each sequence."""
        num_rows = len(ids)
        if num_rows > self._plan.max_rows:
            self._plan = self._make(num_rows)
        # Layers that only read memory compute the rows that get logits: all of them, then.
        computed = [run.num_rows for run in runs] if needs_hidden and self._plan.hidden.is_of_logits else num_logits
        described = [self._described(*one) for one in zip(sequences, runs, computed, strict=True)]
        of_pictures = _encoded(ids, pictures, runs)
        if self._padded:
            ids = np.where(np.isin(ids, self._padded[1:]), self._padded[0], ids)
        self._plan.run(described, ids, _positions(runs, pictures), torch.get_num_threads(), of_pictures)
        logits = self._copied(self._plan.logits, sum(computed))
        if computed is not num_logits:
            parts = zip(torch.split(logits, [*computed]), num_logits, strict=True)
            logits = torch.cat([part[-count:] for part, count in parts])
        return logits, self._copied(self._plan.hidden, num_rows) if needs_hidden else None

    def _described(self, sequence: KVSequence, run: Run, num_logits: int) -> PlannedRun:
        """Raises `NotInvariant` if pages are missing that the operators would read or write."""
        for table in sequence.tables:
            has_room = run.end <= len(table.pages) * self._page_tokens
            if not has_room or table.complete_from > table.group.first_needed(run.start):
                raise NotInvariant("attention to tokens that the memory does not keep")
        addresses = [table.addresses.buffer_info()[0] for table in sequence.tables]
        return PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans)

    def _copied(self, rows: Any, num_rows: int) -> torch.Tensor:
        return torch.from_numpy(self._plan.copied(rows, num_rows)).view(self._dtype)


def _positions(runs: Sequence[Run], pictures: Sequence[PictureRows | None]) -> np.ndarray:
    """Returns the positions of the rows of a step, int64 [1, rows] or [axes, rows]."""
    found = [np.arange(run.start, run.end)[None] for run in runs]
    for number, one in enumerate(pictures):
        if one is not None and one.positions is not None:
            found[number] = one.positions.numpy()
    axes = max(map(len, found))
    return np.concatenate([np.broadcast_to(one, (axes, one.shape[1])) for one in found], axis=1)


def _encoded(ids: np.ndarray, pictures: Sequence[PictureRows | None], runs: Sequence[Run]) -> EncodedRows | None:
    """Returns what an encoder gives for rows of a step, None if none is of a picture."""
    encoder = next((one.encoder for one in pictures if one is not None), None)
    if encoder is None:
        return None
    is_placeholder = ids == encoder.token_id
    encoded = encoded_rows(encoder, torch.from_numpy(is_placeholder), runs, pictures)
    numbers = np.flatnonzero(is_placeholder)
    return EncodedRows(numbers, encoded.data_ptr(), encoded.nbytes // max(1, len(encoded)), encoded)


def config_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> DecoderConfig:
    """Returns the configuration of a model."""
    layers = layout.layers[: len(decoder_of(model).layers)]
    places = [places_of(layout, page_tokens, number) for number in range(len(layers))]
    windows = [spec.window or 0 for spec in layers]
    config = model.config.get_text_config(decoder=True)
    found = of_model(config, windows, places, _rotary(model), sees_pictures_whole(model.config))
    # transformers multiplies by a number in the type of the model.
    rounded, of_layers = (
        float(torch.tensor(one).to(model.dtype)) for one in (found.embedding_multiplier, found.layer_input_multiplier)
    )
    further = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    if found.latent is not None:
        # With a factor for scaled positions.
        found = replace(found, scale=decoder_of(model).layers[0].self_attn.scaling)
    return replace(found, embedding_multiplier=rounded, layer_input_multiplier=of_layers, deepstack=len(further))


def places_of(layout: Layout, page_tokens: int, layer: int) -> dict[str, Location]:
    """Returns where the parts of a layer are in pages, by their names in the layout."""
    found = {}
    for table, group in enumerate(layout.groups):
        of_head = page_tokens * group.head_dim
        for index, spec in enumerate(group.specs):
            if spec.layer == layer:
                offset = index * group.heads * of_head * group.dtype.itemsize
                found[spec.part] = Location(
                    table, offset, group.heads, group.head_dim, group.dtype.itemsize, of_head, group.head_dim
                )
    return found


def _rotary(model: PreTrainedModel) -> dict[str, Rotary]:
    module: Any = decoder_of(model).rotary_emb
    # One kind of RoPE for the whole model, or one for each kind of layer.
    kinds = {"": ""} if isinstance(module.rope_type, str) else {kind: f"{kind}_" for kind in module.rope_type}
    found = {}
    for kind, prefix in kinds.items():
        frequencies = getattr(module, f"{prefix}inv_freq").float().numpy()
        axes = _axes(getattr(module, "mrope_section", None), len(frequencies), model)
        factor = float(getattr(module, f"{prefix}attention_scaling"))
        found[kind] = Rotary(frequencies, factor, pairing_of(model.config.get_text_config(decoder=True)), axes=axes)
    for one in getattr(decoder_of(model), "rotary_embs", ()):
        theta = str(one.config.rope_parameters["rope_theta"])
        found[theta] = Rotary(one.inv_freq.float().numpy(), float(one.attention_scaling))
    return found


def _axes(sections: Sequence[int] | None, count: int, model: PreTrainedModel) -> np.ndarray | None:
    """Returns which dimension of a position each frequency has, int64 [count], None if positions have one. Sections of
    frequencies follow each other, or take turns."""
    if sections is None:
        return None
    if model.config.get_text_config(decoder=True).model_type in SECTIONS_IN_ORDER:
        return np.repeat(np.arange(len(sections)) % 3, sections)
    axes = np.zeros(count, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


_plans: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, ModelPlan | None]] = WeakKeyDictionary()
"""The last plans of models, by their layers, kernels and memory; None for a model of no family."""


def is_planned(model: PreTrainedModel, layout: Layout) -> bool:
    """Returns whether a model that is exact at every token has a plan."""
    return has_plan(model.config) and not layout.has_draft_layer


def plan_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> ModelPlan | None:
    """Returns the plan of a model that is exact at every token, None for one of no family."""
    # The self-check computes the first layers alone.
    key = layout, page_tokens, operators(), len(getattr(decoder_of(model), "layers", ()))
    known, plan = _plans.get(model, (None, None))
    if known != key:
        plan = ModelPlan(model, layout, page_tokens) if is_planned(model, layout) else None
        _plans[model] = key, plan
    return plan
