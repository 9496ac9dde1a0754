"""Multimodal models of a few hundred kilobytes with random weights, as folders that `--model` takes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.chat_model import POSITIONS, VOCAB_SIZE, write_tokenizer

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE + 16,
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
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
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


def write_qwen3_vl(folder: Path) -> Path:
    """Qwen3-VL: positions have three axes, and two layers of the text get more of an image (deepstack)."""
    import torch
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    special = {"vision_bos": "<|vision_start|>", "vision_eos": "<|vision_end|>"}
    special |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    template = TEXT_OR_PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = _tokenizer(folder, template, **special)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(special.values()))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    config = Qwen3VLConfig(
        text_config=_TEXT | {"head_dim": 16, "rope_parameters": rope},
        vision_config=vision
        | {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    torch.manual_seed(5)
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    return _save(folder, Qwen3VLForConditionalGeneration(config), tokenizer, images)


def _write_idefics(folder: Path, name: str) -> Path:
    import torch
    import transformers
    from transformers import LlamaConfig

    special = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    special |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "<image>"), **special)
    config = getattr(transformers, f"{name}Config")(
        text_config=LlamaConfig(**_TEXT).to_dict(),
        vision_config=_VISION | {"image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.image_token_id,
    )
    torch.manual_seed(6)
    images = getattr(transformers, f"{name}ImageProcessorPil")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return _save_processor(_save(folder, model, tokenizer, images), f"{name}Processor", image_seq_len=4)


def _save_processor(folder: Path, name: str, **settings: Any) -> Path:
    """Writes what belongs to no part of a processor, which cannot be made here without a part for videos."""
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **settings}))
    return folder


def write_smolvlm(folder: Path) -> Path:
    """SmolVLM: an image is cut into tiles."""
    return _write_idefics(folder, "SmolVLM")


def write_idefics3(folder: Path) -> Path:
    """Idefics3: the same tiles with another processor."""
    return _write_idefics(folder, "Idefics3")


def write_lfm2_vl(folder: Path) -> Path:
    """LFM2-VL: tiles, and a language model with convolutions. Its processor needs torchvision: without, text only."""
    import torch
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    special = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    special |= {"image_thumbnail_token": "<|img_thumbnail|>"}
    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "<image>"), **special)
    config = Lfm2VlConfig(
        text_config=_TEXT | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        vision_config=_VISION | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
        image_token_id=tokenizer.image_token_id,
        projector_hidden_size=64,
    )
    torch.manual_seed(7)
    images = {"min_image_tokens": 4, "max_image_tokens": 16, "encoder_patch_size": 4, "tile_size": 32}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(images | {"image_processor_type": "Lfm2VlImageProcessor", "processor_class": "Lfm2VlProcessor"})
    )
    return _save(folder, Lfm2VlForConditionalGeneration(config), tokenizer)


def write_mistral3(folder: Path) -> Path:
    """Mistral 3 with Pixtral's encoder: a line of an image ends with a token of text."""
    import torch
    from transformers import Mistral3Config, MistralConfig, PixtralImageProcessorPil
    from transformers import Mistral3ForConditionalGeneration as Mistral3

    special = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "[IMG]"), **special)
    config = Mistral3Config(
        text_config=MistralConfig(**_TEXT, head_dim=16, sliding_window=None),
        vision_config={"model_type": "pixtral", **_VISION, "image_size": 64, "patch_size": 4},
        image_token_index=tokenizer.image_token_id,
    )
    torch.manual_seed(8)
    images = PixtralImageProcessorPil(patch_size=4, size={"longest_edge": 64})
    _save(folder, Mistral3(config), tokenizer, images)
    return _save_processor(folder, "PixtralProcessor", patch_size=4, spatial_merge_size=2)


def write_llava_next(folder: Path) -> Path:
    """LLaVA-NeXT: an image as a whole and as tiles, of which the encoder's rows depend on its size."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
    )
    from transformers import LlavaNextForConditionalGeneration as LlavaNext

    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "<image>"), image_token="<image>")
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**_VISION, image_size=28, patch_size=7),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=tokenizer.image_token_id,
        image_grid_pinpoints=pinpoints,
    )
    torch.manual_seed(9)
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _save(folder, LlavaNext(config), LlavaNextProcessor(images, tokenizer, **settings))


def write_gemma4(folder: Path) -> Path:
    """Gemma 4: images of any number of tokens, which see each other, and a state for each layer (no sounds)."""
    import torch
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Gemma4ImageProcessorPil,
    )

    special = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    special |= {
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
        "video_token": "<|video|>",
    }
    tokenizer = _tokenizer(folder, TEXT_OR_PARTS.replace("IMAGE", "<|image|>"), **special)
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in special.items()}
    text: dict[str, Any] = {
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 32,
    }
    text |= {
        "pad_token_id": 0,
        "vocab_size_per_layer_input": _TEXT["vocab_size"],
        "use_bidirectional_attention": "vision",
    }
    config = Gemma4Config(
        text_config=_TEXT | text | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=_VISION
        | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
        audio_config=None,
        eoa_token_index=ids.pop("eoa_token"),
        **{f"{name}_id": id_ for name, id_ in ids.items()},
    )
    torch.manual_seed(10)
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    parts = {"image_processor": images, "feature_extractor": Gemma4AudioFeatureExtractor()}
    parts = {name: json.loads(part.to_json_string()) for name, part in parts.items()}
    tokenizer.pad_token = tokenizer.eos_token
    model = Gemma4ForConditionalGeneration(config)
    return _save_processor(_save(folder, model, tokenizer), "Gemma4Processor", **parts)


VISION_MODELS: dict[str, Callable[[Path], Path]] = {
    "llava": write_llava,
    "qwen2_5_vl": write_qwen2_5_vl,
    "gemma3": write_gemma3,
    "qwen3_vl": write_qwen3_vl,
    "smolvlm": write_smolvlm,
    "idefics3": write_idefics3,
    "mistral3": write_mistral3,
    "llava_next": write_llava_next,
    "gemma4": write_gemma4,
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


def image_part(content: bytes, kind: str = "png") -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"},
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
