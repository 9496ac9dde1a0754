"""Several requests at once: whose turn it is, what stays in memory when one is over, and what waits for memory. That
each gets the reply that it gets alone is what `test_lives.py` is about."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from msgspec.structs import replace

from diskprefix.daemon.engine.active_requests import ActiveRequests
from diskprefix.daemon.engine.constraints.constraint_grammar import Forbidden, forbidden_by
from diskprefix.daemon.engine.forward import forward
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent, GenerateRequest, ReadEvent, Reading
from diskprefix.errors import ContextTooLong
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.cache.tiers.tier import Prefetched, PrefetchRequest
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.housekeeping import Housekeeping
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import node_root
from diskprefix.prefixstore.store.writer import WriterLimits
from diskprefix.tokens import TokenIds, TokenPath, as_token_ids, root_hash
from diskprefix.values import SHARED, Tenant
from tests.daemon.engine.driving import (
    WORDS,
    Client,
    after_steps,
    alone,
    bound_memory,
    load,
    patch_steps,
    recorded_requests,
    request,
    run_request,
    run_together,
    running,
    tokens,
    wait_until_idle,
    write_model,
)
from tests.runtime.plan import tiny
from tests.waiting import wait_for


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Engine:
    engine = load(folder, tmp_path / "kv")
    assert engine.cache.layout.exact_at == "token"
    return engine


def settle(engine: Engine) -> None:
    engine.cache.finish_aside()
    assert engine.cache.writer.flush(30)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step."""
    found = list[int]()

    def noted(run: Any, step: Any) -> Any:
        found.append(sum(len(rows.token_ids) for rows in step))
        return run(step)

    patch_steps(monkeypatch, noted)
    return found


# Whose turn it is.


class Masks:
    """In the place of `forbidden_by`: lets `num_before` masks be computed at once, and the others when they may."""

    def __init__(self, patch: pytest.MonkeyPatch, num_before: int) -> None:
        self.go_on, self.num_before, self.num_asked = threading.Event(), num_before, 0
        patch.setattr("diskprefix.daemon.engine.constraints.constrained_reply.forbidden_by", self.compute)

    def compute(self, matcher: LLMatcher, vocab_size: int) -> Forbidden:
        self.num_asked += 1
        assert self.num_asked <= self.num_before or self.go_on.wait(120)
        return forbidden_by(matcher, vocab_size)

    def wait_until_held(self) -> None:
        wait_for(lambda: self.num_asked > self.num_before)


HELD = request(tokens(80, 6), n=3, temperature=1.0, seed=2, constraint=WORDS)


@pytest.mark.parametrize("num_before", [0, 4], ids=["the first", "a later one"])
def test_a_mask_that_is_not_ready_delays_nobody_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    wanted = alone(engine, HELD)
    masks = Masks(monkeypatch, num_before)
    with running(engine) as inbox:
        held = Client(inbox, HELD)
        masks.wait_until_held()
        free = Client(inbox, request(tokens(60, 2)))
        wait_for(lambda: free.events and isinstance(free.events[-1], DoneEvent))
        assert not any(isinstance(event, DoneEvent) for event in held.events)
        masks.go_on.set()
    assert held.done
    assert [held.tokens_of(choice) for choice in range(3)] == [wanted.tokens_of(choice) for choice in range(3)]


def test_a_reply_whose_mask_never_comes_can_be_cancelled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(monkeypatch, 0)
    with running(engine) as inbox:
        held = Client(inbox, HELD)
        masks.wait_until_held()
        held.ticket.cancel()
        inbox.wake()
        wait_until_idle(inbox)
    masks.go_on.set()
    assert not any(isinstance(event, DoneEvent) for event in held.events)


def as_of(name: str, value: str, token_ids: TokenIds, **params: Any) -> GenerateRequest:
    named: dict[str, Any] = {name: value}
    return request(token_ids, **named, **params)


@pytest.mark.parametrize("name", ["share", "conversation"])
def test_one_with_many_requests_leaves_every_second_place_to_the_other(folder: Path, tmp_path: Path, name: str) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2, record=tmp_path / "trace.jsonl")
    callers = ["many", "many", "many", "one"]
    run_together(engine, [as_of(name, caller, tokens(80 + i, i)) for i, caller in enumerate(callers)])
    engine.close()
    ended = [one.prompt_tokens for one in recorded_requests(tmp_path / "trace.jsonl")]
    assert (sorted(ended[:2]), ended[2:]) == ([80, 83], [81, 82])


