"""Encoders of pictures, in `mmproj` files next to the files of text models.

Such a file has the architecture `clip`. The type of its projector selects the table. The meaning of the metadata is in
llama.cpp's `tools/mtmd/clip.cpp`, the sources of tensors in its converter (`conversion/`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.architecture import Architecture, EncoderArchitecture
from diskprefix.runtime.files.gguf.metadata import MOST_LAYERS, Metadata, shown
from diskprefix.runtime.files.gguf.sources import (
    Array,
    Sources,
    TensorSource,
    changed,
    joined,
    minus_one,
    moved,
    paired_queries,
    same,
)
from diskprefix.runtime.plan.families.type_table import is_declared
from diskprefix.runtime.plan.model_config import ModelConfig

if TYPE_CHECKING:
    from diskprefix.runtime.files.gguf.gguf_header import FileTensor

Values: TypeAlias = dict[str, Any]

CLIP = "clip"
"""The architecture of all these files."""
_PATCHES, _SCALE = "v.patch_embd", "vision.projector.scale_factor"
_SOFT, _UNUSED = "<image_soft_token>", "<unused0>"
"""The placeholder for a row of a picture in Gemma 3, and the placeholder here for files that lack it, as most do."""
_OF_OTHERS = ("video", "audio", "boa", "eoa")
"""Special tokens of videos and sounds, which are not read. A vocabulary may lack them."""
_SOUND = ("a.", "mm.a.")
_UP_OR_DOWN = re.compile("ffn_(?:up|down)")
_CHECKED = (
    *("has_vision_encoder", "projector_type", "vision.projector_type", "vision.projection_dim"),
    # Pictures may have their own size, or the tensors of the encoder say it.
    "vision.image_size",
)
"""Keys that are read when the file is found, or that change nothing."""


class EncoderParts(Struct, frozen=True, kw_only=True):
    """The metadata of an encoder as transformers has them: its configuration `vision`, `extra` values for the
    configuration of the whole model, and the settings of the processors of pictures and of all."""

    vision: Values
    extra: Values = field(default_factory=dict)
    images: Values
    settings: Values = field(default_factory=dict)


class PictureEncoder(EncoderArchitecture, frozen=True, kw_only=True):
    """An encoder with its `projector`. With a model of text it becomes transformers' model of the type `model_type`.

    `of_text` maps the architectures of text files to the types of the text decoder in the whole model. `in_text`
    returns options of the text decoder that it has only with an encoder, from the metadata of the text file. `tokens`
    has the texts of special tokens by their names in processors; configurations append `_id`. `processors` are the
    class for pictures and the class of the whole processor.
    """

    projector: str
    of_text: Mapping[str, str]
    parts: Callable[[Metadata], EncoderParts]
    in_text: Callable[[Metadata, Values], Values] = lambda _metadata, _options: {}
    tokens: Mapping[str, str]
    processors: tuple[str, str]

    def of_file(self, metadata: Metadata) -> PictureEncoder:
        """Returns the encoder with the tensors of this file."""
        return replace(self, sources={**self.sources, **_deepstack(metadata)})


class PictureSettings(Struct, frozen=True, kw_only=True, eq=False):
    """The settings of a processor: the name of its class for pictures and of its own class, the settings of both, and
    its special tokens by name."""

    processors: tuple[str, str]
    images: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokens: Mapping[str, str]


def make_composite(
    encoder: PictureEncoder, metadata: Metadata, text: ModelConfig, of_text: Metadata
) -> tuple[ModelConfig, PictureSettings]:
    """Returns the configuration of a text model with an encoder, and the settings of its processor.

    `metadata` is of the encoder's file, `of_text` of the text file; `text` is the configuration of the text model.
    Raises `ModelError` for a key that is missing, or that nothing reads.
    """
    kind, named = encoder.model_type, encoder.tokens
    array = of_text.header.arrays.get("tokenizer.ggml.tokens")
    numbers = {} if array is None else {token: number for number, token in enumerate(array.content)}
    special = {name: _UNUSED if token == _SOFT and token not in numbers else token for name, token in named.items()}
    for name, token in special.items():
        if token not in numbers and not name.startswith(_OF_OTHERS):
            raise ModelError(f"the file has no token {token}, which models with pictures have")
    ids = {f"{name}_id": numbers[token] for name, token in special.items() if token in numbers}
    try:
        parts = encoder.parts(metadata)
        given = {
            "model_type": kind,
            "text_config": text.to_dict(),
            "vision_config": parts.vision,
            "tie_word_embeddings": text.tie_word_embeddings,
            **{name: number for name, number in ids.items() if is_declared(kind, name)},
            **parts.extra,
        }
        config = ModelConfig.of(given)
        settings = PictureSettings(
            processors=encoder.processors,
            images=_normalised(metadata) | parts.images,
            settings=parts.settings,
            tokens=special,
        )
    except ModelError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ModelError(f"the metadata of the mmproj file are not those of {encoder.model_type}: {said}") from error
    for key in _CHECKED:
        metadata.mark_read(key)
    metadata.require_read()
    return config, settings


def _normalised(metadata: Metadata) -> Values:
    statistics = {name: metadata.numbers(f"vision.{name}") for name in ("image_mean", "image_std")}
    for name, values in statistics.items():
        if len(values) < 3:
            raise ModelError(f"the file's clip.vision.{name} is {shown(values)}, which is not three numbers")
    return {name: list(values[:3]) for name, values in statistics.items()}


def _sizes(metadata: Metadata, activation: str, names: str, expected: float | None = None) -> Values:
    """Returns the sizes of an encoder. `names` are the options for its blocks, its heads, and its epsilon; there is no
    option for the epsilon if the class has a fixed one, `expected`."""
    blocks, heads, *others = names.split()
    epsilon = metadata("vision.attention.layer_norm_epsilon")
    if expected is not None and abs(epsilon / expected - 1) > 1e-3:
        raise ModelError(f"the file's clip.vision.attention.layer_norm_epsilon is {epsilon:g}, not {expected:g}")
    known = {"use_gelu": "gelu_pytorch_tanh", "use_silu": "silu"}
    used = next((name for key, name in known.items() if metadata.get(key, False)), activation)
    if used != activation:
        raise ModelError(f"the mmproj file computes with {used}, and the model with {activation}")
    if not 0 < (count := metadata("vision.block_count")) <= MOST_LAYERS:
        raise ModelError(f"the file's clip.vision.block_count is {count}: no encoder has so many")
    return {
        "hidden_size": metadata("vision.embedding_length"),
        # In old files this is 0, or the names of the two matrices are swapped.
        "intermediate_size": metadata.get("vision.feed_forward_length", 0)
        or max(metadata.num_rows(f"v.blk.0.ffn_{part}.weight") for part in ("up", "down")),
        blocks: count,
        heads: metadata("vision.attention.head_count"),
        **dict.fromkeys(others, epsilon),
        "patch_size": metadata("vision.patch_size"),
    }


# -- SigLIP: Gemma 3, SmolVLM ----------------------------------------------------------------------------------------


def _siglip_sources(owner: str) -> Sources:
    return {
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")},
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        f"{owner}.embeddings.patch_embedding": _PATCHES,
        f"{owner}.embeddings.position_embedding": "v.position_embd",
        f"{owner}.post_layernorm": "v.post_ln",
    }


def _siglip(metadata: Metadata) -> Values:
    sizes = _sizes(metadata, "gelu_pytorch_tanh", "num_hidden_layers num_attention_heads layer_norm_eps")
    return sizes | {"image_size": metadata("vision.image_size")}


def _rows_of_square(metadata: Metadata, scale: int) -> int:
    """Returns the number of rows of a square picture."""
    side = metadata("vision.image_size") // metadata("vision.patch_size") // metadata.get(_SCALE, scale)
    return int(side**2)


def _gemma_3(metadata: Metadata) -> EncoderParts:
    size, rows = metadata("vision.image_size"), _rows_of_square(metadata, 4)
    return EncoderParts(
        vision=_siglip(metadata) | {"vision_use_head": False},
        extra={"mm_tokens_per_image": rows},
        images={"size": {"height": size, "width": size}},
        settings={"image_seq_length": rows},
    )


def _idefics_3(metadata: Metadata) -> EncoderParts:
    size = metadata("vision.image_size")
    longest = metadata.get("vision.preproc_image_size", size)
    return EncoderParts(
        vision=_siglip(metadata),
        extra={"scale_factor": metadata.get(_SCALE, 2)},
        images={"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}},
        settings={"image_seq_len": _rows_of_square(metadata, 2)},
    )


# -- Qwen ------------------------------------------------------------------------------------------------------------

_QWEN_LAYER: Sources = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": ("attn_qkv", joined("attn_q", "attn_k", "attn_v")),
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    # Outside of the layers. The kernel has a matrix for each of two frames; a picture is used for both.
    "model.visual.patch_embed.proj.weight": TensorSource(
        (f"{_PATCHES}.weight", f"{_PATCHES}.weight.1"), lambda _, *frames: np.stack(frames, axis=2), same
    ),
    "model.visual.patch_embed.proj.bias": f"{_PATCHES}.bias",
    "model.visual.pos_embed": "v.position_embd",
    **dict.fromkeys(("model.visual.merger.norm", "model.visual.merger.ln_q"), "v.post_ln"),
    **dict.fromkeys(("model.visual.merger.linear_fc1", "model.visual.merger.mlp.0"), "mm.0"),
    **dict.fromkeys(("model.visual.merger.linear_fc2", "model.visual.merger.mlp.2"), "mm.2"),
}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"} | {
    f"vision_{end}_token": f"<|vision_{end}|>" for end in ("start", "end")
}


def _deep_layers(metadata: Metadata) -> list[int]:
    return [layer for layer, is_deep in enumerate(metadata.numbers("vision.is_deepstack_layers")) if is_deep]


def _deepstack(metadata: Metadata) -> Sources:
    """Returns the sources of the encoder levels that are added after the first layers of the text model."""
    parts = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    return {
        f"model.visual.deepstack_merger_list.{i}.{name}": f"v.deepstack.{layer}.{tensor}"
        for i, layer in enumerate(_deep_layers(metadata))
        for name, tensor in parts.items()
    }


def _qwen(metadata: Metadata, activation: str, fewest: int) -> EncoderParts:
    """Returns the parts of an encoder for pictures of any size, with at least `fewest` tokens."""
    sizes = _sizes(metadata, activation, "depth num_heads", 1e-6)
    patch, merge = sizes["patch_size"], metadata.get("vision.spatial_merge_size", 2)
    of_token = (patch * merge) ** 2
    size = {
        "shortest_edge": metadata.get("vision.image_min_pixels", fewest * of_token),
        "longest_edge": metadata.get("vision.image_max_pixels", 16384 * of_token),
    }
    return EncoderParts(
        vision=sizes | {"out_hidden_size": metadata("vision.projection_dim"), "spatial_merge_size": merge},
        images={"patch_size": patch, "merge_size": merge, "size": size},
    )


def _qwen_2_5(metadata: Metadata) -> EncoderParts:
    parts, every = _qwen(metadata, "silu", 4), metadata("vision.n_wa_pattern")
    whole = [i for i in range(parts.vision["depth"]) if (i + 1) % every == 0]
    # The side of windows, as in llama.cpp.
    return replace(parts, vision=parts.vision | {"fullatt_block_indexes": whole, "window_size": 112})


def _qwen_3(metadata: Metadata) -> EncoderParts:
    parts, positions = _qwen(metadata, "gelu_pytorch_tanh", 64), metadata.num_rows("v.position_embd.weight")
    own = {"num_position_embeddings": positions, "deepstack_visual_indexes": _deep_layers(metadata)}
    return replace(parts, vision=parts.vision | own)


def _in_sections(metadata: Metadata, options: Values) -> Values:
    """Returns the rotary parameters for positions with three dimensions."""
    interleaved = {} if metadata.architecture == "qwen2vl" else {"mrope_interleaved": True}
    return {"rope_parameters": options["rope_parameters"] | {"mrope_section": metadata.sections()} | interleaved}


# -- Mistral 3 -------------------------------------------------------------------------------------------------------

_PIXTRAL: Sources = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "attention.q_proj": moved("attn_q", paired_queries),
    "attention.k_proj": moved("attn_k", paired_queries),
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "model.vision_tower.patch_conv": _PATCHES,
    "model.vision_tower.ln_pre": "v.pre_ln",
    "model.multi_modal_projector.norm": "mm.input_norm",
    "model.multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "model.multi_modal_projector.linear_1": "mm.1",
    "model.multi_modal_projector.linear_2": "mm.2",
}


def _pixtral(metadata: Metadata) -> EncoderParts:
    sizes = _sizes(metadata, "silu", "num_hidden_layers num_attention_heads", 1e-5)
    size, merge = metadata("vision.image_size"), metadata.get("vision.spatial_merge_size", 1)
    own = {
        "model_type": "pixtral",
        "image_size": size,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": metadata.get("rope.freq_base", 10000.0)},
    }
    return EncoderParts(
        vision=sizes | own,
        extra={"spatial_merge_size": merge, "multimodal_projector_bias": metadata.has("mm.1.bias")},
        images={"size": {"longest_edge": size}, "patch_size": sizes["patch_size"]},
        settings={"patch_size": sizes["patch_size"], "spatial_merge_size": merge},
    )


# -- Gemma 4 ---------------------------------------------------------------------------------------------------------

_CAUSAL_WIDTHS = (1536, 2560)
"""The widths of E2B and E4B, in which a token of a picture sees no later ones."""
_LINEAR = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {
    "self_attn.o_proj": "attn_out",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_BOUNDS = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")]


def _pixels_last(config: Any, patches: Array) -> Array:
    """Returns [out, rows × columns × colours] from [out, colours, rows, columns]."""
    side = config.patch_size
    by_colour = patches.reshape(len(patches), -1, side, side)
    return by_colour.transpose(0, 2, 3, 1).reshape(len(patches), -1)


_GEMMA_4: Sources = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"{name}.linear": tensor for name, tensor in _LINEAR.items()},
    **{f"{name}.{bound}": f"{tensor}.{bound}" for name, tensor in _LINEAR.items() for bound in _BOUNDS},
    "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "model.vision_tower.patch_embedder.input_proj": TensorSource((_PATCHES,), _pixels_last, same),
    "model.vision_tower.std_bias": "v.std_bias",
    "model.vision_tower.std_scale": "v.std_scale",
    "model.embed_vision.embedding_projection": "mm.input_projection",
}


def _gemma_4(metadata: Metadata) -> EncoderParts:
    sizes = _sizes(metadata, "gelu_pytorch_tanh", "num_hidden_layers num_attention_heads rms_norm_eps")
    heads, positions = sizes["num_attention_heads"], metadata.tensors.get("v.position_embd.weight")
    kernel = {"pooling_kernel_size": metadata.get(_SCALE, 3)}
    own = kernel | {
        "num_key_value_heads": heads,
        "head_dim": metadata.num_rows("v.blk.0.attn_q.weight") // heads,
        "position_embedding_size": 0 if positions is None else positions.shape[-2],
        "use_clipped_linears": metadata.has(".input_max"),
        "standardize": metadata.has("v.std_bias"),
    }
    return EncoderParts(vision=sizes | own, images=kernel | {"patch_size": sizes["patch_size"]})


def _with_pictures_of_gemma_4(metadata: Metadata, options: Values) -> Values:
    return {
        "use_bidirectional_attention": None if metadata("embedding_length") in _CAUSAL_WIDTHS else "vision",
        # The class embeds it for the tokens of pictures.
        "pad_token_id": options["pad_token_id"] or 0,
    }


# -- the tables ------------------------------------------------------------------------------------------------------


def _layers(owner: str) -> re.Pattern[str]:
    return re.compile(rf"model\.{owner}\.(\d+)\.(.+)")


_QWEN_2_5 = PictureEncoder(
    projector="qwen2.5vl_merger",
    model_type="qwen2_5_vl",
    of_text={"qwen2vl": "qwen2_5_vl_text"},
    layers=_layers(r"visual\.blocks"),
    sources=_QWEN_LAYER,
    parts=_qwen_2_5,
    in_text=_in_sections,
    tokens=_QWEN_TOKENS,
    processors=("Qwen2VLImageProcessorPil", "Qwen2_5_VLProcessor"),
)
_QWEN_3 = replace(
    _QWEN_2_5,
    projector="qwen3vl_merger",
    model_type="qwen3_vl",
    of_text={"qwen3vl": "qwen3_vl_text"},
    parts=_qwen_3,
    processors=("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
)
_ENCODERS: Sequence[PictureEncoder] = (
    _QWEN_2_5,
    _QWEN_3,
    replace(_QWEN_3, model_type="qwen3_vl_moe", of_text={"qwen3vlmoe": "qwen3_vl_moe_text"}),
    PictureEncoder(
        projector="gemma3",
        model_type="gemma3",
        of_text={"gemma3": "gemma3_text"},
        layers=_layers(r"vision_tower\.encoder\.layers"),
        sources={
            **_siglip_sources("model.vision_tower"),
            "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection",
            "model.multi_modal_projector.mm_soft_emb_norm": changed("mm.soft_emb_norm", minus_one),
        },
        parts=_gemma_3,
        tokens={"image_token": _SOFT, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        processors=("Gemma3ImageProcessorPil", "Gemma3Processor"),
    ),
    PictureEncoder(
        projector="gemma4v",
        model_type="gemma4",
        of_text={"gemma4": "gemma4_text"},
        layers=_layers(r"vision_tower\.encoder\.layers"),
        sources=_GEMMA_4,
        parts=_gemma_4,
        in_text=_with_pictures_of_gemma_4,
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        processors=("Gemma4ImageProcessorPil", "Gemma4Processor"),
    ),
    PictureEncoder(
        projector="pixtral",
        model_type="mistral3",
        of_text={"llama": "llama", "mistral3": "ministral3"},
        layers=_layers(r"vision_tower\.transformer\.layers"),
        sources=_PIXTRAL,
        # This tensor is a row of the text embeddings.
        unused=("v.token_embd.img_break",),
        parts=_pixtral,
        tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        processors=("PixtralImageProcessorPil", "PixtralProcessor"),
    ),
    PictureEncoder(
        projector="idefics3",
        model_type="idefics3",
        of_text={"llama": "llama"},
        text="model.text_model.",
        layers=_layers(r"vision_model\.encoder\.layers"),
        sources={
            **_siglip_sources("model.vision_model"),
            "model.connector.modality_projection.proj": "mm.model.fc",
        },
        parts=_idefics_3,
        tokens={"image_token": "<image>"},
        processors=("Idefics3ImageProcessorPil", "Idefics3Processor"),
    ),
)
MAY_HAVE_ENCODER = frozenset(text for encoder in _ENCODERS for text in encoder.of_text)
HAVE_ENCODER = MAY_HAVE_ENCODER - {"llama", "mistral3", "gemma3"}
"""Architectures of text files: some of their models have an encoder of pictures (MAY), or all of them (HAVE)."""


def tensors_of_pictures(width: int, tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Returns the tensors that are not for sound. Swaps the names of the up and down matrices of old files, which
    confuse them, in an encoder of this width."""
    vision = [tensor for tensor in tensors if not tensor.name.startswith(_SOUND)]
    rows = {tensor.name: tensor.shape[0] for tensor in vision}
    if rows.get("v.blk.0.ffn_up.weight") != width or rows.get("v.blk.0.ffn_down.weight") == width:
        return vision
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return [replace(tensor, name=_UP_OR_DOWN.sub(lambda part: other[part[0]], tensor.name)) for tensor in vision]


def projector_type(metadata: Metadata) -> str:
    """Returns the type of a file's projector of pictures, "" if it has none."""
    if metadata.architecture != CLIP or not metadata.get("has_vision_encoder", True):
        return ""
    return metadata.text("projector_type") or metadata.text("vision.projector_type")


def encoder_for(text: str, projector: str) -> PictureEncoder | None:
    """Returns the encoder with this projector for text files of the architecture `text`, None if there is no table."""
    return next((encoder for encoder in _ENCODERS if encoder.projector == projector and text in encoder.of_text), None)


def with_encoder(architecture: Architecture, text: str, encoder: PictureEncoder) -> Architecture:
    """Returns the architecture of a text file, for a model with an encoder."""
    return replace(
        architecture,
        model_type=encoder.of_text[text],
        config=lambda metadata, options: architecture.config(metadata, options) | encoder.in_text(metadata, options),
        encoder=encoder,
        unused=(*architecture.unused, *encoder.unused),
    )
