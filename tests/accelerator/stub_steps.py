"""The engine on a stub of a device: what crosses to it and back in a step that decodes, and what a recorded step
computes. `python -m tests.accelerator.stub_steps FOLDER NAME...` writes lines of JSON; the names are those of tiny
models whose recorded steps are compared bit for bit. torch's curves must have one code (`ATEN_CPU_CAPABILITY=default`),
as on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from diskprefix.model.load.imports import import_transformers

# Before anything else imports transformers: it takes half the time.
import_transformers()

from diskprefix.engine import measured_model  # noqa: E402
from diskprefix.engine.drafting import likeliest  # noqa: E402
from diskprefix.engine.loop import Engine, Loop  # noqa: E402
from diskprefix.kv.layout import Layout  # noqa: E402
from diskprefix.model.exact.invariant import install  # noqa: E402
from diskprefix.model.exact.rehearsal import read_layout  # noqa: E402
from diskprefix.model.exact.step_graphs import StepGraphs  # noqa: E402
from diskprefix.model.load import loader  # noqa: E402
from diskprefix.model.load.placing import UnreadWeights  # noqa: E402
from tests.accelerator.graph_checks import require_the_same  # noqa: E402
from tests.accelerator.stub_device import DEVICE, StubRecorder, StubTensor, counts, moved  # noqa: E402
from tests.engine.driving import load, request, run_together, tokens  # noqa: E402
from tests.exactness.architectures import tiny_model  # noqa: E402
from tests.model import tiny  # noqa: E402

NUM_TOKENS = 3
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
COUNTS = (1, 3)
"""The replies that are computed together. The last ones are recorded with a row more."""
FEWER: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}
"""What tiny models have less of here: kernels are interpreted."""


def _unread_model(source: Any) -> Any:
    """In place of the loader's, which cannot read weights into a device in Python."""
    torch.manual_seed(7)
    return moved(source.kind.loader.from_config(source.config, dtype=source.dtype)), UnreadWeights()


def _taken_as_exact(model: Any, **_: Any) -> tuple[Layout, str]:
    """In place of `make_exact`, whose measurement takes minutes in the interpreter."""
    layout = _layout_of(model)
    install(model)
    return layout, ""


def _layout_of(model: Any) -> Layout:
    with torch.inference_mode():
        return replace(read_layout(model), exact_at="token", packs=True)


def _asked(number: int) -> Any:
    """Requests of several lengths; every other one is sampled. Nothing of them is saved."""
    sampling = {"seed": number, **SAMPLED} if number % 2 else {"presence_penalty": 0.1} if number == 2 else {}
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


def replayed(name: str) -> dict[str, Any]:
    """Compares recorded steps of a tiny model with steps that are not recorded."""
    model = tiny_model(name, torch.float32, **FEWER.get(name, {}))
    # On a device that is no CPU, experts of transformers call what torch has only for GPUs.
    layout, _ = _layout_of(model), moved(model)
    install(model)
    recorder = StubRecorder()
    graphs = StepGraphs(model, layout, recorder)
    steps = require_the_same(model, layout, graphs, COUNTS[-1], 12)
    return {"model": name, "steps": steps, "replays": recorder.num_replays, "states": len(layout.states)}


def guesses() -> dict[str, Any]:
    """Counts what is waited for when a draft model's logits of three replies become guesses."""
    before = counts.copy()
    found = likeliest(StubTensor(torch.eye(3, 250)))
    return {"guesses": [token for token, _ in found], **(counts - before)}


def main(folder: Path, names: Sequence[str]) -> None:
    model = tiny.write_folder(folder / "model", dtype=torch.float32, max_position_embeddings=2048)
    with (
        patch.object(loader, "_unread_model", _unread_model),
        patch.object(loader, "_pick_device", lambda _: DEVICE),
        patch.object(measured_model, "make_exact", _taken_as_exact),
    ):
        engine = load(model, folder / "kv")
    one_by_one = [run_together(engine, [_asked(number)])[0].tokens for number in range(COUNTS[-1])]
    for recorder in (None, StubRecorder()):
        engine.graphs = None if recorder is None else StepGraphs(engine.model, engine.cache.layout, recorder)
        for count in COUNTS:
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
    engine.close()
    print(json.dumps(guesses()), flush=True)
    for name in names:
        print(json.dumps(replayed(name)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