@pytest.mark.parametrize("name", ["share", "conversation"])
def test_who_runs_nothing_does_not_wait_for_the_many_replies_of_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2, record=tmp_path / "trace.jsonl")
    many = as_of(name, "many", tokens(80), n=6, max_tokens=60)
    one = as_of(name, "one", tokens(83, 1), max_tokens=2)
    with running(engine) as inbox:
        inbox.submit(many, lambda _: None)
        after_steps(monkeypatch, 3, lambda: inbox.submit(one, lambda _: None))
        wait_until_idle(inbox)
    engine.close()
    assert [ended.prompt_tokens for ended in recorded_requests(tmp_path / "trace.jsonl")] == [83, 80]


def test_steps_beside_replies_keep_the_pace_and_the_replies_are_those_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, tmp_path / "kv", block_size=256)
    steps = list[tuple[int, int]]()

    def noted(model: Any, step: Any) -> Any:
        num_decoding = sum(chunk.sequence.is_decoding for chunk in step)
        steps.append((num_decoding, sum(chunk.num_rows for chunk in step) - num_decoding))
        return forward(model, step)

    monkeypatch.setattr("diskprefix.daemon.engine.loop.forward", noted)
    # A machine on which a step takes 20 ms, and each row of a prompt 1 ms.
    engine.clock = lambda: sum(0.02 + 0.001 * rows for _, rows in steps)
    requests = [request(tokens(60, 1), scope="off", max_tokens=60), request(tokens(2000, 2), scope="off")]
    unpaced = [run_together(engine, [one])[0].tokens for one in requests]
    steps.clear()
    assert [client.tokens for client in run_together(engine, requests)] == unpaced
    beside = [rows for num_decoding, rows in steps if num_decoding and rows]
    assert len(beside) > 20
    usual = [rows for rows in beside[10:-1] if rows <= 32]
    assert all(rows >= 25 for rows in usual), "of the 50 ms, 20 are for the reply"
    assert len(usual) > 4 / 5 * len(beside[10:-1]), "now and then, a step with twice the rows is measured"


# What stays in memory.


class Asked:
    """In the place of the shared tier: notes how many tokens are in memory when it is asked."""

    def __init__(self) -> None:
        self.in_memory_tokens: list[int] = []

    def prefetch(self, request: PrefetchRequest) -> Prefetched:
        self.in_memory_tokens.append(request.in_memory_tokens)
        return Prefetched()

    def upload(self, _: object) -> None:
        """Nothing is shared."""


def test_the_next_turn_goes_on_from_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(engine.cache, "remote", asked)
    (first,) = run_together(engine, [request(tokens(300))])
    turn = np.concatenate([tokens(300), np.array(first.tokens, np.int32), tokens(20, 1)])
    (second,) = run_together(engine, [request(turn)])
    assert second.done.usage.cached_tokens == 300 + len(first.tokens) - 1
    assert second.done.cache.source == "memory"
    assert asked.in_memory_tokens == [0, second.done.usage.cached_tokens], "the shared tier is told what memory has"
    assert len(engine.pages.kept.sequence_ends()) == 2


def test_another_conversation_with_the_same_beginning_shares_it(engine: Engine) -> None:
    base = tokens(200)
    one, other = (np.concatenate([base, tokens(1000, seed)]) for seed in (1, 2))
    run_together(engine, [request(one)])
    (client,) = run_together(engine, [request(other)])
    assert (client.done.usage.cached_tokens, client.done.cache.source) == (200, "memory")
    (again,) = run_together(engine, [request(one)])
    assert again.done.usage.cached_tokens == len(one)


@pytest.mark.parametrize(
    "options", [{"scope": "off"}, {"save": False}, {"tenant": Tenant.of_key("somebody")}], ids=["off", "read", "tenant"]
)
def test_what_is_nobody_elses_is_not_found_in_memory(engine: Engine, options: dict[str, Any]) -> None:
    run_together(engine, [request(tokens(300), **options)])
    (client,) = run_together(engine, [request(tokens(300), save=False)])
    assert client.done.usage.cached_tokens == 0


def test_what_was_purged_is_forgotten_in_memory_too(engine: Engine) -> None:
    run_together(engine, [request(tokens(300))])
    settle(engine)
    purge(engine.cache.store, PurgeFilter(), time.time(), lambda _: None)
    # The writer looks for purges of other processes every second.
    wait_for(lambda: engine.cache.namespaces.epochs == engine.cache.store.epochs)
    (client,) = run_together(engine, [request(tokens(300))])
    assert client.done.usage.cached_tokens == 0


