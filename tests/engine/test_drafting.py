"""A draft model: replies are those without it, bit for bit, and what it has is kept and restored as well."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.drafting import ModelDrafter, likeliest
from diskprefix.engine.guesser import DraftRate
from diskprefix.engine.loop import Engine, Loop
from diskprefix.engine.request import ErrorEvent
from diskprefix.errors import ModelError
from diskprefix.kv.sizes import TILE
from diskprefix.model.exact import runner
from diskprefix.nouns import SHARED
from tests.engine.driving import (
    BLOCK,
    POSITIONS,
    REPLY,
    Client,
    asked_of,
    forget_idle,
    load,
    request,
    run_together,
    running,
    said,
    some_are_wrong,
    tokens,
    wait_until_idle,
    write_model,
)
from tests.model import tiny

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
TEXT = tokens(150, 1)
MOST_GUESSED = 3 * REPLY


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a smaller one with its tokenizer."""
    at = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "max_position_embeddings": POSITIONS}
    served = tiny.write_folder(at / "served", num_hidden_layers=3, **sizes)
    return served, tiny.write_folder(at / "draft", seed=1, **sizes)


class AtOnce(Executor):
    """Fetches when it is asked to, so that the same steps guess each time."""

    def submit(self, fetch: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fetch(*args))
        return done


class Never(Executor):
    """Fetches nothing."""

    def __init__(self) -> None:
        self.fetches: list[Future[Any]] = []

    def submit(self, *_: Any) -> Future[Any]:  # type: ignore[override]
        self.fetches.append(Future())
        return self.fetches[-1]


def drafting(folders: tuple[Path, Path], kv: Path, **settings: Any) -> Engine:
    engine = load(folders[0], kv, draft_model=str(folders[1]), **settings)
    drafter(engine).model._fetcher.shutdown()
    drafter(engine).model._fetcher = AtOnce()  # type: ignore[assignment]
    # No step is measured, so that the same guesses are computed each time.
    engine.clock = lambda: 0.0
    return engine


