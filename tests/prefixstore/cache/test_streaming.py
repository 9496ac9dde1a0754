"""Blocks are written while the prompt is computed: whatever happens on the way, what is stored is a sound beginning."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.errors import StoreFull, StoreUnavailable
from diskprefix.prefixstore.cache import saving as saving_module
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.pages import Captured
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.codec.codec import PIECE_BYTES
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import PromptDigest, TokenIds
from diskprefix.values import CacheOptions, Prompt, Scope
from tests.prefixstore.cache.opening import AUTO, FULL, OFF, Opened, gated, is_sound
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_llama, tiny_settings
from tests.steps import forward

KINDS = ["token", "grid", "qwen3_next"]
PROMPT = random_prompt(1, 6 * BLOCK + 3)


def only(num_tokens: int, ttl_s: float | None = None) -> CacheOptions:
    return CacheOptions(scope=Scope("tokens", num_tokens), ttl_s=ttl_s)


def stored_blocks(runner: Runner, token_ids: TokenIds) -> list[bool]:
    """Tells whether each block of the prompt is in the store."""
    cached = CachedRequest(runner.cache, Prompt(token_ids), FULL)
    names = cached.nodes.path.block_names
    cached.close()
    with runner.cache.store.snapshot() as snapshot:
        return [snapshot.usage(name) is not None for name in names]


def during_prefill(patch: pytest.MonkeyPatch, act: Callable[[CachedRequest, KVSequence], None]) -> None:
    """Calls `act` after each step of each prefill."""
    after_step = CachedRequest.after_step

    def and_act(self: CachedRequest, sequence: KVSequence) -> None:
        after_step(self, sequence)
        act(self, sequence)

    patch.setattr(CachedRequest, "after_step", and_act)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scope", ["full", 40 * BLOCK])
def test_what_is_saved_waits_in_pages_however_slow_the_disk_is(
    name: str, scope: str | int, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks in those of the sequence, and its end in pages that it leaves behind. The buffer is not used."""
    prompt = random_prompt(1, 40 * BLOCK + 3)
    runner = opened(name, kv_cache_write_buffer=10)
    writer = runner.cache.writer
    with gated(runner, monkeypatch):
        cold = runner.run(prompt, scope, reply=4)
        places = {(page.address, page.num_bytes) for page in filter(None, runner.sequence.pages())}
        full = [node for node in writer.pending.values() if len(node.token_ids) == BLOCK]
        assert {(address(node.payload[0]), node.payload_bytes) for node in full} <= places
        assert len(full) == 40
        held = {page for hold in runner.pool.holds for page in hold.pages}
        assert sum(page.num_bytes for page in held) >= 40 * BLOCK * runner.layout.bytes_per_token
        assert writer.room_bytes == 10
    assert (cold.report.saved, runner.cache.stats()["dropped"]) == ("queued", 0)
    assert (runner.pool.holds, writer.pending_bytes) == (set(), 0)
    runner.reopen()
    warm = runner.run(prompt, scope, reply=4)
    assert same(cold, warm)
    assert warm.report.restored == (len(prompt) if scope == "full" else scope)


def address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


