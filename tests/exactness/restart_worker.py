"""Run prompts through the prefix cache in a process of its own, which then dies of SIGKILL.

PLAN: {"folder": str, "dtype": "bfloat16", "requests": [{"seeds": [[seed, num_tokens], ...], "scope": "full"}, ...]},
and "exact_at" and "block_size" where they are not those of `Runner` alone; "mixture" names a model of which experts and
all else are in 4 bits, or a .gguf file. A prompt is its seeded parts, joined. A third number says how many tokens of a
part are taken. OUT holds the next-token logits of every request as raw bytes,
the greedy tokens, and how many tokens were restored.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import torch

from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings
from tests.exactness.architectures import quantised_tiny_model
from tests.model.tensor_weights import modules_of
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

REPLY = 4


def main(plan_file: str, out_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    mixture = plan.get("mixture")
    if mixture and mixture.endswith(".gguf"):
        model = modules_of(load_model(Settings(model=mixture), lambda _line: None))
    else:
        model = quantised_tiny_model(mixture, "Q4_1") if mixture else tiny_llama(getattr(torch, plan["dtype"]))
    settings = tiny_settings(Path(plan["folder"]), block_size=plan.get("block_size", BLOCK))
    runner = Runner(model, settings, exact_at=plan.get("exact_at", "grid"))
    logits, greedy, restored = [], [], []
    for request in plan["requests"]:
        prompt = np.concatenate(
            [random_prompt(seed, length)[: sum(cut) or None] for seed, length, *cut in request["seeds"]]
        )
        answer = runner.run(prompt % model.config.vocab_size, request["scope"], reply=REPLY)
        logits.append(answer.logits.view(torch.uint8).numpy())
        greedy.append(answer.greedy)
        restored.append(answer.report.restored)
    runner.flush()
    np.savez(out_file, logits=np.stack(logits), greedy=np.array(greedy), restored=np.array(restored))
    os.kill(os.getpid(), signal.SIGKILL)
