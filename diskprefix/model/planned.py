"""The runtime of a model whose steps are a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from diskprefix.kv.layout import Layout
from diskprefix.kv.numbers import array_dtype, converted, item_bytes
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.sizes import EIGHTS
from diskprefix.kv.step import Run
from diskprefix.model.config import DecoderConfig
from diskprefix.model.drafts import DraftLayer, DraftRow
from diskprefix.model.families.decoder import decoder
from diskprefix.model.families.memory_layout import layout_of
from diskprefix.model.families.model_types import of_model, padded_tokens, sees_pictures_whole
from diskprefix.model.families.slot_names import SlotNames
from diskprefix.model.load.draft_layer import with_one_more
from diskprefix.model.operands import Buffer, EncodedRows, Location, PlannedRun, StateLocation
from diskprefix.model.plan import ComputePlan
from diskprefix.model.runtime import PictureRows, Rows, StepOutput, UncachedState, begin_step
from diskprefix.model.slots import Slots
from diskprefix.model.weights import Weights
from diskprefix.native import address_of, calls
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import operators

_ROWS = 256
"""The rows that a plan is made for. A step of more makes a larger one."""
DTYPES = {"float32": calls.FLOAT32, "bfloat16": calls.BFLOAT16}


class NotExact(Exception):
    """A plan cannot compute a step, or gives a token other bits in another one. The argument says why."""


class PlanRuntime:
    """Computes the steps of a model by its plan, over memory of a layout (`model.runtime`). `is_of_first`: only the
    first layers are computed, up to the first one of each kind: the others compute with the same code."""

    has_hidden = True

    def __init__(
        self, weights: Weights, config: Any, layout: Layout, page_tokens: int, *, is_of_first: bool = False
    ) -> None:
        """Raises `ValueError` for a configuration that the layout does not fit. `config` is transformers' of the
        whole model."""
        self.layout, self.vocab_size = layout, layout.vocab_size
        found = config_of(config, weights.dtype, layout, page_tokens)
        self.config = first_layers(found) if is_of_first else found
        self.weights, self._names = weights, SlotNames.of(config.get_text_config(decoder=True))
        self._dtype, self._page_tokens = weights.dtype, page_tokens
        self._plans = dict[bool, ComputePlan]()
        self.wait: Callable[[], None] = lambda: None
        """Returns when all weights are in memory. Called before each step."""

    @property
    def plan(self) -> ComputePlan:
        """The plan of the usual steps."""
        return self._plan_for(_ROWS, with_hidden=self.layout.has_draft_layer)

    @cached_property
    def draft_layer(self) -> DraftLayer:
        """The draft layer of a layout that has one."""
        return DraftLayer(self.config, self._begin)

    @property
    def plans(self) -> list[ComputePlan]:
        """The plans that compute what memory keeps."""
        return [self.plan, *([self.draft_layer.plan] if self.layout.has_draft_layer else [])]

    def prepare(self) -> None:
        """Makes the plans."""
        assert self.plan
        assert not self.layout.has_draft_layer or self.draft_layer

    def _plan_for(self, num_rows: int, *, with_hidden: bool) -> ComputePlan:
        """Returns the plan of a step. One that gives the hidden states of all rows computes all of the last layers."""
        plan = self._plans.get(with_hidden)
        if plan is None or num_rows > plan.max_rows:
            plan, slots = self._begin(num_rows)
            decoder(plan, self.config, slots, with_hidden=with_hidden)
            self._plans[with_hidden] = plan
        return plan

    def _begin(self, num_rows: int) -> tuple[ComputePlan, Slots]:
        """Returns an empty plan for so many rows at least, and the weights."""
        compiled = operators()
        assert compiled is not None, "a model of a plan is exact at every token"
        dtype, max_rows = DTYPES[self._dtype], max(num_rows, _ROWS)
        plan = ComputePlan(compiled, dtype, max_rows, self.config.vocab_size, self._page_tokens)
        return plan, Slots(self.weights, self.config.norm, self.config.epsilon, self._names)

    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes a step: all rows of all sequences together. Raises what `wait` raises."""
        self.wait()
        sequences, runs = begin_step(step)
        token_ids, pictures = np.concatenate([rows.token_ids for rows in step]), [rows.pictures for rows in step]
        counts = [rows.num_logits for rows in step]
        plan = self._plan_for(len(token_ids), with_hidden=needs_hidden or self.layout.has_draft_layer)
        described = [self._described(plan, *one) for one in zip(sequences, runs, counts, strict=True)]
        ids, of_pictures = token_ids, _encoded(pictures, runs)
        if padded := self.config.padded_tokens:
            ids = np.where(np.isin(ids, padded[1:]), padded[0], ids)
        plan.run(described, ids, _positions(runs, pictures), num_threads(), of_pictures)
        logits = self._copied(plan, plan.logits, sum(counts))
        if self.layout.has_draft_layer:
            may_lag, hidden = all(rows.may_lag for rows in step), plan.copied(plan.hidden, len(ids))
            self.draft_layer.keep_up(sequences, runs, token_ids, hidden, may_lag=may_lag)
        for sequence, run in zip(sequences, runs, strict=True):
            sequence.end_step(run)
        return StepOutput(
            np.split(logits, np.cumsum(counts)[:-1]),
            self._copied(plan, plan.hidden, len(ids)) if needs_hidden else None,
        )

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Computes guesses by the draft layer."""
        return self.draft_layer.draft(rows)

    def new_state(self) -> UncachedState:
        """Raises `NotImplementedError`: the state of a model with a plan is cached."""
        raise NotImplementedError

    def _described(self, plan: ComputePlan, sequence: KVSequence, run: Run, num_logits: int) -> PlannedRun:
        """Raises `NotExact` if pages are missing that the operators would read or write."""
        for table in sequence.tables:
            has_room = run.end <= len(table.pages) * self._page_tokens
            if not has_room or table.complete_from > table.group.first_needed(run.start):
                raise NotExact("attention to tokens that the memory does not keep")
        addresses = [table.addresses.buffer_info()[0] for table in sequence.tables]
        states = [page.address for page in sequence.states]
        if run.replays is None:
            return PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans, states, states)
        befores = [page.address for page in sequence.spares]
        kept = np.empty(run.num_rows * plan.kept_bytes, np.uint8)
        found = PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans, befores, states, kept)
        run.replays.append(partial(self._replay, plan, found))
        return found

    @staticmethod
    def _replay(plan: ComputePlan, run: PlannedRun, num_rows: int) -> None:
        plan.replay(run, num_rows, num_threads())

    def _copied(self, plan: ComputePlan, rows: Buffer, num_rows: int) -> np.ndarray:
        return converted(plan.copied(rows, num_rows).view(array_dtype(self._dtype)), "float32")


def _positions(runs: Sequence[Run], pictures: Sequence[PictureRows | None]) -> np.ndarray:
    """Returns the positions of the rows of a step, int64 [1, rows] or [axes, rows]."""
    found = [np.arange(run.start, run.end)[None] for run in runs]
    for number, one in enumerate(pictures):
        if one is not None and one.positions is not None:
            found[number] = one.positions
    axes = max(map(len, found))
    return np.concatenate([np.broadcast_to(one, (axes, one.shape[1])) for one in found], axis=1)


def _encoded(pictures: Sequence[PictureRows | None], runs: Sequence[Run]) -> EncodedRows | None:
    """Returns what an encoder gives for rows of a step, None if none is of a picture. A placeholder in a text is a
    token like any other."""
    given = [one for one in pictures if one is not None]
    is_picture = [
        np.zeros(run.num_rows, bool) if one is None else one.is_picture for run, one in zip(runs, pictures, strict=True)
    ]
    numbers = np.flatnonzero(np.concatenate(is_picture))
    if not len(numbers):
        return None
    encoded = np.concatenate([one.encoded for one in given], axis=1)
    return EncodedRows(numbers, address_of(encoded), encoded[0].nbytes, encoded)


def config_of(config: Any, dtype: str, layout: Layout, page_tokens: int) -> DecoderConfig:
    """Returns the configuration of a model that computes in `dtype`. `config` is transformers' of the whole."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    layers = layout.layers[: None if layout.has_draft_layer else num_layers]
    places = [places_of(layout, page_tokens, number) for number in range(len(layers))]
    states = [states_of(layout, number) for number in range(len(layers))]
    windows = [spec.window or 0 for spec in layers]
    if getattr(text, "kv_lora_rank", None) is None:
        places = [_parted(of_layer, spec.latent_dim) for of_layer, spec in zip(places, layers, strict=True)]
    extended = with_one_more(text) if layout.has_draft_layer else text
    found = of_model(extended, windows, places, states, sees_pictures_whole(config))
    draft_layer = found.layers[-1] if layout.has_draft_layer else None
    found = replace(found, layers=found.layers[:num_layers], draft_layer=draft_layer)
    # transformers multiplies by a number in the type of the model.
    multipliers = np.array([found.embedding_multiplier, found.layer_input_multiplier], np.float32)
    rounded, of_layers = converted(converted(multipliers, dtype), "float32").tolist()
    levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    found = replace(found, embedding_multiplier=rounded, layer_input_multiplier=of_layers, deepstack=len(levels))
    return replace(found, padded_tokens=tuple(padded_tokens(config)))


