"""Looks at what --model names before anything slow: whether it is there, and whether its folder is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from diskprefix.errors import ModelError
from diskprefix.model.load.checkpoint import weight_files_of
from diskprefix.model.load.embedded import EMBEDDED
from diskprefix.model.load.gguf_file import first_parts
from diskprefix.model.load.hub import cached_model, cached_models, is_gguf_model
from diskprefix.model.load.proposals import known_names
from diskprefix.printable import escaped
from diskprefix.progress import Report
from diskprefix.settings import Settings


def is_embedded(model: str | None) -> bool:
    return model is None or (model == EMBEDDED.name and not os.path.isdir(model))


def default_sampling(settings: Settings) -> dict[str, float]:
    """Returns the sampling of requests that say none: that of `--sampling`, and of the embedded model."""
    return {**(EMBEDDED.sampling if is_embedded(settings.model) else {}), **settings.sampling_values}


def require_named(model: str | None, flag: str, *, with_weights: bool = False) -> None:
    """Raises `ModelError` with the nearest name if there is no such path, or a name without a slash is not in the hub's
    cache. `with_weights`: files that are missing in a folder are noticed, too."""
    if model is None or is_embedded(model):
        return
    path = Path(os.path.expanduser(model))
    is_gguf = path.suffix.lower() == ".gguf"
    if model.strip() and os.path.isdir(path):
        if with_weights:
            weight_files_of(path)
    elif os.path.isfile(path):
        if not is_gguf:
            raise ModelError(f"{flag}: {model} is a file; give the folder that holds the model, or a .gguf file")
    elif is_gguf or not model.strip() or model.startswith(("./", "../", "/", "~")):
        raise ModelError(f"{flag}: no such file or folder: {model!r}{_nearest(model, _models_beside(path))}")
    elif "/" not in model and cached_model(model) is None:
        names = [EMBEDDED.name, *_models_beside(path), *(name for name, _ in cached_models())]
        raise ModelError(
            f"{flag}: {model!r} is no file or folder here, names of the hub are org/name, and {known_names(model)}"
            f"{_nearest(model, names)}"
        )


def _models_beside(path: Path) -> Iterator[str]:
    """Yields the names of the models in the folder in which a model was looked for."""
    with suppress(OSError):
        for entry in sorted(path.parent.iterdir()):
            if is_gguf_model(entry.name) or (entry / "config.json").is_file():
                yield entry.name


def _nearest(model: str, names: Iterator[str] | list[str]) -> str:
    folder, _, name = model.rpartition("/")
    by_letters = {one.casefold(): one for one in names}
    # A path is written as the user has begun it.
    near = [by_letters[one] for one in get_close_matches(name.casefold(), by_letters, n=1)]
    return f"; the nearest is {escaped(os.path.join(folder or model[: model.find('/') + 1], near[0]))}" if near else ""


def name_faster(folder: Path, files: list[Path], report: Report) -> None:
    """Reports a smaller `.gguf` model beside the weight `files` that are served. It would be faster on a CPU."""
    served = _num_bytes(files)
    models = first_parts(one.name for one in folder.glob("*.gguf") if is_gguf_model(one.name))
    sizes = {name: _num_bytes([folder / part for part in parts]) for name, parts in models.items()}
    smaller = {name: size for name, size in sizes.items() if size < served}
    if smaller:
        best = escaped(str(folder / max(smaller, key=lambda name: smaller[name])))
        report(f"serving the safetensors of {folder}; a .gguf file there is smaller, so it is faster: --model {best}")


def _num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
