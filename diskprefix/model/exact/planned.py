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
from diskprefix.model.families.decoder import decoder
from diskprefix.model.families.model_types import OPTIONS, of_model
from diskprefix.model.plan import ComputePlan, Location, PlannedRun, Rotary
from diskprefix.model.slots import Slots
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
        # A plan is kept as long as its model.
        self._model, self._dtype, self._page_tokens = ref(model), model.dtype, page_tokens
        self._plan = self._make(_ROWS)

    def _make(self, max_rows: int) -> ComputePlan:
        compiled, model = operators(), self._model()
        assert compiled is not None, "a model of a plan is exact at every token"
        assert model is not None, "it runs"
        plan = ComputePlan(compiled, _DTYPES[self._dtype], max_rows, self._config.vocab_size, self._page_tokens)
        decoder(plan, self._config, Slots(model, _NORMS[self._config.norm], self._config.epsilon))
        return plan

    def run(
        self, sequences: Sequence[KVSequence], runs: Sequence[Run], ids: np.ndarray, kept: np.ndarray
    ) -> torch.Tensor:
        """Computes a step of token ids, int64 [rows]. Returns the logits of the rows number `kept`, [logits, vocab]."""
        num_rows = len(ids)
        if num_rows > self._plan.max_rows:
            self._plan = self._make(num_rows)
        positions = np.concatenate([np.arange(run.start, run.end) for run in runs])[None]
        described = [self._described(*one) for one in zip(sequences, runs, strict=True)]
        self._plan.run(described, ids, kept, positions, torch.get_num_threads())
        return self._copied(self._plan.logits, len(kept))

    def _described(self, sequence: KVSequence, run: Run) -> PlannedRun:
        """Raises `NotInvariant` if pages are missing that the operators would read or write."""
        for table in sequence.tables:
            has_room = run.end <= len(table.pages) * self._page_tokens
            if not has_room or table.complete_from > table.group.first_needed(run.start):
                raise NotInvariant("attention to tokens that the memory does not keep")
        addresses = [table.addresses.buffer_info()[0] for table in sequence.tables]
        return PlannedRun(run.start, run.num_rows, addresses, run.flat_spans)

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Returns the hidden states of the last step behind the last norm, [rows, hidden_size]."""
        return self._copied(self._plan.hidden, num_rows)

    def _copied(self, rows: Any, num_rows: int) -> torch.Tensor:
        return torch.from_numpy(self._plan.copied(rows, num_rows)).view(self._dtype)


def config_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> DecoderConfig:
    """Returns the configuration of a model."""
    layers = layout.layers[: len(model.get_decoder().layers)]
    places = [places_of(layout, page_tokens, number) for number in range(len(layers))]
    windows = [spec.window or 0 for spec in layers]
    config = model.config.get_text_config(decoder=True)
    found = of_model(config, windows, places, _rotary(model), sees_pictures_whole(model.config))
    # transformers multiplies by a number in the type of the model.
    rounded = float(torch.tensor(found.embedding_multiplier).to(model.dtype))
    return replace(found, embedding_multiplier=rounded)


def places_of(layout: Layout, page_tokens: int, layer: int) -> dict[str, Location]:
    """Returns where the parts of a layer are in pages, by their names in the layout."""
    found = {}
    for table, group in enumerate(layout.groups):
        of_head = page_tokens * group.head_dim
        for index, spec in enumerate(group.specs):
            if spec.layer == layer:
                offset = index * group.heads * of_head * group.dtype.itemsize
                found[spec.part] = Location(table, offset, of_head, group.head_dim)
    return found


def _rotary(model: PreTrainedModel) -> dict[str, Rotary]:
    module: Any = model.get_decoder().rotary_emb
    # One kind of RoPE for the whole model, or one for each kind of layer.
    kinds = {"": ""} if isinstance(module.rope_type, str) else {kind: f"{kind}_" for kind in module.rope_type}
    return {
        kind: Rotary(
            getattr(module, f"{prefix}inv_freq").float().numpy(), float(getattr(module, f"{prefix}attention_scaling"))
        )
        for kind, prefix in kinds.items()
    }


_plans: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, ModelPlan | None]] = WeakKeyDictionary()
"""The last plans of models, by their layers, kernels and memory; None for a model of no family."""


def plan_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> ModelPlan | None:
    """Returns the plan of a model that is exact at every token, None for one of no family."""
    # The self-check computes the first layers alone.
    key = layout, page_tokens, operators(), len(getattr(model.get_decoder(), "layers", ()))
    known, plan = _plans.get(model, (None, None))
    if known != key:
        has_plan = model.config.get_text_config(decoder=True).model_type in OPTIONS and not layout.has_draft_layer
        plan = ModelPlan(model, layout, page_tokens) if has_plan else None
        _plans[model] = key, plan
    return plan
