"""The engine on a stub of a device: what crosses to it and back in a step that decodes, and what a recorded step
computes. `python -m tests.accelerator.stub_steps FOLDER` writes lines of JSON. torch's curves must have one code
(`ATEN_CPU_CAPABILITY=default`), as on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from diskprefix.engine import measured_model
from diskprefix.engine.loop import Engine, Loop
from diskprefix.kv.layout import Layout
from diskprefix.model.exact.invariant import install
from diskprefix.model.exact.rehearsal import read_layout
from diskprefix.model.exact.step_graphs import StepGraphs
from diskprefix.model.load import loader
from diskprefix.model.load.placing import UnreadWeights
from tests.accelerator.graph_checks import require_the_same
from tests.accelerator.stub_device import DEVICE, StubRecorder, counts, moved
from tests.engine.driving import load, request, run_together, tokens
from tests.model import tiny

NUM_TOKENS = 4
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}


def _unread_model(source: Any) -> Any:
    """In place of the loader's, which cannot read weights into a device in Python."""
    torch.manual_seed(7)
    return moved(source.kind.loader.from_config(source.config, dtype=source.dtype)), UnreadWeights()


def _taken_as_exact(model: Any, **_: Any) -> tuple[Layout, str]:
    """In place of `make_exact`, whose measurement takes minutes in the interpreter."""
    with torch.inference_mode():
        layout = replace(read_layout(model), exact_at="token", packs=True)
    install(model)
    return layout, ""


def _asked(number: int) -> Any:
    """Requests of several lengths; every other one is sampled. Nothing of them is saved."""
    sampling = {"seed": number, **SAMPLED} if number % 2 else {"presence_penalty": 0.1} if number == 4 else {}
    return request(
        tokens(6 + number, number), name=f"{number}", scope="off", max_tokens=NUM_TOKENS, logit_bias={}, **sampling
    )


def replies(engine: Engine, count: int, counted: list[Counter[str]]) -> list[list[int]]:
    """Returns the tokens of so many replies that are computed together. `counted` gets the counts of each step that
    only decodes."""
    compute = Loop._compute

    def counting(self: Loop, step: Any) -> None:
        only_decodes = all(chunk.sequence.is_decoding for chunk in step)
        before = counts.copy()
        compute(self, step)
        if only_decodes and len(step) == count:
            counted.append(counts - before)

    with patch.object(Loop, "_compute", counting):
        clients = run_together(engine, [_asked(number) for number in range(count)])
    for client in clients:
        assert client.done
    return [client.tokens for client in clients]


def main(folder: Path) -> None:
    model = tiny.write_folder(folder / "model", dtype=torch.float32, max_position_embeddings=2048)
    with (
        patch.object(loader, "_unread_model", _unread_model),
        patch.object(loader, "_pick_device", lambda _: DEVICE),
        patch.object(measured_model, "make_exact", _taken_as_exact),
    ):
        engine = load(model, folder / "kv")
    one_by_one = [run_together(engine, [_asked(number)])[0].tokens for number in range(8)]
    for recorder in (None, StubRecorder()):
        engine.graphs = None if recorder is None else StepGraphs(engine.model, engine.cache.layout, recorder)
        for count in (1, 8):
            counted: list[Counter[str]] = []
            found = replies(engine, count, counted)
            line = {
                "recorded": recorder is not None,
                "replies": count,
                "same": found == one_by_one[:count],
                "replays": recorder and recorder.num_replays,
                "steps": len(counted),
                # The first step of its kind may record.
                **{name: max(one[name] for one in counted[1:]) for name in ("uploads", "downloads", "waits")},
            }
            print(json.dumps(line), flush=True)
    recorder = StubRecorder()
    graphs = StepGraphs(engine.model, engine.cache.layout, recorder)
    replayed = [require_the_same(engine.model, engine.cache.layout, graphs, count, 12) for count in (3,)]
    print(json.dumps({"replayed": replayed}), flush=True)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
