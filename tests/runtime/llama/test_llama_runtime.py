"""The runtime over llama.cpp's library: a sequence has the same bits wherever its context was before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence, Prefix
from diskprefix.runtime.contract import Rows, State
from diskprefix.runtime.llama import llama_runtime
from diskprefix.runtime.llama.llama_context import Failed, NoMemory
from diskprefix.runtime.llama.llama_layout import LlamaLayout, uncached_layout
from diskprefix.runtime.llama.llama_runtime import LlamaRuntime, LlamaState
from diskprefix.runtime.llama.state_form import StateForm
from diskprefix.runtime.load.self_check import sequence_with_room
from diskprefix.tokens import Logits
from tests.runtime.llama.scripted_library import KINDS, VOCAB, ScriptedLlama, model_of, rehearsed_form

BLOCK, ROOM = 32, 400
STEPS = (BLOCK, BLOCK, BLOCK, 7, 1, 1, 1)
SOME = ["dense", "q8", "short window", "long window", "hybrid", "recurrent", "transposed", "transposed hybrid"]
SOME += ["sparse", "sparse with a window", "sparse hybrid"]


@cache
def form_of(name: str) -> tuple[StateForm, LlamaLayout]:
    return rehearsed_form(model_of(ScriptedLlama(name)))


class Served:
    """A runtime of a model, with pages of its own."""

    def __init__(self, name: str, *, block: int = BLOCK, cached: bool = True, **options: Any) -> None:
        form, placed = form_of(name)
        self.api, self.form = ScriptedLlama(name), form
        of_model = (form, placed) if cached else (None, uncached_layout(VOCAB, "a reason"))
        self.runtime = LlamaRuntime(model_of(self.api, step=block), *of_model, **options)
        self.pool = PagePool(placed.layout, block_size=block)

    def sequence(self, prefix: Prefix | None = None) -> KVSequence:
        """Its memory after the prefix holds no numbers."""
        return sequence_with_room(self.pool, ROOM, prefix)

    def step(self, state: State, num_tokens: int, seed: int = 1, *, may_lag: bool | None = None) -> Logits:
        """Single tokens are those of a reply, unless `may_lag` says something else."""
        assert isinstance(state, KVSequence | LlamaState)
        start = len(state.token_ids) if isinstance(state, LlamaState) else state.num_tokens
        token_ids = np.random.default_rng(seed).integers(0, VOCAB, ROOM)[start : start + num_tokens]
        may_lag = num_tokens == 1 if may_lag is None else may_lag
        return self.runtime.run([Rows(state, token_ids, may_lag=may_lag)]).logits[0]

    def steps(self, state: State, counts: Sequence[int], seed: int = 1) -> list[bytes]:
        return [self.step(state, count, seed).tobytes() for count in counts]

    def owners(self) -> list[Any]:
        """Returns the sequences of the contexts; the one that was used last is at the end."""
        return [held.owner for held in self.runtime._held]


def content(sequence: KVSequence) -> bytes:
    """Returns what the next token may read."""
    sequence.complete_pages()
    return sequence.content(
        max((table.group.first_needed(sequence.num_tokens) for table in sequence.tables), default=0)
    )


@cache
def alone(name: str, seed: int, steps: tuple[int, ...] = STEPS, block: int = BLOCK) -> tuple[list[bytes], bytes]:
    """Returns the logits after each step of a sequence that nothing interrupts, and its content."""
    served = Served(name, block=block)
    sequence = served.sequence()
    return served.steps(sequence, steps, seed), content(sequence)


def restored(sequence: KVSequence, pool: PagePool) -> KVSequence:
    """Returns a copy in a pool of another process, as after a restore: without pages that a window has passed, and with
    any finite numbers in the rows before it."""
    count, size = sequence.num_tokens, pool.block_size
    sequence.complete_pages()
    copy = KVSequence(pool)
    assert copy.take_pages_to(ROOM)
    for table, source in zip(copy.tables, sequence.tables, strict=True):
        first = table.group.first_needed(count)
        for number, page in enumerate(source.pages[: -(-count // size)]):
            if number < first // size:
                pool.release_pages([table.pages[number]])
                table.set(number, None)
            elif (target := table.pages[number]) is not None and page is not None:
                target.tensor[:] = page.tensor
                target.tensor[:, :, : max(0, first - number * size)].view(np.uint8)[:] = 0x3C
        table.first = first // size
    for target, page in zip(copy.states, sequence.states, strict=True):
        target.tensor[:] = page.tensor
    copy.truncate(count)
    return copy


@pytest.mark.cases(2)
@pytest.mark.parametrize("block", [32, 96])
@pytest.mark.parametrize("name", KINDS)
def test_a_restored_sequence_has_the_bits_of_an_uninterrupted_run(name: str, block: int) -> None:
    """In the new memory of another process, at ends of blocks and of a prompt."""
    steps = (block, block, block, 7, 1, 1, 1)
    logits, whole = alone(name, 1, steps, block)
    for end in (1, 2, 3, 4, 6):
        served = Served(name, block=block)
        sequence = served.sequence()
        served.steps(sequence, steps[:end])
        other = Served(name, block=block)
        again = restored(sequence, other.pool)
        assert other.steps(again, steps[end:]) == logits[end:], end
        assert content(again) == whole, end


@pytest.mark.cases(9)
@pytest.mark.parametrize("num_contexts", [1, 2, 3])
@pytest.mark.parametrize("name", SOME)
def test_conversations_in_turn_have_the_bits_of_each_alone(name: str, num_contexts: int) -> None:
    served = Served(name, max_contexts=num_contexts)
    sequences = {seed: served.sequence() for seed in (1, 2)}
    for number, count in enumerate(STEPS):
        for seed, sequence in sequences.items():
            assert served.step(sequence, count, seed).tobytes() == alone(name, seed)[0][number], (number, seed)
    for seed, sequence in sequences.items():
        assert content(sequence) == alone(name, seed)[1]
    assert len(served.api.made) == min(num_contexts, 2)


@pytest.mark.parametrize("name", SOME)
def test_single_tokens_are_copied_when_somebody_asks_or_takes_the_context(name: str) -> None:
    served = Served(name)
    sequence, copies = served.sequence(), list[bytes]()

    def pages() -> bytes:
        return b"".join(page.tensor.tobytes() for page in sequence.pages() if page is not None)

    def copied_by(action: Callable[[], object]) -> None:
        before = pages()
        action()
        copies.append(pages())
        assert copies[-1] != before

    served.steps(sequence, STEPS[:4])
    for action in (sequence.complete_pages, lambda: served.step(served.sequence(), 5, 2)):
        before = pages()
        served.steps(sequence, (1, 1))
        assert pages() == before
        copied_by(action)
    # A copy of what is there changes nothing.
    sequence.complete_pages()
    assert pages() == copies[-1]
    served = Served(name)
    each = served.sequence()
    for count in (*STEPS[:4], 1, 1, 1, 1):
        served.step(each, count)
        each.complete_pages()
    assert content(each) == content(sequence)


@pytest.mark.parametrize("name", SOME)
def test_the_single_token_at_the_end_of_a_prompt_is_copied_at_once(name: str) -> None:
    """Its state is saved without being asked for."""
    served = Served(name)
    sequence = served.sequence()
    served.step(sequence, BLOCK)
    before = sequence.content(BLOCK)
    served.step(sequence, 1, may_lag=False)
    after = sequence.content(BLOCK)
    sequence.complete_pages()
    assert after == sequence.content(BLOCK) != before


def test_single_tokens_are_copied_at_the_end_of_a_block() -> None:
    served = Served("hybrid")
    sequence = served.sequence()
    served.steps(sequence, (BLOCK - 2, 1))
    before = sequence.content()
    served.step(sequence, 1)
    assert sequence.content(0, BLOCK) == content(sequence) != before


def test_pages_that_a_sequence_shares_are_not_written_to() -> None:
    """What a window has passed is put into a context as zeros."""
    served = Served("short window")
    source = served.sequence()
    served.steps(source, STEPS[:3])
    before = [page.tensor.tobytes() for table in source.tables for page in table.pages[:3] if page is not None]
    served.steps(served.sequence(source.prefix()), STEPS[3:])
    after = [page.tensor.tobytes() for table in source.tables for page in table.pages[:3] if page is not None]
    assert after == before


@pytest.mark.parametrize("name", [name for name in SOME if not KINDS[name].states])
def test_a_sequence_that_was_cut_is_filled_again(name: str) -> None:
    served = Served(name)
    sequence = served.sequence()
    served.steps(sequence, STEPS[:5])
    sequence.truncate(2 * BLOCK)
    assert served.owners() == [None]
    assert served.steps(sequence, STEPS[2:]) == alone(name, 1)[0][2:]
    assert content(sequence) == alone(name, 1)[1]


def test_the_pages_decide_what_a_sequence_is_that_was_changed() -> None:
    served = Served("dense")
    one, other = served.sequence(), served.sequence()
    served.steps(one, STEPS[:3], 1)
    served.steps(other, STEPS[:3], 2)
    for table, source in zip(one.tables, other.tables, strict=True):
        for page, of_other in zip(table.pages[:3], source.pages[:3], strict=True):
            assert page is not None
            assert of_other is not None
            page.tensor[:] = of_other.tensor
    one.truncate(3 * BLOCK)
    assert served.steps(one, STEPS[3:], 2) == alone("dense", 2)[0][3:]


@pytest.mark.cases(9)
@pytest.mark.parametrize("num_contexts", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_a_context_grows_with_its_sequence(name: str, num_contexts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (*[BLOCK] * 7, 30, *[1] * 6)
    expected = alone(name, 1, steps)
    monkeypatch.setattr(llama_runtime, "_LEAST_CELLS", 256)
    served = Served(name, max_contexts=num_contexts)
    sequence = served.sequence()
    assert served.steps(sequence, steps) == expected[0]
    assert content(sequence) == expected[1]
    assert served.api.made == [256, 512]
    assert len(served.api.contexts) == 1


def test_no_context_is_larger_than_the_positions_of_the_model() -> None:
    served = Served("dense")
    served.step(served.sequence(), 5)
    assert served.api.made == [512]


def test_the_context_that_was_not_used_for_longest_goes_first() -> None:
    served = Served("hybrid", max_contexts=2)
    one, two, three = (served.sequence() for _ in range(3))
    for sequence in (one, two, one, three):
        served.step(sequence, BLOCK, 1)
    assert served.owners() == [one, three]
    # A sequence that has ended needs no context.
    three.close()
    served.step(two, BLOCK, 1)
    assert served.owners() == [one, two]
    assert len(served.api.contexts) == 2


@pytest.mark.parametrize("limit", ["free bytes", "the library"])
def test_a_device_without_room_for_a_second_context_has_one(limit: str) -> None:
    served = Served("short window", max_contexts=9, free_bytes=lambda: 0 if limit == "free bytes" else 1 << 62)
    served.api.most_contexts = 9 if limit == "free bytes" else 1
    sequences = {seed: served.sequence() for seed in (1, 2)}
    for number, count in enumerate(STEPS):
        for seed, sequence in sequences.items():
            assert served.step(sequence, count, seed).tobytes() == alone("short window", seed)[0][number]
            assert len(served.api.contexts) == 1


def test_without_memory_for_any_context_the_message_says_what_to_do() -> None:
    served = Served("dense")
    served.api.most_contexts = 0
    sequence = served.sequence()
    with pytest.raises(NoMemory, match=r"no context of 512 tokens: out of memory; .* lower --context or --gpu-layers"):
        served.step(sequence, BLOCK)
    served.api.most_contexts = 1
    assert served.steps(sequence, STEPS) == alone("dense", 1)[0]


@pytest.mark.cases(34)
@pytest.mark.parametrize("number", range(len(STEPS)))
@pytest.mark.parametrize("name", SOME)
def test_after_a_failed_step_the_sequence_goes_on_with_its_bits(name: str, number: int) -> None:
    served = Served(name)
    sequence = served.sequence()
    served.steps(sequence, STEPS[:number])
    # What single tokens added is copied before other steps only.
    sequence.complete_pages()
    served.api.statuses.append(-3)
    with pytest.raises(Failed, match=r"computed nothing \(status -3\): failed to compute"):
        served.step(sequence, STEPS[number])
    assert [held.context.end for held in served.runtime._held] == [0]
    assert sequence.num_tokens == sum(STEPS[:number])
    assert served.steps(sequence, STEPS[number:]) == alone(name, 1)[0][number:]
    assert content(sequence) == alone(name, 1)[1]


@pytest.mark.parametrize("name", SOME)
def test_a_failed_step_behind_single_tokens_leaves_no_pages_without_their_rows(name: str) -> None:
    served = Served(name)
    sequence = served.sequence()
    served.steps(sequence, STEPS[:-1])
    served.api.statuses.append(-3)
    with pytest.raises(Failed):
        served.step(sequence, 1)
    # The tokens that are left, perhaps fewer, have the rows of a run without the failure.
    other = Served(name)
    expected, left = other.sequence(), sequence.num_tokens - sum(STEPS[:4])
    other.steps(expected, (*STEPS[:4], *[1] * left))
    assert content(sequence) == content(expected)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_state_that_the_library_does_not_take_fails_the_step_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(name)
    sequence = served.sequence()
    served.steps(sequence, STEPS[:4])
    sequence.mark = None
    with monkeypatch.context() as patch:
        patch.setattr(served.api, "llama_state_seq_set_data_ext", lambda *_: 0)
        with pytest.raises(Failed, match=r"took no state of [\d,]+ bytes: it gives no reason"):
            served.step(sequence, 1)
    assert served.api.contexts == []
    assert served.steps(sequence, STEPS[4:]) == alone(name, 1)[0][4:]


def test_a_state_without_all_tokens_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a hole would be saved."""
    served = Served("short window")
    sequence = served.sequence()
    monkeypatch.setattr(served.runtime, "_pieces", lambda _sequence, start, stop: [(start, stop)])
    with pytest.raises(Failed, match="gave the state of 12 tokens from 20 on"):
        served.step(sequence, BLOCK)


