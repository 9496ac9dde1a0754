"""The engine on a real model folder: the events and limits of one request, models that bypass the cache, and what is
recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from diskprefix.daemon.engine import served_model as generate
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import Constraint, DoneEvent, FinishEvent, TextEvent
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.daemon.settings import Settings
from diskprefix.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelError,
    NonFiniteLogits,
    SettingsError,
    StoreUnavailable,
)
from diskprefix.prefixstore.kv import pages
from diskprefix.prefixstore.kv.numbers import converted, dtype_of
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.simulate import trace_formats
from diskprefix.prefixstore.simulate.geometry import SLICEABLE
from diskprefix.prefixstore.simulate.simulator import Policy, simulate
from diskprefix.prefixstore.simulate.trace import RecordedDaemon, Trace
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from diskprefix.runtime import choose_runtime as choosing
from diskprefix.runtime.grid import state_layout
from diskprefix.runtime.grid.rehearsal import rehearse
from diskprefix.runtime.load import self_check
from diskprefix.tokens import Logits
from diskprefix.values import Scope
from tests.daemon.engine.driving import (
    Cancelled,
    bound_memory,
    done,
    load,
    recorded_requests,
    request,
    run,
    run_request,
    tokens,
    tokens_of,
    weight_of,
)
from tests.daemon.server.chat_model import write_tokenizer
from tests.exactness.architectures import OVERRIDES, shrink
from tests.modules import runtime_of
from tests.runtime.load.ollama_folder import OllamaFolder
from tests.runtime.plan import tiny

BLOCK = 16
POSITIONS = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16, max_position_embeddings=POSITIONS)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Engine:
    return load(folder, tmp_path / "kv", block_size=BLOCK)


SERVES = """
import sys, threading
from pathlib import Path
from diskprefix.daemon.app import load_engine
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.request import DoneEvent, GenerateRequest, SamplingParams
from diskprefix.daemon.settings import Settings
from diskprefix.tokens import as_token_ids
from diskprefix.values import CacheOptions, Prompt, Scope

limits = {"block_size": 16, "kv_cache_min_tokens": 16, "kv_cache_gate": "off"}
settings = Settings(model=sys.argv[1], kv_cache_dir=Path(sys.argv[2]), **limits)
for _ in range(2):
    engine, events, is_over = load_engine(settings, lambda _: None), [], threading.Event()
    engine.finish_load()
    inbox = Inbox(engine.serve)
    inbox.start()

    def emit(event):
        events.append(event)
        if isinstance(event, DoneEvent):
            is_over.set()

    sampling, options = SamplingParams(max_tokens=4, temperature=0.7, seed=1), CacheOptions(scope=Scope("full"))
    prompt = Prompt(as_token_ids(range(3, 60)))
    inbox.submit(GenerateRequest(id="a", prompt=prompt, sampling=sampling, cache=options), emit)
    assert is_over.wait(60)
    inbox.stop(30)
    engine.close()
    print(events[-1].cache.restored, *{"torch", "transformers"} & sys.modules.keys())
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_request_is_served_and_restored_without_torch_and_transformers(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    model = folder if kind == "folder" else tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0")
    command = [sys.executable, "-c", SERVES, str(model), str(tmp_path / "kv")]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, "0\n57\n"), answer.stderr


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


