"""The shapes that `tools/bench shapes` measures, and their files, which are made once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from diskprefix.progress import Report
from tools.shapes.folder_shapes import DENSE_3B, HYBRID_4B, LATENT_MIXTURE, FolderShape, write_folder
from tools.shapes.gguf_shapes import DENSE_7B, GPT_OSS, MIXTURE_30B, GgufShape, write_gguf


@dataclass(frozen=True)
class Shape:
    """`flags` are those of `diskprefix serve`, `beside` is the peer that reads the same file."""

    what: str
    form: GgufShape | FolderShape
    beside: str
    flags: tuple[str, ...] = ()


SHAPES = {
    "a": Shape("dense 7B (Qwen2.5), Q4_K_M", DENSE_7B, "llama.cpp"),
    "b": Shape("30B-A3B (Qwen3-MoE), Q4_K_M, layers that fit in 12 GB", MIXTURE_30B, "llama.cpp"),
    "c": Shape("gpt-oss-20b, MXFP4 and Q8_0", GPT_OSS, "llama.cpp"),
    "d": Shape("hybrid 4B (Qwen3.5), bfloat16", HYBRID_4B, "generate"),
    "e": Shape("latent attention (DeepSeek-V2-Lite), bfloat16, layers that fit in 9 GB", LATENT_MIXTURE, "generate"),
    "f": Shape("dense 3B (Qwen2.5), bfloat16, --weights int4", DENSE_3B, "generate", ("--weights", "int4")),
}


def shape_file(letter: str, folder: Path, tokenizer: Path, scale: int, layers: int | None, report: Report) -> Path:
    """Returns the file or folder of a shape, which is made in `folder` if it is not there.

    `tokenizer` is a GGUF file, in a folder that has the same tokenizer as transformers reads it. `layers` and `scale`
    make the shape smaller. Raises `ModelError` if the disk has no room for it.
    """
    form = SHAPES[letter].form
    digest = hashlib.sha256(repr((form, scale, layers, tokenizer.name)).encode()).hexdigest()[:8]
    path = folder / f"{letter}-{digest}"
    if isinstance(form, GgufShape):
        path = path.with_suffix(".gguf")
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(form, GgufShape):
        return write_gguf(form.scaled(scale, layers), tokenizer, path, report)
    return write_folder(form, tokenizer.parent, path, report, scale, layers)
