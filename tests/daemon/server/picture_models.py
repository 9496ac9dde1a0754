"""Multimodal models of a few hundred kilobytes with random weights, as folders that `--model` takes."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.daemon.server.chat_model import POSITIONS, VOCAB_SIZE, write_tokenizer

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


@dataclass(frozen=True, kw_only=True)
class TinyPictured:
    """A model of the classes `kind` of transformers, which a call writes with random weights.

    `special` are tokens by the names that processors have for them, `ids` those of which the configuration has the id,
    by its own names. The template writes `image` for an image. `images` are settings of the processor of images, of the
    class of `image_kind` if that is another. With `processor`, settings of the whole one, there is one file for both.
    """

    kind: str
    seed: int
    special: dict[str, str]
    image: str
    ids: dict[str, str]
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] | None = None
    image_kind: str = ""
    processor: dict[str, Any] | None = None
    template: str = TEXT_OR_PARTS

    def __call__(self, folder: Path, *, template: str | None = None) -> Path:
        import torch
        import transformers

        tokenizer = _tokenizer(folder, (template or self.template).replace("IMAGE", self.image), **self.special)
        config = getattr(transformers, f"{self.kind}Config")(
            text_config=_TEXT | self.text,
            vision_config=dict(self.vision),
            **{name: tokenizer.convert_tokens_to_ids(self.special[token]) for name, token in self.ids.items()},
            **self.beside,
        )
        torch.manual_seed(self.seed)
        model = getattr(transformers, f"{self.kind}ForConditionalGeneration")(config)
        if self.kind == "Gemma3":
            # It begins as zeros: no image would matter.
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
        model.save_pretrained(folder)
        # Some processors pad.
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
        if self.images is not None:
            images = getattr(transformers, f"{self.image_kind or self.kind}ImageProcessorPil")(**self.images)
            if self.processor is None:
                images.save_pretrained(folder)
            else:
                own = {"processor_class": f"{self.kind}Processor", "image_processor": images.to_dict()}
                (folder / "processor_config.json").write_text(json.dumps(own | self.processor))
        return folder


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING = {"head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_LLAVA = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}

write_llava = TinyPictured(
    kind="Llava",
    seed=1,
    special={"image_token": "<image>"},
    image="<image>",
    ids={"image_token_index": "image_token"},
    text={"model_type": "llama"},
    vision=_VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    beside={"image_seq_length": 4},
    images={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    image_kind="CLIP",
    processor=_LLAVA | {"patch_size": 14},
    template=PARTS_ONLY,
)
"""LLaVA with a Llama: images are tokens among others. Its template takes lists of parts only."""

_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
write_llava_next = replace(
    write_llava,
    kind="LlavaNext",
    seed=9,
    vision=write_llava.vision | {"patch_size": 7},
    beside={"image_grid_pinpoints": _PINPOINTS},
    images={**(write_llava.images or {}), "image_grid_pinpoints": _PINPOINTS},
    image_kind="",
    processor=_LLAVA | {"patch_size": 7},
    template=TEXT_OR_PARTS,
)
"""LLaVA-NeXT: an image as a whole and as tiles. The number of the encoder's rows depends on its size."""

_OF_QWEN = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
write_qwen2_5_vl = TinyPictured(
    kind="Qwen2_5_VL",
    seed=2,
    special={
        "vision_bos": "<|vision_start|>",
        "vision_eos": "<|vision_end|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    },
    image="<|vision_start|><|image_pad|><|vision_end|>",
    ids={
        "vision_start_token_id": "vision_bos",
        "vision_end_token_id": "vision_eos",
        "image_token_id": "image_token",
        "video_token_id": "video_token",
    },
    text={"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
    vision=_OF_QWEN | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
    images={"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
    image_kind="Qwen2VL",
)
"""Qwen2.5-VL: positions have three axes, and images shift the positions of later text."""

write_qwen3_vl = replace(
    write_qwen2_5_vl,
    kind="Qwen3VL",
    seed=5,
    text={"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    vision=_OF_QWEN | {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
)
"""Qwen3-VL: positions have three axes, and two layers of the text get more of an image (deepstack)."""

write_gemma3 = TinyPictured(
    kind="Gemma3",
    seed=3,
    special={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    image="<start_of_image>",
    ids={"boi_token_index": "boi_token", "eoi_token_index": "eoi_token", "image_token_index": "image_token"},
    text=_SLIDING,
    vision=_VISION | {"image_size": 28, "patch_size": 7},
    beside={"mm_tokens_per_image": 4},
    images={"size": {"height": 28, "width": 28}},
    processor={"image_seq_length": 4},
)
"""Gemma 3: sliding windows, and images whose tokens see each other."""

_SMOLVLM = TinyPictured(
    kind="SmolVLM",
    seed=6,
    special={
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    image="<image>",
    ids={"image_token_id": "image_token"},
    text={"model_type": "llama"},
    vision=_VISION | {"image_size": 32, "patch_size": 8},
    images={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    processor={"image_seq_len": 4},
)
"""SmolVLM: an image is cut into tiles."""

_LFM2_VL = TinyPictured(
    kind="Lfm2Vl",
    seed=7,
    special={
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    image="<image>",
    ids={"image_token_id": "image_token"},
    text={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    vision=_VISION | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
    beside={"projector_hidden_size": 64},
)


def write_lfm2_vl(folder: Path) -> Path:
    """LFM2-VL: tiles, and a language model with convolutions. Its processor needs torchvision: without, text only."""
    images: dict[str, Any] = {"min_image_tokens": 4, "max_image_tokens": 16, "encoder_patch_size": 4, "tile_size": 32}
    images |= {"image_processor_type": "Lfm2VlImageProcessor", "processor_class": "Lfm2VlProcessor"}
    (_LFM2_VL(folder) / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


_MISTRAL_3 = TinyPictured(
    kind="Mistral3",
    seed=8,
    special={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    image="[IMG]",
    ids={"image_token_index": "image_token"},
    text={"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    vision=_VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 4},
    images={"patch_size": 4, "size": {"longest_edge": 64}},
    image_kind="Pixtral",
    processor={"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
)
"""Mistral 3 with Pixtral's encoder: a line of an image ends with a token of text."""

_GEMMA_4 = TinyPictured(
    kind="Gemma4",
    seed=10,
    special={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
        "video_token": "<|video|>",
    },
    image="<|image|>",
    ids={"eoa_token_index": "eoa_token"}
    | {f"{name}_token_id": f"{name}_token" for name in ("boi", "eoi", "image", "boa", "audio", "video")},
    text=_SLIDING
    | {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "pad_token_id": 0}
    | {"vocab_size_per_layer_input": _TEXT["vocab_size"], "use_bidirectional_attention": "vision"},
    vision=_VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
    beside={"audio_config": None},
    images={"patch_size": 4, "max_soft_tokens": 70},
    processor={"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
)
"""Gemma 4: images of any number of tokens, which see each other, and a state for each layer (no sounds)."""

VISION_MODELS = {
    "llava": write_llava,
    "qwen2_5_vl": write_qwen2_5_vl,
    "gemma3": write_gemma3,
    "qwen3_vl": write_qwen3_vl,
    "smolvlm": _SMOLVLM,
    "idefics3": replace(_SMOLVLM, kind="Idefics3"),
    "mistral3": _MISTRAL_3,
    "llava_next": write_llava_next,
    "gemma4": _GEMMA_4,
}


def image_bytes(
    color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (40, 30), kind: str = "PNG"
) -> bytes:
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