@pytest.mark.parametrize(("listed", "known"), [([], {2}), ([0, 1], {0, 1, 2})])
def test_a_token_that_ends_a_call_ends_the_reply_though_the_model_does_not_list_it(
    listed: list[int], known: set[int], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    assert generate._end_ids(listed, (), tokenizer) == known | {tokenizer.convert_tokens_to_ids("<|call|>")}


@pytest.mark.usefixtures("own_places")
def test_a_stop_of_ollama_that_is_a_special_token_ends_the_reply_with_nothing_cut(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "own.gguf")
    ollama = OllamaFolder(tmp_path / "home" / ".ollama" / "models")
    stop = ollama.layer("params", b'{"stop": ["<|im_start|>", "User:"]}')
    ollama.add("registry.ollama.ai/library/tiny:1b", ollama.layer("model", (tmp_path / "own.gguf").read_bytes()), stop)
    for sampling, begins in (("model", [TextEvent(0, "", (1,)), FinishEvent(0, "stop")]), ("neutral", None)):
        engine = load(Path("tiny:1b"), tmp_path / sampling, sampling=sampling)
        events = run(engine, tokens(20), logit_bias={1: 100.0}, max_tokens=3)
        engine.close()
        assert events[:-1] == (begins or [*[TextEvent(0, "", (1,))] * 3, FinishEvent(0, "length")])


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


def test_a_prompt_that_leaves_no_position_and_an_empty_one_are_refused(engine: Engine) -> None:
    with pytest.raises(ContextTooLong, match=f"has {POSITIONS} tokens, of {POSITIONS}, the context of this model"):
        run(engine, tokens(POSITIONS))
    with pytest.raises(InvalidRequest, match=r"^the prompt is empty$"):
        run(engine, tokens(0))


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(generate, "kv_bytes", lambda: int(free() * 0.9))
    monkeypatch.setattr(pages, "_READ_EVERY_S", 0.0)


def test_a_prompt_or_a_reply_whose_state_exceeds_the_memory_is_refused_and_the_next_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_folder(tmp_path / "long", dtype=torch.bfloat16, max_position_embeddings=4096)
    free = [1 << 30]
    set_free_memory(monkeypatch, lambda: free[0])
    engine = load(folder, tmp_path / "kv", block_size=BLOCK)
    bound_memory(engine.pages, engine.pages.pool.limit_bytes)
    free[0] = 200 << 10
    refusal = "2000 tokens need 250.0 KiB of KV memory, 182.0 KiB are available; use a shorter prompt or a machine with"
    with pytest.raises(ContextTooLong, match=re.escape(refusal)):
        run(engine, tokens(2000))
    free[0] = 300 << 10
    assert len(tokens_of(run(engine, tokens(2000), max_tokens=2))) == 2
    bound_memory(engine.pages, engine.pages.pool.limit_bytes)
    engine.pages.pool.make_ahead(1020, lambda: False)
    free[0] = 0
    with pytest.raises(ContextTooLong, match=r"^1025 tokens need"):
        run(engine, tokens(1010), max_tokens=100)


def test_memory_is_taken_ahead_for_the_longest_prompt_and_a_turn_or_less_where_little_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = SimpleNamespace(kv_limit=1 << 30)
    model = tiny.llama()
    layout = rehearse(model)
    reserved: list[int] = []
    monkeypatch.setattr(PagePool, "make_ahead", lambda _, num_tokens, _wanted: reserved.append(num_tokens))
    model.config.max_position_embeddings = 1 << 20
    parts = {"config": model.config, "dtype": model.dtype, "device": model.device, "encoder": None}
    parts |= {"stops": [], "suppressed": []}
    parts |= {
        "tokenizer": tiny.tokenizer(),
        "processor": None,
        "origin": Path("tiny"),
        "finish": None,
        "in_memory": None,
    }
    loaded: Any = SimpleNamespace(**parts, name="tiny", fit=fit)
    store = SimpleNamespace(longest_prompt=lambda: 3000, reads=SimpleNamespace(ask=lambda read: read()))
    cache: Any = SimpleNamespace(layout=layout, settings=Settings(), store=store, close=bool, on_forget=[])
    for free in (0, 200 * layout.bytes_per_token, 1 << 40):
        set_free_memory(monkeypatch, lambda free=free: free)  # type: ignore[misc]
        Engine(loaded, runtime_of(model, cache.layout, 256), cache, Settings())
    assert reserved == [0, 90, 5048]


def test_memory_that_runs_out_after_the_weights_is_one_line_and_frees_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    for module, step in ((choosing, "check"), (generate, "PageCache")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, starved)
            with pytest.raises(ModelError, match=r"^the model fits in memory, but nothing [^\n]+$"):
                load(folder, tmp_path / "kv")
    load(folder, tmp_path / "kv").close()


@pytest.mark.parametrize("scope", ["full", "auto:30", "off"])
def test_what_a_cancelled_request_computed_is_there_after_a_restart(scope: str, folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", block_size=BLOCK)
    engine.max_rows = BLOCK
    with pytest.raises(Cancelled):
        run(engine, tokens(100), scope=scope, steps=2)
    engine.close()
    engine = load(folder, tmp_path / "kv", block_size=BLOCK)
    again = done(run(engine, tokens(100)))
    expected = (0, "none") if scope == "off" else (2 * BLOCK, "disk")
    assert (again.usage.cached_tokens, again.cache.source) == expected


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("where", ["logits", "state"])
def test_a_request_whose_logits_are_not_finite_fails_alone_and_saves_no_such_state(
    engine: Engine, temperature: float, where: str
) -> None:
    """If the logits alone are not finite, the blocks before them are right."""
    cold = tokens_of(run(engine, tokens(100), temperature=temperature, seed=1, scope="off"))
    weight = weight_of(engine, "norm.weight" if where == "logits" else "layers.0.self_attn.v_proj.weight")
    sound = weight.copy()
    weight[...] = converted(np.array(np.nan, np.float32), dtype_of(weight))
    with pytest.raises(NonFiniteLogits):
        run(engine, tokens(100), temperature=temperature)
    weight[...] = sound
    engine.cache.finish_aside()
    assert engine.cache.writer.flush(30)
    assert (engine.cache.stats()["blocks"] > 0, engine.cache.stats()["entries"]) == (where == "logits",) * 2
    assert tokens_of(run(engine, tokens(100), temperature=temperature, seed=1)) == cold


def test_layers_for_a_gpu_are_refused_where_nothing_gives_them_to_one() -> None:
    with pytest.raises(SettingsError, match=r"^--gpu-layers: only llama\.cpp's library"):
        choosing.load_servable(Settings(model="/nowhere", runtime="plan", gpu_layers=3), print)


def test_the_file_of_another_program_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with open_lmdb(tmp_path / "kv", max_dbs=1, mode=0o600) as env:
        theirs = env.open_db(b"theirs")
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value", db=theirs)
    (tmp_path / "kv").chmod(0o700)
    with pytest.raises(StoreUnavailable, match="belongs to another program"):
        load(tmp_path / "no-such-model", tmp_path / "kv")


# Models that bypass the cache.

NUM_TOKENS = 37
"""Two steps of the grid and a bit."""
REPLY = 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("openai-gpt", "recurrent_gemma", "mamba", "rwkv", "minimax", "deepseek_v32")},
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
}


