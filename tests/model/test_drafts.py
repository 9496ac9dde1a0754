"""The draft layer: its memory has the same bits however a prompt is computed, the model's own are those without it, and
its guesses are those of transformers' module."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from diskprefix.kv.layers import TokenLayer
from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.model import drafts
from diskprefix.model.drafts import DraftRow, draft, draft_layer_of
from diskprefix.model.exact.fused import matrix_of
from diskprefix.model.exact.invariant import as_it_was
from diskprefix.model.exact.runner import forward, run
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.exact.state_layout import made_up_tokens
from diskprefix.model.load.draft_layer import with_draft_layer
from diskprefix.model.runtime import Rows
from diskprefix.model.vision_encoder import PictureRows, VisionEncoder
from diskprefix.native import library
from diskprefix.native.library import operators
from diskprefix.native.matrix import product
from tests.exactness.architectures import DRAFTING, WITH_DRAFT_LAYER, quantised_tiny_model, shrink, tiny_model
from tests.runner import Runner, tiny_settings

pytestmark = pytest.mark.usefixtures("cache")

LENGTH = 90


def made(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, Layout]:
    model = tiny_model(name, dtype)
    layout, reason = make_exact(model)
    assert (reason, layout.packs, layout.has_draft_layer) == ("", True, DRAFTING in name)
    return model, layout


def sequence_of(layout: Layout) -> KVSequence:
    """With memory for a prompt, and for guesses, that is not finite."""
    sequence = KVSequence(PagePool(layout, torch.device("cpu"), block_size=16))
    sequence.reserve(LENGTH + 16)
    for page in sequence.pages():
        if page is not None:
            page.tensor.view(torch.uint8).fill_(0xFF)
    return sequence


def computed(model: PreTrainedModel, layout: Layout, *steps: int) -> tuple[KVSequence, torch.Tensor]:
    sequence = sequence_of(layout)
    parts = torch.split(made_up_tokens(model, 5, LENGTH), list(steps), dim=1)
    return sequence, torch.cat([forward(model, sequence, part, part.shape[1]) for part in parts])


def memory_of(sequence: KVSequence, num_layers: int) -> list[bytes]:
    """Returns what the first layers have: states, keys and values, with a window those of the last tokens. The layer
    behind all has the hidden states, too."""
    found = [page.tensor for page in sequence.states]
    for layer in sequence.layers[:num_layers]:
        if isinstance(layer, TokenLayer):
            rows = [layer.keys, layer.values]
            if sequence.hidden is not None and layer is sequence.layers[-1]:
                rows.append(sequence.hidden)
            first = sequence.num_tokens - 20 if layer.window else 0
            found += [part.gathered(first, sequence.num_tokens) for part in rows]
    assert all(part.isfinite().all() for part in found)
    return [bytes(part.view(torch.uint8).numpy().tobytes()) for part in found]


def guesses(model: PreTrainedModel, *sequences: KVSequence, count: int = 3) -> list[list[Any]]:
    found: list[list[Any]] = [[] for _ in sequences]
    rows = [DraftRow(sequence, 7, sequence.num_tokens) for sequence in sequences]
    for _ in range(count):
        assert all(row.state.make_room(row.position + 1) for row in rows)
        guessed, hidden = draft(model, rows)
        for each, (token, probability), its in zip(found, guessed, hidden, strict=True):
            each += [token, probability, its.tolist()]
        rows = [
            DraftRow(row.state, token, row.position + 1, its)
            for row, (token, _), its in zip(rows, guessed, hidden, strict=True)
        ]
    return found


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_its_memory_may_lag_within_a_block(name: str) -> None:
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
    sequence.settle()
    assert memory_of(sequence, len(layout.layers)) == memory_of(whole, len(layout.layers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WITH_DRAFT_LAYER)
@torch.inference_mode()
def test_its_memory_has_the_same_bits_however_a_prompt_is_cut(name: str, dtype: torch.dtype) -> None:
    model, layout = made(name, dtype)
    whole, logits = computed(model, layout, LENGTH)
    cut, others = computed(model, layout, 1, 30, 2, 1, 17, 39)
    assert torch.equal(logits, others)
    assert memory_of(whole, len(layout.layers)) == memory_of(cut, len(layout.layers))
    assert guesses(model, whole) == guesses(model, cut)


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_the_model_computes_what_it_computes_without(name: str) -> None:
    (model, layout), (plain, its) = made(name + DRAFTING), made(name)
    assert layout.layers[:-1] == its.layers
    (one, logits), (other, expected) = computed(model, layout, 50, 1, 39), computed(plain, its, 50, 1, 39)
    assert torch.equal(logits, expected)
    assert memory_of(one, len(its.layers)) == memory_of(other, len(its.layers))


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite", "mimo_v2_flash"])
@torch.inference_mode()
def test_guesses_leave_no_trace_and_share_forwards(name: str) -> None:
    model, layout = made(name + DRAFTING)
    ids = made_up_tokens(model, 5, LENGTH)
    alone, (beside, _) = sequence_of(layout), computed(model, layout, LENGTH)
    expected, behind = memory_of(computed(model, layout, LENGTH)[0], len(layout.layers)), guesses(model, beside)[0]
    forward(model, alone, ids[:, :40])
    for end in (41, 43, LENGTH):
        lengths = [layer.length for layer in alone.token_layers]
        (its,) = guesses(model, alone)
        assert guesses(model, beside, alone) == [behind, its]
        assert [layer.length for layer in alone.token_layers] == lengths
        other = computed(model, layout, LENGTH)[0]
        run(model, [Rows(other, ids[0, :7].numpy()), Rows(alone, ids[0, alone.num_tokens : end].numpy())])
    assert memory_of(alone, len(layout.layers)) == expected


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "mimo_v2_flash"])
@torch.inference_mode()
def test_a_restored_sequence_guesses_as_before(name: str, tmp_path: Path) -> None:
    model, _ = made(name + DRAFTING)
    runner = Runner(model, tiny_settings(tmp_path), exact_at="token")
    prompt = made_up_tokens(model, 5, LENGTH)[0].int().numpy()
    runner.run(prompt, "full")
    expected, memory = guesses(model, runner.sequence), memory_of(runner.sequence, len(runner.layout.layers))
    shared = KVSequence(runner.pool)
    assert shared.begin_with(runner.sequence.prefix())
    assert memory_of(shared, len(runner.layout.layers)) == memory
    assert guesses(model, shared) == expected
    runner.reopen()
    answer = runner.run(prompt, 1)
    assert (answer.report.source, answer.report.restored, answer.num_forwards) == ("disk", LENGTH, 0)
    assert memory_of(runner.sequence, len(runner.layout.layers)) == memory
    assert guesses(model, runner.sequence) == expected
    runner.close()


@torch.inference_mode()
def test_pictures_change_nothing_of_that() -> None:
    text, towers = shrink("qwen3_5").to_dict(), {"depth": 1, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4}
    config = Qwen3_5Config(text_config=text, vision_config=towers | {"intermediate_size": 64}, image_token_id=5)
    torch.manual_seed(0)
    model = with_draft_layer(Qwen3_5ForConditionalGeneration)._from_config(config, dtype=torch.bfloat16).eval()
    layout, reason = make_exact(model)
    assert (reason, layout.packs, layout.has_draft_layer) == ("", True, True)
    ids, encoder = made_up_tokens(model, 5, LENGTH).clamp(min=6), VisionEncoder(model, 5)
    ids[0, 20:36] = 5
    encoded = torch.randn(1, 16, encoder.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = torch.cat([torch.arange(20), torch.full((16,), 20), torch.arange(24, LENGTH - 12)]).expand(3, -1)

    def found(*ends: int) -> Any:
        sequence, is_picture = sequence_of(layout), ids[0] == 5
        for start, end in pairwise([0, *ends]):
            first, last = (int(is_picture[:position].sum()) for position in (start, end))
            its = (is_picture[start:end], encoded[:, first:last], positions[:, start:end])
            run(model, [Rows(sequence, ids[0, start:end].numpy(), pictures=PictureRows(encoder, *its))])
        return memory_of(sequence, len(layout.layers)), guesses(model, sequence)

    assert found(LENGTH) == found(3, 22, 23, 30, 37, 80, LENGTH)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_guesses_are_those_of_the_module_of_transformers(name: str) -> None:
    model, layout = made(name + DRAFTING, torch.float32)
    sequence, layer = computed(model, layout, LENGTH)[0], draft_layer_of(model)
    assert layer is not None
    with as_it_was(model):
        model.config.num_mtp_layers = 1
        theirs, memory = MtpModel(model, 1).eval(), MtpCache(config=model.config.get_mtp_config())
        theirs.layers[0].load_state_dict(layer.state_dict())
        ids, positions = made_up_tokens(model, 5, LENGTH), torch.arange(LENGTH + 1)[None]
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        hidden = functional.pad(hidden, (0, 0, 1, 0))
        ids, expected = functional.pad(ids, (0, 1), value=7), list[list[Any]]()
        for _ in range(3):
            hidden = theirs.forward_layer(0, hidden, positions, memory, input_ids=ids)[:, -1:]
            chances = theirs.shared_head(hidden)[0, -1].softmax(-1)
            expected.append([int(chances.argmax()), float(chances.max()), hidden[0, -1]])
            ids, positions = chances.argmax()[None, None], positions[:, -1:] + 1
    (found,) = guesses(model, sequence)
    for number, (token, probability, its) in enumerate(expected):
        assert found[3 * number] == token
        assert found[3 * number + 1] == pytest.approx(probability, rel=1e-3)
        assert torch.allclose(torch.tensor(found[3 * number + 2]), its, atol=1e-4)


@pytest.mark.parametrize("weights", ["", "Q8_0", "Q4_1"])
def test_the_likeliest_of_the_tokens_that_are_guessed_is_found(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_FREQUENT", 64)
    monkeypatch.setattr(drafts, "_SPECIAL", 40)
    name = "qwen3_5" + DRAFTING
    model = quantised_tiny_model(name, weights) if weights else tiny_model(name, torch.bfloat16)
    matrix = matrix_of(model.get_output_embeddings())
    compiled = operators()
    assert matrix is not None
    assert compiled is not None
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = product(compiled, hidden, matrix).float()
    scores[:, 64:352] = -torch.inf
    found = drafts._guesses(drafts._parts_of(model.get_output_embeddings()), hidden)
    assert [token for token, _ in found] == scores.argmax(dim=-1).tolist()
    assert [chance for _, chance in found] == pytest.approx(scores.softmax(dim=-1).amax(dim=-1).tolist())
    assert {token > 64 for token, _ in found} == {False, True}


def test_on_the_grid_it_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    library.choose("torch")
    layout, reason = make_exact(tiny_model("qwen3_5" + DRAFTING, torch.bfloat16))
    assert reason
    assert not layout.has_draft_layer
    assert "draft layer is not used" in caplog.text
