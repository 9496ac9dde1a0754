"""What the simulator says of a workload, the daemon's own cache does: of each request the same is restored and kept.

The cache holds the state of small random models here. What is kept of a request is written when it is over, and waited
for, so that time plays no part: what a request uses is superseded later.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.cache import cached_request as request_module
from diskprefix.prefixstore.cache import saving as saving_module
from diskprefix.prefixstore.kv import kept_blocks
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.recording.recording import RequestRecorder
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulated_memory import SimulatedMemory
from diskprefix.prefixstore.simulate.simulator import Outcome, Policy, Simulator
from diskprefix.prefixstore.simulate.trace import TraceRequest
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.store import Store
from diskprefix.scope import parse_scope
from diskprefix.tenant_ids import group_of
from diskprefix.tokens import TokenIds, as_token_ids, raw_boundaries, root_hash
from diskprefix.values import SHARED, CacheOptions, Mark, Prompt, Scope, Selection
from tests.exactness.architectures import tiny_model
from tests.examples import examples, thorough
from tests.prefixstore.simulate.workloads import interleaved, one_off
from tests.runner import BLOCK, VOCAB, Answer, Runner, random_prompt, tiny_llama, tiny_settings

BEGIN, END, SYSTEM, USER, REPLY = 1, 2, 3, 4, 5
TEXT = 10
"""Tokens from here on are words."""
AUTO = Scope("auto", 30)
MIN_TOKENS, COLD_MAX, INTERVAL = 2 * BLOCK, 8 * BLOCK, 4 * BLOCK
STATES = "token", "sliceable", "lfm2", "qwen3_next", "mamba2"
EXACT = "token", "lfm2"
"""Those that are exact at every token; lfm2 has checkpoints, which then lie at any token."""


@pytest.fixture(autouse=True, scope="module")
def _uncompressed() -> Iterator[None]:
    """The simulated disk has uncompressed nodes only."""
    opened = Store.__init__

    def open_raw(store: Store, *args: Any, **named: Any) -> None:
        opened(store, *args, **named)
        store.codec = Codec.RAW

    with pytest.MonkeyPatch.context() as context:
        context.setattr(Store, "__init__", open_raw)
        yield


class Seen(NamedTuple):
    restored: int
    reason: str
    selected: int
    aligned: int
    checkpoints: tuple[int, ...]
    window: int
    recent: int
    common: int


@dataclass(frozen=True)
class Turn:
    """What a request is, by numbers that `Conversations` makes sense of."""

    how: str
    which: int = 0
    size: int = 20
    scope: str | None = None
    group: str = ""
    salt: str = ""
    save: bool = True
    marked: bool = False
    is_raw: bool = False
    reply: int = 0
    restarted: bool = False


class Conversations:
    """Prompts that share, grow, branch, change and repeat, drawn from a seed: messages between markers, or, where a
    turn is raw, the same tokens without any known structure."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._systems = [self._message(SYSTEM, size) for size in (45, 70)]
        self._open: list[list[TokenIds]] = []
        self._replies: list[TokenIds | None] = []
        """What the model answered to each, behind the beginning of a reply that the template wrote."""

    def next(self, turn: Turn) -> TraceRequest:
        messages = self._messages(turn)
        self._open.append(messages)
        self._replies.append(None)
        # The template may write another beginning of the reply than the one that the reply then has.
        self._opening = as_token_ids([BEGIN, REPLY] if turn.size % 5 else [BEGIN, REPLY, 7, 7])
        token_ids = np.concatenate([*messages, self._opening])
        boundaries = raw_boundaries(token_ids, (BEGIN, END))
        has_system = not turn.is_raw and turn.how != "unlike"
        if turn.is_raw:
            token_ids, boundaries = np.where(token_ids < TEXT, token_ids + TEXT, token_ids), ()
        middle = len(token_ids) // 2
        prompt = Prompt(
            token_ids,
            boundaries=boundaries,
            system_end=len(messages[0]) + 1 if has_system else 0,
            marks=(Mark(middle), Mark(min(middle + 1 + turn.size, len(token_ids)), 300.0)) if turn.marked else (),
        )
        return TraceRequest(
            when=float(len(self._open)),
            prompt=prompt,
            scope=None if turn.scope is None else parse_scope(turn.scope, param="scope"),
            group=group_of(turn.group) if turn.group else b"",
            tenant=turn.salt,
            save=turn.save,
            ttl_s=1000.0 if turn.size % 7 == 6 else None,
        )

    def _messages(self, turn: Turn) -> list[TokenIds]:
        if turn.how == "short":
            return [self._message(USER, turn.size % 12)]
        if turn.how == "unlike":
            return [self._message(USER, 60 + turn.size)]
        if turn.how == "new" or not self._open:
            return [self._systems[turn.which % len(self._systems)], self._message(USER, turn.size)]
        before = list(self._open[-1 - turn.which % min(len(self._open), 4)])
        if turn.how == "edit":
            before[turn.size % len(before)] = self._message(USER, turn.size)
        if turn.how == "branch":
            before = before[: 1 + turn.size % len(before)]
        if turn.how == "within":
            last = before[-1].copy()
            last[len(last) // 2 :] = self._text(len(last) - len(last) // 2)
            return [*before[:-1], last]
        if turn.how in ("grow", "branch"):
            before += [self._message(REPLY, turn.size // 2), self._message(USER, turn.size)]
        if turn.how == "answer" and (reply := self._replies[-1]) is not None:
            before = [*self._open[-1], reply, self._message(USER, turn.size)]
        return before

    def answered(self, token_ids: TokenIds) -> None:
        self._replies[-1] = np.concatenate([self._opening, token_ids, as_token_ids([END])])

    def _message(self, role: int, size: int) -> TokenIds:
        return np.concatenate([as_token_ids([BEGIN, role]), self._text(size), as_token_ids([END])])

    def _text(self, size: int) -> TokenIds:
        return self._random.integers(TEXT, VOCAB, size).astype(np.int32)


HOWS = "new", "grow", "grow", "answer", "answer", "branch", "edit", "within", "again", "unlike", "short"
SCOPES = None, None, None, "auto:2", "full", "off", "40", "150", "auto:1"
TURNS = st.builds(
    Turn,
    how=st.sampled_from(HOWS),
    which=st.integers(0, 3),
    size=st.integers(0, 60),
    scope=st.sampled_from(SCOPES),
    group=st.sampled_from(["", "", "", "a", "b"]),
    salt=st.sampled_from(["", "", "", "somebody"]),
    save=st.sampled_from([True, True, True, True, False]),
    marked=st.sampled_from([False, False, False, True]),
    is_raw=st.sampled_from([False, False, False, True]),
    reply=st.sampled_from([0, 1, 9, 40]),
    restarted=st.sampled_from([False, False, False, False, True]),
)


@cache
def model_of(state: str) -> PreTrainedModel:
    return tiny_llama() if state in ("token", "sliceable") else tiny_model(state, torch.float32)


def geometry_of(runner: Runner) -> Geometry:
    layout = runner.layout
    return Geometry(layout.bytes_per_token, layout.state_bytes, layout.logits_bytes, layout.exact_at)


POLICY = Policy(scope=AUTO, block_size=BLOCK, min_tokens=MIN_TOKENS, interval=INTERVAL, cold_max=COLD_MAX)


class Daemon:
    def __init__(self, folder: Path, state: str, model: PreTrainedModel | None = None, **changes: object) -> None:
        values: dict[str, object] = {
            "kv_cache_min_tokens": MIN_TOKENS,
            "kv_cache_cold_max": COLD_MAX,
            "kv_cache_interval": INTERVAL,
            "kv_cache_gate": "off",
        }
        self.recording = folder / "recording.jsonl"
        self._histories: list[tuple[bytes, list[TokenIds]]] = []
        self.runner = Runner(
            model or model_of(state),
            tiny_settings(folder / "kv", **(values | changes)),
            on_prompts=self._note_history,
            exact_at="token" if state in EXACT else "grid",
        )
        self._recorder = self._open_recorder()
        self._written_before = 0

    def close(self) -> None:
        self._recorder.close()
        self.runner.close()

    def restart(self) -> None:
        self._written_before = self.written_tokens
        self._recorder.close()
        self.runner.reopen()
        self._recorder = self._open_recorder()

    def share_disk(self, simulator: Simulator, budget_bytes: int) -> None:
        """The daemon has written what the simulator says, and no page more."""
        store = self.runner.cache.store
        store.meter.budget_bytes = budget_bytes
        store.written_lately = lambda: SimpleNamespace(last_day=lambda _now: simulator.disk.last_day(0.0))  # type: ignore

    def step(self, request: TraceRequest, reply: int = 0) -> Answer:
        options = self.options(request)
        disk, store = threading.Event(), self.runner.cache.store
        publish = store.publish
        with patch.object(store, "publish", lambda pub: publish(pub) if disk.wait(30) else 0):
            answer = self.runner.run_prompt(request.prompt, options, reply=reply)
            self.runner.cache.finish_aside()
            disk.set()
            self.runner.flush()
        for root, prompts in self._histories:
            self._recorder.know(root, prompts)
        self._histories.clear()
        self._recorder.record_request(
            request.prompt,
            options,
            answer.report,
            root=self.runner.cache.namespaces.get(options.tenant).root,
            when=1e9 + request.when,
            reply=computed(answer),
            prefill_ms=0.0,
            remembered=answer.is_published,
        )
        return answer

    def options(self, request: TraceRequest) -> CacheOptions:
        return CacheOptions(
            scope=request.scope or AUTO,
            tenant=SHARED.with_salt(request.tenant) if request.tenant else SHARED,
            group=request.group,
            save=request.save,
            ttl_s=request.ttl_s,
            is_asked=request.scope is not None or request.ttl_s is not None,
        )

    def _note_history(self, root: bytes, prompts: Iterable[TokenIds]) -> None:
        """The engine opens its recorder first; here that comes later, as it asks for the store's secret."""
        self._histories.append((root, [token_ids.copy() for token_ids in prompts]))

    def _open_recorder(self) -> RequestRecorder:
        settings = Settings(block_size=BLOCK, kv_cache_min_tokens=MIN_TOKENS, disk_prefix_cache=str(AUTO))
        recorder = RequestRecorder(self.recording, settings, lambda: self.runner.cache.store.secret)
        layout = self.runner.layout
        recorder.describe(
            bytes_per_token=layout.bytes_per_token,
            state_bytes=layout.state_bytes,
            logits_bytes=layout.logits_bytes,
            exact_at=layout.exact_at,
        )
        return recorder

    @property
    def written_tokens(self) -> int:
        return self._written_before + self.runner.cache.writer.written_tokens

    def stored(self) -> tuple[int, int]:
        with self.runner.cache.store.snapshot() as snapshot:
            table = snapshot.usages()
        return len(table.names), int(table.records["stored_bytes"].sum())


def computed(answer: Answer) -> TokenIds:
    return as_token_ids(answer.greedy[:-1])


def seen(answer: Answer) -> Seen:
    return _seen(answer.report.restored, answer.report.selection)


def foreseen(outcome: Outcome) -> Seen:
    return _seen(outcome.restored, outcome.selection)


def _seen(restored: int, selection: Selection) -> Seen:
    return Seen(
        restored=restored,
        reason=selection.reason,
        selected=selection.selected,
        aligned=selection.aligned,
        checkpoints=selection.checkpoints,
        window=selection.window,
        recent=selection.recent,
        common=selection.common,
    )


def agreed(daemon: Daemon, seed: int, turns: Sequence[Turn], policy: Policy = POLICY) -> list[Seen]:
    """Assert that the cache does with each turn what the simulator says, of the workload itself and of what was
    recorded of it; what that is. Closes the daemon."""
    conversations = Conversations(seed)
    simulator = Simulator(policy, geometry_of(daemon.runner))
    if policy.write_budget_bytes:
        daemon.share_disk(simulator, policy.write_budget_bytes)
    happened = []
    for number, turn in enumerate(turns):
        if turn.restarted:
            daemon.restart()
        request = conversations.next(turn)
        answer = daemon.step(request, turn.reply)
        conversations.answered(as_token_ids(answer.greedy))
        request = replace(request, reply=computed(answer))
        happened.append(seen(answer))
        said = foreseen(simulator.step(request))
        assert said == happened[-1], f"request {number}, {turn}"
    assert daemon.written_tokens == simulator.totals.written_tokens
    num_nodes, num_bytes = daemon.stored()
    daemon.close()
    assert num_nodes == len(simulator.store)
    assert num_bytes == pytest.approx(simulator.store.used_bytes, rel=0.25), "pieces are rounded up to pages"
    if any(turn.restarted and any(before.reply > 1 for before in turns[:at]) for at, turn in enumerate(turns)):
        # After a restart, a recorder knows the prompts of before, and not their replies.
        return happened
    replayer = Simulator(policy, geometry_of(daemon.runner))
    for number, request in enumerate(read_trace(daemon.recording)):
        assert foreseen(replayer.step(request)) == happened[number], f"request {number} as recorded, {turns[number]}"
    assert number + 1 == len(turns)
    return happened


@pytest.mark.cases(1)
@pytest.mark.parametrize("state", STATES)
@settings(max_examples=examples(4))
@given(seed=st.integers(0, 2**16), turns=st.lists(TURNS, min_size=2, max_size=12))
def test_each_request_is_foretold(
    state: str, seed: int, turns: list[Turn], tmp_path_factory: pytest.TempPathFactory
) -> None:
    agreed(Daemon(tmp_path_factory.mktemp("agreement"), state), seed, turns)


def an_hour() -> list[Turn]:
    """Many turns. State that cannot be cut is not kept at once any more, after the first ones, where it is seldom of
    use."""
    random = np.random.default_rng(6)
    turns = []
    for number in range(70):
        scope = SCOPES[number // 3 % len(SCOPES)] if number % 3 == 2 else None
        how = ("unlike" if number % 2 else "branch") if 20 <= number < 50 else HOWS[random.integers(len(HOWS))]
        which, size = random.integers(4), random.integers(61)
        turns.append(Turn(how, which=int(which), size=int(size), scope=scope, restarted=number % 10 == 9))
    return turns


@pytest.mark.cases(1)
@pytest.mark.parametrize("state", STATES)
def test_a_long_workload_with_restarts_is_foretold_to_its_end(state: str, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, state)
    happened = agreed(daemon, 1, an_hour())
    reasons = Counter(one.reason for one in happened)
    expected = {
        "continues",
        "full",
        "tokens",
        "off",
        "room" if state in ("token", "sliceable") else "learning",
    }
    assert expected <= reasons.keys()
    assert any(len(one.checkpoints) > 1 for one in happened) == (state not in ("token", "sliceable"))
    assert sum(one.restored > 0 for one in happened) > len(happened) // 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("state", ["token", "sliceable", "lfm2"])
def test_what_a_write_budget_leaves_out_is_foretold(state: str, tmp_path: Path) -> None:
    """Each kind of request is sent while the budget is new, when it is half used, and when it is spent."""
    turns = [dataclasses.replace(turn, restarted=False) for turn in an_hour()]
    whole = Simulator(POLICY, geometry_of(Daemon(tmp_path / "whole", state).runner))
    conversations = Conversations(1)
    for turn in turns:
        whole.step(conversations.next(turn))
        conversations.answered(as_token_ids([]))
    budget_bytes = whole.totals.written_bytes // 3
    policy = replace(POLICY, write_budget_bytes=budget_bytes)
    happened = agreed(Daemon(tmp_path / "budget", state), 1, turns, policy)
    left_out = [one for one in happened if one.reason == "write_budget"]
    assert any(one.aligned for one in left_out)
    assert any(not one.aligned for one in left_out)
    assert sum(one.reason == "continues" for one in happened)


@pytest.mark.parametrize("state", STATES)
def test_a_message_that_was_replaced_is_told_from_what_the_template_wrote(state: str, tmp_path: Path) -> None:
    """Only a marker tells, so a recording must have them too. The group leaves the window empty, and
    what is off is not remembered."""
    turns = [Turn("new", size=50, scope="off"), Turn("grow", size=8), Turn("within", size=9, group="a")]
    *_, last = agreed(Daemon(tmp_path, state), 1, turns)
    assert last.reason != "continues"


def test_a_turn_that_goes_on_from_a_recorded_reply_is_foretold(tmp_path: Path) -> None:
    turns = [Turn("grow", size=4, reply=9), Turn("answer", size=54)]
    _, last = agreed(Daemon(tmp_path, "token"), 21108, turns)
    assert last.restored > last.common, "more than the first prompt"


@pytest.mark.parametrize("ttl_s", [0.0, 200.0])
def test_checkpoints_that_were_to_stay_for_longer_are_foretold(ttl_s: float, tmp_path: Path) -> None:
    """Those of the marked turn are to stay for 300 s."""
    turns = [Turn("grow", size=40, reply=9, marked=number == 1) for number in range(9)]
    agreed(Daemon(tmp_path, "lfm2", kv_cache_ttl=ttl_s), 1, turns, replace(POLICY, ttl_s=ttl_s))


BUDGET_BYTES = 16 << 20


class Timed:
    """A daemon and a simulator with the same budget and the clock of the requests."""

    def __init__(self, folder: Path, scope: Scope, budget_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = [1e9]
        for module in (request_module, saving_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: self._now[0], perf_counter=lambda: 0.0))
        self.daemon = Daemon(
            folder, "sliceable", tiny_llama(torch.float32), block_size=64, kv_cache_budget=budget_bytes
        )
        monkeypatch.setattr(self.daemon.runner.cache.store, "clock", lambda: self._now[0])
        policy = replace(POLICY, scope=scope, block_size=64, budget_bytes=budget_bytes, seconds_per_token=0.0)
        self.simulator = Simulator(policy, geometry_of(self.daemon.runner))
        self._scope = scope

    def step(self, request: TraceRequest) -> tuple[int, int]:
        """Returns the tokens that the daemon and the simulator restored."""
        self._now[0] = 1e9 + request.when
        answer = self.daemon.step(replace(request, scope=self._scope))
        return answer.report.restored, self.simulator.step(request).restored


@thorough
@pytest.mark.slow
@pytest.mark.parametrize("scope", [Scope("full"), AUTO], ids=str)
def test_under_a_small_budget_both_stay_within_it_and_restore_about_the_same(
    scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties among what is evicted fall otherwise, as names are others; so the totals alone are compared."""
    requests = crowded(110)
    num_prompt_tokens = sum(len(request.prompt.token_ids) for request in requests)
    both = Timed(tmp_path, scope, BUDGET_BYTES, monkeypatch)
    cache, totals, restored = both.daemon.runner.cache, both.simulator.totals, 0
    for request in requests:
        restored += both.step(request)[0]
        assert cache.store.file_bytes() <= BUDGET_BYTES
    evicted = cache.writer.evicted
    both.daemon.close()
    assert totals.peak_bytes <= BUDGET_BYTES
    assert min(evicted, totals.evictions) > 100
    assert restored / num_prompt_tokens == pytest.approx(totals.restored_share, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [16 << 20, 17 << 20])
def test_prompts_in_turn_are_foretold_with_room_for_half(
    budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node more or less that is evicted would show for rounds: each prompt then evicts the end of the next one."""
    prompts = list(one_off(3, 40, system=(200, 300), user=(600, 900)))
    both = Timed(tmp_path, AUTO, budget_bytes, monkeypatch)
    restored = []
    for number in range(100):
        request = prompts[number % len(prompts)]
        request = replace(request, prompt=_in_small_tokens(request.prompt), when=20.0 * number)
        restored.append(both.step(request))
    evicted = both.daemon.runner.cache.writer.evicted
    both.daemon.close()
    assert evicted
    assert any(by_daemon for by_daemon, _ in restored)
    assert sum(by_daemon != simulated for by_daemon, simulated in restored) <= 2


def crowded(num_requests: int) -> list[TraceRequest]:
    """Conversations that take turns, and prompts that nobody repeats, in the tokens of a small model."""
    talks = interleaved(1, num_requests, system=(300, 300), user=(30, 300), reply=(20, 200), conversations=6)
    others = one_off(2, num_requests // 4, system=(50, 300), user=(100, 900))
    both = sorted([*talks, *others], key=lambda request: request.when)
    return [replace(request, prompt=_in_small_tokens(request.prompt)) for request in both]


def _in_small_tokens(prompt: Prompt) -> Prompt:
    ids = prompt.token_ids
    return replace(prompt, token_ids=np.where(ids < TEXT, ids, TEXT + ids % (VOCAB - TEXT)).astype(np.int32))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("state", "num_blocks"),
    [("token", 20), ("sliceable", 20), ("mamba2", 20), *((state, 999) for state in ("token", "lfm2", "mamba2"))],
)
def test_memory_is_as_in_a_daemon(state: str, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "_MIN_RECLAIMED", 1)
    is_exact = state in ("token", "lfm2")
    runner = Runner(model_of(state), tiny_settings(tmp_path), exact_at="token" if is_exact else "grid")
    layout = runner.layout
    runner.close()
    geometry = Geometry(layout.bytes_per_token, layout.state_bytes, exact_at=layout.exact_at)
    limit = num_blocks * (BLOCK * layout.bytes_per_token + layout.state_bytes)
    pages = PageCache(layout, block_size=BLOCK, limit_bytes=limit, free_bytes=lambda: 1 << 40)
    memory, owner = SimulatedMemory(limit, geometry, BLOCK), Owner(root_hash(""), 0)
    random, prompts = np.random.default_rng(3), [random_prompt(0, 40)]
    num_found = 0
    for number in range(150):
        before = prompts[-1 - random.integers(min(len(prompts), 5))]
        before = before[: len(before) if random.integers(2) else random.integers(1, len(before))]
        prompt = np.concatenate([before, random_prompt(number, int(random.choice([1, BLOCK, 23])))])[: 10 * BLOCK]
        prompts.append(prompt)
        sequence = pages.begin_sequence(owner, prompt)
        assert isinstance(sequence, KVSequence)
        assert memory.match("", prompt) == sequence.num_tokens
        num_found += sequence.num_tokens > 0
        assert sequence.take_pages_to(len(prompt))
        sequence.truncate(len(prompt))
        pages.set_ready(sequence, len(prompt))
        pages.end_sequence(sequence, keep=True)
        memory.keep("", prompt, len(prompt))
        assert pages.check() == []
    assert num_found
