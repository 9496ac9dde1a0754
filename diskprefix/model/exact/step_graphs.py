"""Steps that only decode, recorded once and replayed: an accelerator then waits for no launch of a kernel.

A recorded step has a fixed number of rows. What differs from step to step is in its `StepInputs`: tokens, positions and
the memory of sequences, which may grow and move. Rows that nobody needs have a sequence of their own. A row does not
depend on the others, so it has the bits that it has in a step that is not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.kv.step import Run
from diskprefix.model.exact import accelerated, runner
from diskprefix.model.exact.runner import Rows, packed_forward
from diskprefix.model.exact.step_inputs import StepInputs
from diskprefix.model.load.memory import hold
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64)
MOST_GRAPHS = 24
"""A graph is recorded for a number of rows, and for up to twice as many keys as another. Each takes about the time of
three steps, once, and all share the memory of the largest."""
_PADDING = Run(1, 1)
"""Behind a first token, because a state is set to zero there."""


class GraphRecorder(Protocol):
    """A device that records what it computes."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Records `compute`, which has run before. Returns what it returned, in memory that stays, and a function that
        computes it again. Raises the errors of torch for what cannot be recorded."""


class AcceleratorGraphs:
    """A recorder of a GPU: CUDA graphs, HIP graphs, or those of Intel. They share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._pool = self._module.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        # Meanwhile other threads copy, and allocate memory.
        options = {"capture_error_mode": "thread_local"} if self._device.type == "cuda" else {}
        graph = self._module.CUDAGraph() if self._device.type == "cuda" else self._module.XPUGraph()
        self._module.empty_cache()
        unused = self._unused()
        with self._module.device(self._device), self._module.graph(graph, pool=self._pool, **options):
            found = compute()
        # What the recorded step computes with, nobody else may use.
        hold(self._device, self._unused() - unused)
        return found, graph.replay

    def _unused(self) -> int:
        return int(self._module.memory_reserved(self._device) - self._module.memory_allocated(self._device))


@dataclass(frozen=True, eq=False)
class _Graph:
    """A recorded step. `inputs` are the integers that it reads, and `form` is that of its `StepInputs`."""

    form: tuple[Any, ...]
    inputs: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]


class StepGraphs:
    """The recorded steps of one model. For the thread that computes its steps."""

    def __init__(self, model: PreTrainedModel, layout: Layout, recorder: GraphRecorder) -> None:
        self._model, self._layout, self._recorder = model, layout, recorder
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By the number of rows, and of spans of keys."""
        self._may_record = True
        self._padding: KVArena | None = None

    def replay(self, step: Sequence[Rows]) -> list[torch.Tensor] | None:
        """Computes a step in which each sequence has one row, and returns the logits of each, [1, vocab], valid until
        the next step. Returns None if the step cannot be replayed."""
        arenas = [rows.state for rows in step if isinstance(rows.state, KVArena) and rows.token_ids.shape[1] == 1]
        count = next((number for number in NUM_ROWS if number >= len(step)), None)
        if count is None or len(arenas) < len(step) or not all(arena.num_tokens for arena in arenas):
            return None
        graph = self._graph_for(count, accelerated.spans_before(1 + max(arena.num_tokens for arena in arenas)))
        if graph is None:
            return None
        runs = [arena.begin_step(1) for arena in arenas]
        inputs = self._inputs(arenas, runs, [rows.token_ids for rows in step], count)
        assert inputs.form == graph.form, "the layout alone decides it"
        graph.inputs.copy_(accelerated.staged(inputs.numbers, self._model.device), non_blocking=True)
        graph.replay()
        for arena, run in zip(arenas, runs, strict=True):
            arena.end_replay(run)
        return list(torch.split(graph.logits[: len(step)], 1))

    def _inputs(self, arenas: list[KVArena], runs: list[Run], token_ids: list[torch.Tensor], count: int) -> StepInputs:
        """Returns the inputs of a step that is filled up to `count` rows."""
        if self._padding is None:
            self._padding = KVArena(self._layout, self._model.device, capacity_step=1)
            self._padding.reserve(_PADDING.end)
        missing = count - len(arenas)
        return StepInputs(
            [*arenas, *[self._padding] * missing],
            (*runs, *[_PADDING] * missing),
            [*token_ids, *[torch.zeros(1, 1, dtype=torch.long)] * missing],
            [1] * count,
        )

    def _graph_for(self, count: int, num_spans: int) -> _Graph | None:
        """Returns a recorded step of `count` rows and at least so many spans; None if there is none, and it cannot be
        recorded."""
        key = count, 1 << (num_spans - 1).bit_length()
        if key not in self._graphs and self._may_record and len(self._graphs) < MOST_GRAPHS:
            try:
                self._graphs[key] = self._recorded(*key)
            except Exception as error:  # noqa: BLE001 (of a model class of any age and author; steps go on without)
                self._may_record = False
                log.warning("[engine] no more steps are recorded as graphs: %s", first_line(error))
        return self._graphs.get(key)

    def _recorded(self, count: int, num_spans: int) -> _Graph:
        """Records a step of so many rows, with no sequence but the padding."""
        padding = self._inputs([], [], [], count)
        numbers, end = accelerated.uploaded(padding.numbers, self._model.device), accelerated.span_end(num_spans)
        assert self._padding is not None
        arenas, placed = [self._padding] * count, padding.within(numbers, end)
        # Kernels are compiled at their first launch, which cannot be recorded.
        packed_forward(self._model, arenas, placed)
        logits, replay = self._recorder.record(partial(packed_forward, self._model, arenas, placed))
        log.info("[engine] a step of %d rows is recorded, for up to %d tokens", count, end)
        return _Graph(padding.form, numbers, logits, replay)


def replay_or_run(graphs: StepGraphs | None, model: PreTrainedModel, step: Sequence[Rows]) -> list[torch.Tensor]:
    """Computes a step by one of `graphs`, or as `runner.run` does. Returns what that returns."""
    replayed = None if graphs is None else graphs.replay(step)
    return runner.run(model, step) if replayed is None else replayed


def graphs_of(model: PreTrainedModel, layout: Layout) -> StepGraphs | None:
    """Returns the recorded steps of a model, None if its steps cannot be recorded."""
    can_record = layout.packs and model.device.type in ("cuda", "xpu")
    return StepGraphs(model, layout, AcceleratorGraphs(model.device)) if can_record else None
