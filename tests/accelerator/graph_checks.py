"""Checks of recorded steps, on an accelerator (`tools/gpu --part graphs`) or on a stub: a sequence has the bits that it
has in steps that are not recorded, whoever shares them, and after its memory has moved.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.model.exact import runner
from diskprefix.model.exact.runner import Rows
from diskprefix.model.exact.step_graphs import StepGraphs

NUM_STEPS = 4


def require_the_same(model: PreTrainedModel, layout: Layout, graphs: StepGraphs, count: int, longest: int) -> int:
    """Decodes so many sequences of up to `longest` tokens twice, with `graphs` and without. In the middle memory grows,
    and one third alone has a last step. Returns how many steps were replayed. Raises `AssertionError`."""
    lengths = [max(2, longest - 7 * number) for number in range(count)]
    replayed = [0]

    def decoded(use: StepGraphs | None) -> list[bytes]:
        arenas = [KVArena(layout, model.device, capacity_step=1) for _ in lengths]
        prompts = [_ids(number, length) for number, length in enumerate(lengths)]
        runner.run(model, [Rows(*one) for one in zip(arenas, prompts, strict=True)])
        found = []
        for step in range(NUM_STEPS):
            if step == NUM_STEPS // 2:
                for arena in arenas:
                    arena.reserve(arena.capacity + 1)
            taking_part = arenas[2 * count // 3 :] if step == NUM_STEPS - 1 else arenas
            rows = [Rows(arena, _ids(1000 + 97 * step + number, 1)) for number, arena in enumerate(taking_part)]
            logits = use and use.replay(rows)
            replayed[0] += logits is not None
            logits = logits or runner.run(model, rows)
            found += [bytes(one.float().cpu().numpy()) for one in logits]
        return found + [bytes(a.read_tokens(0, a.num_tokens)) + bytes(a.read_states()) for a in arenas]

    with torch.inference_mode():
        assert decoded(graphs) == decoded(None), f"{count} sequences have other bits in recorded steps"
    return replayed[0]


def _ids(seed: int, count: int) -> torch.Tensor:
    return torch.randint(3, 200, (1, count), generator=torch.Generator().manual_seed(seed))
