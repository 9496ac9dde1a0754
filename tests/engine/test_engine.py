"""The engine on a real model folder: events, limits, choices, cancellation, and the cache behind them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest
import torch
from transformers import AutoTokenizer

from diskprefix.engine import measured_model
from diskprefix.engine import served_model as generate
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import Constraint, DoneEvent, Event, FinishEvent, TextEvent
from diskprefix.errors import ContextTooLong, InvalidRequest, ModelError, NonFiniteLogits, StoreUnavailable
from diskprefix.kv.arena import KVArena
from diskprefix.model.exact.self_check import rehearse
from diskprefix.model.load import memory
from diskprefix.settings import Settings
from diskprefix.tokens import TokenIds
from tests.engine import driving
from tests.engine.driving import Cancelled, request, run_request, tokens, tokens_of
from tests.model import tiny
from tests.server.chat_model import write_tokenizer

BLOCK = 16
POSITIONS = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16, max_position_embeddings=POSITIONS)


def load(model: Path, kv: Path) -> Engine:
    return driving.load(model, kv, block_size=BLOCK)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv")
    yield engine
    engine.close()


def run(engine: Engine, token_ids: TokenIds, *, steps: int | None = None, **options: Any) -> list[Event]:
    return run_request(engine, request(token_ids, **options), steps=steps)


def done(events: list[Event]) -> DoneEvent:
    last = events[-1]
    assert isinstance(last, DoneEvent)
    return last


def test_the_reply_ends_at_max_tokens_or_at_the_positions(engine: Engine) -> None:
    events = run(engine, tokens(20), max_tokens=5)
    assert (len(tokens_of(events)), events[-2]) == (5, FinishEvent(0, "length"))
    assert done(events).usage.completion_tokens == 5
    events = run(engine, tokens(POSITIONS - 3), max_tokens=None)
    assert (len(tokens_of(events)), events[-2]) == (3, FinishEvent(0, "length"))


def test_a_request_for_no_tokens_has_its_prompt_kept(engine: Engine) -> None:
    events = run(engine, tokens(100), max_tokens=0, n=2)
    assert events[:-1] == [FinishEvent(0, "length"), FinishEvent(1, "length")]
    assert done(events).usage.completion_tokens == 0
    assert done(events).timings.ttft_ms > 0
    assert done(run(engine, tokens(100), max_tokens=1)).usage.cached_tokens == 100


def test_the_end_of_sequence_token_stops_and_has_no_text(engine: Engine) -> None:
    events = run(engine, tokens(20), logit_bias={2: 100.0})
    assert events[:-1] == [TextEvent(0, "", (2,)), FinishEvent(0, "stop")]


@pytest.mark.parametrize(("listed", "known"), [(None, {2}), (0, {0, 2}), ([0, 1], {0, 1, 2})])
def test_a_token_that_ends_a_call_ends_the_reply_though_the_model_does_not_list_it(
    listed: Any, known: set[int], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
    assert generate._eos_ids(model, tokenizer) == known | {tokenizer.convert_tokens_to_ids("<|call|>")}


def test_special_tokens_have_a_text_where_the_request_asks_for_it(engine: Engine) -> None:
    asked = frozenset({"<|im_start|>", "<|im_end|>", "<|no such token|>"})
    for shown, text in ((asked, "<|im_start|><|im_end|>"), (frozenset[str](), "")):
        grammar = Constraint(kind="lark", source="start: <|im_start|>+")
        events = run(engine, tokens(20), constraint=grammar, shown=shown, logit_bias={2: 100.0})
        assert tokens_of(events) == [1, 2]
        assert "".join(e.text for e in events if isinstance(e, TextEvent)) == text


@pytest.mark.parametrize(
    ("params", "text", "end"),
    [
        ({}, "abcab", FinishEvent(0, "stop")),
        ({"max_tokens": 5}, "abcab", FinishEvent(0, "stop")),
        ({"max_tokens": 4}, "abca", FinishEvent(0, "length")),
        ({"stop": ("ca",)}, "ab", FinishEvent(0, "stop", "ca")),
        ({"stop": ("bX",)}, "abcab", FinishEvent(0, "stop")),
    ],
    ids=str,
)
def test_a_constrained_reply_ends_where_nothing_may_follow_and_where_any_reply_ends(
    engine: Engine, params: dict[str, Any], text: str, end: FinishEvent
) -> None:
    events = run(engine, tokens(20), constraint=Constraint(kind="lark", source='start: "abcab"'), **params)
    assert "".join(e.text for e in events if isinstance(e, TextEvent)) == text
    assert events[-2] == end
    assert done(events).usage.completion_tokens == len(tokens_of(events))


@pytest.mark.parametrize("length", [POSITIONS, POSITIONS + 100])
def test_a_prompt_that_leaves_no_position_is_refused(engine: Engine, length: int) -> None:
    with pytest.raises(ContextTooLong, match=f"has {length} tokens, of {POSITIONS}, the positions of this model"):
        run(engine, tokens(length))


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^the prompt is empty$"):
        run(engine, tokens(0))


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    return tiny.write_folder(tmp_path / "long", dtype=torch.bfloat16, max_position_embeddings=4096)


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: free())


def test_a_prompt_whose_state_exceeds_the_memory_is_refused_and_the_next_is_served(
    long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 30]
    set_free_memory(monkeypatch, lambda: free[0])
    engine = load(long_folder, tmp_path / "kv")
    engine.pool._spare.clear()
    free[0] = 200 << 10
    refusal = "2000 tokens need 264.0 KiB of KV memory, 180.0 KiB are available; use a shorter prompt or a machine with"
    with pytest.raises(ContextTooLong, match=re.escape(refusal)):
        run(engine, tokens(2000))
    free[0] = 300 << 10
    assert len(tokens_of(run(engine, tokens(2000), max_tokens=2))) == 2
    engine.close()


def test_a_reply_that_exceeds_the_memory_ends_with_an_error(
    long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 30]
    set_free_memory(monkeypatch, lambda: free[0])
    engine = load(long_folder, tmp_path / "kv")
    engine.pool._spare = [engine.pool._new_arena()]
    engine.pool._spare[0].reserve(1020)
    free[0] = 0
    with pytest.raises(ContextTooLong, match=r"^1025 tokens need"):
        run(engine, tokens(1010), max_tokens=100)
    engine.close()


def test_memory_is_taken_ahead_for_the_longest_prompt_and_a_turn_or_less_where_little_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = SimpleNamespace(kv_limit=1 << 30)
    parts = {"model": tiny.llama(), "tokenizer": tiny.tokenizer(), "media": None, "origin": None}
    loaded: Any = SimpleNamespace(**parts, name="tiny", fit=fit)
    layout = rehearse(loaded.model)
    reserved: list[int] = []
    monkeypatch.setattr(KVArena, "reserve", lambda _, num_tokens: reserved.append(num_tokens))
    loaded.model.config.max_position_embeddings = 1 << 20
    cache: Any = SimpleNamespace(layout=layout, settings=Settings(), store=SimpleNamespace(longest_prompt=lambda: 3000))
    for free in (0, 200 * layout.bytes_per_token, 1 << 40):
        set_free_memory(monkeypatch, lambda free=free: free)  # type: ignore[misc]
        Engine(loaded, cache)
    assert reserved == [0, 90, 5048]


def test_memory_that_runs_out_after_the_weights_is_one_line_and_frees_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    for module, step in ((measured_model, "make_exact"), (generate, "KVPool")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, starved)
            with pytest.raises(ModelError, match=r"^the model fits in memory, but nothing [^\n]+$"):
                load(folder, tmp_path / "kv")
    load(folder, tmp_path / "kv").close()


@pytest.mark.parametrize("scope", ["full", "auto:30", "off"])
def test_what_a_cancelled_request_computed_is_there_after_a_restart(scope: str, folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv")
    engine.max_rows = BLOCK
    with pytest.raises(Cancelled):
        run(engine, tokens(100), scope=scope, steps=2)
    engine.close()
    engine = load(folder, tmp_path / "kv")
    again = done(run(engine, tokens(100)))
    expected = (0, "none") if scope == "off" else (2 * BLOCK, "disk")
    assert (again.usage.cached_tokens, again.cache.source) == expected
    engine.close()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("where", ["logits", "state"])
def test_a_request_whose_logits_are_not_finite_fails_alone_and_saves_no_such_state(
    engine: Engine, temperature: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the logits alone are not finite, the blocks before them are right."""
    cold = tokens_of(run(engine, tokens(100), temperature=temperature, seed=1, scope="off"))
    module = engine.model.lm_head if where == "logits" else engine.model.model.layers[0].self_attn.v_proj
    forward, sound = module.forward, module.weight.data.clone()
    with monkeypatch.context() as patch:
        if where == "logits":
            patch.setattr(module, "forward", lambda hidden: forward(hidden) * float("nan"))
        else:
            # A compiled layer reads the weights, and does not call the module.
            module.weight.data.fill_(float("nan"))
        with pytest.raises(NonFiniteLogits):
            run(engine, tokens(100), temperature=temperature)
    module.weight.data.copy_(sound)
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    assert (engine.cache.stats()["blocks"] > 0, engine.cache.stats()["entries"]) == (where == "logits", 0)
    assert tokens_of(run(engine, tokens(100), temperature=temperature, seed=1)) == cold


def test_the_file_of_another_program_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "kv"), max_dbs=1, mode=0o600) as env:
        theirs = env.open_db(b"theirs")
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value", db=theirs)
    (tmp_path / "kv").chmod(0o700)
    with pytest.raises(StoreUnavailable, match="belongs to another program"):
        load(tmp_path / "no-such-model", tmp_path / "kv")
