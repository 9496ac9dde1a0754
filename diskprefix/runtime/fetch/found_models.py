"""The models that other programs have fetched to this machine. They are served where they are: nothing there is ever
written, locked, moved or removed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diskprefix.folders import cache_home
from diskprefix.runtime.fetch.hub import cached_models, gguf_models_in, is_model_folder
from diskprefix.runtime.files.gguf.gguf_file import model_stem
from diskprefix.runtime.files.manifests import FoundModel, llama_cpp_models, ollama_models, ollama_roots

_TOOLS = "tools/bench"
OWNERS = ("Ollama", "LM Studio", "llama.cpp", _TOOLS)
_MOST_DEPTH = 4


def found_models() -> Iterator[FoundModel]:
    """Yields the models of Ollama, LM Studio, llama.cpp and `tools/bench models`. A name may come twice: the first has
    it."""
    for root in ollama_roots():
        with suppress(OSError):
            for model in ollama_models(root):
                model.names += [name.removesuffix(":latest") for name in model.names if name.endswith(":latest")]
                yield model
    for folder in map(_path, ("~/.lmstudio/models", "~/.cache/lm-studio/models")):
        for path in models_below(folder):
            below = path.relative_to(folder).with_name(path.name if path.is_dir() else model_stem(path))
            yield FoundModel(owner="LM Studio", names=[str(below)], parts=[path])
    caches = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    folder = _path(os.environ.get("LLAMA_CACHE") or f"{caches}/llama.cpp")
    with suppress(OSError):
        yield from (manifests := llama_cpp_models(folder))
        named = [part for model in manifests for part in model.parts]
        loose = [(model_stem(path), path) for path in gguf_models_in(folder) if path not in named]
        for name, path in (*loose, *cached_models(folder)):
            yield FoundModel(owner="llama.cpp", names=[name], parts=[path])
    for name, files in _of_tools(cache_home() / "models"):
        yield FoundModel(owner=_TOOLS, names=[name], parts=files)


def _of_tools(place: Path) -> list[tuple[str, list[Path]]]:
    """Returns the names and files of the models that `tools/bench models` has fetched."""
    models: list[tuple[str, list[Path]]] = []
    folders: list[Path] = []
    with suppress(OSError):
        folders = sorted(place.iterdir())
    for folder in folders:
        # Others are made of these, or are the embedded model.
        if folder.name[0] == "." or "=" in folder.name:
            continue
        with suppress(OSError):
            if len(files := gguf_models_in(folder)) == 1:
                models.append((folder.name, files))
    return models


def found_model(name: str) -> FoundModel | None:
    """Returns the model of another program with this name."""
    return next((model for model in found_models() if name in model.names), None)


def models_below(folder: Path) -> list[Path]:
    """Returns the models in a folder and below it, each folder once: folders with a configuration and weights, and
    `.gguf` files, split ones by their first part. Unreadable models are left out."""
    models: list[Path] = []
    seen: set[Path] = set()
    waiting = [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        # Before Python 3.13 a link to itself is a `RuntimeError`.
        with suppress(OSError, RuntimeError):
            if place.resolve() in seen:
                continue
            seen.add(place.resolve())
            if is_model_folder(place):
                models.append(place)
                continue
            models += gguf_models_in(place)
            if depth < _MOST_DEPTH:
                waiting += [(inner, depth + 1) for inner in place.iterdir() if inner.is_dir() and inner.name[0] != "."]
    return sorted(models)


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))
