"""The parts of a model's identity beside the model: a digest of our own Python, versions and kernels."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from diskprefix.kernel_settings import cpu_kind, device_kind, environment, switches

_PACKAGE = Path(__file__).parents[2]
_CODE = (
    *(f"runtime/{room}/**/*.py" for room in ("plan", "files", "fetch", "load", "grid")),
    "runtime/*.py",
    "runtime/pictures/vision_encoder.py",
    "native/*.py",
    "prefixstore/kv/page_table.py",
    "prefixstore/kv/step.py",
)
"""Our own Python modules that read weights or compute: they decide which operators are called with which operands."""
_COMPUTE_NOTHING = {
    *("alternatives", "embedded", "fit", "found_models", "hub", "made_once", "manifests", "named_model", "proposals"),
    *("recommended_sampling", "runtime_options"),
    *("chat_template", "file_tokenizer", "folder_tokenizer", "read_tokenizer", "string_hashes", "template_sandbox"),
    *("tokenizer", "vocabulary_parts"),
}
"""Modules that are left out: those that find, fetch or refuse a model (the digest of the weights covers their result),
those for texts (names of blocks contain the token ids), and the one for what comes after the logits."""


@cache
def code_digest() -> str:
    """Returns a digest of our own Python that decides about the bits. The C++ sources have their own
    (`native.build.digest`). Where in doubt, a module is in it: a needless miss costs time, a wrong hit gives a wrong
    answer."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in _PACKAGE.glob(pattern)):
        if path.stem in _COMPUTE_NOTHING:
            continue
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def computed_by(model: Any) -> str:
    """Returns everything except the model that decides about its bits: our own code, versions, device, CPU,
    environment, switches and threads. Measurements are stored under it."""
    from importlib.metadata import version

    import torch

    libraries = code_digest(), torch.__version__, *map(version, ("transformers", "gguf", "numpy"))
    kernels = cpu_kind(), environment(), switches(model), torch.get_num_threads()
    return f"{libraries} {device_kind(model.device)} {kernels}"
