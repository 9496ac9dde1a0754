"""Replies with guesses, of the text before and of a draft model: bit for bit those without. What a draft model has is
kept and restored as well. `test_lives.py` has guesses in random lives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import MistralConfig, MistralForCausalLM

from diskprefix.daemon.engine.fetches import Fetches
from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.engine.loop import Engine, Loop
from diskprefix.daemon.engine.request import ErrorEvent, GenerateRequest, Reading
from diskprefix.daemon.engine.speculation import choose_drafts
from diskprefix.daemon.engine.speculation.choose_drafts import Speculation
from diskprefix.daemon.engine.speculation.draft_model import DraftModel
from diskprefix.daemon.engine.speculation.guesser import Rates
from diskprefix.daemon.engine.speculation.model_proposer import ModelProposer
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.errors import ModelError
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.kv.numbers import converted, dtype_of
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.kv.step import Run
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.pieces import Payload
from diskprefix.prefixstore.store.purge import PurgeFilter
from diskprefix.runtime.contract import Rows, StepOutput
from diskprefix.runtime.plan.drafts import likeliest
from diskprefix.tokens import Logits, TokenIds, as_token_ids
from diskprefix.values import SHARED, Tenant
from tests.daemon.engine.driving import (
    BLOCK,
    WORDS,
    Client,
    ScriptedProposer,
    after_steps,
    alone,
    bound_memory,
    load,
    request,
    run_together,
    running,
    said,
    tokens,
    wait_until_idle,
    weight_of,
    write_model,
)
from tests.prefixstore.kv.hashed_state import ids_of
from tests.runtime.plan import tiny
from tests.waiting import wait_for

POSITIONS = 1024
WINDOW = 512
REPLY = 40
MOST_GUESSED = 3 * REPLY
TEXT = np.tile(tokens(90, 1), 3)
LLAMA = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
Guess: TypeAlias = Callable[[Engine, list[Client]], AbstractContextManager[Any]]


class AtOnce(Executor):
    """Fetches when it is asked to, so that the same steps guess each time."""

    def submit(self, fetch: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fetch(*args))
        return done


class Later(Executor):
    """Fetches once `run` is called."""

    def __init__(self) -> None:
        self.fetches: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fetch: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        self.fetches.append((partial(fetch, *args), Future()))
        return self.fetches[-1][1]

    def run(self) -> None:
        while self.fetches:
            fetch, future = self.fetches.pop(0)
            future.set_result(fetch())


def fetching_by(executor: Executor) -> AbstractContextManager[Any]:
    """Within it, loops that begin have an executor fetch for draft models."""
    make: Any = Fetches.__init__

    def made(self: Fetches, *args: Any) -> None:
        make(self, *args)
        self._pools = {**self._pools, "draft": executor}

    return patch.object(Fetches, "__init__", made)


@pytest.fixture(autouse=True)
def fetches_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead_jobs, "_QUIET_S", 0.0)
    with fetching_by(AtOnce()):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a smaller one with its tokenizer."""
    at = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "max_position_embeddings": POSITIONS}
    served = tiny.write_folder(at / "served", num_hidden_layers=3, **sizes)
    return served, tiny.write_folder(at / "draft", seed=1, **sizes)


def guessing(model: Path, kv: Path, **settings: Any) -> Engine:
    engine = load(model, kv, **{"speculative": "ngram"} | settings)
    # No step is measured, so that the same guesses are computed each time.
    engine.clock = lambda: 0.0
    engine.speculation.times._FIRST = 0.03
    return engine


def drafting(folders: tuple[Path, Path], kv: Path, **settings: Any) -> Engine:
    engine = guessing(folders[0], kv, draft_model=str(folders[1]), **settings)
    # Its guesses alone.
    model = proposer(engine)
    engine.speculation = Speculation(None, [model], model._times, engine.clock)
    return engine


def drafter(engine: Engine) -> DraftModel:
    assert engine.draft is not None
    return engine.draft


def proposer(engine: Engine) -> ModelProposer:
    (found,) = (one for one in engine.speculation.proposers if isinstance(one, ModelProposer))
    return found


