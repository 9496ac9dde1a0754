"""What one CPU has stored is of use to every other one: all tokens are restored, with the bits of a cold run there.

Each variant of the operators stands for the CPUs that choose it; all have the same bits (`runtime/load/test_bits.py`).
`tools/arm64` restores on ARM64 what was stored here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diskprefix.daemon.engine.loop import Engine
from tests.daemon.engine.driving import alone, load, request, run_together, said, tokens
from tests.daemon.engine.stored_prompts import BLOCK, LENGTH, MODELS
from tests.native.variants import of_this_cpu

CPUS = of_this_cpu()[::-1]
"""The oldest one first."""
Open = Callable[..., Engine]


@pytest.fixture(params=MODELS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens an engine of a machine with a CPU, by the kernels that it would choose."""
    model = MODELS[request.param](tmp_path)
    with ExitStack() as engines:

        def open_on(kernels: str, machine: str = "kv", **settings: Any) -> Engine:
            engine = load(model, tmp_path / machine, kernels=kernels, block_size=BLOCK, **settings)
            engines.callback(engine.close)
            return engine

        yield open_on


@pytest.mark.cases(2)
def test_a_prompt_stored_on_the_oldest_cpu_is_restored_on_the_newest(opened: Open) -> None:
    asked = request(tokens(LENGTH), logprobs=2, max_tokens=8)
    engine = opened(CPUS[0])
    (first,) = run_together(engine, [asked])
    assert engine.close()
    engine = opened(CPUS[-1])
    cold = alone(engine, asked)
    (again,) = run_together(engine, [asked])
    assert again.done.usage.cached_tokens == LENGTH
    assert said(first) == said(cold) == said(again)


@pytest.mark.parametrize("opened", ["attention", "quants"], indirect=True)
def test_machines_with_other_cpus_share_a_bucket(opened: Open, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the key of the tests' fleet")
    key.chmod(0o600)
    shared = {"remote_tier": (tmp_path / "bucket").as_uri(), "remote_write": "all", "namespace_key_file": key}
    asked = request(tokens(LENGTH), logprobs=2, max_tokens=8)
    engine = opened(CPUS[0], "one", **shared)
    (first,) = run_together(engine, [asked])
    assert engine.close()
    engine = opened(CPUS[-1], "other", **shared)
    (other,) = run_together(engine, [asked])
    assert other.done.cache is not None
    assert (other.done.cache.source, other.done.cache.restored >= LENGTH // BLOCK * BLOCK) == ("remote", True)
    assert said(other) == said(first)
