"""All architectures of `.gguf` files that are read."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.errors import ModelError
from diskprefix.printable import shown
from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.dense_families import DENSE, OLMO_3
from diskprefix.runtime.files.gguf.late_gemmas import GEMMA_3N, GEMMA_4
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.metadata import shown as shown_value
from diskprefix.runtime.files.gguf.mixture_families import MIXTRAL, MIXTURES, deepseek
from diskprefix.runtime.files.gguf.recurrent_families import RECURRENT
from diskprefix.runtime.files.gguf.windowed_families import GRANITE_WINDOWS_MOE, WINDOWED, small_thinker

_BY_NAME = DENSE | MIXTURES | WINDOWED | RECURRENT | {"gemma3n": GEMMA_3N, "gemma4": GEMMA_4}
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    **{name: (architecture.model_type,) for name, architecture in _BY_NAME.items()},
    "deepseek2": ("deepseek_v2", "deepseek_v3"),
    "llama": ("llama", MIXTRAL.model_type),
    "smallthinker": ("smallthinker",),
    "olmo2": ("olmo2", OLMO_3.model_type),
    "granite_swa": ("granite_swa", GRANITE_WINDOWS_MOE.model_type),
}
"""The types of transformers' models that files become, by the architecture of the file."""
NAMES = MODEL_TYPES.keys()


def architecture_of(metadata: Metadata) -> Architecture:
    """Returns the architecture of a file. Raises `ModelError` if it is not supported."""
    name = metadata.architecture
    if not isinstance(said := metadata.header.values.get("general.architecture"), str):
        raise ModelError(f"the file's general.architecture is {'missing' if said is None else shown_value(said)}")
    if name == "deepseek2":
        return deepseek(metadata)
    if name == "smallthinker":
        return small_thinker(metadata)
    if name == "llama" and metadata.get("expert_count"):
        return MIXTRAL
    if name == "olmo2" and metadata.get("attention.sliding_window"):
        return OLMO_3
    if name == "granite_swa" and metadata.get("expert_count"):
        return GRANITE_WINDOWS_MOE
    if name not in _BY_NAME:
        known = ", ".join(sorted(NAMES))
        raise ModelError(f"files of the architecture {shown(name)} are not read; those of {known} are")
    return _BY_NAME[name]
