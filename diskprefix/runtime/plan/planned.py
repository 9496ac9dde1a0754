"""The runtime of a model whose steps are a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from diskprefix.native import address_of, calls
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import operators
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.numbers import array_dtype, converted, item_bytes
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.sizes import Q8_BLOCK
from diskprefix.prefixstore.kv.step import Run
from diskprefix.runtime.contract import PictureRows, Rows, StepOutput, UncachedState, begin_step
from diskprefix.runtime.plan.config import DecoderConfig
from diskprefix.runtime.plan.draft_layer import with_one_more
from diskprefix.runtime.plan.drafts import DraftLayer, DraftRow
from diskprefix.runtime.plan.families.decoder import decoder
from diskprefix.runtime.plan.families.decoder_options import options_of_model, padded_tokens, sees_pictures_whole
from diskprefix.runtime.plan.families.memory_layout import layout_of
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.operands import EncodedRows, Location, PlannedRun, StateLocation
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.runtime.plan.slots import Slots
from diskprefix.runtime.plan.weights import Weights

_ROWS = 256
"""The largest step of a new plan, in rows. A larger step makes a larger plan."""
DTYPES = {"float32": calls.FLOAT32, "bfloat16": calls.BFLOAT16}


class NotExact(Exception):
    """A plan cannot compute a step, or a token has other bits in another step. The argument says why."""


class PlanRuntime:
    """Computes the steps of a model by its plan, over memory of a layout (`model.runtime`). `is_of_first`: computes
    only the first layers, up to the first layer of the last kind that appears; the other layers run the same code."""

    has_hidden = True

    def __init__(
        self, weights: Weights, config: Any, layout: Layout, page_tokens: int, *, is_of_first: bool = False
    ) -> None:
        """Raises `ValueError` for a configuration that the layout does not fit. `config` is transformers' configuration
        of the whole model."""
        self.layout, self.vocab_size = layout, layout.vocab_size
        options = config_of(config, weights.dtype, layout, page_tokens)
        self.config = first_layers(options) if is_of_first else options
        self.weights, self._names = weights, SlotNames.of(config.get_text_config(decoder=True))
        self._dtype, self._page_tokens = weights.dtype, page_tokens
        self._runners = dict[bool, PlanRunner]()
        self.wait: Callable[[], None] = lambda: None
        """Returns when all weights are in memory. Called before each step."""

    @property
    def runner(self) -> PlanRunner:
        """The runner of the plan of ordinary steps."""
        return self._runner_for(_ROWS, with_hidden=self.layout.has_draft_layer)

    @cached_property
    def draft_layer(self) -> DraftLayer:
        """The draft layer of a layout that has one."""
        return DraftLayer(self.config, self._begin)

    @property
    def plans(self) -> list[ComputePlan]:
        """The plans that compute what memory keeps."""
        return [self.runner.plan, *([self.draft_layer.runner.plan] if self.layout.has_draft_layer else [])]

    def prepare(self) -> None:
        """Makes the plans."""
        assert self.runner
        assert not self.layout.has_draft_layer or self.draft_layer

    def _runner_for(self, num_rows: int, *, with_hidden: bool) -> PlanRunner:
        """Returns the runner for a step. `with_hidden`: its plan computes the hidden states of all rows."""
        runner = self._runners.get(with_hidden)
        if runner is None or num_rows > runner.plan.max_rows:
            runner, slots = self._begin(num_rows)
            decoder(runner.plan, self.config, slots, with_hidden=with_hidden)
            self._runners[with_hidden] = runner
        return runner

    def _begin(self, num_rows: int) -> tuple[PlanRunner, Slots]:
        """Returns the runner of an empty plan of at least `num_rows` rows, and the weights."""
        compiled = operators()
        assert compiled is not None, "a model has a plan only if there are compiled operators"
        dtype, max_rows = DTYPES[self._dtype], max(num_rows, _ROWS)
        plan = ComputePlan(dtype, max_rows, self.config.vocab_size)
        return PlanRunner(compiled, plan, self._page_tokens), Slots(self.weights, self.config.norms, self._names)

    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes a step: all rows of all sequences together. Raises what `wait` raises."""
        self.wait()
        sequences, runs = begin_step(step)
        token_ids, pictures = np.concatenate([rows.token_ids for rows in step]), [rows.pictures for rows in step]
        counts = [rows.num_logits for rows in step]
        with_hidden = needs_hidden or self.layout.has_draft_layer
        runner = self._runner_for(len(token_ids), with_hidden=with_hidden)
        described = [self._described(runner, *of_sequence) for of_sequence in zip(sequences, runs, counts, strict=True)]
        ids, of_pictures = token_ids, _encoded(pictures, runs)
        if padded := self.config.inputs.padded_tokens:
            ids = np.where(np.isin(ids, padded[1:]), padded[0], ids)
        runner.run(described, ids, _positions(runs, pictures), num_threads(), of_pictures)
        logits = self._floats(runner.copied(runner.plan.logits, sum(counts)))
        hidden = runner.copied(runner.plan.hidden, len(ids)) if with_hidden else None
        if self.layout.has_draft_layer:
            assert hidden is not None
            may_lag = all(rows.may_lag for rows in step)
            self.draft_layer.keep_up(sequences, runs, token_ids, hidden, may_lag=may_lag)
        for sequence, run in zip(sequences, runs, strict=True):
            sequence.end_step(run)
        states = None if hidden is None or not needs_hidden else self._floats(hidden)
        return StepOutput(np.split(logits, np.cumsum(counts)[:-1]), states)

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Computes draft tokens by the draft layer."""
        return self.draft_layer.draft(rows)

    def new_state(self) -> UncachedState:
        """Raises `NotImplementedError`: the state of a model with a plan is cached."""
        raise NotImplementedError

    def _described(self, runner: PlanRunner, sequence: KVSequence, run: Run, num_logits: int) -> PlannedRun:
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
        kept = np.empty(run.num_rows * runner.plan.kept_bytes, np.uint8)
        planned = PlannedRun(run.start, run.num_rows, num_logits, addresses, run.flat_spans, befores, states, kept)
        run.replays.append(partial(self._replay, runner, planned))
        return planned

    @staticmethod
    def _replay(runner: PlanRunner, run: PlannedRun, num_rows: int) -> None:
        runner.replay(run, num_rows, num_threads())

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows, uint8 [rows, bytes of a row], as float32 [rows, width]."""
        return converted(rows.view(array_dtype(self._dtype)), "float32")