def test_a_purge_of_one_tenant_leaves_the_requests_memory_and_waiting_saves_of_others_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the purged tenant nothing is left, in this process and in one that starts afterwards. The store had a record
    of neither when it was purged."""
    monkeypatch.setattr("diskprefix.prefixstore.store.writer.Writer.resume_writing", lambda _self: None)
    engine, (purged, other) = load(folder, tmp_path / "kv"), map(SHARED.with_salt, ("purged", "other"))
    cache, num_steps = engine.cache, 0
    cache.writer.limits = WriterLimits(max_held_s=600.0, pause_s=600.0)
    cache.writer.pause_writing()
    ended = {tenant: request(tokens(300), tenant=tenant) for tenant in (purged, other)}
    runs = {tenant: request(tokens(200, 5), tenant=tenant, max_tokens=30) for tenant in (purged, other)}
    run_together(engine, ended.values())

    def with_a_purge(run: Any, step: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 15:
            # As another process does it.
            assert cache.writer.num_pending
            purge(cache.store, PurgeFilter(salt="purged"), time.time(), lambda _: None)
            wait_for(lambda: cache.namespaces.epochs == cache.store.epochs)
        return run(step)

    with monkeypatch.context() as patch:
        patch_steps(patch, with_a_purge)
        clients = run_together(engine, runs.values())
    assert num_steps > 15
    assert [client.done.usage.completion_tokens for client in clients] == [30, 30]
    assert clients[0].tokens == clients[1].tokens
    assert {block.owner.tenant for block in engine.pages.kept.blocks.values()} == {str(other)}

    def sources(of: Engine) -> list[tuple[int, str]]:
        asked = [replace(one, cache=replace(one.cache, save=False)) for one in (*ended.values(), *runs.values())]
        cached = [client.done for one in asked for client in run_together(of, [one])]
        return [(done.usage.cached_tokens, done.cache.source) for done in cached]

    assert sources(engine) == [(0, "none"), (300, "memory"), (0, "none"), (200, "memory")]
    monkeypatch.undo()
    cache.writer.resume_writing()
    dropped = cache.writer.dropped
    settle(engine)
    assert cache.writer.dropped == dropped
    with cache.store.snapshot() as snapshot:
        entries = [entry for _, entry in snapshot.entries()]
        roots = {node_root(value) for _, value in snapshot.records("nodes")} | {entry.root for entry in entries}
    assert (len(entries), roots) == (2, {root_hash(cache.root_record(other).identity)})
    assert engine.close()
    again = load(folder, tmp_path / "kv")
    assert sources(again) == [(0, "none"), (300, "disk"), (0, "none"), (200, "disk")]
    assert again.close()


def test_an_engine_without_work_forgets_what_was_to_be_kept_for_a_time_only(engine: Engine) -> None:
    one = request(tokens(300))
    with running(engine) as inbox:
        inbox.submit(replace(one, cache=replace(one.cache, ttl_s=0.5)), lambda _: None)
        wait_until_idle(inbox)
        wait_for(lambda: not engine.pages.kept.sequence_ends())


@pytest.mark.parametrize(("ttl_s", "saved"), [(None, [78]), (60, [])])
def test_what_has_expired_is_not_saved(
    ttl_s: float | None, saved: list[int], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "diskprefix.daemon.engine.served_model.save_idle",
        lambda _cache, _state, token_ids, *_: asked.append(len(token_ids)),
    )
    one = request(tokens(67, 1))
    run_request(engine, replace(one, cache=replace(one.cache, ttl_s=ttl_s)))
    # A read that is open now would have hung for a minute.
    wait_for(lambda: not engine.cache.store.reads._open)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    engine.save_idle()
    assert asked == saved


def test_what_was_used_longest_ago_gives_its_memory_to_others(engine: Engine) -> None:
    bound_memory(engine.pages, engine.pages.pool.sequence_bytes(1000))
    for seed in range(4):
        run_together(engine, [request(tokens(300, seed))])
    settle(engine)
    assert engine.cache.writer.flush(30)
    sources = [run_together(engine, [request(tokens(300, seed))])[0].done.cache.source for seed in (3, 0)]
    assert sources == ["memory", "disk"]


def test_a_client_that_leaves_while_its_prompt_is_fetched_leaves_what_was_in_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_together(engine, [request(tokens(300), save=True)])
    run_step = Restore.run_step
    with running(engine) as inbox, monkeypatch.context() as patch:
        clients: list[Client] = []

        def leaving(*args: Any) -> None:
            run_step(*args)
            clients[0].ticket.cancel()

        patch.setattr(Restore, "run_step", leaving)
        with inbox._changed:
            clients.append(Client(inbox, request(np.concatenate([tokens(300), tokens(50, 1)]))))
        wait_until_idle(inbox)
    assert engine.pages.check() == []
    assert engine.pages.stats()["kept_tokens"] >= 300


# What is computed once.


def test_identical_requests_compute_the_prompt_once_and_a_repeat_computes_nothing_of_it(
    engine: Engine, rows: list[int]
) -> None:
    clients = run_together(engine, [request(tokens(900)) for _ in range(3)])
    assert sum(rows) < 900 + 3 * 20
    assert clients[0].tokens == clients[1].tokens == clients[2].tokens
    assert [client.done.usage.cached_tokens for client in clients] == [0, 900, 900]
    rows.clear()
    (again,) = run_together(engine, [request(tokens(900))])
    assert again.tokens == clients[0].tokens
    assert set(rows) == {1}


@pytest.mark.parametrize("options", [{}, {"save": False}, {"scope": "off"}], ids=["shared", "read", "off"])
def test_the_prompt_of_several_choices_is_computed_once_and_stays_if_it_is_shared(
    options: dict[str, Any], engine: Engine, rows: list[int]
) -> None:
    (client,) = run_together(engine, [request(tokens(900), n=3, **options)])
    assert sum(rows) <= 900 + 3 * 12
    assert client.tokens_of(1) == client.tokens_of(2) == client.tokens
    assert (engine.pages.stats()["kept_tokens"] > 0) == (not options)


def test_a_request_that_is_sent_again_goes_on_where_the_first_was_cancelled(engine: Engine, rows: list[int]) -> None:
    for _ in range(5):
        with running(engine) as inbox, pytest.MonkeyPatch.context() as patch:
            client = Client(inbox, request(tokens(1500)))
            after_steps(patch, 1, client.ticket.cancel)
            wait_until_idle(inbox)
    (last,) = run_together(engine, [request(tokens(1500))])
    assert len(last.tokens) == 12
    assert sum(rows) <= 1500 + 12


# Memory that does not suffice.


def test_where_memory_is_for_few_all_are_served_and_what_never_fits_fails_alone(engine: Engine) -> None:
    bound_memory(engine.pages, engine.pages.pool.sequence_bytes(1024))
    asked = [request(tokens(1000), max_tokens=60), request(tokens(100)), request(tokens(2000)), request(tokens(90, 1))]
    outgrows, short, too_long, other = run_together(engine, asked)
    for failed in (outgrows, too_long):
        with pytest.raises(ContextTooLong, match="--kv-memory allows"):
            failed.done  # noqa: B018
    assert short.done
    assert other.done


def test_choices_of_which_one_loses_the_prompts_memory_are_all_the_same(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The first has ended, the second has its memory, the third waits for it, and an older request takes it away. Pages
    that are saved would be freed first."""
    old = request(tokens(990, 1), max_tokens=100, save=False)
    many = request(tokens(1000, 2), max_tokens=20, n=3, save=False)
    expected = alone(engine, old).tokens, alone(engine, many).tokens
    bound_memory(engine.pages, 2 * engine.pages.pool.sequence_bytes(1024))
    caplog.set_level("INFO")
    one, several = run_together(engine, [old, many])
    assert (one.tokens, several.tokens) == expected
    assert several.tokens_of(1) == several.tokens_of(2) == several.tokens
    assert "others need its memory" in caplog.text


