"""State that a request stored is there for as long as somebody asks for it or continues it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.nouns import CacheOptions, Mark, Prompt
from diskprefix.store.store import Publication
from diskprefix.tokens import TokenIds
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

FULL = parse_scope("full", param="scope")
SHORT_S, LONG_S = 300.0, 3600.0


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv"))
    yield runner
    runner.close()


def ttls_s(runner: Runner, token_ids: TokenIds) -> list[int]:
    """The recorded times to live of a prompt's blocks, in their order."""
    cached = runner.cache.begin(Prompt(token_ids), CacheOptions(scope=FULL))
    names = cached.nodes.block_names
    cached.close()
    with runner.cache.store.snapshot() as snapshot:
        table = snapshot.usages()
    return [int(table.records["ttl_s"][table.row_of[name]]) for name in names]


@pytest.mark.parametrize("end", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("is_stored_before", [False, True])
def test_a_mark_keeps_every_block_that_ends_at_it_or_before(end: int, is_stored_before: bool, runner: Runner) -> None:
    """A mark on a block's end is about that block too, whether this request stores it or an earlier one did."""
    token_ids = random_prompt(1, 4 * BLOCK)
    options = CacheOptions(scope=FULL, ttl_s=SHORT_S)
    if is_stored_before:
        runner.run_prompt(Prompt(token_ids), options)
        runner.flush()
    runner.run_prompt(Prompt(token_ids, marks=(Mark(end, LONG_S), Mark(3 * BLOCK, SHORT_S))), options)
    runner.flush()
    num_marked = end // BLOCK
    expected = [LONG_S] * num_marked + [SHORT_S] * (3 - num_marked)
    runner.wait_for(lambda: ttls_s(runner, token_ids)[:3] == expected)


@pytest.mark.parametrize(
    ("state", "end", "num_tokens"),
    [("sliceable", 2 * BLOCK + 5, 2 * BLOCK + 5), ("qwen3_next", 2 * BLOCK, 4 * BLOCK)],
    ids=["tail", "checkpoint"],
)
def test_a_mark_keeps_the_state_that_is_stored_exactly_at_it(
    state: str, end: int, num_tokens: int, tmp_path: Path
) -> None:
    """No block ends with the prompt's tail or with a checkpoint, so their own records must say it."""
    model = tiny_llama() if state == "sliceable" else tiny_model(state, torch.float32)
    runner = Runner(model, tiny_settings(tmp_path / "kv"))
    scope = FULL if state == "sliceable" else parse_scope(BLOCK, param="scope")
    prompt = Prompt(random_prompt(1, num_tokens), marks=(Mark(end, LONG_S),))
    runner.run_prompt(prompt, CacheOptions(scope=scope, ttl_s=SHORT_S))
    runner.flush()
    with runner.cache.store.snapshot() as snapshot:
        assert snapshot.usages().records["ttl_s"].tolist() == [LONG_S] * 3, "two blocks, and what ends at the mark"
    runner.close()


def test_what_a_queued_publication_continues_is_not_removed_before_it_is_written(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is restored and its pins are given back; then it would expire, while what continues it still waits."""
    store = runner.cache.store
    short = random_prompt(1, 2 * BLOCK + 3)
    longer = np.concatenate([short, random_prompt(2, 3 * BLOCK)])
    runner.run(short, "full")
    runner.flush()
    disk, publish = threading.Event(), store.publish

    def publish_when_the_disk_is_free(publication: Publication) -> int:
        assert disk.wait(30)
        return publish(publication)

    monkeypatch.setattr(store, "publish", publish_when_the_disk_is_free)
    answer = runner.run(longer, "full")
    runner.cache.settle()
    assert (answer.report.restored, answer.report.saved) == (2 * BLOCK, "queued")
    later = time.time() + 1e6
    monkeypatch.setattr(store, "clock", lambda: later)
    assert store.evictor.expire(60.0) == 1, "the end of the short prompt, which nothing continues"
    disk.set()
    runner.flush()
    assert runner.cache.writer.dropped == 0
    runner.reopen()
    assert runner.run(longer, "full").report.restored == len(longer)
