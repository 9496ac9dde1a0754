"""All architectures of `.gguf` files that are read."""

from __future__ import annotations

from diskprefix.errors import ModelError
from diskprefix.model.gguf.architecture import Architecture
from diskprefix.model.gguf.dense_families import DENSE
from diskprefix.model.gguf.gemma4 import GEMMA_4
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.gguf.mixture_families import MIXTRAL, MIXTURES, deepseek
from diskprefix.model.gguf.recurrent_families import RECURRENT

_BY_NAME = DENSE | MIXTURES | RECURRENT | {"gemma4": GEMMA_4}
NAMES = frozenset({*_BY_NAME, "deepseek2"})


def architecture_of(metadata: Metadata) -> Architecture:
    """Returns the architecture of a file. Raises `ModelError` for one that is not read."""
    name = metadata.architecture
    if name == "deepseek2":
        return deepseek(metadata)
    if name == "llama" and metadata.get("expert_count"):
        return MIXTRAL
    if name == "olmo2" and metadata.get("attention.sliding_window"):
        return DENSE["olmo3"]
    if name not in _BY_NAME:
        raise ModelError(f"files of the architecture {name} are not read; those of {', '.join(sorted(NAMES))} are")
    return _BY_NAME[name]
