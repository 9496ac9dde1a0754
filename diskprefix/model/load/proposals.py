"""Models of the hub for those who have none, and the short names by which they can be named."""

from __future__ import annotations

import os
from difflib import get_close_matches

from diskprefix.errors import SettingsError
from diskprefix.model.load.memory import available_ram_bytes
from diskprefix.printable import shown
from diskprefix.units import format_size

_PROPOSED = {
    "qwen3.6:35b": ("unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M", 24_900_000_000),
    "gemma4:26b": ("unsloth/gemma-4-26B-A4B-it-GGUF:UD-Q4_K_M", 19_500_000_000),
    "gpt-oss:20b": ("ggml-org/gpt-oss-20b-GGUF:MXFP4", 13_700_000_000),
    "gemma4:e4b": ("unsloth/gemma-4-E4B-it-GGUF:Q4_K_M", 10_200_000_000),
    "qwen3.5:9b": ("unsloth/Qwen3.5-9B-GGUF:Q4_K_M", 9_700_000_000),
    "gemma4:e2b": ("unsloth/gemma-4-E2B-it-GGUF:Q4_K_M", 7_400_000_000),
    "qwen3.5:4b": ("unsloth/Qwen3.5-4B-GGUF:Q4_K_M", 5_900_000_000),
    "qwen3.5:2b": ("unsloth/Qwen3.5-2B-GGUF:Q4_K_M", 2_900_000_000),
}
"""Models that call tools well, from the largest to the smallest: the short name, as Ollama writes it, the repository
with the quant, and the bytes of memory that the model needs for a context of 16 384 tokens.

The bytes are those of `model.load.fit` for the shapes of the models. The files have parameters × bits: 5.1 to 5.4 bits
of each parameter in Q4_K_M, 4.6 in MXFP4. In memory the recurrent layers of Qwen (0.4 to 1.6 billion parameters) and
the embeddings of each layer of Gemma 4 E2B and E4B (2.3 and 2.8 billion) have 16 bits.
"""


def full_name(model: str) -> str:
    """Returns the repository of a short name. Any other name stays as it is. Nothing is read: clients send names."""
    return _PROPOSED.get(model.lower(), (model, 0))[0]


def meant_name(model: str) -> str:
    """Returns `full_name` of what a user names on this machine, where the name of a file, a folder or another program's
    model stays as it is."""
    if (name := full_name(model)) == model or os.path.exists(model):
        return model
    # It imports what reads models, and no start of a command needs it.
    from diskprefix.model.load.found_models import found_model

    return name if found_model(model) is None else model


def known_names(model: str) -> str:
    """Returns the short names, the nearest to `model` first, for a message about a name that is none."""
    near = get_close_matches(model.lower(), _PROPOSED, n=1)
    return f"short names are {', '.join(dict.fromkeys((*near, *_PROPOSED)))}"


def require_repository(model: str) -> str:
    """Returns `meant_name` of a model to fetch. Raises `SettingsError` for a name that no repository can have."""
    if "/" not in (name := meant_name(model)):
        raise SettingsError(f"no model has the short name {shown(model)!r}; {known_names(model)}; others are ORG/NAME")
    return name


def none_known() -> str:
    """Returns that no model is known, and what to do."""
    fetching = f"fetch one with {proposed()}, or put a .gguf file below --models-dir"
    return f"no model is known: {fetching}; the daemon looks again at SIGHUP and at its next start"


def proposed() -> str:
    """Returns the command that fetches the largest model that fits into the free memory, or else the smallest, with
    the memory that the model needs."""
    free = available_ram_bytes()
    name = next((name for name, (_, num_bytes) in _PROPOSED.items() if num_bytes <= free), [*_PROPOSED][-1])
    needed = f"{format_size(_PROPOSED[name][1])} of memory; {format_size(free)} are free"
    return f"`diskprefix pull {name}` ({needed})"
