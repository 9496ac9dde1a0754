"""Random histories of sequences that share pages: each has the state of its own tokens, and all is counted right."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
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

from diskprefix.errors import ContextTooLong
from diskprefix.prefixstore.kv import kept_blocks
from diskprefix.prefixstore.kv import page_cache as page_cache_module
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.page_table import PageTable
from diskprefix.prefixstore.kv.pages import Captured, Page, PagePool
from diskprefix.prefixstore.kv.prefix_match import PrefixMatch
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.store.epochs import EVERYONE, Purges
from diskprefix.scope import parse_scope
from diskprefix.tokens import Logits, TokenIds, TokenPath
from diskprefix.values import CacheOptions
from tests.examples import examples
from tests.prefixstore.kv.hashed_state import (
    BLOCK,
    WINDOW,
    compute_for_all,
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
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.clocks = [mock.patch.object(module, "time", clock) for module in (page_cache_module, kept_blocks)]
        for one in self.clocks:
            one.start()
        self.running: list[KVSequence] = []
        self.ids: dict[KVSequence, TokenIds] = {}
        self.seeds: dict[KVSequence, object] = {}
        self.holds: list[tuple[Captured, list[bytes]]] = []
        self.purges = Purges()
        self.num_begun = 0
        self.private: set[bytes] = set()
        """The keys of requests that share nothing, which are forgotten when their last sequence has ended."""
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
        token_ids = self.ids.pop(sequence)[: sequence.num_tokens]
        del self.seeds[sequence]
        self.cache.end_sequence(sequence, keep=keep, token_ids=token_ids, options=OPTIONS)
        running = {one.private for one in map(self.owner, self.running) if one is not None}
        for private in self.private - running:
            self.cache.forget_private(private)
        self.private &= running

    def owner(self, sequence: KVSequence) -> Owner | None:
        return self.cache.running[sequence].owner

    has_running = precondition(lambda self: self.running)

    @rule(
        trunk=st.sampled_from([10, 100]), shared=st.integers(1, 40), rest=IDS,
        root=st.sampled_from([b"a", b"b", b"", b"ax", b"ay"]), lasts_s=st.sampled_from(LASTS_S),
        computes_last=st.booleans(),
    )  # fmt: skip
    def begin(self, trunk: int, shared: int, rest: list[int], root: bytes, lasts_s: float, computes_last: bool) -> None:
        token_ids = tokens(range(trunk, trunk + shared), *rest)
        tenant = str(root[:1])
        owner = Owner(root[:1] * 16, 1, tenant, self.purges.last(tenant), root[1:]) if root else None
        self.num_begun += 1
        try:
            until = self.now + lasts_s
            sequence = self.cache.begin_sequence(owner, token_ids, computes_last=computes_last, expires_at=until)
        except ContextTooLong:
            return
        if not isinstance(sequence, KVSequence):
            assert self.running or self.holds, "there is something to wait for"
            return
        seed: object = self.num_begun if owner is None else owner._replace(private=b"")
        in_memory_tokens, logits = sequence.num_tokens, self.cache.running[sequence].logits
        if in_memory_tokens and not any(self.seeds[one] == seed for one in self.running):
            assert self.lasts_until[seed, token_ids[:in_memory_tokens].tobytes()] > self.now
        assert in_memory_tokens < len(token_ids) or (logits is not None and not computes_last)
        if logits is not None:
            assert np.array_equal(logits, self.logits(seed, token_ids))
        self.private |= {owner.private} if owner is not None else set()
        self.add(sequence, token_ids, seed)
        self.use(sequence)

    def logits(self, seed: object, token_ids: TokenIds) -> Logits:
        found: Logits = hashes(seed, token_ids, len(token_ids) - 1, len(token_ids))[0].view(np.float32)
        return found

    def use(self, sequence: KVSequence) -> None:
        for end in range(1, sequence.num_tokens + 1):
            key = self.seeds[sequence], self.ids[sequence][:end].tobytes()
            self.lasts_until[key] = max(self.lasts_until.get(key, 0.0), self.cache.running[sequence].expires_at)

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
        is_prompt = end == len(self.cache.running[sequence].path.token_ids)
        if not compute_for_all(self.cache, sequence, token_ids, end, seed=self.seeds[sequence], num_wrong=num_wrong):
            self.remove(sequence, keep=True)
            return
        self.ids[sequence] = token_ids[: max(end, len(prompt))]
        self.use(sequence)
        if has_logits and is_prompt:
            self.cache.keep_logits(sequence, self.logits(self.seeds[sequence], prompt))
            self.cache.keep_prompt(sequence)

    @has_running
    @rule(number=PICK, end=st.integers(0, 12))
    def restore(self, number: int, end: int) -> None:
        sequence = self.picked(number)
        if BLOCK * end > sequence.num_tokens and BLOCK * end <= len(self.cache.running[sequence].path.token_ids):
            try:
                restore(self.cache, sequence, self.ids[sequence], BLOCK * end, seed=self.seeds[sequence])
            except MemoryError:
                self.remove(sequence, keep=False)
            else:
                self.use(sequence)

    @has_running
    @rule(number=PICK, count=st.integers(1, 20))
    def truncate(self, number: int, count: int) -> None:
        """As behind a damaged block."""
        sequence = self.picked(number)
        end = max(0, sequence.num_tokens - count)
        if sequence.continues_at(end) and (not end or not sequence.states):
            sequence.truncate(end)
            self.cache.set_ready(sequence, end)

    @has_running
    @rule(number=PICK, how=st.sampled_from(["keep", "keep", "drop", "fail"]))
    def end(self, number: int, how: str) -> None:
        sequence = self.picked(number)
        if how == "fail":
            self.cache.forget_names(sequence)
        self.remove(sequence, keep=how == "keep")

    @rule(number=PICK)
    def resume(self, number: int) -> None:
        ended = self.cache.kept.sequence_ends()
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
            if what == "purge":
                self.purges = self.purges.and_of(EVERYONE)
            self.cache.forget_expired(self.purges)
        if what == "purge":
            unused = [page for of in (*pool._free, *pool._blank) for page in of]
            assert not any(page.rows.any() for page in unused)

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.check() == []
        assert self.cache.pool.used_bytes <= self.cache.pool.taken_bytes <= self.cache.pool.limit_bytes
        for sequence in self.running:
            assert wrong(sequence, self.ids[sequence], seed=self.seeds[sequence]) == []

    def teardown(self) -> None:
        for one in self.clocks:
            one.stop()
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


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", MODELS)
def test_each_sequence_has_the_state_of_its_own_tokens(model: str) -> None:
    run_state_machine_as_test(type("History", (Histories,), MODELS[model]), settings=SETTINGS)


def of_any_owner(cache: PageCache, owner: Owner, path: TokenPath, **options: bool) -> PrefixMatch:
    other = next((key[0] for key in cache.kept.blocks), owner)
    return _match(cache, other, other.path(path.token_ids, BLOCK), **options)


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
        (PageTable, "unwritable", that_are_not_there),
        (PagePool, "hold", not_the_third_time),
    ],
    ids=["tenants are not told apart", "shared pages are written", "a user is not counted"],
)
def test_a_broken_rule_of_pages_shows(of: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, broken)
    found = settings(SETTINGS, max_examples=1000, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Histories, settings=found)
