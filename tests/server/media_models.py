"""Multimodal models of a few hundred kilobytes with random weights, as folders that `--model` takes."""

from __future__ import annotations

import base64
import io
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.chat_model import POSITIONS, VOCAB_SIZE, write_tokenizer

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE + 8,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

TEXT_OR_PARTS = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}IMAGE{% elif part.type == 'audio' %}AUDIO{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PARTS_ONLY = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content | selectattr('type', 'equalto', 'image') %}IMAGE{% endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _tokenizer(folder: Path, template: str, **special: str) -> Any:
    """The chat model's tokenizer with more special tokens, by the names under which processors ask for them."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    write_tokenizer(folder, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=special)


def _save(folder: Path, model: Any, *parts: Any) -> Path:
    model.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)
    return folder


def write_llava(folder: Path, *, template: str = PARTS_ONLY) -> Path:
    """LLaVA with a Llama: images are tokens among others. Its template takes lists of parts only."""
    import torch
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
    from transformers import LlavaForConditionalGeneration as Llava

    tokenizer = _tokenizer(folder, template.replace("IMAGE", "<image>"), image_token="<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION, image_size=28, patch_size=14),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=tokenizer.image_token_id,
        image_seq_length=4,
    )
    torch.manual_seed(1)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _save(folder, Llava(config), LlavaProcessor(images, tokenizer, **settings))


def write_qwen2_5_vl(folder: Path) -> Path:
    """Qwen2.5-VL: positions have three axes, and images shift those of the text behind them."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

    special = {"vision_bos": "<|vision_start|>", "vision_eos": "<|vision_end|>"}
    special |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    template = TEXT_OR_PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = _tokenizer(folder, template, **special)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(special.values()))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(2)
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    return _save(folder, Qwen2_5_VLForConditionalGeneration(config), tokenizer, images)


def write_gemma3(folder: Path) -> Path:
    """Gemma 3: sliding windows, and images whose tokens see each other."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessorPil, Gemma3Processor

    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "<start_of_image>"), **special)
    start, end, image = tokenizer.convert_tokens_to_ids(list(special.values()))
    config = Gemma3Config(
        text_config=_TEXT
        | {"head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=_VISION | {"image_size": 28, "patch_size": 7},
        mm_tokens_per_image=4,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=image,
    )
    torch.manual_seed(3)
    model = Gemma3ForConditionalGeneration(config)
    # It begins as zeros: no image would matter.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    return _save(folder, model, processor)


def write_qwen2_audio(folder: Path) -> Path:
    """Qwen2-Audio: takes sounds, and no images."""
    import torch
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    special = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    template = TEXT_OR_PARTS.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    tokenizer = _tokenizer(folder, template, **special)
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=16
        ),
        text_config=Qwen2Config(**_TEXT),
        audio_token_index=tokenizer.audio_token_id,
    )
    torch.manual_seed(4)
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer)
    return _save(folder, Qwen2AudioForConditionalGeneration(config), processor)


VISION_MODELS: dict[str, Callable[[Path], Path]] = {
    "llava": write_llava,
    "qwen2_5_vl": write_qwen2_5_vl,
    "gemma3": write_gemma3,
}


def image_bytes(
    color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (40, 30), kind: str = "PNG"
) -> bytes:
    """A picture with a lighter corner, as a file."""
    from PIL import Image

    picture = Image.new("RGB", size, color)
    picture.paste((250, 250, 200), (0, 0, size[0] // 2, size[1] // 2))
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def wav_bytes(
    *,
    seconds: float = 0.5,
    rate: int = 16000,
    hertz: float = 440.0,
    width: int = 2,
    channels: int = 1,
    is_extensible: bool = False,
) -> bytes:
    """A sine at half of the loudest, as a WAV file; extensible: with the longer header of newer programs."""
    tone = np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate) / 2
    steps = np.round(tone * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    frames = np.repeat(steps, channels).astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(frames)
    content = file.getvalue()
    if not is_extensible:
        return content
    pcm = bytes.fromhex("0100000000001000800000aa00389b71")
    longer = struct.pack("<IH", 40, 0xFFFE) + content[22:36] + struct.pack("<HHI", 22, 8 * width, 0) + pcm
    return b"RIFF" + struct.pack("<I", len(content) + 16) + b"WAVEfmt " + longer + content[36:]


def image_part(content: bytes, kind: str = "png") -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"},
    }


def audio_part(content: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