@contextmanager
def beside(runner: Runner, prompt: TokenIds) -> Iterator[SimpleNamespace]:
    """Measures the peak of what is allocated beside the memory of the prompt's state, by numpy and Python."""
    runner.run(random_prompt(2, 10), "off")  # The plan of a step is made once.
    runner.sequence.reserve(len(prompt) + 16)
    found = SimpleNamespace(peak_bytes=0)
    tracemalloc.start()
    yield found
    found.peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_a_long_state_takes_no_memory_beside_itself_but_some_pieces(tmp_path: Path) -> None:
    """32 MiB of state, saved and restored in pieces."""
    model = tiny_llama(torch.bfloat16, num_key_value_heads=16, num_attention_heads=16, head_dim=128)
    settings = tiny_settings(tmp_path, block_size=128)
    runner, prompt = Runner(model, settings, exact_at=None), random_prompt(1, 2048)
    state_bytes = len(prompt) * runner.layout.bytes_per_token
    assert state_bytes == 32 << 20
    with beside(runner, prompt) as saving:
        cold = runner.run(prompt, "full", reply=4)
        runner.flush()
    assert runner.cache.stats()["saved_bytes"] >= state_bytes
    assert saving.peak_bytes < 6 * PIECE_BYTES
    runner.reopen()
    with beside(runner, prompt) as restoring:
        warm = runner.run(prompt, "full", reply=4)
    assert restoring.peak_bytes < 6 * PIECE_BYTES
    assert same(cold, warm)
    assert warm.report.restored == len(prompt)
    runner.close()


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_stored_before_the_prompt_is_computed_and_its_entry_after(
    name: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written stays until what continues it is written too, though it may be old: a prefill takes minutes."""
    runner = opened(name)
    store, now = runner.cache.store, time.time()
    seen: list[tuple[list[bool], int]] = []

    def look(_: CachedRequest, _sequence: KVSequence) -> None:
        runner.flush()
        patch.setattr(store, "clock", lambda: now + 1e6)
        assert store.evictor.expire(1.0) == 0
        seen.append((stored_blocks(runner, PROMPT), store.counts()["entries"]))

    with monkeypatch.context() as patch:
        during_prefill(patch, look)
        runner.run(PROMPT, "full")
        runner.flush()
    assert seen[:6] == [([True] * done + [False] * (6 - done), 1) for done in range(1, 7)], "with a partial entry"
    assert (store.counts()["entries"], runner.cache.stats()["dropped"]) == (1, 0)
    assert is_sound(runner)
    assert not store.evictor.pinned()


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wanted_after", [1, 2, 5, 7])
def test_where_the_memory_is_wanted_while_the_disk_is_slow_what_was_queued_before_is_stored(
    name: str, wanted_after: int, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dropped block takes all with it that continues it, and the entry; what comes after is dropped too."""
    runner = opened(name)
    prompt = random_prompt(1, 7 * BLOCK + 3)
    cold = runner.run(prompt, "off", reply=2)

    def want(_: CachedRequest, sequence: KVSequence) -> None:
        if sequence.num_tokens == wanted_after * BLOCK < 7 * BLOCK:
            assert runner.cache.writer.drop_pages()

    # Here the sequence goes on; where memory is wanted, pages are dropped that no sequence uses.
    monkeypatch.setattr(Captured, "frees", lambda _captured: True)
    with monkeypatch.context() as patch, gated(runner, monkeypatch):
        during_prefill(patch, want)
        first = runner.run(prompt, "full", reply=2)
        if wanted_after == 7:
            # Only the end behind the blocks is lost, and the reply's.
            assert runner.cache.writer.drop_pages()
            assert name != "token" or runner.cache.writer.drop_pages()
    assert same(first, cold)
    num_stored = 7 if wanted_after == 7 else wanted_after - 1
    assert stored_blocks(runner, prompt) == [True] * num_stored + [False] * (7 - num_stored)
    stats = runner.cache.stats()
    # What is stored of it is listed as a part.
    assert (stats["entries"], stats["prompts"], stats["dropped"]) == (num_stored > 0, 1, 1)
    assert (stats["pending_bytes"], stats["errors"], runner.pool.holds) == (0, 0, set())
    assert [record.message[-9:] for record in caplog.records if "not saved" in record.message] == ["om for it"]
    assert is_sound(runner)
    assert not runner.cache.store.evictor.pinned()
    again = runner.run(prompt, "full", reply=2)
    assert same(again, cold)
    assert name == "qwen3_next" or again.report.restored == num_stored * BLOCK
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("error", [StoreFull("no room"), StoreUnavailable("the disk is away"), MemoryError()], ids=repr)
@pytest.mark.parametrize("lost", [0, 3])
def test_a_store_that_fails_in_the_middle_loses_what_comes_after_and_no_answer(
    name: str, error: Exception, lost: int, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened(name)
    cold = runner.run(PROMPT, "off", reply=2)
    publish = runner.cache.store.publish
    published: list[list[bytes]] = []

    def fail_once(pub: Publication) -> int:
        """One publication is never written: not with what else waits, and not alone."""
        names = [node.name for node in pub.nodes]
        if names not in published:
            published.append(names)
        if published.index(names) == lost:
            raise error
        return publish(pub)

    with monkeypatch.context() as patch:
        patch.setattr(runner.cache.store, "publish", fail_once)
        during_prefill(patch, lambda *_: runner.flush())
        first = runner.run(PROMPT, "full", reply=2)
        runner.flush()
    assert same(first, cold)
    assert first.report.saved == "dropped"
    assert stored_blocks(runner, PROMPT) == [True] * lost + [False] * (6 - lost)
    stats = runner.cache.stats()
    assert (stats["entries"], stats["dropped"], stats["pending_bytes"]) == (lost > 0, 1, 0)
    assert is_sound(runner)
    assert not runner.cache.store.evictor.pinned()
    assert same(runner.run(PROMPT, "full", reply=2), cold)
    runner.reopen()
    assert runner.run(PROMPT, "full").report.restored == len(PROMPT)
    assert runner.cache.stats()["state"] == "ok"


def test_a_block_that_is_written_in_the_middle_has_its_cost(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the prompts before had it, and before there are any, as its own prompt had it so far."""
    runner = opened("token")

    def seconds() -> list[float]:
        runner.flush()
        with runner.cache.store.snapshot() as snapshot:
            return sorted(map(float, snapshot.usages().records["prefill_s"]))

    clock = iter(np.arange(1000.0, 9000.0, 0.5))
    with monkeypatch.context() as patch:
        patch.setattr(saving_module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)), time=time.time))
        during_prefill(patch, lambda *_: runner.flush())
        runner.run(random_prompt(1, 2 * BLOCK + 3), 2 * BLOCK)
    # Each look at the clock takes half a second: after one step of 16 tokens, and after two.
    assert seconds() == [pytest.approx(0.5)] * 2
    for num_tokens in (100, 200, 300, 400):
        runner.cache.cost_model.record_prefill(num_tokens, num_tokens / 100)
    runner.run(random_prompt(2, 2 * BLOCK + 3), 2 * BLOCK)
    assert seconds()[:2] == [pytest.approx(BLOCK / 100)] * 2


def test_a_batch_takes_what_fits_together_and_no_more(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """State in memory is published at once: it must not be copied at once."""
    runner = opened("token")
    monkeypatch.setattr(saving_module, "_BATCH_BYTES", 3 * BLOCK * runner.layout.bytes_per_token)
    sizes: list[int] = []
    publish = runner.cache.store.publish

    def noted(pub: Publication) -> int:
        sizes.append(len(pub.nodes))
        return publish(pub)

    prompt = random_prompt(1, 8 * BLOCK)
    runner.run(prompt, "off")
    cached = CachedRequest(runner.cache, Prompt(prompt), only(8 * BLOCK - 1))
    cached.fetch(runner.sequence, 8 * BLOCK, np.zeros(4, np.float32))
    cached.choose(runner.sequence)
    with monkeypatch.context() as patch:
        patch.setattr(runner.cache.store, "publish", noted)
        cached.publish(runner.sequence, np.zeros(4, np.float32), 0.0)
        cached.close()
        runner.flush()
    assert sizes == [3, 3, 2]
    assert all(stored_blocks(runner, prompt)[:7])


# Requests that are cancelled.


def ttls_s(runner: Runner) -> list[tuple[int, NodeKind, int]]:
    """The end, the kind and the time to live of each stored node."""
    with runner.cache.store.snapshot() as snapshot:
        table = snapshot.usages()
        nodes = [snapshot.node(name) for name in table.names]
        ttls = table.records["ttl_s"].tolist()
    return sorted((node.end, node.kind, ttl) for node, ttl in zip(nodes, ttls, strict=True) if node is not None)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [FULL, AUTO, only(2 * BLOCK)], ids=["full", "auto", "number"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_cancelled_request_that_comes_again_goes_on_from_where_it_was(
    name: str, options: CacheOptions, steps: int, opened: Opened
) -> None:
    runner, prompt = opened(name), Prompt(PROMPT)
    cold = runner.run_prompt(prompt, OFF, reply=3)
    assert runner.cancelled(prompt, options, steps).saved == "queued"
    runner.reopen()
    assert is_sound(runner)
    assert runner.cache.stats()["prompts"] == 0
    with runner.cache.store.snapshot() as snapshot:
        found = [(entry.kind, entry.came_from) for _, entry in snapshot.entries()]
    came_from = PromptDigest.of(runner.cache.store.secret, PROMPT)
    assert found == [("partial", came_from)], "it is no prompt that was answered"
    again = runner.run_prompt(prompt, options, reply=3)
    assert (again.report.restored, again.num_forwards) == (steps * BLOCK, 7 - steps)
    assert same(again, cold)


def test_where_a_model_is_exact_at_every_token_nothing_of_it_is_computed_again(opened: Opened) -> None:
    """It is cancelled in the middle of a block; later that block takes the place of its part."""
    runner = opened("token")
    cold = runner.run(PROMPT, "off", reply=3)
    cached = CachedRequest(runner.cache, Prompt(PROMPT), AUTO)
    runner.new_sequence(len(PROMPT))
    cached.restore(runner.sequence)
    forward(runner.model, runner.sequence, torch.from_numpy(PROMPT[: 2 * BLOCK + 5]).long().unsqueeze(0))[-1]
    cached.after_step(runner.sequence)
    cached.save_partial(runner.sequence, PROMPT[: 2 * BLOCK + 5])
    assert cached.close().saved == "queued"
    runner.reopen()
    assert runner.cache.stats()["blocks"] == 3
    again = runner.run(PROMPT, "full", reply=3)
    assert again.report.restored == 2 * BLOCK + 5
    assert same(again, cold)
    runner.flush()
    assert runner.cache.stats()["blocks"] == 6 + 1, "the tail, and no part of a block"
    assert is_sound(runner)


def test_it_goes_on_also_where_it_is_cancelled_again_and_again(opened: Opened) -> None:
    runner = opened("qwen3_next")
    for done in range(6):
        assert runner.cancelled(Prompt(PROMPT), FULL, 1).restored == done * BLOCK
        runner.reopen()
    assert runner.run_prompt(Prompt(PROMPT), FULL).num_forwards == 1


@pytest.mark.parametrize(("asked_s", "kept_s"), [(None, 600), (60.0, 600), (3600.0, 3600)])
def test_what_the_policy_would_not_keep_is_kept_for_ten_minutes_or_as_long_as_the_request_asks(
    asked_s: float | None, kept_s: int, opened: Opened
) -> None:
    runner, states = opened("token"), opened("qwen3_next")
    runner.cancelled(Prompt(PROMPT), only(2 * BLOCK, asked_s), 4)
    states.cancelled(Prompt(PROMPT), only(1, asked_s), 4)
    runner.flush()
    states.flush()
    assert [ttl for _, _, ttl in ttls_s(runner)] == [asked_s or 0, asked_s or 0, kept_s, kept_s]
    assert {(kind, ttl) for _, kind, ttl in ttls_s(states)} == {(NodeKind.BLOCK, kept_s), (NodeKind.CHECKPOINT, kept_s)}


def test_once_the_policy_keeps_it_it_stays(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = opened("token")
    runner.cancelled(Prompt(PROMPT), only(1), 4)
    runner.run_prompt(Prompt(PROMPT), FULL)
    runner.flush()
    later = time.time() + 1e6
    monkeypatch.setattr(runner.cache.store, "clock", lambda: later)
    assert runner.cache.store.evictor.expire(0.0) == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("why", ["off", "read only", "computing is faster"])
def test_a_cancelled_request_that_must_not_save_leaves_nothing(name: str, why: str, opened: Opened) -> None:
    runner = opened(name, kv_cache_gate="auto")
    if why == "computing is faster":
        for num_tokens in (100, 200, 300, 400):
            runner.cache.cost_model.record_prefill(num_tokens, num_tokens / 1e6)
            runner.cache.cost_model.record_restore(num_tokens, num_tokens * 1.0)
    options = {"off": OFF, "read only": replace(FULL, save=False)}.get(why, FULL)
    assert runner.cancelled(Prompt(PROMPT), options, 4).saved == "none"
    runner.flush()
    assert runner.cache.store.counts()["blocks"] == 0