@pytest.fixture(scope="module")
def engines(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    kv = tmp_path_factory.mktemp("kv")
    found = {
        "plain": load(folders[0], kv / "plain"),
        "ngram": guessing(folders[0], kv / "ngram"),
        "draft": drafting(folders, kv / "draft"),
    }
    yield found
    for engine in found.values():
        engine.close()


@pytest.fixture
def fresh(engines: dict[str, Engine]) -> dict[str, Engine]:
    """They remember nothing of the tests before."""
    for engine in engines.values():
        engine.pages.forget_idle()
    drafter(engines["draft"]).pages.forget_idle()
    engines["draft"].ahead._jobs.clear()
    proposer(engines["draft"]).rates = Rates(ModelProposer._FIRST)
    return engines


@pytest.fixture
def plain(fresh: dict[str, Engine]) -> Engine:
    return fresh["plain"]


@pytest.fixture
def ngram(fresh: dict[str, Engine]) -> Engine:
    """It looks for what came before."""
    return fresh["ngram"]


@pytest.fixture
def draft(fresh: dict[str, Engine]) -> Engine:
    """It has a draft model."""
    return fresh["draft"]


def some_are_wrong(client: Client) -> bool:
    return 0 < client.done.timings.accepted_tokens < client.done.timings.drafted_tokens


def scripted(engine: Engine, clients: Iterable[Client]) -> AbstractContextManager[Any]:
    """Within it, the engine guesses the replies of these clients, with mistakes."""
    replies = [client.tokens for client in clients]
    times = StepTimes()
    times._FIRST = 0.03
    guessing = Speculation(ScriptedProposer(lambda _: replies), [], times, engine.clock)
    return patch.object(engine, "speculation", guessing)


def always(token_ids: list[int]) -> Guess:
    return lambda engine, clients: _both(
        scripted(engine, clients), patch.object(ScriptedProposer, "guesses", lambda *_: token_ids)
    )


def _both(*contexts: AbstractContextManager[Any]) -> ExitStack:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()


def helped(engine: Engine, clients: Iterable[Client], share: float = 0.8) -> AbstractContextManager[Any]:
    """Within it, the draft model computes what it computes, and guesses the replies of these clients: this share of
    their tokens, and wrong ones. How good it seems does not depend on the requests before."""
    proposer(engine).rates = Rates(ModelProposer._FIRST)
    replies = [client.tokens_of(n) for client in clients for n in range(client.ticket.request.sampling.n)]
    model, chance = drafter(engine), random.Random(1)
    compute = model.compute

    def helping(step: Any) -> Logits:
        logits = compute(step)
        for (sequence, _), of_next in zip(step, logits, strict=True):
            reply = next((one for one, of in model.sequences.items() if of is sequence), None)
            if reply is None:
                continue
            coming = next((one for one in replies if one[: len(reply.token_ids)] == reply.token_ids), [])
            at = sequence.state.num_tokens - reply.prompt_tokens
            if 0 <= at < len(coming):
                of_next[coming[at] if chance.random() < share else (coming[at] + 1) % 250] = of_next.max() + 20
        return logits

    return patch.object(model, "compute", helping)


def unguessed(_engine: Engine, _clients: list[Client]) -> AbstractContextManager[Any]:
    return ExitStack()


def as_without(
    plain: Engine, engine: Engine, one: GenerateRequest, guess: Guess, *within: AbstractContextManager[Any]
) -> Client:
    """Returns a client of `engine`, to whom the same was said as to that of `plain`."""
    (expected,) = run_together(plain, [one])
    with _both(*within), guess(engine, [expected]):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    return found


def no_memory_is_busy(engine: Engine) -> bool:
    return not engine.pages.running and not drafter(engine).pages.running


# Guesses of the text before.


def test_text_that_repeats_itself_is_guessed_from_itself(plain: Engine, ngram: Engine) -> None:
    one = request(TEXT, max_tokens=100, repetition_penalty=1.02, frequency_penalty=0.01)
    assert some_are_wrong(as_without(plain, ngram, one, unguessed))


def test_each_guess_that_is_right_saves_a_step(plain: Engine, ngram: Engine) -> None:
    num_steps, compute = [0], Loop._compute_step

    def counted(loop: Loop, step: Any) -> bool:
        num_steps[0] += step[0].sequence.is_decoding and loop._served is ngram
        return compute(loop, step)

    counting = patch.object(Loop, "_compute_step", counted)
    found = as_without(plain, ngram, request(TEXT, max_tokens=REPLY), scripted, counting)
    # The first token is that of the prompt's last step.
    assert len(found.tokens) == 1 + num_steps[0] + found.done.timings.accepted_tokens


def test_guesses_reach_neither_beyond_the_context_nor_beyond_the_memory(plain: Engine, ngram: Engine) -> None:
    ends: list[int] = []
    end_step = KVSequence.end_step

    def noted(sequence: KVSequence, run: Run) -> None:
        end_step(sequence, run)
        ends.append(sequence.num_tokens)

    one = request(np.tile(tokens(60, 1), 16), max_tokens=None)
    found = as_without(plain, ngram, one, unguessed, patch.object(KVSequence, "end_step", noted))
    assert found.done.usage.completion_tokens == POSITIONS - 960
    assert found.done.timings.accepted_tokens > 0
    assert max(ends) == POSITIONS - 1


def test_no_request_loses_its_memory_to_guesses(plain: Engine, ngram: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """It ends shortly before it would need more than there is."""
    caplog.set_level("INFO")
    one = request(tokens(384, 5), max_tokens=200, scope="off", temperature=1.0, seed=3)
    whole = alone(plain, one)
    last = next(n for n in range(126, 110, -1) if whole.tokens.index(whole.tokens[n]) == n)
    limit_bytes = ngram.pages.pool.limit_bytes
    bound_memory(ngram.pages, ngram.pages.pool.sequence_bytes(512))
    end = patch.object(ngram, "end_ids", frozenset({whole.tokens[last]}))
    with end, always([3] * 20)(ngram, [whole]):
        (found,) = run_together(ngram, [one])
    assert found.tokens == whole.tokens[: last + 1]
    assert found.done.timings.drafted_tokens > REPLY
    assert "waits" not in caplog.text
    ngram.pages.pool.limit_bytes = limit_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_guess_whose_state_is_infinite_fails_no_reply(name: str, tmp_path: Path) -> None:
    """Attention multiplies it by 0, which gives no number, in the rows before it too."""
    model = write_model(tmp_path / "model", name)
    plain, ngram = load(model, tmp_path / "plain"), guessing(model, tmp_path / "ngram")
    one = request(tokens(90, 1), max_tokens=REPLY)
    (expected,) = run_together(plain, [one])
    infinite = next(token for token in range(3, 250) if token not in {*one.prompt.token_ids, *expected.tokens})
    weight = weight_of(ngram, "embed_tokens.weight")
    weight[infinite] = converted(np.array(np.inf, np.float32), dtype_of(weight))
    found = as_without(plain, ngram, one, always([infinite]))
    assert found.done.timings.drafted_tokens > 0


def test_a_model_that_is_not_exact_at_every_token_computes_no_guesses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = guessing(write_model(tmp_path, "mpt"), tmp_path / "kv")
    assert "nothing is guessed" in caplog.text
    (client,) = run_together(engine, [request(TEXT)])
    assert client.done.timings.drafted_tokens == 0


# Recurrent layers, whose states a wrong guess has changed.

FEW = {2: -100.0, **dict.fromkeys((50, 51, 52), 100.0)}
"""Replies of so few different tokens repeat themselves."""
REPEATING = [
    request(TEXT, max_tokens=60, logprobs=2, logit_bias=FEW),
    request(tokens(200, 2), max_tokens=REPLY, logprobs=0, logit_bias=FEW, temperature=1.0, seed=3, n=2),
]


def said_and_saved(engine: Engine, requests: list[GenerateRequest]) -> tuple[list[Client], Any]:
    """Returns the clients, and what they were told, with the bytes of all that was saved and of all that stays."""
    make, saved, kept = PromptNodes.new_node, dict[Any, bytes](), list[tuple[bytes, bytes]]()

    def noted(nodes: PromptNodes, node: Node, payload: Payload, **others: Any) -> NewNode:
        new = make(nodes, node, payload, **others)
        saved[new.kind, new.position, bytes(new.token_ids)] = b"".join(payload)
        return new

    with patch.object(PromptNodes, "new_node", noted):
        clients = run_together(engine, requests)
    for node in engine.pages.kept.sequence_ends():
        sequence = engine.pages.resume(node)
        assert sequence is not None
        kept.append((node.token_ids.tobytes(), sequence.content(sequence.num_tokens)))
        engine.pages.end_sequence(sequence, keep=False)
    return clients, (list(map(said, clients)), saved, sorted(kept))


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "kimi_linear", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_what_recurrent_layers_say_and_save_is_that_without_guesses(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", name)
    plain, ngram = load(model, tmp_path / "plain"), guessing(model, tmp_path / "ngram")
    _, expected = said_and_saved(plain, REPEATING)
    clients, found = said_and_saved(ngram, REPEATING)
    assert all(map(some_are_wrong, clients))
    assert found == expected
    assert ngram.check_memory() == []


def test_where_no_memory_is_left_for_the_states_before_it_no_guess_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = guessing(write_model(tmp_path / "model", "qwen3_5"), tmp_path / "kv")
    (expected,) = run_together(engine, REPEATING[:1])
    assert some_are_wrong(expected)
    bound_memory(engine.pages, engine.pages.pool.sequence_bytes(len(TEXT) + 60))
    (found,) = run_together(engine, REPEATING[:1])
    assert said(found) == said(expected)
    assert found.done.timings.drafted_tokens == 0
    assert "waits" not in caplog.text


# A draft model.

SAMPLED: dict[str, Any] = {"max_tokens": REPLY, "temperature": 1.0}
REQUESTS = [
    request(TEXT, max_tokens=REPLY),
    request(TEXT, **SAMPLED, seed=3),
    request(TEXT, **SAMPLED, seed=1, n=3),
    request(TEXT, **SAMPLED, seed=2, constraint=WORDS),
    request(tokens(300, 4), max_tokens=REPLY),
    request(TEXT, **SAMPLED, seed=5, n=2, scope="off"),
]


def test_replies_of_several_requests_at_once_are_those_without(plain: Engine, draft: Engine) -> None:
    expected = run_together(plain, REQUESTS)
    with helped(draft, expected):
        found = run_together(draft, REQUESTS)
    assert list(map(said, found)) == list(map(said, expected))
    assert all(map(some_are_wrong, found))
    assert no_memory_is_busy(draft)


def test_guesses_that_had_no_row_may_be_the_next_tokens(
    plain: Engine, draft: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft model has computed them all, and its logits behind the last one are needed again."""
    (expected,) = run_together(plain, REQUESTS[:1])
    with (
        helped(draft, [expected], share=1.0),
        patch.object(choose_drafts, "worth_computing", lambda chances, _times: [min(1, len(one)) for one in chances]),
    ):
        (found,) = run_together(draft, REQUESTS[:1])
    assert said(found) == said(expected)
    assert found.done.timings.accepted_tokens > 1
    assert "goes on without" not in caplog.text


def test_many_tokens_that_it_was_not_asked_for_are_computed_before_it_guesses(
    plain: Engine, draft: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    one, calls = request(tokens(40, 31), max_tokens=60), list[int]()
    (expected,) = run_together(plain, [one])

    def gain(*_: object) -> float:
        calls.append(1)
        return 0.0 if 12 < len(calls) < 40 else 2.0

    with helped(draft, [expected], share=0.0), patch.object(proposer(draft), "gain", gain):
        (found,) = run_together(draft, [one])
    assert said(found) == said(expected)
    assert len(calls) > 45
    assert "goes on without" not in caplog.text


def noting(engine: Engine, note: Callable[[int], None]) -> AbstractContextManager[Any]:
    """Within it, `note` gets the number of tokens of each step of the draft model, before that is computed."""
    runtime = drafter(engine).runtime
    compute = runtime.run

    def noted(step: Sequence[Rows]) -> StepOutput:
        note(sum(len(rows.token_ids) for rows in step))
        return compute(step)

    return patch.object(runtime, "run", noted)


def computed_by(engine: Engine, plain: Engine, one: GenerateRequest) -> int:
    """Asserts that the reply is the plain one. Returns how many tokens the draft model computed."""
    sizes = list[int]()
    assert some_are_wrong(as_without(plain, engine, one, helped, noting(engine, sizes.append)))
    return sum(sizes)


def next_turn(plain: Engine, one: GenerateRequest) -> TokenIds:
    (client,) = run_together(plain, [one])
    return np.concatenate([one.prompt.token_ids, as_token_ids(client.tokens), tokens(9, 9)])


def test_over_miss_save_hit_and_restart_the_reply_is_the_plain_one_and_the_draft_models_state_comes_back(
    folders: tuple[Path, Path], plain: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tokens(5 * BLOCK + 7, 8)
    first = request(text, max_tokens=REPLY)
    engine = drafting(folders, tmp_path / "kv")
    assert computed_by(engine, plain, first) > len(text)
    (remembered,) = drafter(engine).cache.namespaces.get(SHARED).seen._prompts
    assert remembered.token_ids.tolist() == text.tolist()
    assert computed_by(engine, plain, first) < MOST_GUESSED, "it is in memory"
    engine.close()

    again = drafting(folders, tmp_path / "kv")
    turn = request(next_turn(plain, first), max_tokens=REPLY)
    assert computed_by(again, plain, turn) < MOST_GUESSED
    assert drafter(again).cache.restored_tokens.total() > len(text) + REPLY - 10, "with the reply"
    again.pages.forget_idle()
    assert computed_by(again, plain, turn) < MOST_GUESSED
    again.close()
    assert "goes on without" not in caplog.text


def test_what_only_memory_had_of_both_models_is_restored_after_the_model_was_unloaded(
    folders: tuple[Path, Path], plain: Engine, tmp_path: Path
) -> None:
    """The policy keeps nothing of the first turn of a tenant of its own. The next reply is that of one process."""
    own: dict[str, Any] = {"scope": "auto:30", "tenant": SHARED.with_salt("mine"), "max_tokens": REPLY}
    first = request(tokens(5 * BLOCK + 7, 18), **own)
    turn = request(next_turn(plain, first), **own)
    engine = drafting(folders, tmp_path / "kv")
    computed_by(engine, plain, first)
    engine.save_idle()
    engine.close()
    again = drafting(folders, tmp_path / "kv")
    as_without(plain, again, turn, helped)
    for cache in (again.cache, drafter(again).cache):
        assert cache.restored_tokens.total() > len(first.prompt.token_ids) + REPLY - 10


@pytest.mark.parametrize("is_restarted", [False, True])
def test_from_the_second_turn_on_guesses_begin_with_the_first_token(
    folders: tuple[Path, Path], plain: Engine, tmp_path: Path, is_restarted: bool
) -> None:
    """Replies are too short to pay for the draft model's own prompt. It is computed when nothing else runs."""
    first = request(tokens(500, 20), max_tokens=4)
    turn = request(next_turn(plain, first), max_tokens=12)
    (expected,) = run_together(plain, [turn])
    engine = drafting(folders, tmp_path / "kv")
    with patch.object(proposer(engine), "_pays", return_value=False), running(engine) as inbox:
        client = Client(inbox, first)
        wait_until_idle(inbox)
        wait_for(lambda: engine.ahead.wait_s is None)
    assert client.done.timings.drafted_tokens == 0
    if is_restarted:
        engine.close()
        engine = drafting(folders, tmp_path / "kv")
    drafted = list[int]()
    compute = Loop._compute_step

    def noted(loop: Loop, step: Any) -> bool:
        drafted.extend(chunk.num_drafted for chunk in step if chunk.sequence.is_decoding)
        return compute(loop, step)

    # The first step of an engine is one to compare with.
    run_together(engine, [request(tokens(9, 21), scope="off", max_tokens=2)])
    drafted.clear()
    with helped(engine, [expected], share=1.0), patch.object(Loop, "_compute_step", noted):
        (found,) = run_together(engine, [turn])
    assert said(found) == said(expected)
    assert drafted[0] > 0
    assert no_memory_is_busy(engine)


def test_a_request_waits_for_one_step_of_what_is_computed_ahead(draft: Engine) -> None:
    one = request(tokens(900, 22), max_tokens=4)
    sizes, clients = list[int](), list[Client]()
    with running(draft) as inbox:

        def noted(num_tokens: int) -> None:
            sizes.append(num_tokens)
            if len(sizes) == 2:
                clients.append(Client(inbox, request(tokens(30, 23), max_tokens=4, scope="off")))
            elif len(sizes) > 2:
                assert not inbox.queue_depth

        with noting(draft, noted), patch.object(proposer(draft), "_pays", return_value=False):
            Client(inbox, one)
            wait_for(lambda: sum(sizes) >= 900)
            wait_for(lambda: draft.ahead.wait_s is None)
    assert clients[0].done
    assert max(sizes) <= 256
    assert no_memory_is_busy(draft)


def test_what_was_purged_is_not_computed_ahead(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine, num_steps = drafting(folders, tmp_path / "kv"), [0]

    def purging(_: int) -> None:
        num_steps[0] += 1
        engine.cache.purge(PurgeFilter())

    with noting(engine, purging), patch.object(proposer(engine), "_pays", return_value=False):
        run_together(engine, [request(tokens(300, 26), max_tokens=4)])
        with running(engine) as inbox:
            wait_for(lambda: engine.ahead.wait_s is None)
            Client(inbox, request(tokens(30, 25), max_tokens=2, scope="off"))
    assert num_steps == [1]
    assert no_memory_is_busy(engine)
    assert engine.cache.writer.flush(10.0)
    assert engine.cache.stats()["prompts"] == engine.cache.stats()["blocks"] == 0


@pytest.mark.parametrize("pays", [False, True])
def test_of_a_reply_during_which_all_is_purged_nothing_is_kept(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """Neither what the draft model computes in the reply, nor what it would compute when nothing runs."""
    engine = drafting(folders, tmp_path / "kv")
    model, purged, ready = drafter(engine), list[Any](), ModelProposer._ready
    monkeypatch.setattr(proposer(engine), "_pays", lambda *_: pays)
    monkeypatch.setattr(proposer(engine), "begin_reply", lambda _: None)
    monkeypatch.setattr(ModelProposer, "_ready", lambda *args: ready(*args) if purged else [])
    after_steps(monkeypatch, 4, lambda: purged.append(engine.cache.purge(PurgeFilter())))
    with running(engine) as inbox:
        Client(inbox, request(tokens(200, 26), max_tokens=REPLY))
        wait_until_idle(inbox)
        wait_for(lambda: engine.ahead.wait_s is None)
    assert purged
    assert engine.cache.writer.flush(10.0)
    assert engine.cache.stats()["prompts"] == engine.cache.stats()["blocks"] == 0
    assert not list(model.pages.kept.sequence_ends())


def test_of_a_draft_that_begins_while_a_purge_is_noticed_nothing_is_kept(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafting(folders, tmp_path / "kv")
    model, purged = drafter(engine), list[Any]()
    owner_of = model.cache.owner

    def purging(tenant: Tenant) -> Owner:
        if not purged:
            purged.append(engine.cache.purge(PurgeFilter()))
        return owner_of(tenant)

    monkeypatch.setattr(proposer(engine), "_pays", lambda *_: True)
    monkeypatch.setattr(model.cache, "owner", purging)
    run_together(engine, [request(tokens(200, 26), max_tokens=REPLY)])
    assert purged
    engine.drop_gone()
    assert not model.pages.kept.blocks


def test_with_a_deleted_prompt_the_memory_of_its_tenant_goes_in_the_draft_model_too(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model has a root of its own, and has read the prompt as well."""
    engine, (deleted, other) = drafting(folders, tmp_path / "kv"), map(SHARED.with_salt, ("deleted", "other"))
    monkeypatch.setattr(proposer(engine), "_pays", lambda *_: True)
    run_together(engine, [request(tokens(200, 26), tenant=tenant, max_tokens=REPLY) for tenant in (deleted, other)])
    assert engine.cache.writer.flush(10.0)

    def in_memory() -> list[set[str]]:
        return [{block.owner.tenant for block in pages.kept.blocks.values()} for _, pages in engine._caches()]

    assert in_memory() == [{str(deleted), str(other)}] * 2
    root = engine.cache.owner(deleted).root
    with engine.cache.store.snapshot() as snapshot:
        [name] = [name for name, entry in snapshot.entries() if entry.root == root]
    engine.cache.delete(name.hex())
    engine.drop_gone()
    assert in_memory() == [{str(other)}] * 2


def test_what_has_expired_is_not_computed_ahead(draft: Engine) -> None:
    over, sizes = patch.object(drafter(draft).cache, "lasts_s", return_value=0.0), list[int]()
    with over, noting(draft, sizes.append), patch.object(proposer(draft), "_pays", return_value=False):
        run_together(draft, [request(tokens(100, 27), max_tokens=4)])
        with running(draft):
            wait_for(lambda: draft.ahead.wait_s is None)
    assert not sizes


def test_texts_whose_embeddings_are_asked_for_are_nothing_for_it(draft: Engine) -> None:
    one = request(tokens(100, 28), max_tokens=0)
    before = proposer(draft)._reply_tokens
    with patch.object(drafter(draft), "_start_sequence") as begun:
        run_together(draft, [replace(one, reading=Reading(pooling="mean"))])
    assert not begun.called
    assert draft.ahead.wait_s is None
    assert proposer(draft)._reply_tokens == before


def test_what_it_keeps_is_what_it_computes_as_the_served_model(
    folders: tuple[Path, Path], draft: Engine, tmp_path: Path
) -> None:
    run_together(draft, [request(tokens(200, 11), max_tokens=REPLY)])
    pages = drafter(draft).pages
    node = max(pages.kept.sequence_ends(), key=lambda node: node.end)
    kept = pages.resume(node)
    assert kept is not None
    assert kept.num_tokens > 200
    served = load(folders[1], tmp_path / "kv")
    sequence = KVSequence(served.pages.pool)
    served.runtime.run([Rows(sequence, ids_of(pages, node).astype(np.int64))])
    assert kept.content() == sequence.content()
    pages.end_sequence(kept, keep=False)
    assert drafter(draft).cache.root == served.cache.root


def test_windows_that_move_on_while_it_guesses_keep_what_is_needed_when_guesses_are_wrong(tmp_path: Path) -> None:
    """A window of whole pages: its first token is the first of a page when it moves on."""
    served = tiny.write_folder(tmp_path / "served", dtype=torch.bfloat16, max_position_embeddings=4096)
    torch.manual_seed(2)
    sizes = {name: tiny.llama().config.to_dict()[name] for name in (*LLAMA, "vocab_size")}
    config = MistralConfig(**sizes, sliding_window=WINDOW, max_position_embeddings=4096)
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    tiny.tokenizer().save_pretrained(tmp_path / "draft")
    engine = drafting((served, tmp_path / "draft"), tmp_path / "kv")
    pages = drafter(engine).pages
    one = request(tokens(4 * WINDOW - 8, 17), max_tokens=REPLY)
    (expected,) = run_together(engine, [one])
    pages.forget_idle()
    with helped(engine, [expected], share=0.0):
        (found,) = run_together(engine, [one])
    assert found.done.timings.drafted_tokens > 20
    (node,) = pages.kept.sequence_ends()
    kept = pages.resume(node)
    assert kept is not None
    assert kept.complete_from > 0, "it has moved on"
    sequence = KVSequence(PagePool(kept.layout, block_size=BLOCK))
    ids = ids_of(pages, node).astype(np.int64)
    for start in range(0, len(ids), 256):
        drafter(engine).runtime.run([Rows(sequence, ids[start : start + 256])])
    assert kept.content(4 * WINDOW - 4) == sequence.content(4 * WINDOW - 4, kept.num_tokens)
    pages.end_sequence(kept, keep=False)


def test_what_the_draft_model_lacks_of_a_cancelled_request_is_computed_when_nothing_else_runs(
    plain: Engine, draft: Engine
) -> None:
    """It is computed in two steps, and the client leaves before the second."""
    model, sizes, one = drafter(draft), list[int](), request(tokens(400, 12), max_tokens=REPLY)

    def leaving(num_tokens: int) -> None:
        if not sizes:
            next(iter(model.sequences)).running.ticket.cancel()
        sizes.append(num_tokens)

    with noting(draft, leaving), running(draft) as inbox:
        Client(inbox, replace(one, sampling=replace(one.sampling, max_tokens=200)))
        wait_until_idle(inbox)
        wait_for(lambda: draft.ahead.wait_s is None)
    assert len(sizes) > 1
    assert no_memory_is_busy(draft)
    model.pages.forget_idle()
    assert computed_by(draft, plain, one) < len(one.prompt.token_ids), "it was saved"


ONE = request(tokens(100, 13), max_tokens=REPLY)


def test_where_there_is_no_memory_for_it_a_reply_is_not_guessed_and_not_delayed(plain: Engine, draft: Engine) -> None:
    nothing = patch.object(drafter(draft).pages.pool, "limit_bytes", 1)
    assert as_without(plain, draft, ONE, unguessed, nothing).done.timings.drafted_tokens == 0


def test_its_positions_bound_what_it_guesses(plain: Engine, draft: Engine) -> None:
    bounded = patch.object(drafter(draft), "max_positions", 160)
    assert 0 < as_without(plain, draft, ONE, helped, bounded).done.timings.drafted_tokens < REPLY


def test_a_reply_does_not_wait_for_a_fetch_that_has_not_begun_to_load_and_gives_its_memory_back(
    plain: Engine, draft: Engine
) -> None:
    later, (expected,) = Later(), run_together(plain, [ONE])
    with fetching_by(later), patch.object(draft.ahead, "add_job"), running(draft) as inbox:
        found = Client(inbox, ONE)
        wait_until_idle(inbox)
        assert said(found) == said(expected)
        assert found.done.timings.drafted_tokens == 0
        assert no_memory_is_busy(draft)
        later.run()
        assert no_memory_is_busy(draft)


def test_a_draft_model_that_fails_fails_no_request(
    plain: Engine, draft: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = list[int]()

    def failing(num_tokens: int) -> None:
        sizes.append(num_tokens)
        if len(sizes) > 4:
            raise RuntimeError("no more")

    found = as_without(plain, draft, ONE, unguessed, noting(draft, failing))
    assert found.done.timings.drafted_tokens > 0
    assert len(sizes) >= 5
    assert caplog.text.count("goes on without model guesses: no more") == 1
    assert no_memory_is_busy(draft)


def test_a_reply_that_goes_on_without_it_may_lose_its_memory(plain: Engine, draft: Engine) -> None:
    model, take_in, num_preempted = drafter(draft), Loop._take_in, [0]

    def preempting(loop: Loop) -> None:
        for reply in (reply for one in loop._active.requests for reply in one.replies):
            if len(reply.token_ids) == 20 and reply.state is not None and not num_preempted[0]:
                num_preempted[0] += 1
                assert not reply.guesser.rates
                loop._active.preempt(reply)
        take_in(loop)

    failing = patch.object(model, "compute", side_effect=RuntimeError("no more"))
    as_without(plain, draft, ONE, unguessed, failing, patch.object(Loop, "_take_in", preempting))
    assert num_preempted == [1]


def test_a_draft_model_whose_state_cannot_be_given_back_ends_neither_a_failing_request_nor_the_engine(
    plain: Engine, draft: Engine
) -> None:
    def failing(cached: CachedRequest, *_: Any) -> None:
        if cached.cache is drafter(draft).cache:
            raise RuntimeError("a bug of the draft model")
        raise ZeroDivisionError("a bug")

    with patch.multiple(CachedRequest, close=failing, publish_reply=failing, save_partial=failing):
        (failed,) = run_together(draft, [request(tokens(100, 31), max_tokens=REPLY)])
    assert isinstance(failed.events[-1], ErrorEvent)
    assert no_memory_is_busy(draft)
    as_without(plain, draft, ONE, unguessed)


def test_where_it_is_never_right_it_is_not_asked_any_more(plain: Engine, draft: Engine) -> None:
    model, asked = drafter(draft), list[int]()
    compute, plan = model.compute, Loop._next_step

    def wrong(step: Any) -> Logits:
        asked[-1] += 1
        return np.roll(compute(step), 1, axis=1)

    def planned(loop: Loop) -> Any:
        asked.append(0)
        return plan(loop)

    one = request(tokens(100, 16), max_tokens=300)
    within = patch.object(model, "compute", wrong), patch.object(Loop, "_next_step", planned)
    as_without(
        plain, draft, one, unguessed, *within, patch.object(proposer(draft), "rates", Rates(ModelProposer._FIRST))
    )
    assert sum(asked[:100]) > 10
    assert sum(asked[-150:]) < 10


def test_guesses_are_the_likeliest_tokens_with_their_probabilities() -> None:
    logits = torch.randn(3, 250_000, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits[1, 249_999], logits[2, 7] = 20.0, torch.nan
    *found, (_, not_finite) = likeliest(logits.float().numpy())
    assert [token for token, _ in found] == logits[:2].argmax(-1).tolist()
    assert [chance for _, chance in found] == pytest.approx(logits[:2].float().softmax(-1).amax(-1).tolist(), rel=1e-4)
    assert math.isnan(not_finite)


def of_another_vocabulary(at: Path) -> Path:
    other = tiny.write_folder(at / "other", dtype=torch.bfloat16)
    text = (other / "tokenizer.json").read_text("utf-8").replace('"<|im_end|>"', '"<|the_end|>"')
    (other / "tokenizer.json").write_text(text, "utf-8")
    return other


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (of_another_vocabulary, "other has another vocabulary than served"),
        (lambda at: write_model(at / "mpt", "mpt", torch.float32), "mpt cannot guess, it is not exact at every token"),
        (lambda at: write_model(at / "mamba", "qwen3_next", torch.float32), "mamba cannot guess, a recurrent layer"),
        (lambda at: at / "nowhere", "no such file or folder"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_its_flag(
    folders: tuple[Path, Path], tmp_path: Path, write: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(ModelError, match=f"--draft-model: {words}"):
        drafting((folders[0], write(tmp_path)), tmp_path / "kv")


def test_memory_is_shared_so_that_as_many_tokens_fit_both(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = drafting(folders, tmp_path / "kv", kv_memory=8 << 20)
    pools = engine.pages.pool, drafter(engine).pages.pool
    limit_bytes = sum(pool.limit_bytes for pool in pools)
    assert limit_bytes == pytest.approx(8 << 20, abs=2)
    served, draft = (pool.limit_bytes / pool.layout.bytes_per_token for pool in pools)
    assert served == pytest.approx(draft, rel=1e-3)
    assert engine.memory_stats()["limit_bytes"] == limit_bytes
    assert engine.memory_stats()["used_bytes"] == sum(pool.used_bytes for pool in pools)
