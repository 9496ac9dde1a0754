"""What can be seen of the requests in an engine while they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from diskprefix.app import load_engine
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.gauges import Activity
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import GenerateRequest, SamplingParams
from diskprefix.nouns import CacheOptions, Prompt
from diskprefix.settings import Settings
from tests.engine.driving import Client, after_steps, wait_until_idle
from tests.model import tiny

BLOCK = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("activity")
    settings = Settings(
        model=str(tiny.write_folder(folder / "model", dtype=torch.bfloat16)),
        kv_cache_dir=folder / "kv",
        block_size=BLOCK,
        kv_cache_min_tokens=BLOCK,
        kv_cache_budget=32 << 20,
        kv_cache_gate="off",
        max_sequences=1,
    )
    engine = load_engine(settings, lambda _: None)
    engine.max_rows = BLOCK
    yield engine
    engine.close()


def request(name: str, num_tokens: int, *, max_tokens: int = 8, seed: int = 0) -> GenerateRequest:
    token_ids = np.random.default_rng(seed).integers(3, 250, num_tokens).astype(np.int32)
    return GenerateRequest(
        id=name,
        prompt=Prompt(token_ids),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
        cache=CacheOptions(scope=parse_scope("full", param="scope")),
    )


def seen_after(engine: Engine, steps: int, *requests: GenerateRequest) -> list[Activity]:
    """What another thread sees after so many steps, while the engine's thread stands still."""
    inbox = Inbox(engine.serve, 8)
    for one in requests:
        Client(inbox, one)
    found: list[Activity] = []

    def look() -> None:
        looking = threading.Thread(target=lambda: found.extend(inbox.activities()))
        looking.start()
        looking.join()

    with pytest.MonkeyPatch.context() as patch:
        after_steps(patch, steps, look)
        inbox.start()
        wait_until_idle(inbox)
    assert inbox.activities() == []
    inbox.stop(0)
    return found


def test_a_prompt_is_seen_to_grow_and_what_comes_after_it_to_wait(engine: Engine) -> None:
    first, second = seen_after(engine, 2, request("first", 100), request("second", 60, seed=1))
    assert (first.id, first.state, first.ready_tokens, first.prompt_tokens) == ("first", "prefilling", 2 * BLOCK, 100)
    assert (second.id, second.state, second.ready_tokens, second.prompt_tokens) == ("second", "waiting", 0, 60)
    assert (str(first.scope), first.queue_s is None, second.queue_s) == ("full", False, None)
    assert first.ttft_s is None


def test_a_reply_is_seen_to_grow_with_what_was_restored_before_it(engine: Engine) -> None:
    seen_after(engine, 1, request("known", 48, seed=2))
    [activity] = seen_after(engine, 3, request("again", 48, seed=2))
    assert (activity.state, activity.restored_tokens, activity.ready_tokens) == ("decoding", 48, 48)
    assert activity.reply_tokens == 4
    assert activity.ttft_s is not None
    assert activity.tokens_per_s is not None
    assert activity.tokens_per_s > 0
    assert activity.elapsed_s >= activity.ttft_s
