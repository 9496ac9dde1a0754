"""Steps that cannot be recorded. Those that can are replayed on a stub of a device (`tests.accelerator`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch

from diskprefix.kv.arena import KVArena
from diskprefix.model.exact import runner
from diskprefix.model.exact.runner import Rows
from diskprefix.model.exact.step_graphs import StepGraphs, replay_or_run
from tests.model.exact.test_packed import made

pytestmark = pytest.mark.usefixtures("cache")
PROMPTS = ([[5, 6, 7]], [[8, 9]])


class RefusingRecorder:
    def record(self, _compute: Callable[[], torch.Tensor]) -> NoReturn:
        raise RuntimeError("an operation of this model cannot be recorded")


@torch.inference_mode()
def test_a_step_that_cannot_be_recorded_is_prepared_once_and_has_its_bits(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    model, layout = made("llama")
    graphs = StepGraphs(model, layout, RefusingRecorder())

    def decoded(use: StepGraphs | None) -> list[list[bytes]]:
        arenas = [KVArena(layout, model.device) for _ in PROMPTS]
        runner.run(model, [Rows(arena, torch.tensor(ids)) for arena, ids in zip(arenas, PROMPTS, strict=True)])
        with patch.object(KVArena, "begin_step", autospec=True, side_effect=KVArena.begin_step) as begun:
            steps = [replay_or_run(use, model, [Rows(arena, torch.tensor([[4]])) for arena in arenas]) for _ in "12"]
        assert begun.call_count == len(steps) * len(arenas)
        return [[bytes(one.float().numpy()) for one in logits] for logits in steps]

    with caplog.at_level(logging.WARNING, "diskprefix"):
        assert decoded(graphs) == decoded(None)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "[engine] no more steps are recorded as graphs: an operation of this model cannot be recorded"
