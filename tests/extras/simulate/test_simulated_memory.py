"""The simulated memory finds, keeps and forgets what a page cache does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.extras.simulate.simulated_memory import SimulatedMemory
from diskprefix.kv import kept_blocks
from diskprefix.kv.page_cache import PageCache
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.tokens import root_hash
from tests.extras.simulate.test_agreement import model_of
from tests.runner import BLOCK, Runner, random_prompt, tiny_settings


@pytest.mark.parametrize(
    ("state", "num_blocks"),
    [("token", 20), ("sliceable", 20), ("mamba2", 20), *((state, 999) for state in ("token", "lfm2", "mamba2"))],
)
def test_memory_is_as_in_a_daemon(state: str, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "_RECLAIMED", 1)
    is_exact = state in ("token", "lfm2")
    runner = Runner(model_of(state), tiny_settings(tmp_path), exact_at="token" if is_exact else "grid")
    layout = runner.layout
    runner.close()
    geometry = Geometry(layout.bytes_per_token, layout.state_bytes, exact_at=layout.exact_at)
    limit = num_blocks * (BLOCK * layout.bytes_per_token + layout.state_bytes)
    device = torch.device("cpu")
    pages = PageCache(layout, device, block_size=BLOCK, limit_bytes=limit, free_bytes=lambda: 1 << 40)
    memory, owner = SimulatedMemory(limit, geometry, BLOCK), Owner(root_hash(""), 0, None)
    random, prompts = np.random.default_rng(3), [random_prompt(0, 40)]
    num_found = 0
    for number in range(150):
        before = prompts[-1 - random.integers(min(len(prompts), 5))]
        before = before[: len(before) if random.integers(2) else random.integers(1, len(before))]
        prompt = np.concatenate([before, random_prompt(number, int(random.choice([1, BLOCK, 23])))])[: 10 * BLOCK]
        prompts.append(prompt)
        sequence = pages.begin(owner, prompt)
        assert isinstance(sequence, KVSequence)
        assert memory.match("", prompt) == sequence.num_tokens
        num_found += sequence.num_tokens > 0
        assert sequence.make_room(len(prompt))
        sequence.truncate(len(prompt))
        pages.set_ready(sequence, len(prompt))
        pages.end(sequence, keep=True)
        memory.keep("", prompt, len(prompt))
        assert pages.check() == []
    assert num_found