def write_uncached(path: Path, model_type: str, **fields: Any) -> Path:
    """A model of that type with random weights in float32."""
    torch.manual_seed(0)
    config = shrink(model_type, **(OVERRIDES.get(model_type, {}) | fields))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def one_pass(model: PreTrainedModel, ids: torch.Tensor) -> Logits:
    keeps = model._supports_logits_to_keep()
    with torch.inference_mode():
        logits = model(input_ids=ids, **({"logits_to_keep": 1} if keeps else {})).logits[0, -1]
    found: Logits = logits.float().numpy()
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize(("model_type", "fields"), MODELS.values(), ids=MODELS)
def test_the_reply_of_a_model_that_bypasses_the_cache_is_what_generate_gives(
    model_type: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(write_uncached(tmp_path / "model", model_type, **fields), tmp_path / "kv", block_size=BLOCK)
    seen: list[Logits] = []
    sample = Sampler.sample

    def spied(self: Sampler, logits: Logits, *given: Any) -> int:
        seen.append(logits.copy())
        return sample(self, logits, *given)

    monkeypatch.setattr(Sampler, "sample", spied)
    token_ids = tokens(NUM_TOKENS)
    ids = torch.from_numpy(token_ids).long().unsqueeze(0)
    # Without the tokens that would end a reply.
    special = range(len(tiny.SPECIAL_TOKENS))
    unwanted = dict.fromkeys(special, -100.0)
    events = run(engine, token_ids, max_tokens=REPLY, n=2, logit_bias=unwanted)
    model: Any = engine.runtime._model  # type: ignore[attr-defined]
    expected = model.generate(ids, max_new_tokens=REPLY, do_sample=False, bad_words_ids=[[t] for t in special])
    assert tokens_of(events) == tokens_of(events, 1) == expected[0, NUM_TOKENS:].tolist()
    assert np.array_equal(seen[0], one_pass(model, ids))
    assert (done(events).cache.miss_reason, done(events).usage.cached_tokens) == ("unsupported", 0)
    assert engine.cache.stats()["state"] == "unsupported"
    with pytest.raises(Cancelled):
        run(engine, token_ids, steps=2)
    assert tokens_of(run(engine, token_ids, max_tokens=REPLY, logit_bias=unwanted)) == tokens_of(events)


def test_a_model_that_transformers_cannot_run_step_by_step_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_uncached(tmp_path / "model", "xlstm", hidden_size=64, num_blocks=2, num_heads=2, qk_dim_factor=0.5)
    with pytest.raises(ModelError, match=r"^a model of type xlstm cannot be run step by step: [^\n]+$"):
        load(folder, tmp_path / "kv")
    # The store was closed: it can be opened again.
    load(tiny.write_folder(tmp_path / "llama"), tmp_path / "kv").close()


# What is recorded: enough to tell what caching would have done.


def recorded(model: Path, at: Path, *, scope: str = "off", cancelled: bool = False) -> Trace:
    """Returns what a daemon recorded of a prompt that was sent twice with the daemon's own scope."""
    record = at / "trace.jsonl"
    engine = load(model, at / "kv", block_size=BLOCK, disk_prefix_cache=scope, record=record)
    engine.max_rows = BLOCK
    for _ in range(2):
        try:
            run_request(engine, request(tokens(100), scope=scope, max_tokens=3), steps=2 if cancelled else None)
        except Cancelled:
            assert cancelled
    engine.close()
    return read_trace(record)


def test_a_request_that_is_computed_because_restoring_would_be_slower_is_recorded_with_that_reason(
    folder: Path, tmp_path: Path
) -> None:
    record = tmp_path / "trace.jsonl"
    options: dict[str, Any] = {"kv_memory_keeps": False, "kv_cache_gate": "auto", "record": record}
    engine = load(folder, tmp_path / "kv", block_size=BLOCK, **options)
    one = request(tokens(100), max_tokens=3)
    first = run_request(engine, one)
    engine.cache.finish_aside()
    assert engine.cache.writer.flush(30)
    again = run_request(engine, one)
    for _ in range(32):
        engine.cache.cost_model.record_prefill(1000, 1e-3)
        engine.cache.cost_model.record_restore(1 << 20, 10.0)
    assert not engine.cache.cost_model.allows(100)
    closed = run_request(engine, one)
    engine.close()
    assert closed[:-1] == again[:-1] == first[:-1]
    assert [line.restored for line in recorded_requests(record)] == [0, 100, 0]
    reports = [events[-1].cache for events in (first, again, closed) if isinstance(events[-1], DoneEvent)]
    assert [report.miss_reason for report in reports] == ["new", None, "faster_to_compute"]


def restored(trace: Trace) -> int:
    policy = Policy(scope=Scope("full"), block_size=BLOCK, min_tokens=BLOCK)
    return simulate(trace, policy, SLICEABLE).restored_tokens


@pytest.mark.parametrize("scope", ["off", "full"])
def test_what_was_recorded_without_a_cache_tells_what_one_would_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    # A fast processor computes these prompts in less.
    monkeypatch.setattr(trace_formats, "_MIN_MEASURED_S", 0.0)
    trace = recorded(folder, tmp_path, scope=scope)
    assert [(request.scope, request.remembered) for request in trace] == [(None, True)] * 2
    assert restored(trace) == 100
    daemon = trace.daemon
    assert isinstance(daemon, RecordedDaemon)
    assert daemon.geometry is not None
    assert (daemon.block_size, daemon.min_tokens, daemon.geometry.state_bytes) == (BLOCK, BLOCK, 0)
    assert min(daemon.geometry.bytes_per_token, daemon.geometry.logits_bytes, daemon.tokens_per_s) > 0


def test_what_was_cancelled_before_its_end_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    trace = recorded(folder, tmp_path, scope="full", cancelled=True)
    assert [request.remembered for request in trace] == [False, False]
    assert restored(trace) == 0


def test_a_model_that_cannot_be_cached_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "known_reason", lambda *_: "no family has it")
    monkeypatch.delitem(state_layout.KINDS, DynamicSlidingWindowLayer)
    tiny.write_sliding(tmp_path / "model")
    trace = recorded(tmp_path / "model", tmp_path, scope="full")
    assert "DynamicSlidingWindowLayer" in caplog.text, "it says why it bypasses the cache"
    assert restored(trace) == 100
    assert trace.daemon is not None
    assert trace.daemon.geometry is None, "nobody knows"
