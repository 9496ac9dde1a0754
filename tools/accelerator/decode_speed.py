"""The speed of decoding with random weights: of this project's steps, recorded or not, and of vLLM.

`python -m tools.accelerator.decode_speed FOLDER` measures vLLM, in a process of its own, and writes lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

COUNTS = (1, 32)
PROMPT, STEPS = 512, 64
VLLM_MODES = {
    "eager": {"DISKPREFIX_EAGER": "1"},
    "graphs": {},
    "batch-invariant": {"VLLM_BATCH_INVARIANT": "1"},
}
"""The environments of its modes. Ours gives the same bits in any company, as the last of them."""


def ours(folder: Path, device: str) -> Iterator[tuple[tuple[int, bool], float]]:
    """Yields the tokens a second by the number of sequences and whether steps are recorded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from diskprefix.engine.device import synchronize
    from diskprefix.kv.arena import KVArena
    from diskprefix.model.exact import runner
    from diskprefix.model.exact.invariance import make_exact
    from diskprefix.model.exact.step_graphs import graphs_of, replay_or_run

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    layout, _ = make_exact(model)
    graphs, ids = graphs_of(model, layout), torch.ones(1, PROMPT, dtype=torch.long)
    with torch.inference_mode():
        for count in COUNTS:
            arenas = [KVArena(layout, model.device) for _ in range(count)]
            for arena in arenas:
                runner.run(model, [runner.Rows(arena, ids)])
            rows = [runner.Rows(arena, ids[:, :1]) for arena in arenas]
            for use in (None, graphs) if graphs else (None,):
                for _ in range(3):
                    replay_or_run(use, model, rows)
                synchronize(model.device)
                started = time.perf_counter()
                for _ in range(STEPS):
                    # The next step needs the tokens of this one.
                    torch.cat(replay_or_run(use, model, rows)).argmax(-1).cpu()
                yield (count, use is not None), count * STEPS / (time.perf_counter() - started)


def of_vllm(folder: Path, mode: str) -> Iterator[tuple[int, float]]:
    """Yields the tokens a second by the number of sequences."""
    command = [sys.executable, "-m", "tools.accelerator.decode_speed", str(folder)]
    found = subprocess.run(command, env=os.environ | VLLM_MODES[mode], stdout=subprocess.PIPE, text=True, check=True)
    for line in found.stdout.splitlines():
        if line.startswith('{"count"'):
            one = json.loads(line)
            yield one["count"], one["tok_s"]


def print_rates(folder: str) -> None:
    import vllm

    is_eager = "DISKPREFIX_EAGER" in os.environ
    llm = vllm.LLM(folder, load_format="dummy", enforce_eager=is_eager, enable_prefix_caching=False, max_model_len=2048)
    for count in COUNTS:
        prompts = [{"prompt_token_ids": [1 + number] * PROMPT} for number in range(count)]
        times = []
        # Two lengths of reply: their difference is decoding alone. The first run is not measured.
        for num_tokens in (4, 4, 4 + STEPS):
            started = time.perf_counter()
            llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
            times.append(time.perf_counter() - started)
        print(json.dumps({"count": count, "tok_s": count * STEPS / (times[2] - times[1])}), flush=True)


if __name__ == "__main__":
    print_rates(sys.argv[1])
