"""Random histories of sequences that share pages: each has the state of its own tokens, and all is counted right."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import ContextTooLong
from diskprefix.kv import page_cache as page_cache_module
from diskprefix.kv.page_cache import PageCache, PrefixMatch
from diskprefix.kv.page_table import PageTable
from diskprefix.kv.pages import Captured, Page, PagePool
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.nouns import CacheOptions
from diskprefix.tokens import TokenIds
from tests.examples import examples
from tests.kv.hashed_state import (
    BLOCK,
    WINDOW,
    compute,
    hashes,
    holding,
    ids_of,
    layout_of,
    page_cache,
    restore,
    tokens,
    wrong,
)

IDS = st.lists(st.integers(0, 2), max_size=9)
PICK = st.integers(0, 99)
LASTS_S = (1.0, 5.0, float("inf"))
OPTIONS = CacheOptions(scope=parse_scope("full", param="scope"))


class Histories(RuleBasedStateMachine):
    """Each step does what an engine does, to one of the sequences that run. The seed of a state is its owner, or for
    those of nobody a number of its own."""

    kind, window = "token", None
    """The model's, see `layout_of`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        clock = mock.patch.object(page_cache_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        clock.start()
        self.stop_clock = clock.stop
        self.running: list[KVSequence] = []
        self.ids: dict[KVSequence, TokenIds] = {}
        self.seeds: dict[KVSequence, object] = {}
        self.holds: list[tuple[Captured, list[bytes]]] = []
        self.purged_at = b""
        self.num_begun = 0
        self.lasts_until: dict[tuple[object, bytes], float] = {}
        """When the last state of some tokens expires, by its owner."""

    @initialize(blocks=st.sampled_from([14, 20, 60]), keeps=st.sampled_from([True, True, True, False]))
    def open(self, blocks: int, keeps: bool) -> None:
        self.cache = page_cache(layout_of(self.kind, self.window), blocks=blocks, keeps=keeps)
        for number, root in enumerate((b"a", b"b")):
            self.begin(10, 18, [0], root, float("inf"), False)
            self.compute(number, 18, [], 0, False)

    def picked(self, number: int) -> KVSequence:
        return self.running[number % len(self.running)]

    def add(self, sequence: KVSequence, token_ids: TokenIds, seed: object) -> None:
        self.running.append(sequence)
        self.ids[sequence], self.seeds[sequence] = token_ids, seed

    def remove(self, sequence: KVSequence, *, keep: bool) -> None:
        self.running.remove(sequence)
        del self.ids[sequence], self.seeds[sequence]
        self.cache.end(sequence, keep=keep, options=OPTIONS)

    has_running = precondition(lambda self: self.running)

    @rule(
        trunk=st.sampled_from([10, 100]), shared=st.integers(1, 40), rest=IDS, root=st.sampled_from([b"a", b"b", b""]),
        lasts_s=st.sampled_from(LASTS_S), leaves_last=st.booleans(),
    )  # fmt: skip
    def begin(self, trunk: int, shared: int, rest: list[int], root: bytes, lasts_s: float, leaves_last: bool) -> None:
        token_ids = tokens(range(trunk, trunk + shared), *rest)
        owner = Owner(root * 16, 1, self.purged_at) if root else None
        self.num_begun += 1
        try:
            until = self.now + lasts_s
            sequence = self.cache.begin(owner, token_ids, leaves_last=leaves_last, expires_at=until)
        except ContextTooLong:
            return
        if not isinstance(sequence, KVSequence):
            assert self.running or self.holds, "there is something to wait for"
            return
        seed: object = owner or self.num_begun
        have = sequence.num_tokens
        if have and not any(one.owner == owner for one in self.running):
            assert self.lasts_until[seed, token_ids[:have].tobytes()] > self.now
        assert have < len(token_ids) or (sequence.logits is not None and not leaves_last)
        if sequence.logits is not None:
            assert torch.equal(sequence.logits, self.logits(seed, token_ids))
        self.add(sequence, token_ids, seed)
        self.use(sequence)

    def logits(self, seed: object, token_ids: TokenIds) -> torch.Tensor:
        return torch.from_numpy(hashes(seed, token_ids, len(token_ids) - 1, len(token_ids))[0])

    def use(self, sequence: KVSequence) -> None:
        for end in range(1, sequence.num_tokens + 1):
            key = self.seeds[sequence], self.ids[sequence][:end].tobytes()
            self.lasts_until[key] = max(self.lasts_until.get(key, 0.0), sequence.expires_at)

    def name(self, sequence: KVSequence, num_prompt: int) -> None:
        """What others find of a model on the grid is the prompt."""
        sequence.token_ids = self.ids[sequence]
        is_exact = sequence.layout.exact_at == "token"
        sequence.num_exact = len(sequence.token_ids) if is_exact else min(num_prompt, len(sequence.token_ids))
        self.cache.name_blocks(sequence)
        self.use(sequence)

    @has_running
    @rule(number=PICK, count=st.integers(1, 30), more=IDS, num_wrong=st.integers(0, 3), has_logits=st.booleans())
    def compute(self, number: int, count: int, more: list[int], num_wrong: int, has_logits: bool) -> None:
        sequence = self.picked(number)
        token_ids, prompt = self.ids[sequence], self.ids[sequence]
        if sequence.num_tokens == len(token_ids):
            # A reply.
            token_ids = tokens(token_ids, *more)
        end = min(len(token_ids), sequence.num_tokens + count)
        if end == sequence.num_tokens:
            return
        if not compute(sequence, token_ids, end, seed=self.seeds[sequence], num_wrong=num_wrong):
            self.remove(sequence, keep=True)
            return
        self.ids[sequence] = token_ids[: max(end, len(prompt))]
        self.name(sequence, sequence.num_exact or len(prompt))
        if has_logits and end == len(prompt) == sequence.num_exact:
            self.cache.keep_logits(sequence, self.logits(self.seeds[sequence], prompt))

    @has_running
    @rule(number=PICK, end=st.integers(0, 12))
    def restore(self, number: int, end: int) -> None:
        sequence = self.picked(number)
        if BLOCK * end > sequence.num_tokens and BLOCK * end <= len(self.ids[sequence]):
            try:
                restore(self.cache, sequence, self.ids[sequence], BLOCK * end, seed=self.seeds[sequence])
            except MemoryError:
                self.remove(sequence, keep=False)
            else:
                self.name(sequence, sequence.num_exact)

    @has_running
    @rule(number=PICK, count=st.integers(1, 20), more=IDS)
    def truncate(self, number: int, count: int, more: list[int]) -> None:
        """And goes on with other tokens."""
        sequence = self.picked(number)
        end = max(0, sequence.num_tokens - count)
        if sequence.continues_at(end) and (not end or not sequence.states):
            sequence.truncate(end)
            sequence.num_ready = min(sequence.num_ready, end)
            self.ids[sequence] = tokens(self.ids[sequence][:end], *more)
            self.name(sequence, min(sequence.num_exact, end))

    @has_running
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        source = self.picked(number)
        if (sequence := self.cache.fork(source)) is not None:
            assert sequence.num_tokens == source.num_tokens
            self.add(sequence, self.ids[source][: source.num_tokens], self.seeds[source])
            for one, token in ((sequence, 3), (source, 4)):
                self.compute(self.running.index(one), 1, [token], 0, False)

    @has_running
    @rule(number=PICK, how=st.sampled_from(["keep", "keep", "drop", "fail"]))
    def end(self, number: int, how: str) -> None:
        sequence = self.picked(number)
        if how == "fail":
            self.cache.forget(sequence)
        self.remove(sequence, keep=how == "keep")

    @rule(number=PICK)
    def resume(self, number: int) -> None:
        ended = self.cache.ended()
        if ended and (sequence := self.cache.resume(node := ended[number % len(ended)])) is not None:
            self.add(sequence, ids_of(self.cache, node)[: sequence.num_tokens], node.owner)

    @has_running
    @rule(number=PICK)
    def hold(self, number: int) -> None:
        sequence = self.picked(number)
        blocks = range(sequence.num_tokens // BLOCK)
        pages = [page for block in blocks for page in sequence.block(block) if page is not None]
        self.holds.append((holding(self.cache.pool, pages), [bytes(page.payload()) for page in pages]))

    @precondition(lambda self: self.holds)
    @rule(number=PICK)
    def release(self, number: int) -> None:
        hold, contents = self.holds.pop(number % len(self.holds))
        assert [bytes(page.payload()) for page in hold.pages] == contents
        hold.release()

    @rule(what=st.sampled_from(["time", "time", "purge", "reclaim", "reclaim", "forget idle"]))
    def forget(self, what: str) -> None:
        pool = self.cache.pool
        if what == "reclaim":
            pool.reclaim(1)
        elif what == "forget idle":
            self.cache.forget_idle()
        else:
            self.now += 0.7
            self.purged_at += b"p" * (what == "purge")
            self.cache.drop_gone(self.purged_at)
        if what == "purge":
            unused = [page for of in (*pool._free, *pool._blank) for page in of]
            assert not any(bool(page.tensor.view(torch.uint8).any()) for page in unused)

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.check() == []
        assert self.cache.pool.used_bytes <= self.cache.pool.taken_bytes <= self.cache.pool.limit_bytes
        for sequence in self.running:
            assert wrong(sequence, self.ids[sequence], seed=self.seeds[sequence]) == []

    def teardown(self) -> None:
        self.stop_clock()
        for sequence in list(self.running):
            self.remove(sequence, keep=True)
        for hold, _ in self.holds:
            hold.release()
        if hasattr(self, "cache"):
            self.cache.forget_idle()
            assert self.cache.pool.used_bytes == 0


MODELS: dict[str, dict[str, Any]] = {
    "token": {"kind": "token"},
    "window": {"kind": "token", "window": WINDOW},
    "sliceable": {"kind": "sliceable"},
    "token_checkpoints": {"kind": "token_checkpoints"},
    "checkpoints": {"kind": "checkpoints"},
}
SETTINGS = settings(max_examples=examples(10), stateful_step_count=40)


@pytest.mark.parametrize("model", MODELS)
def test_each_sequence_has_the_state_of_its_own_tokens(model: str) -> None:
    run_state_machine_as_test(type("History", (Histories,), MODELS[model]), settings=SETTINGS)


def of_any_owner(cache: PageCache, owner: Owner, token_ids: TokenIds, **options: bool) -> PrefixMatch:
    return _match(cache, next((key[0] for key in cache._nodes), owner), token_ids, **options)


def that_are_not_there(table: PageTable, first: int, end: int) -> list[int]:
    return [n for n in range(first, end) if n >= len(table.pages) or table.pages[n] is None]


def not_the_third_time(pool: PagePool, pages: Iterable[Page | None]) -> None:
    pages = list(pages)
    counted = vars(pool).setdefault("counted", [])
    counted.append(any(pages))
    if sum(counted) != 3 or not any(pages):
        _hold(pool, pages)


_match, _hold = PageCache.match_prefix, PagePool.hold


@pytest.mark.parametrize(
    ("of", "name", "broken"),
    [
        (PageCache, "match_prefix", of_any_owner),
        (PageTable, "to_take", that_are_not_there),
        (PagePool, "hold", not_the_third_time),
    ],
    ids=["tenants are not told apart", "shared pages are written", "a user is not counted"],
)
def test_a_broken_rule_of_pages_shows(of: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, broken)
    found = settings(SETTINGS, max_examples=200, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Histories, settings=found)