@pytest.mark.parametrize("num_contexts", [1, 2])
@pytest.mark.parametrize("name", ["dense", "hybrid", "recurrent"])
def test_sequences_that_are_not_cached_are_computed_again_in_a_context_of_another(name: str, num_contexts: int) -> None:
    served = Served(name, cached=False, max_contexts=num_contexts)
    states = {seed: served.runtime.new_state() for seed in (1, 2)}
    for number, count in enumerate(STEPS):
        for seed, state in states.items():
            assert served.step(state, count, seed).tobytes() == alone(name, seed)[0][number]
    served.api.statuses.append(1)
    with pytest.raises(Failed):
        served.step(states[1], 3)
    expected = Served(name)
    sequence = expected.sequence()
    expected.steps(sequence, STEPS)
    assert served.step(states[1], 3).tobytes() == expected.step(sequence, 3).tobytes()


def test_each_of_the_last_rows_has_its_logits() -> None:
    served = Served("dense")
    token_ids = np.random.default_rng(1).integers(0, VOCAB, ROOM)[:BLOCK]
    (several,) = served.runtime.run([Rows(served.sequence(), token_ids, num_logits=3)]).logits
    assert several.shape == (3, VOCAB)
    assert several[-1].tobytes() == alone("dense", 1)[0][0]
    sequence = served.sequence()
    served.runtime.run([Rows(sequence, token_ids[:-3])])
    singles = [served.runtime.run([Rows(sequence, token_ids[at : at + 1])]).logits[0] for at in range(-3, -1)]
    assert np.concatenate(singles).tobytes() == several[:2].tobytes()


def test_close_frees_every_context() -> None:
    served = Served("dense", max_contexts=2)
    for _ in range(2):
        served.step(served.sequence(), 5)
    assert len(served.api.contexts) == 2
    served.runtime.close()
    assert served.api.contexts == []