def first_layers(config: DecoderConfig) -> DecoderConfig:
    """Returns the configuration without the layers behind the first one of each kind."""
    kinds = [replace(layer, places={}, states={}) for layer in config.layers]
    return replace(config, layers=config.layers[: max(map(kinds.index, kinds)) + 1])


def places_of(layout: Layout, page_tokens: int, layer: int) -> dict[str, Location]:
    """Returns where the parts of a layer are in pages, by their names in the layout."""
    found = {}
    for table, group in enumerate(layout.groups):
        of_head, size = page_tokens * group.items, item_bytes(group.dtype)
        for index, spec in enumerate(group.specs):
            if spec.layer == layer:
                offset, of_item = index * group.heads * of_head * size, EIGHTS if group.dtype == "q8" else 1
                form = group.heads, group.head_dim, size, of_head, group.items, of_item
                found[spec.part] = Location(table, offset, *form)
    return found


def _parted(places: dict[str, Location], key_dim: int) -> dict[str, Location]:
    """Returns the places of keys and of values that memory has in one row, as the layout has those of a single head."""
    if "latent" not in places:
        return places
    rows = places.pop("latent")
    return {**places, "keys": replace(rows, dim=key_dim), "values": rows.behind(key_dim)}


def states_of(layout: Layout, layer: int) -> dict[tuple[str, int], StateLocation]:
    """Returns where the states of a layer are in pages of states, by part and index."""
    return {
        (spec.part, spec.index): StateLocation(number, index * spec.num_bytes, spec.shape, item_bytes(spec.dtype))
        for number, group in enumerate(layout.states)
        for index, spec in enumerate(group.specs)
        if spec.layer == layer
    }


def plan_layout(weights: Weights, config: Any, kv_type: str = "auto") -> Layout:
    """Returns the layout of a model that has a plan. `config` is transformers' of the whole model. Raises
    `SettingsError` for rows that `--kv-type` does not take."""
    found = layout_of(config, weights.dtype, kv_type, with_draft_layer=weights.has_draft_layer)
    return replace(found, exact_at="token", packs=True)
