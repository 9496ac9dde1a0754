"""The models that other programs have fetched to this machine. They are served where they are: nothing there is ever
written, locked, moved or removed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diskprefix.model.load.gguf_file import model_stem
from diskprefix.model.load.hub import cached_models, gguf_models_in, is_model_folder
from diskprefix.model.load.manifests import ManifestModel, llama_cpp_models, ollama_models

OWNERS = ("Ollama", "LM Studio", "llama.cpp")
_OF_OLLAMAS_SERVICE = Path("/usr/share/ollama/.ollama/models")
_MOST_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model by the name that its `owner` gives it. `path` is its folder or the first part of its `.gguf` file, None
    if it cannot be served: then `problem` says why."""

    name: str
    aliases: tuple[str, ...] = ()
    owner: str
    path: Path | None
    problem: str = ""


def found_models() -> Iterator[FoundModel]:
    """Yields the models of Ollama, LM Studio and llama.cpp. A name may come twice: the first has it."""
    models = os.environ.get("OLLAMA_MODELS")
    for root in (Path(models) if models else _home(".ollama/models"), _OF_OLLAMAS_SERVICE):
        for model in ollama_models(root):
            short = [name.removesuffix(":latest") for name in model.names if name.endswith(":latest")]
            yield _of_manifest(model, "Ollama", (*model.names[1:], *short))
    for folder in _folders_of_lm_studio():
        for path in models_below(folder):
            name = path.relative_to(folder).with_name(path.name if path.is_dir() else model_stem(path))
            yield FoundModel(name=str(name), owner="LM Studio", path=path)
    for folder in _folders_of_llama_cpp():
        manifests = list(llama_cpp_models(folder))
        yield from (_of_manifest(model, "llama.cpp") for model in manifests)
        named = {part for model in manifests for part in model.parts}
        for path in gguf_models_in(folder) if folder.is_dir() else ():
            if path not in named:
                yield FoundModel(name=model_stem(path), owner="llama.cpp", path=path)
        for name, path in cached_models(folder):
            yield FoundModel(name=name, owner="llama.cpp", path=path)


def found_model(name: str) -> FoundModel | None:
    """Returns the model of another program with this name."""
    return next((model for model in found_models() if name in (model.name, *model.aliases)), None)


def models_below(folder: Path) -> list[Path]:
    """Returns the models in a folder and below it, each folder once: folders with a configuration and weights, and
    `.gguf` files, of which a split one counts by its first part. What cannot be read is left out."""
    found: list[Path] = []
    seen: set[Path] = set()
    waiting = [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        if place.resolve() in seen:
            continue
        seen.add(place.resolve())
        with suppress(OSError):
            if is_model_folder(place):
                found.append(place)
                continue
            found += gguf_models_in(place)
            if depth < _MOST_DEPTH:
                waiting += [(one, depth + 1) for one in place.iterdir() if one.is_dir() and one.name[0] != "."]
    return sorted(found)


def _of_manifest(model: ManifestModel, owner: str, aliases: tuple[str, ...] = ()) -> FoundModel:
    path = None if model.problem else model.parts[0]
    return FoundModel(name=model.names[0], aliases=aliases, owner=owner, path=path, problem=model.problem)


def _home(below: str) -> Path:
    return Path(os.path.expanduser(f"~/{below}"))


def _folders_of_lm_studio() -> list[Path]:
    """Returns the folder of models in each home that LM Studio may have here, or the one that its settings name."""
    homes = [_home(".lmstudio"), _home(".cache/lm-studio")]
    with suppress(OSError, ValueError):
        homes.insert(0, Path(_home(".lmstudio-home-pointer").read_text(encoding="utf-8").strip()))
    folders = [home / "models" for home in homes]
    for home in homes:
        with suppress(OSError, ValueError, LookupError, TypeError):
            folders.append(Path(json.loads((home / "settings.json").read_bytes())["downloadsFolder"]))
    return [folder for folder in dict.fromkeys(folders) if folder.is_absolute()]


def _folders_of_llama_cpp() -> list[Path]:
    own = os.environ.get("LLAMA_CACHE")
    caches = _home("Library/Caches" if sys.platform == "darwin" else ".cache")
    return [Path(own)] if own else [Path(os.environ.get("XDG_CACHE_HOME") or caches) / "llama.cpp"]
