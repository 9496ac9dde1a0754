"""The draft layer: its memory has the same bits however a prompt is computed, the model's own are those without it, and
its guesses are those of transformers' module."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.numbers import Array, converted
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import PictureRows, Rows
from diskprefix.runtime.grid.cache_argument import cache_argument
from diskprefix.runtime.grid.state_layout import made_up_tokens
from diskprefix.runtime.pictures.vision_encoder import VisionEncoder
from diskprefix.runtime.plan.drafts import DraftLayer, DraftRow
from diskprefix.runtime.plan.families import draft_decoder
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan_runner import PlanRunner
from tests.arrays import array_of
from tests.exactness.architectures import (
    DRAFTING,
    WITH_DRAFT_LAYER,
    quantised_tiny_model,
    shrink,
    tiny_model,
    with_draft_layer,
)
from tests.modules import layout_of, plan_runtime
from tests.runner import Runner, tiny_settings
from tests.steps import forward, made_once, run

pytestmark = pytest.mark.usefixtures("cache")

LENGTH = 90


def made(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Layout]:
    model = tiny_model(name, dtype)
    layout, reason = layout_of(model)
    assert (reason, layout.packs, layout.has_draft_layer) == ("", True, DRAFTING in name)
    return model, layout


def sequence_of(layout: Layout, num_tokens: int = LENGTH) -> KVSequence:
    """With memory for a prompt, and for guesses, that is not finite."""
    sequence = KVSequence(PagePool(layout, block_size=16))
    sequence.reserve(num_tokens + 16)
    for page in sequence.pages():
        if page is not None:
            page.rows.fill(0xFF)
    return sequence


def computed(model: PreTrainedModel, layout: Layout, *steps: int) -> tuple[KVSequence, torch.Tensor]:
    sequence = sequence_of(layout, sum(steps))
    parts = torch.split(made_up_tokens(model, 5, sum(steps)), list(steps), dim=1)
    return sequence, torch.cat([forward(model, sequence, part, part.shape[1]) for part in parts])


def memory_of(sequence: KVSequence) -> dict[tuple[int, str], bytes]:
    """Returns what each layer has: states, keys and values, with a window those of the last tokens. The layer behind
    all has the hidden states, too."""
    found = dict[tuple[int, str], Array]()
    for group, page in zip(sequence.layout.states, sequence.states, strict=True):
        found |= {(spec.layer, spec.part): state for spec, state in zip(group.specs, page.tensor, strict=True)}
    for table in sequence.tables:
        first, end = table.group.first_needed(sequence.num_tokens), sequence.num_tokens
        rows = table.gathered(first, end)
        found |= {(spec.layer, spec.part): of_one for spec, of_one in zip(table.group.specs, rows, strict=True)}
    assert all(np.isfinite(converted(part, "float32")).all() for part in found.values())
    return {name: part.tobytes() for name, part in found.items()}


def guesses(model: PreTrainedModel, *sequences: KVSequence, count: int = 3) -> list[list[Any]]:
    found: list[list[Any]] = [[] for _ in sequences]
    rows = [DraftRow(sequence, 7, sequence.num_tokens) for sequence in sequences]
    for _ in range(count):
        assert all(row.state.take_pages_to(row.position + 1) for row in rows)
        guessed, hidden = made_once(model, rows[0].state.layout, 16).draft(rows)
        for each, (token, probability), its in zip(found, guessed, hidden, strict=True):
            each += [token, probability, its.tolist()]
        rows = [
            DraftRow(row.state, token, row.position + 1, its)
            for row, (token, _), its in zip(rows, guessed, hidden, strict=True)
        ]
    return found


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_the_memory_of_the_draft_layer_may_lag_within_a_block(name: str) -> None:
    """Tokens come one by one, with a guess behind each, which is wrong. Now and then its memory is needed."""
    model, layout = made(name + DRAFTING)
    ids, (whole, _) = made_up_tokens(model, 5, LENGTH), computed(model, layout, LENGTH)
    sequence, lags = sequence_of(layout), list[int]()
    forward(model, sequence, ids[:, :30])
    for at in range(30, LENGTH):
        if at in (50, 53):
            other = sequence_of(layout)
            forward(model, other, ids[:, :at])
            assert guesses(model, sequence) == guesses(model, other)
        run(model, [Rows(sequence, np.array([int(ids[0, at]), 3]), 2, may_lag=True)])
        sequence.take_back(at + 1)
        lags.append(len(sequence.undrafted))
        assert sequence.num_drafted >= sequence.num_tokens // 16 * 16, "others read complete blocks"
    assert max(lags) > 10
    sequence.complete_pages()
    assert memory_of(sequence) == memory_of(whole)


@pytest.mark.cases(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WITH_DRAFT_LAYER)
@torch.inference_mode()
def test_the_cut_of_a_prompt_changes_no_bit_of_the_draft_layers_memory(name: str, dtype: torch.dtype) -> None:
    model, layout = made(name, dtype)
    whole, logits = computed(model, layout, LENGTH)
    cut, others = computed(model, layout, 1, 30, 2, 1, 17, 39)
    assert torch.equal(logits, others)
    assert memory_of(whole) == memory_of(cut)
    assert guesses(model, whole) == guesses(model, cut)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_a_draft_layer_changes_no_bit_of_the_model(name: str) -> None:
    (model, layout), (plain, its) = made(name + DRAFTING), made(name)
    assert layout.layers[:-1] == its.layers
    (one, logits), (other, expected) = computed(model, layout, 50, 1, 39), computed(plain, its, 50, 1, 39)
    assert torch.equal(logits, expected)
    assert memory_of(one).items() >= memory_of(other).items()


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_guesses_leave_no_trace_and_share_forwards(name: str) -> None:
    model, layout = made(name + DRAFTING)
    ids = made_up_tokens(model, 5, LENGTH)
    alone, (beside, _) = sequence_of(layout), computed(model, layout, LENGTH)
    expected, behind = memory_of(computed(model, layout, LENGTH)[0]), guesses(model, beside)[0]
    forward(model, alone, ids[:, :40])
    for end in (41, 43, LENGTH):
        length = alone.num_tokens
        (its,) = guesses(model, alone)
        assert guesses(model, beside, alone) == [behind, its]
        assert alone.num_tokens == length
        other = computed(model, layout, LENGTH)[0]
        run(model, [Rows(other, ids[0, :7].numpy()), Rows(alone, ids[0, alone.num_tokens : end].numpy())])
    assert memory_of(alone) == expected


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "mimo_v2_flash"])
@torch.inference_mode()
def test_a_restored_sequence_guesses_as_before(name: str, tmp_path: Path) -> None:
    model, _ = made(name + DRAFTING)
    runner = Runner(model, tiny_settings(tmp_path), exact_at="token")
    prompt = made_up_tokens(model, 5, LENGTH)[0].int().numpy()
    runner.run(prompt, "full")
    expected, memory = guesses(model, runner.sequence), memory_of(runner.sequence)
    shared = KVSequence(runner.pool)
    assert shared.begin_with(runner.sequence.prefix())
    assert memory_of(shared) == memory
    assert guesses(model, shared) == expected
    runner.reopen()
    answer = runner.run(prompt, 1)
    assert (answer.report.source, answer.report.restored, answer.num_forwards) == ("disk", LENGTH, 0)
    assert memory_of(runner.sequence) == memory
    assert guesses(model, runner.sequence) == expected
    runner.close()


@torch.inference_mode()
def test_the_cut_of_a_prompt_with_pictures_changes_no_bit() -> None:
    text, towers = shrink("qwen3_5").to_dict(), {"depth": 1, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4}
    config = Qwen3_5Config(text_config=text, vision_config=towers | {"intermediate_size": 64}, image_token_id=5)
    torch.manual_seed(0)
    model = with_draft_layer(Qwen3_5ForConditionalGeneration)._from_config(config, dtype=torch.bfloat16).eval()
    layout, reason = layout_of(model)
    assert (reason, layout.packs, layout.has_draft_layer) == ("", True, True)
    ids, encoder = made_up_tokens(model, 5, LENGTH).clamp(min=6), VisionEncoder(model, 5, is_exact=True)
    ids[0, 20:36] = 5
    encoded = torch.randn(1, 16, encoder.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = torch.cat([torch.arange(20), torch.full((16,), 20), torch.arange(24, LENGTH - 12)]).expand(3, -1)

    def found(*ends: int) -> Any:
        sequence, is_picture = sequence_of(layout), ids[0] == 5
        for start, end in pairwise([0, *ends]):
            first, last = (int(is_picture[:position].sum()) for position in (start, end))
            its = (is_picture[start:end].numpy(), array_of(encoded[:, first:last]), positions[:, start:end].numpy())
            run(model, [Rows(sequence, ids[0, start:end].numpy(), pictures=PictureRows(encoder, *its))])
        return memory_of(sequence), guesses(model, sequence)

    assert found(LENGTH) == found(3, 22, 23, 30, 37, 80, LENGTH)


@torch.inference_mode()
def test_a_step_larger_than_the_plan_has_the_bits_of_small_steps() -> None:
    model, layout = made("deepseek_v3" + DRAFTING)
    (whole, _), (cut, _) = computed(model, layout, 300), computed(model, layout, 200, 100)
    assert memory_of(whole) == memory_of(cut)


@torch.inference_mode()
def test_a_step_copies_its_hidden_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = made("qwen3_5" + DRAFTING)
    runtime, addresses, copy = plan_runtime(model, layout, 16), list[int](), PlanRunner.copied

    def counted(runner: PlanRunner, rows: Buffer, num_rows: int) -> np.ndarray:
        addresses.append(rows.address)
        return copy(runner, rows, num_rows)

    monkeypatch.setattr(PlanRunner, "copied", counted)
    step = [Rows(sequence_of(layout), made_up_tokens(model, 5, 20)[0].numpy())]
    output = runtime.run(step, needs_hidden=True)
    assert addresses.count(runtime.runner.plan.hidden.address) == 1
    assert output.hidden is not None
    stored = converted(copy(runtime.runner, runtime.runner.plan.hidden, 20).view(np.uint16), "float32")
    assert np.array_equal(output.hidden, stored)


def hidden_of_module(model: PreTrainedModel, token_ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Returns what transformers' module computes for tokens and the hidden states before them, [1, n, hidden_size]."""
    decoder, layer, (_, count) = model.get_decoder(), model.get_decoder().draft_layer, token_ids.shape
    assert layer is not None
    window, ages = getattr(layer.mtp_block.self_attn, "sliding_window", None), torch.arange(count)[:, None]
    ages = ages - torch.arange(count)
    mask = torch.zeros(1, 1, count, count).masked_fill((ages < 0) | (ages >= (window or count)), -torch.inf)
    embedded, positions = model.get_input_embeddings()(token_ids), torch.arange(count)[None]
    by_kind = isinstance(decoder.rotary_emb.rope_type, dict)
    angles = decoder.rotary_emb(embedded, positions, *(["sliding_attention" if window else "full_attention"] * by_kind))
    its: dict[str, Any] = {"position_embeddings": angles, "attention_mask": mask, "position_ids": positions}
    its[str(cache_argument(type(layer.mtp_block).forward))] = None
    hidden: torch.Tensor = layer(embedded, before, **its)
    return hidden


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", WITH_DRAFT_LAYER)
@torch.inference_mode()
def test_draft_tokens_equal_those_of_transformers_module(name: str) -> None:
    assert len(WITH_DRAFT_LAYER) == sum(each.draft_layer is not None for each in TYPES.values())
    model, theirs = made(name, torch.float32), tiny_model(name, torch.float32)
    (found,) = guesses(model[0], computed(*model, LENGTH)[0])
    ids = made_up_tokens(theirs, 5, LENGTH)
    before = theirs.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    before, ids = torch.cat([torch.zeros_like(before[:, :1]), before], 1), torch.cat([ids, torch.tensor([[7]])], 1)
    for token, probability, hidden in zip(found[::3], found[1::3], found[2::3], strict=True):
        its = hidden_of_module(theirs, ids, before)[:, -1:]
        chances = theirs.get_output_embeddings()(its)[0, -1].softmax(-1)
        assert token == int(chances.argmax())
        assert probability == pytest.approx(float(chances.max()), rel=1e-4)
        assert np.allclose(np.array(hidden, np.uint8).view(np.float32), its[0, -1].numpy(), atol=1e-4)
        before, ids = torch.cat([before, its], 1), torch.cat([ids, torch.tensor([[token]])], 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("weights", ["", "Q8_0", "Q4_1", "float32"])
@torch.inference_mode()
def test_the_likeliest_draft_token_is_returned(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, is_quantised = "qwen3_5" + DRAFTING, weights.startswith("Q")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    model = quantised_tiny_model(name, weights) if is_quantised else tiny_model(name, dtype)
    layout, _ = layout_of(model)
    every = plan_runtime(model, layout, 16).draft_layer
    rows = [DraftRow(sequence_of(layout), token, 3) for token in range(30)]
    for row in rows:
        forward(model, row.state, made_up_tokens(model, row.token_id, 3))
    every.draft(rows)
    scores = torch.from_numpy(every.runner.copied(every.runner.plan.logits, len(rows)).view(np.float32))
    monkeypatch.setattr(draft_decoder, "_FREQUENT", 64)
    monkeypatch.setattr(draft_decoder, "_SPECIAL", 40)
    first, last = draft_decoder.draft_tokens(scores.shape[1])
    scores[:, first.stop : last.start] = -torch.inf
    found, _ = DraftLayer(every._config, every._begin).draft(rows)
    assert [token for token, _ in found] == scores.argmax(dim=-1).tolist()
    assert [chance for _, chance in found] == pytest.approx(scores.softmax(dim=-1).amax(dim=-1).tolist(), rel=1e-5)
    assert {token > 64 for token, _ in found} == {False, True}