def refuse_room(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """Has a sequence get no room for so many tokens, once."""
    make_room, refused = KVSequence.take_pages_to, list[int]()

    def refusing(self: KVSequence, end: int) -> bool:
        if end != num_tokens or refused:
            return make_room(self, end)
        refused.append(end)
        return False

    monkeypatch.setattr(KVSequence, "take_pages_to", refusing)


def test_a_reply_that_loses_its_memory_while_nothing_else_runs_begins_again_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is saved, so no writer gives pages back, and nothing that expires ends the wait."""
    monkeypatch.setattr(Housekeeping, "maintain", lambda _: None)
    one = request(tokens(100), save=False)
    expected = alone(engine, one).tokens
    refuse_room(monkeypatch, 105)
    with running(engine) as inbox:
        client = Client(inbox, one)
        wait_for(lambda: client.events and isinstance(client.events[-1], DoneEvent))
    assert (client.tokens, engine.figures.preemptions) == (expected, 1)


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_preempted_reply_whose_tenant_is_purged_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_purged: bool
) -> None:
    """Neither in memory nor, when the daemon ends, in the store. It is answered all the same."""
    one, preempt = request(tokens(100)), ActiveRequests.preempt
    expected = alone(engine, one).tokens

    def purging(self: ActiveRequests, *args: Any, **options: Any) -> None:
        preempt(self, *args, **options)
        if is_purged:
            engine.cache.purge(PurgeFilter())

    monkeypatch.setattr(ActiveRequests, "preempt", purging)
    monkeypatch.setattr(ActiveRequests, "_free_written_pages", lambda _self, _until: False)
    refuse_room(monkeypatch, 105)
    (client,) = run_together(engine, [one])
    assert (client.tokens, engine.figures.preemptions) == (expected, 1)
    engine.drop_gone()
    assert bool(engine.pages.kept.blocks) != is_purged
    engine.save_idle()
    settle(engine)
    assert bool(engine.cache.store.counts()["blocks"]) != is_purged


def test_a_mean_is_computed_of_all_tokens_and_again_after_it_has_lost_its_memory(
    engine: Engine, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has the whole prompt. What is not computed has no hidden states, so a mean begins with nothing of it."""
    one = request(tokens(600), scope="off", max_tokens=0)
    mean = replace(one, cache=replace(one.cache, computes_last=True), reading=Reading(pooling="mean"))
    run_together(engine, [request(tokens(600))])
    settle(engine)
    rows.clear()
    (expected,) = run_together(engine, [mean])
    assert sum(rows) == 600
    refuse_room(monkeypatch, 512)
    (found,) = run_together(engine, [mean])
    assert (sum(rows), engine.figures.preemptions) == (600 + 256 + 600, 1)
    vector, again = (event.values for one in (expected, found) for event in one.events if isinstance(event, ReadEvent))
    np.testing.assert_array_equal(vector, again)


def test_who_waits_for_memory_is_matched_again_only_when_something_has_changed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request that was accepted and lost its memory, and one that was not accepted yet."""
    match, matched = PageCache.match_prefix, Counter[int]()

    def noted(self: PageCache, owner: Any, path: TokenPath, **options: Any) -> Any:
        matched[int(path.token_ids[0])] += 1
        return match(self, owner, path, **options)

    old, *others = (request(tokens(500, seed), max_tokens=200) for seed in range(3))
    bound_memory(engine.pages, int(2.5 * engine.pages.pool.sequence_bytes(512)))
    monkeypatch.setattr(PageCache, "match_prefix", noted)
    run_together(engine, [old, *others])
    assert engine.figures.preemptions > 0
    # A block has 16 tokens, so a block more is there after each 16 steps.
    assert max(matched.values()) < 40


@pytest.fixture
def tight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Engine:
    """KV memory has room for 3 264 of 4 096 tokens."""
    caplog.set_level("INFO")
    sizes = {"max_position_embeddings": 4096, "num_hidden_layers": 5}
    folder = tiny.write_folder(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    return load(folder, tmp_path / "kv", kv_memory=1 << 20)


def test_the_context_is_as_long_as_kv_memory_has_room_for(tight: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert (tight.max_positions, tight.model_positions) == (3264, 4096)
    told = [record.getMessage() for record in caplog.get_records("setup")]
    assert "[engine] the context is 3264 of 4096 tokens, the room in KV memory (1.0 MiB, see --kv-memory)" in told
    # It is not saved: a page that a slow disk has not written yet would be memory that it lacks.
    (whole,) = run_together(tight, [request(tokens(3254), scope="off", max_tokens=None)])
    assert (len(whole.tokens), tight.figures.preemptions) == (10, 0)
    (refused,) = run_together(tight, [request(tokens(3264))])
    with pytest.raises(ContextTooLong, match="3264 tokens, of 3264, the room in KV memory "):
        refused.done  # noqa: B018


def test_a_reply_grows_page_by_page_up_to_all_memory(tight: Engine) -> None:
    (client,) = run_together(tight, [request(tokens(1000), max_tokens=1060)])
    assert len(client.tokens) == 1060
    assert tight.figures.preemptions == 0


def test_what_a_preempted_request_had_is_restored_and_not_computed_again(tight: Engine, rows: list[int]) -> None:
    """Memory is for two and a half of the conversations, which all take turns."""
    conversations, replies = [tokens(900, seed) for seed in range(6)], 250
    for _ in range(2):
        clients = run_together(tight, [request(one, max_tokens=replies) for one in conversations])
        said_ = [np.array(client.tokens, np.int32) for client in clients]
        conversations = [np.concatenate(pair) for pair in zip(conversations, said_, strict=True)]
    assert tight.figures.preemptions > 0
    assert tight.pages.check() == []
    # The last token of a reply is computed with the next turn; so is one that is needed to go on.
    assert sum(rows) <= 6 * (900 + 2 * replies) + tight.figures.preemptions


# Sliding windows: what slid out of memory is missed by nobody.

PROMPT, REPLY = 1450, 1130
"""The reply is so long that the window at the prompt's end slides out."""


@pytest.fixture(scope="module")
def sliding_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture
def sliding(sliding_folder: Path, tmp_path: Path) -> Engine:
    return load(sliding_folder, tmp_path / "kv")


def goes_on(engine: Engine, *parts: TokenIds, **options: Any) -> Client:
    """Returns the client of a prompt, whose reply is the one that it gets alone."""
    one = request(np.concatenate(parts), **options)
    (client,) = run_together(engine, [one])
    assert client.tokens == alone(engine, one).tokens
    return client


def test_turns_go_on_where_the_window_still_is_and_from_the_prompts_end(sliding: Engine) -> None:
    prompt = tokens(PROMPT)
    (client,) = run_together(sliding, [request(prompt, max_tokens=REPLY, scope="1")])
    reply = as_token_ids(client.tokens)
    in_the_middle = goes_on(sliding, prompt[:700], tokens(90, 3), scope="1")
    # Such as that of a client that strips what the model thought.
    without_the_reply = goes_on(sliding, prompt, reply[:100], tokens(90, 2), scope="1")
    cached = [turn.done.usage.cached_tokens for turn in (in_the_middle, without_the_reply)]
    assert cached == [700, PROMPT + 100]
    sliding.pages.forget_idle()
    run_together(sliding, [request(prompt, max_tokens=REPLY, scope="1")])
    behind = goes_on(sliding, prompt, reply, tokens(40, 1), scope="1")
    assert behind.done.usage.cached_tokens == PROMPT + REPLY - 1


def test_a_beginning_that_another_request_computes_is_taken_before_it_leaves_the_window(sliding: Engine) -> None:
    long = tokens(2900)
    later = np.concatenate([long[:2000], tokens(100, 1)])
    one, other = request(long, max_tokens=8, scope="1"), request(later, max_tokens=8, scope="1")
    first, second = run_together(sliding, [one, other])
    assert second.done.usage.cached_tokens == 2000
    assert first.tokens == alone(sliding, one).tokens
    assert second.tokens == alone(sliding, other).tokens


@pytest.mark.parametrize("turns", [1, 2])
def test_a_prompt_longer_than_the_memory_of_its_windows_is_saved_whole(
    turns: int, sliding_folder: Path, tmp_path: Path
) -> None:
    """Where it is wanted at its second turn only, its beginning has slid out by then, and was written before."""
    engine = load(sliding_folder, tmp_path / "kv")
    whole = tokens(2800)
    run_together(engine, [request(whole, max_tokens=6, scope="full" if turns == 1 else "1")])
    if turns == 2:
        whole = np.concatenate([whole, tokens(300, 1)])
        (second,) = run_together(engine, [request(whole, max_tokens=6)])
        assert (second.done.cache.source, second.done.cache.saved) == ("memory", "queued")
    engine.close()
    engine = load(sliding_folder, tmp_path / "kv")
    assert goes_on(engine, whole, tokens(20, 2), max_tokens=6).done.usage.cached_tokens == len(whole)
    engine.pages.forget_idle()
    assert goes_on(engine, whole[:2777], tokens(30, 1), max_tokens=6).done.usage.cached_tokens == 2777


def test_what_slides_out_is_not_written_for_a_request_that_saves_nothing(sliding: Engine) -> None:
    run_together(sliding, [request(tokens(2800), max_tokens=6, scope="1", save=False)])
    settle(sliding)
    assert sliding.cache.store.counts()["blocks"] == 0