@pytest.fixture(scope="module")
def engines(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """One without a draft model, and one with it."""
    both = load(folders[0], tmp_path_factory.mktemp("plain")), drafting(folders, tmp_path_factory.mktemp("drafting"))
    yield both
    for engine in both:
        engine.close()


def drafter(engine: Engine) -> ModelDrafter:
    assert engine.drafter is not None
    return engine.drafter


def helped(engine: Engine, clients: Iterable[Client], share: float = 0.8) -> AbstractContextManager[Any]:
    """Within it, the draft model computes what it computes, and guesses the replies of these clients: this share of
    their tokens, and wrong ones. How good it seems does not depend on the requests before."""
    drafter(engine).rate.value = DraftRate().value
    replies = [client.tokens_of(n) for client in clients for n in range(client.ticket.request.sampling.n)]
    model, chance = drafter(engine).model, random.Random(1)
    compute = model.compute

    def helping(step: Any) -> torch.Tensor:
        logits = compute(step)
        for (reply, _), of_next in zip(step, logits, strict=True):
            coming = next((one for one in replies if one[: len(reply.token_ids)] == reply.token_ids), [])
            at = model.sequences[reply].arena.num_tokens - reply.prompt_tokens
            if 0 <= at < len(coming):
                of_next[coming[at] if chance.random() < share else (coming[at] + 1) % 250] = of_next.max() + 20
        return logits

    return patch.object(model, "compute", helping)


REQUESTS = {
    **asked_of(TEXT),
    "another prompt": request(tokens(300, 4), max_tokens=REPLY),
    "not kept": request(TEXT, max_tokens=REPLY, scope="off", n=2, temperature=1.0, seed=5),
}


def test_replies_of_several_requests_at_once_are_those_without(plain: Engine, engine: Engine) -> None:
    expected = run_together(plain, REQUESTS.values())
    with helped(engine, expected):
        found = run_together(engine, REQUESTS.values())
    assert list(map(said, found)) == list(map(said, expected))
    assert all(map(some_are_wrong, found))
    assert not any(allocation.is_busy for allocation in drafter(engine).model.pool.allocations)


def computed_by(engine: Engine, one: Any, expected: Client) -> int:
    """Asserts that the reply is the expected one. Returns how many tokens the draft model computed."""
    model, counted = drafter(engine).model, [0]
    compute = model.compute

    def noted(step: Any) -> torch.Tensor:
        counted[0] += sum(ids.shape[1] for _, ids in step)
        return compute(step)

    with patch.object(model, "compute", noted), helped(engine, [expected]):
        (client,) = run_together(engine, [one])
    assert said(client) == said(expected)
    assert some_are_wrong(client)
    return counted[0]


def test_over_miss_save_hit_and_restart_the_reply_is_the_plain_one_and_the_draft_models_state_comes_back(
    folders: tuple[Path, Path], plain: Engine, tmp_path: Path
) -> None:
    text = tokens(5 * BLOCK + 7, 8)
    first = request(text, max_tokens=REPLY)
    (expected,) = run_together(plain, [first])
    engine = drafting(folders, tmp_path / "kv")
    assert computed_by(engine, first, expected) > len(text)
    (remembered,) = drafter(engine).model.cache.namespaces.get(SHARED).seen._prompts
    assert remembered.token_ids.tolist() == text.tolist()
    assert computed_by(engine, first, expected) < MOST_GUESSED, "it is in memory"
    engine.close()

    again = drafting(folders, tmp_path / "kv")
    turn = request(np.concatenate([text, np.array(expected.tokens, np.int32), tokens(9, 9)]), max_tokens=REPLY)
    (expected,) = run_together(plain, [turn])
    assert computed_by(again, turn, expected) < MOST_GUESSED
    assert drafter(again).model.cache.restored_tokens.total() > len(text) + REPLY - 10, "with the reply"
    forget_idle(again.pool)
    assert computed_by(again, turn, expected) < MOST_GUESSED
    again.close()


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_only_memory_had_of_both_models_is_restored_after_the_model_was_unloaded(
    folders: tuple[Path, Path], plain: Engine, tmp_path: Path, is_saved: bool
) -> None:
    """The policy keeps nothing of the first turn of a tenant of its own. The next reply is that of one process."""
    own: dict[str, Any] = {"scope": "auto:30", "tenant": SHARED.with_salt("mine"), "max_tokens": REPLY}
    text = tokens(5 * BLOCK + 7, 18)
    (first,) = run_together(plain, [request(text, **own)])
    turn = request(np.concatenate([text, np.array(first.tokens, np.int32), tokens(9, 9)]), **own)
    (expected,) = run_together(plain, [turn])
    engine = drafting(folders, tmp_path / "kv")
    assert computed_by(engine, request(text, **own), first) > len(text)
    if is_saved:
        engine.hibernate()
    engine.close()
    again = drafting(folders, tmp_path / "kv")
    with helped(again, [expected]):
        (found,) = run_together(again, [turn])
    assert said(found) == said(expected)
    for cache in (again.cache, drafter(again).model.cache):
        restored = cache.restored_tokens.total()
        assert (restored > len(text) + REPLY - 10) if is_saved else restored == 0
    again.close()


def test_what_it_keeps_is_what_it_computes_as_the_served_model(
    folders: tuple[Path, Path], engine: Engine, tmp_path: Path
) -> None:
    one = request(tokens(200, 11), max_tokens=REPLY)
    run_together(engine, [one])
    allocation = max(drafter(engine).model.pool.allocations, key=lambda allocation: allocation.num_computed)
    assert allocation.num_computed > 200
    alone = load(folders[1], tmp_path / "kv")
    arena = alone.pool._new_arena()
    with torch.inference_mode():
        runner.run(alone.model, [runner.Rows(arena, torch.from_numpy(allocation.token_ids).long()[None])])
    assert allocation.arena.read_tokens(0, allocation.num_computed) == arena.read_tokens(0, allocation.num_computed)
    assert drafter(engine).model.cache.root == alone.cache.root
    alone.close()


def test_windows_that_move_on_while_it_guesses_keep_what_is_needed_when_guesses_are_wrong(tmp_path: Path) -> None:
    """A window of whole tiles: its first token is the first of a tile when the memory moves on."""
    served = tiny.write_folder(tmp_path / "served", dtype=torch.bfloat16, max_position_embeddings=4096)
    torch.manual_seed(2)
    sizes = {name: tiny.llama().config.to_dict()[name] for name in SIZES}
    config = MistralConfig(**sizes, sliding_window=TILE, max_position_embeddings=4096)
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    tiny.tokenizer().save_pretrained(tmp_path / "draft")
    engine = drafting((served, tmp_path / "draft"), tmp_path / "kv")
    pool = drafter(engine).model.pool
    one = request(tokens(4 * TILE - 8, 17), max_tokens=REPLY)
    (expected,) = run_together(engine, [one])
    forget_idle(pool)
    with helped(engine, [expected], share=0.0):
        (found,) = run_together(engine, [one])
    assert found.done.timings.drafted_tokens > 20
    (allocation,) = pool.allocations
    assert allocation.arena.complete_from > 0, "it has moved on"
    arena = pool._new_arena()
    with torch.inference_mode():
        for part in torch.split(torch.from_numpy(allocation.token_ids).long()[None], 256, dim=1):
            runner.run(drafter(engine).model._model, [runner.Rows(arena, part)])
    last = 4 * TILE - 4, allocation.num_computed - 4 * TILE + 4
    assert allocation.arena.read_tokens(*last) == arena.read_tokens(*last)
    engine.close()


def test_a_request_that_is_cancelled_leaves_what_the_draft_model_computed(plain: Engine, engine: Engine) -> None:
    """It is computed in two steps, and the client leaves before the second."""
    model, num_calls, one = drafter(engine).model, [0], request(tokens(400, 12), max_tokens=REPLY)
    compute = model.compute
    (expected,) = run_together(plain, [one])

    def counted(step: Any) -> torch.Tensor:
        num_calls[0] += 1
        if num_calls[0] == 1:
            step[0][0].running.ticket.cancel()
        return compute(step)

    with patch.object(model, "compute", counted), running(engine) as inbox:
        Client(inbox, replace(one, sampling=replace(one.sampling, max_tokens=200)))
        wait_until_idle(inbox)
    assert num_calls[0] == 1
    assert not any(allocation.is_busy for allocation in model.pool.allocations)
    forget_idle(model.pool)
    assert computed_by(engine, one, expected) < 400 - 256 + MOST_GUESSED


def test_where_there_is_no_memory_for_it_a_reply_is_not_guessed_and_not_delayed(plain: Engine, engine: Engine) -> None:
    one = request(tokens(100, 13), max_tokens=REPLY)
    (expected,) = run_together(plain, [one])
    with patch.multiple(drafter(engine).model.pool, limit_bytes=1, _spare=[]):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert found.done.timings.drafted_tokens == 0


def test_a_reply_does_not_wait_for_a_fetch_and_what_it_leaves_behind_is_given_back_later(
    plain: Engine, engine: Engine
) -> None:
    one, model, fetcher = request(tokens(100, 18), max_tokens=REPLY), drafter(engine).model, Never()
    (expected,) = run_together(plain, [one])
    with patch.object(model, "_fetcher", fetcher):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert found.done.timings.drafted_tokens == 0
    assert [allocation.is_busy for allocation in model.pool.allocations] == [True]
    fetcher.fetches[0].set_result(None)
    run_together(engine, [one])
    assert not any(allocation.is_busy for allocation in model.pool.allocations)


def test_its_positions_bound_what_it_guesses(plain: Engine, engine: Engine) -> None:
    one = request(tokens(100, 14), max_tokens=REPLY)
    (expected,) = run_together(plain, [one])
    with patch.object(drafter(engine).model, "max_positions", 160), helped(engine, [expected]):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert 0 < found.done.timings.drafted_tokens < REPLY


def test_a_draft_model_that_fails_fails_no_request(
    plain: Engine, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    one = request(tokens(100, 15), max_tokens=REPLY)
    (expected,) = run_together(plain, [one])
    model, num_calls = drafter(engine).model, [0]
    compute = model.compute

    def failing(step: Any) -> torch.Tensor:
        num_calls[0] += 1
        if num_calls[0] > 4:
            raise RuntimeError("no more")
        return compute(step)

    with patch.object(model, "compute", failing):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert found.done.timings.drafted_tokens > 0
    assert num_calls[0] == 5
    assert caplog.text.count("goes on without the draft model: no more") == 1
    assert not any(allocation.is_busy for allocation in model.pool.allocations)


def test_a_draft_model_whose_state_cannot_be_given_back_ends_neither_a_failing_request_nor_the_engine(
    plain: Engine, engine: Engine
) -> None:
    bad, good = (request(tokens(100, seed), max_tokens=REPLY) for seed in (31, 32))
    (expected,) = run_together(plain, [good])
    model = drafter(engine).model

    def failing(cached: CachedRequest, *_: Any) -> None:
        if cached.cache is model.cache:
            raise RuntimeError("a bug of the draft model")
        raise ZeroDivisionError("a bug")

    with patch.multiple(CachedRequest, close=failing, publish_reply=failing, leave=failing):
        (failed,) = run_together(engine, [bad])
    assert isinstance(failed.events[-1], ErrorEvent)
    assert not any(allocation.is_busy for allocation in (*model.pool.allocations, *engine.pool.allocations))
    (found,) = run_together(engine, [good])
    assert said(found) == said(expected)


def test_where_it_is_never_right_it_is_not_asked_any_more(plain: Engine, engine: Engine) -> None:
    one = request(tokens(100, 16), max_tokens=300)
    (expected,) = run_together(plain, [one])
    model, asked = drafter(engine).model, list[int]()
    compute, plan = model.compute, Loop._next_step

    def wrong(step: Any) -> torch.Tensor:
        asked[-1] += 1
        return torch.roll(compute(step), 1, dims=1)

    def planned(loop: Loop) -> Any:
        asked.append(0)
        return plan(loop)

    with (
        patch.object(model, "compute", wrong),
        patch.object(Loop, "_next_step", planned),
        patch.object(drafter(engine), "rate", DraftRate()),
    ):
        (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert sum(asked[:100]) > 20
    assert sum(asked[-150:]) < 10


def test_guesses_are_the_likeliest_tokens_with_their_probabilities() -> None:
    logits = torch.randn(3, 250_000, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits[1, 249_999], logits[2, 7] = 20.0, torch.nan
    *found, (_, not_finite) = likeliest(logits)
    assert [token for token, _ in found] == logits[:2].argmax(-1).tolist()
    assert [chance for _, chance in found] == pytest.approx(logits[:2].float().softmax(-1).amax(-1).tolist(), rel=1e-4)
    assert math.isnan(not_finite)


def test_a_draft_model_of_another_vocabulary_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tiny.write_folder(tmp_path / "other", dtype=torch.bfloat16)
    text = (other / "tokenizer.json").read_text("utf-8").replace('"<|im_end|>"', '"<|the_end|>"')
    (other / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(ModelError, match="--draft-model: other has another vocabulary than served"):
        load(folders[0], tmp_path / "kv", draft_model=str(other))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpt", "mpt cannot guess, it is not exact at every token"),
        ("qwen3_next", "qwen3_next cannot guess, a recurrent layer"),
        ("", "no such file or folder"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_its_flag(
    folders: tuple[Path, Path], tmp_path: Path, name: str, words: str
) -> None:
    draft = str(write_model(tmp_path / name, name, torch.float32)) if name else "./nowhere"
    with pytest.raises(ModelError, match=f"--draft-model: {words}"):
        load(folders[0], tmp_path / "kv", draft_model=draft)


def test_memory_is_shared_so_that_as_many_tokens_fit_both(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = drafting(folders, tmp_path / "kv", kv_memory=8 << 20)
    pools = engine.pool, drafter(engine).model.pool
    assert sum(pool.limit_bytes for pool in pools) == pytest.approx(8 << 20, abs=2)
    served, draft = (pool.limit_bytes / pool.layout.bytes_per_token for pool in pools)
    assert served == pytest.approx(draft, rel=1e-3)
    assert engine.memory_stats()["limit_bytes"] == sum(pool.limit_bytes for pool in pools)
    assert engine.memory_stats()["used_bytes"] == sum(pool.used_bytes for pool in pools)
    engine.close()