def _positions(runs: Sequence[Run], pictures: Sequence[PictureRows | None]) -> np.ndarray:
    """Returns the positions of the rows of a step, int64 [1, rows] or [axes, rows]."""
    positions = [np.arange(run.start, run.end)[None] for run in runs]
    for number, of_pictures in enumerate(pictures):
        if of_pictures is not None and of_pictures.positions is not None:
            positions[number] = of_pictures.positions
    axes = max(map(len, positions))
    return np.concatenate([np.broadcast_to(of_run, (axes, of_run.shape[1])) for of_run in positions], axis=1)


def _encoded(pictures: Sequence[PictureRows | None], runs: Sequence[Run]) -> EncodedRows | None:
    """Returns the encoder's output for the rows of a step, None if no row belongs to a picture. A placeholder in a text
    is an ordinary token."""
    given = [rows for rows in pictures if rows is not None]
    is_picture = [
        np.zeros(run.num_rows, bool) if rows is None else rows.is_picture
        for run, rows in zip(runs, pictures, strict=True)
    ]
    numbers = np.flatnonzero(np.concatenate(is_picture))
    if not len(numbers):
        return None
    encoded = np.concatenate([rows.encoded for rows in given], axis=1)
    return EncodedRows(numbers, address_of(encoded), encoded[0].nbytes, encoded)


def config_of(config: Any, dtype: str, layout: Layout, page_tokens: int) -> DecoderConfig:
    """Returns the options of a model that computes in `dtype`. `config` is transformers' configuration of the whole
    model."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    layers = layout.layers[: None if layout.has_draft_layer else num_layers]
    places = [places_of(layout, page_tokens, number) for number in range(len(layers))]
    states = [states_of(layout, number) for number in range(len(layers))]
    windows = [spec.window or 0 for spec in layers]
    if getattr(text, "kv_lora_rank", None) is None:
        places = [_parted(of_layer, spec.latent_dim) for of_layer, spec in zip(places, layers, strict=True)]
    extended = with_one_more(text) if layout.has_draft_layer else text
    options = options_of_model(extended, windows, places, states, sees_pictures_whole(config))
    draft_layer = options.layers[-1] if layout.has_draft_layer else None
    options = replace(options, layers=options.layers[:num_layers], draft_layer=draft_layer)
    # transformers rounds these factors to the dtype of the model.
    multipliers = np.array([options.inputs.multiplier, options.inputs.layer_multiplier], np.float32)
    rounded, of_layers = converted(converted(multipliers, dtype), "float32").tolist()
    levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    inputs = replace(
        options.inputs,
        multiplier=rounded,
        layer_multiplier=of_layers,
        padded_tokens=tuple(padded_tokens(config)),
        deepstack=len(levels),
    )
    return replace(options, inputs=inputs)


def first_layers(config: DecoderConfig) -> DecoderConfig:
    """Returns the configuration without the layers after the last kind of layer has appeared once."""
    kinds = [replace(layer, places={}, states={}) for layer in config.layers]
    return replace(config, layers=config.layers[: max(map(kinds.index, kinds)) + 1])


def places_of(layout: Layout, page_tokens: int, layer: int) -> dict[str, Location]:
    """Returns the places of a layer's parts in pages, by their names in the layout."""
    places = {}
    for table, group in enumerate(layout.groups):
        of_head, size = page_tokens * group.items, item_bytes(group.dtype)
        for index, spec in enumerate(group.specs):
            if spec.layer == layer:
                offset, of_item = index * group.heads * of_head * size, Q8_BLOCK if group.dtype == "q8" else 1
                form = group.heads, group.head_dim, size, of_head, group.items, of_item
                places[spec.part] = Location(table, offset, *form)
    return places


def _parted(places: dict[str, Location], key_dim: int) -> dict[str, Location]:
    """Returns the places of keys and values. In memory, keys and values of a single head may share a row (`latent`)."""
    if "latent" not in places:
        return places
    rows = places.pop("latent")
    return {**places, "keys": replace(rows, dim=key_dim), "values": rows.after(key_dim)}


def states_of(layout: Layout, layer: int) -> dict[tuple[str, int], StateLocation]:
    """Returns the places of a layer's states in state pages, by part and index."""
    return {
        (spec.part, spec.index): StateLocation(number, index * spec.num_bytes, spec.shape, item_bytes(spec.dtype))
        for number, group in enumerate(layout.states)
        for index, spec in enumerate(group.specs)
        if spec.layer == layer
    }


def plan_layout(weights: Weights, config: Any, kv_type: str = "auto") -> Layout:
    """Returns the layout of a model that has a plan. `config` is transformers' configuration of the whole model. Raises
    `SettingsError` for rows that `--kv-type` does not take."""
    layout = layout_of(config, weights.dtype, kv_type, with_draft_layer=weights.has_draft_layer)
    return replace(layout, exact_at="token", packs=True)
