"""Stores prompts, and the replies to them; another CPU that is given the folder must restore all, and reply the same.

`tools/arm64` runs it here, and then with an emulated ARM64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.daemon.engine.driving import load, request, run_together, said, tokens, write_model
from tests.runtime.plan import tiny

MODELS: dict[str, Callable[[Path], Path]] = {
    "attention": lambda folder: write_model(folder / "model", "llama"),
    "delta rule": lambda folder: write_model(folder / "model", "qwen3_next"),
    "quants": lambda folder: tiny.write_gguf(folder / "tiny.gguf", quantised="Q4_1"),
    "mixture in quants": lambda folder: tiny.write_gguf(
        folder / "tiny.gguf", quantised="Q8_0", experts=4, expert_width=96
    ),
}
BLOCK, LENGTH = 16, 100


def main(folder: Path) -> None:
    for name, write_to in MODELS.items():
        own = folder / name.replace(" ", "-")
        if own.exists():
            restored, reply = replied(own)
            assert restored == LENGTH, f"{name}: {restored} of {LENGTH} tokens were restored"
            assert reply == (own / "reply").read_text(), f"{name}: another reply"
            print(f"{name}: {restored} tokens restored, the same reply", flush=True)
        else:
            own.mkdir(parents=True)
            (own / "path").write_text(write_to(own).name)
            (own / "reply").write_text(replied(own)[1])


def replied(folder: Path) -> tuple[int, str]:
    """Returns how many tokens of the prompt were restored, and all that the client is told."""
    engine = load(folder / (folder / "path").read_text(), folder / "kv", block_size=BLOCK)
    (client,) = run_together(engine, [request(tokens(LENGTH), logprobs=2, max_tokens=8)])
    assert engine.close()
    return client.done.usage.cached_tokens, repr(said(client))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
