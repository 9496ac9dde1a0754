"""The plan of a loaded model, and a step of sequences by it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import Run
from diskprefix.model.config import DecoderConfig
from diskprefix.model.exact.patterns import NotInvariant, sees_pictures_whole
from diskprefix.model.families.decoder import decoder
from diskprefix.model.families.model_types import (
    SECTIONS_IN_ORDER,
    TURN_BACK,
    of_model,
    padded_tokens,
    pairing_of,
    without_plan,
)
from diskprefix.model.families.slot_names import NAMES
from diskprefix.model.operands import Buffer, EncodedRows, Location, PlannedRun, Rotary, StateLocation
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots, decoder_of
from diskprefix.model.vision_encoder import PictureRows, encoded_rows
from diskprefix.native import calls
from diskprefix.native.library import operators

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 256
"""The rows that a plan is made for. A step of more makes a larger one."""
_DTYPES = {torch.float32: calls.FLOAT32, torch.bfloat16: calls.BFLOAT16}


class ModelPlan:
    """The plan of a model over memory of a layout."""

    def __init__(self, model: PreTrainedModel, layout: Layout, page_tokens: int) -> None:
        self.config = config_of(model, layout, page_tokens)
        self._padded, self._logits_dtype = padded_tokens(model.config), layout.logits_dtype
        # A plan is kept as long as its model.
        self._model, self._dtype, self._page_tokens = ref(model), model.dtype, page_tokens
        self._always_hidden, self._plans = layout.has_draft_layer, dict[bool, ComputePlan]()
        self.plan = self._plan_for(_ROWS, needs_hidden=False)
        """That of the usual steps."""

    def _plan_for(self, num_rows: int, *, needs_hidden: bool) -> ComputePlan:
        """Returns the plan of a step. One that gives the hidden states of all rows computes all of the last layers."""
        key = needs_hidden or self._always_hidden
        plan = self._plans.get(key)
        if plan is None or num_rows > plan.max_rows:
            plan = self._plans[key] = self._make(max(num_rows, _ROWS), with_hidden=key)
        return plan

    def _make(self, max_rows: int, *, with_hidden: bool) -> ComputePlan:
        compiled, model = operators(), self._model()
        assert compiled is not None, "a model of a plan is exact at every token"
        assert model is not None, "it runs"
        plan = ComputePlan(compiled, _DTYPES[self._dtype], max_rows, self.config.vocab_size, self._page_tokens)
        names = NAMES.get(model.config.get_text_config(decoder=True).model_type, {})
        slots = Slots(model, self.config.norm, self.config.epsilon, names)
        decoder(plan, self.config, slots, with_hidden=with_hidden)
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
        plan = self._plan_for(num_rows, needs_hidden=needs_hidden)
        described = [self._described(plan, *one) for one in zip(sequences, runs, num_logits, strict=True)]
        of_pictures = _encoded(ids, pictures, runs)
        if self._padded:
            ids = np.where(np.isin(ids, self._padded[1:]), self._padded[0], ids)
        plan.run(described, ids, _positions(runs, pictures), torch.get_num_threads(), of_pictures)
        logits = self._copied(plan, plan.logits, sum(num_logits)).to(self._logits_dtype)
        return logits, self._copied(plan, plan.hidden, num_rows) if needs_hidden else None

    def _described(self, plan: ComputePlan, sequence: KVSequence, run: Run, num_logits: int) -> PlannedRun:
        """Raises `NotInvariant` if pages are missing that the operators would read or write."""
        for table in sequence.tables:
            has_room = run.end <= len(table.pages) * self._page_tokens
            if not has_room or table.complete_from > table.group.first_needed(run.start):
                raise NotInvariant("attention to tokens that the memory does not keep")
        addresses = [table.addresses.buffer_info()[0] for table in sequence.tables]
        states = [page.tensor.data_ptr() for page in sequence.states]
        if run.replays is None:
            return PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans, states, states)
        befores = [page.tensor.data_ptr() for page in sequence.spares]
        kept = np.empty(run.num_rows * plan.kept_bytes, np.uint8)
        found = PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans, befores, states, kept)
        run.replays.append(partial(self._replay, plan, found))
        return found

    @staticmethod
    def _replay(plan: ComputePlan, run: PlannedRun, num_rows: int) -> None:
        plan.replay(run, num_rows, torch.get_num_threads())

    def _copied(self, plan: ComputePlan, rows: Buffer, num_rows: int) -> torch.Tensor:
        return torch.from_numpy(plan.copied(rows, num_rows)).view(self._dtype)


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


def _layers(model: PreTrainedModel) -> Any:
    names = NAMES.get(model.config.get_text_config(decoder=True).model_type, {})
    return getattr(decoder_of(model), names.get("layers", "layers"), ())


def config_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> DecoderConfig:
    """Returns the configuration of a model."""
    layers = layout.layers[: len(_layers(model))]
    places = [places_of(layout, page_tokens, number) for number in range(len(layers))]
    states = [states_of(layout, number) for number in range(len(layers))]
    windows = [spec.window or 0 for spec in layers]
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) is None:
        places = [_parted(of_layer, spec.latent_dim) for of_layer, spec in zip(places, layers, strict=True)]
    found = of_model(config, windows, places, states, _rotary(model), sees_pictures_whole(model.config))
    # transformers multiplies by a number in the type of the model.
    rounded, of_layers = (
        float(torch.tensor(one).to(model.dtype)) for one in (found.embedding_multiplier, found.layer_input_multiplier)
    )
    further = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    if found.latent is not None:
        # With a factor for scaled positions.
        number = next(number for number, one in enumerate(found.layers) if one.mixer == "latent")
        found = replace(found, scale=_layers(model)[number].self_attn.scaling)
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


def _parted(places: dict[str, Location], key_dim: int) -> dict[str, Location]:
    """Returns the places of keys and of values that memory has in one row, as the layout has those of a single head."""
    if "latent" not in places:
        return places
    rows = places["latent"]
    return {"keys": replace(rows, dim=key_dim), "values": rows.behind(key_dim)}


def states_of(layout: Layout, layer: int) -> dict[tuple[str, int], StateLocation]:
    """Returns where the states of a layer are in pages of states, by part and index."""
    return {
        (spec.part, spec.index): StateLocation(number, index * spec.num_bytes, spec.shape, spec.dtype.itemsize)
        for number, group in enumerate(layout.states)
        for index, spec in enumerate(group.specs)
        if spec.layer == layer
    }


def _rotary(model: PreTrainedModel) -> dict[str, Rotary]:
    config = model.config.get_text_config(decoder=True)
    name = NAMES.get(config.model_type, {}).get("rotary_emb", "rotary_emb")
    module: Any = getattr(decoder_of(model), name, None)
    if module is None:
        return {}
    # One kind of RoPE for the whole model, or one for each kind of layer.
    kinds = {"": ""} if isinstance(module.rope_type, str) else {kind: f"{kind}_" for kind in module.rope_type}
    found = {}
    for kind, prefix in kinds.items():
        frequencies = getattr(module, f"{prefix}inv_freq").float().numpy()
        sections: Any = getattr(module, "mrope_section", None)
        axes = _axes(sections[kind] if isinstance(sections, dict) else sections, len(frequencies), model)
        factor = float(getattr(module, f"{prefix}attention_scaling"))
        if config.model_type in TURN_BACK:
            frequencies = -frequencies
        found[kind] = Rotary(frequencies, factor, pairing_of(config), axes=axes)
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


def reason_without_plan(model: PreTrainedModel) -> str:
    """Returns why a model that is exact at every token has no plan, "" if it has one."""
    if model.dtype not in _DTYPES:
        return f"no plan computes in {str(model.dtype).removeprefix('torch.')}"
    return without_plan(model.config)


def plan_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> ModelPlan | None:
    """Returns the plan of a model that is exact at every token, None for one of no family."""
    # The self-check computes the first layers alone.
    key = layout, page_tokens, operators(), len(_layers(model))
    known, plan = _plans.get(model, (None, None))
    if known != key:
        plan = None if reason_without_plan(model) else ModelPlan(model, layout, page_tokens)
        _plans[model] = key, plan
    return plan
