"""Models whose pictures see themselves whole compute what transformers does, with the same bits in every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    PaliGemmaConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import PictureRows, Rows
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.pictures.vision_encoder import VisionEncoder
from diskprefix.runtime.plan.families.decoder_options import sees_pictures_whole
from tests.arrays import array_of
from tests.daemon.server.picture_models import VISION_MODELS, image_bytes
from tests.exactness.architectures import ARCHITECTURES, WINDOW
from tests.modules import layout_of
from tests.steps import run

pytestmark = pytest.mark.usefixtures("cache")

Spans = tuple[tuple[int, int], ...]
SPANS: Spans = ((7, 12), (30, 30 + 2 * WINDOW), (90, 270))
"""Smaller than a window, larger, and over the end of a page."""
LENGTH, IMAGE = 280, 5


def made(name: str, dtype: torch.dtype, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    text = ARCHITECTURES[name].build(**fields).get_text_config()
    vision = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = CONFIG_MAPPING[name](text_config=text.to_dict(), image_token_id=IMAGE, vision_config=vision)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    return model.eval()


def prompt(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids, int64 [1, LENGTH], and rows of an encoder's output for the pictures' tokens."""
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(IMAGE + 1, 300, (1, LENGTH), generator=random)
    for begin, end in SPANS:
        ids[0, begin:end] = IMAGE
    width = model.config.get_text_config().hidden_size
    return ids, torch.randn(int((ids == IMAGE).sum()), width, generator=random).to(model.dtype)


def encoded(model: PreTrainedModel, rows: torch.Tensor) -> Any:
    return BaseModelOutputWithPooling(pooler_output=rows if model.config.model_type == "gemma3" else [rows])


def computed(model: PreTrainedModel, layout: Layout, steps: Iterable[tuple[int, int]], spans: Spans = SPANS) -> Any:
    ids, rows = prompt(model)
    encoder, is_picture = VisionEncoder(model, IMAGE, is_exact=True), ids[0] == IMAGE
    sequence, logits = KVSequence(PagePool(layout, block_size=256)), torch.empty(0)
    for start, end in steps:
        sequence.truncate(start)
        first, last = (int(is_picture[:position].sum()) for position in (start, end))
        of_step = tuple(span for span in spans if span[0] < end and start < span[1])
        pictures = PictureRows(encoder, is_picture[start:end].numpy(), array_of(rows[None, first:last]), spans=of_step)
        with torch.inference_mode():
            (found,) = run(model, [Rows(sequence, ids[0, start:end].numpy(), end - start, pictures)])
        logits = torch.cat([logits[:start], found])
    first = sequence.complete_from
    return sequence.content(first, LENGTH), logits


MODELS = {"gemma3": {}, "gemma4": {"use_bidirectional_attention": "vision"}}


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers(name: str) -> None:
    model = made(name, torch.float32, **MODELS[name])
    layout, reason = layout_of(model)
    assert not reason
    found, alone = (computed(model, layout, [(0, LENGTH)], spans)[1] for spans in (SPANS, ()))
    ids, rows = prompt(model)
    with torch.inference_mode():
        types = {"mm_token_type_ids" if name == "gemma4" else "token_type_ids": (ids == IMAGE).long()}
        expected, causal = (
            model(input_ids=ids, mm_encoder_outputs={"image": encoded(model, rows)}, **options).logits[0]
            for options in (types, {})
        )
    assert (found - expected).abs().max() < 1e-4
    assert (causal - expected).abs().max() > 1e-2
    assert (alone - causal).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_between_pictures_changes_no_bit(name: str) -> None:
    model = made(name, torch.bfloat16, **MODELS[name])
    layout, _ = layout_of(model)
    state, logits = computed(model, layout, [(0, LENGTH)])
    cuts = [[*pairwise([0, *ends, LENGTH])] for ends in ([7, 12, 13, 80, 270, 271], [30, 78, 90, 275])]
    # The last two go on within a picture.
    for steps in (*cuts, [(0, 270), (100, LENGTH)], [(0, LENGTH), (269, LENGTH)]):
        found, found_logits = computed(model, layout, steps)
        assert found == state
        assert torch.equal(found_logits, logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_placeholder_in_a_text_has_the_same_bits_beside_a_picture_and_alone(name: str) -> None:
    """Gemma 4 embeds another token for it."""
    model = made(name, torch.bfloat16, **MODELS[name])
    layout, _ = layout_of(model)
    assert layout.packs
    encoder, pool = VisionEncoder(model, IMAGE, is_exact=True), PagePool(layout, block_size=256)
    text, pictured = torch.tensor([[20, IMAGE, 21]]), torch.tensor([[30, IMAGE, IMAGE, 31]])
    encoded = torch.randn(1, 2, encoder.hidden).to(model.dtype)
    rows = PictureRows(encoder, (pictured[0] == IMAGE).numpy(), array_of(encoded), spans=((1, 3),))
    with torch.inference_mode():
        (alone,) = run(model, [Rows(KVSequence(pool), text[0].numpy(), 3)])
        beside, _ = run(
            model, [Rows(KVSequence(pool), text[0].numpy(), 3), Rows(KVSequence(pool), pictured[0].numpy(), 1, rows)]
        )
    assert torch.equal(alone, beside)


def test_the_configuration_says_which_layers_see_whole_pictures() -> None:
    found = {name: sees_pictures_whole(made(name, torch.float32, **MODELS[name]).config) for name in MODELS}
    assert found == {"gemma3": "all", "gemma4": "windowed"}
    configs = [LlamaConfig(), Gemma3Config(), PaliGemmaConfig(), Gemma4UnifiedTextConfig(), CONFIG_MAPPING["gemma4"]()]
    assert [*map(sees_pictures_whole, configs)] == ["", "all", "otherwise", "otherwise", ""]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", VISION_MODELS)
def test_an_encoder_without_its_decoder_gives_the_rows_of_the_whole_model(name: str, tmp_path: Path) -> None:
    loaded = load_model(Settings(model=str(VISION_MODELS[name](tmp_path)), dtype="bfloat16"), lambda _: None)
    assert loaded.weights is not None
    assert loaded.encoder is not None
    assert loaded.processor is not None
    assert loaded.encoder is not None
    encoder, whole = loaded.encoder(), loaded.read_modules()
    picture = loaded.processor.read_image(image_bytes(), detail="auto", param="messages")
    found, expected = (
        VisionEncoder(model, loaded.processor.token_id, is_exact=True).encode(picture, picture.prepare())
        for model in (encoder, whole)
    )
    assert np.array_equal(found, expected)
    text = {*whole.get_decoder().parameters(), *whole.get_output_embeddings().parameters()}
    kept, own = ([one.shape for one in found] for found in ({*whole.parameters()} - text, encoder.parameters()))
    assert Counter(kept) == Counter(own)
