"""Tiny models that take pictures, and the pictures in their prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from diskprefix.daemon.settings import Settings
from diskprefix.runtime.load.loader import load_model
from diskprefix.tokens import TokenIds, as_token_ids, picture_ids
from diskprefix.values import Picture
from tests.daemon.server.picture_models import VISION_MODELS, image_bytes, write_lfm2_vl
from tests.exactness.jobs import Job, Lengths, MakeTokens
from tests.runner import Pictures
from tests.runtime.plan.tensor_weights import modules_of

PICTURED: dict[str, Callable[[Path], Path]] = {f"{name} with pictures": one for name, one in VISION_MODELS.items()}
PICTURED["lfm2_vl with pictures"] = write_lfm2_vl
LENGTHS = Lengths(more=95)
"""Such that what continues a prompt has room for a picture, of up to 82 tokens with the text around it."""
FILES = [image_bytes((200, 30, 30)), image_bytes((30, 30, 200), (30, 50)), image_bytes((30, 200, 30), (16, 16))]


def load_pictured(job: Job) -> tuple[PreTrainedModel, MakeTokens, Pictures]:
    """The model, what makes prompts for it, and the pictures in these. The last token of the first picture is the last
    one of the case `shorter`, and the first one of the second is the first that `branch` does not have. The third one
    is behind what is saved."""
    folder, lengths = Path(job.folder) / "model", job.lengths
    if not folder.exists():
        PICTURED[job.name](folder)
    loaded = load_model(Settings(model=str(folder), dtype=job.computes_in), print)
    config, reader = loaded.config, loaded.processor
    if reader is None or reader.problem is not None:
        pictures = [_without_processor(number) for number in range(len(FILES))]
    else:
        pictures = [reader.read_image(content, detail="auto", param="") for content in FILES]
    parts = []
    for picture in pictures:
        part = as_token_ids(loaded.tokenizer.encode(picture.text, add_special_tokens=False))
        part[part == config.image_token_id] = picture_ids(picture.name, picture.num_tokens)
        parts.append(part)

    def make(seed: int, count: int) -> TokenIds:
        vocab_size = config.get_text_config(decoder=True).vocab_size
        token_ids = np.random.default_rng(seed).integers(3, vocab_size, count).astype(np.int32)
        first, last = ([int(np.flatnonzero(part < 0)[at]) for part in parts] for at in (0, -1))
        early, late = lengths.shorter - 1 - last[0], lengths.branch - first[1]
        for part, at in ((parts[0], early), (parts[1], late)) if seed == 1 else ((parts[2], 5),):
            if at + len(part) <= count:
                token_ids[at : at + len(part)] = part
        return token_ids

    return modules_of(loaded), make, {int(picture_ids(picture.name, 1)[0]): picture for picture in pictures}


def _without_processor(number: int) -> Picture:
    """A picture of 4 x 4 patches, as the processor of LFM2-VL would make it if torchvision were here."""
    pixels = torch.rand(1, 16, 48, generator=torch.Generator().manual_seed(number))
    inputs = {"pixel_values": pixels, "spatial_shapes": torch.tensor([[4, 4]])}
    inputs["pixel_attention_mask"] = torch.ones(1, 16, dtype=torch.long)
    return Picture(bytes([number]) * 16, "<image>" * 4, 4, {}, "16x16", 1, "", lambda: inputs)
