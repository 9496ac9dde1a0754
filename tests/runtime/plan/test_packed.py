"""Steps of several sequences: each has the bits that it has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.grid.state_layout import made_up_tokens
from diskprefix.runtime.plan.plan_runner import PlanRunner
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.examples import examples
from tests.modules import layout_of
from tests.steps import forward, run

LENGTHS = (552, 300, 90, 2)
"""Of the sequences; their last tokens are decoded."""
pytestmark = pytest.mark.usefixtures("cache")


def made(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Layout]:
    name, _, kind = name.partition(" ")
    model = quantised_tiny_model(name, kind) if kind else tiny_model(name, dtype)
    layout, reason = layout_of(model)
    assert not reason
    return model, layout


Bits = list[tuple[bytes, list[torch.Tensor]]]
"""By sequence: the state at the end, and the logits of the last tokens, which are computed one a step."""


def sequence_of(layout: Layout) -> KVSequence:
    """With memory in which another sequence was that is not finite."""
    pool = PagePool(layout, block_size=256)
    other = KVSequence(pool)
    assert other.take_pages_to(max(LENGTHS))
    for page in other.pages():
        if page is not None:
            # All bits set are no number in any dtype.
            page.rows.fill(0xFF)
    other.close()
    sequence = KVSequence(pool)
    sequence.reserve(max(LENGTHS))
    return sequence


def alone(model: PreTrainedModel, layout: Layout) -> Bits:
    found: Bits = []
    with torch.inference_mode():
        for number, length in enumerate(LENGTHS):
            sequence, token_ids = sequence_of(layout), made_up_tokens(model, number, length)
            ends = [*range(256, length - 4, 256), *range(max(1, length - 4), length + 1)]
            parts = [token_ids[:, begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
            logits = [forward(model, sequence, part)[-1] for part in parts]
            found.append((state_of(sequence, length), logits[-min(4, length - 1) :]))
    return found


def state_of(sequence: KVSequence, num_tokens: int) -> bytes:
    """Of all tokens, or those of the last window."""
    found = [sequence.content(sequence.num_tokens)]
    for table in sequence.tables:
        first = max(0, num_tokens - (table.group.window or num_tokens))
        found.append(table.gathered(first, num_tokens).tobytes())
    return b"".join(found)


def together(model: PreTrainedModel, layout: Layout, seed: int) -> Bits:
    """In random steps of all sequences; those that are over leave. Some steps of decoding compute tokens behind, right
    ones and wrong ones, which are taken back."""
    chance = random.Random(seed)
    sequences = [sequence_of(layout) for _ in LENGTHS]
    logits: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    with torch.inference_mode():
        while left := [n for n, length in enumerate(LENGTHS) if sequences[n].num_tokens < length]:
            chosen = [n for n in left if chance.random() < 0.8] or left
            chance.shuffle(chosen)
            step, parts = [], []
            for n in chosen:
                start, prompt = sequences[n].num_tokens, max(1, LENGTHS[n] - 4)
                end, num_logits, num_wrong = min(prompt, start + chance.choice([1, 2, 3, 7, 17, 33, 100, 200])), 1, 0
                if start >= prompt:
                    end = chance.randint(start + 1, LENGTHS[n])
                    num_wrong = chance.choice([0, 0, 1, 5])
                    num_logits = end - start + num_wrong
                    parts.append((n, end, end - start))
                else:
                    parts.append((n, end, 0))
                right, wrong = made_up_tokens(model, n, LENGTHS[n]), made_up_tokens(model, 100 + n, 5)
                ids = torch.cat([right[:, start:end], wrong[:, :num_wrong]], dim=1)
                step.append(Rows(sequences[n], ids[0].numpy(), num_logits))
            for (n, end, num_right), found in zip(parts, run(model, step), strict=True):
                sequences[n].take_back(end)
                logits[n] += found[:num_right]
    return [(state_of(a, length), f) for a, length, f in zip(sequences, LENGTHS, logits, strict=True)]


def are_equal(one: Bits, other: Bits) -> bool:
    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return len(a) == len(b) and all(map(torch.equal, a, b))

    return all(state == its and same(a, b) for (state, a), (its, b) in zip(one, other, strict=True))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "gemma3n", "phi3", "gpt_oss", "mixtral", "minicpm3", "gpt_oss Q4_1", "deepseek_v3 Q8_0"),
        *("qwen3_5", "lfm2", "mamba2", "kimi_linear", "falcon_h1", "nemotron_h", "granitemoehybrid Q4_1"),
        *("qwen3_next+draft", "mimo_v2_flash+draft", "deepseek_v3+draft Q8_0"),
    ],
)
def test_sequences_in_random_steps_have_the_bits_of_each_alone(name: str) -> None:
    model, layout = made(name)
    expected = alone(model, layout)
    assert all(logits.isfinite().all() for _, of_one in expected for logits in of_one)
    for seed in range(examples(2)):
        assert are_equal(together(model, layout, seed), expected)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2"])
def test_all_rows_of_a_step_are_taken_back(name: str) -> None:
    model, layout = made(name)
    sequence, token_ids = sequence_of(layout), made_up_tokens(model, 0, 40)
    with torch.inference_mode():
        forward(model, sequence, token_ids[:, :30])
        before = state_of(sequence, 30)
        expected = forward(model, sequence, token_ids[:, 30:], 10)
        sequence.take_back(30)
        assert state_of(sequence, 30) == before
        assert torch.equal(forward(model, sequence, token_ids[:, 30:], 10), expected)


def test_no_other_thread_gets_the_pages_from_which_states_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a restore, which needs memory."""
    model, layout = made("lfm2")
    sequence, token_ids = sequence_of(layout), made_up_tokens(model, 0, 40)
    replay, given_back = PlanRunner.replay, list[bool]()

    def noted(*args: Any) -> None:
        given_back.append(sequence.drop_spares())
        replay(*args)

    monkeypatch.setattr(PlanRunner, "replay", noted)
    with torch.inference_mode():
        forward(model, sequence, token_ids, 10)
        sequence.take_back(35)
    assert not any(given_back)
    assert given_back
    assert sequence.drop_spares()
