"""Looks at what --model names before anything slow: whether it is there, and whether its folder is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import ModelError
from diskprefix.folders import cache_home
from diskprefix.nearest import nearest
from diskprefix.printable import escaped
from diskprefix.progress import Report
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.found_models import found_model, found_models
from diskprefix.runtime.fetch.hub import cached_model, cached_models, gguf_models_in, is_gguf_model
from diskprefix.runtime.fetch.proposals import short_names, short_names_hint
from diskprefix.runtime.files.checkpoint import SAFETENSORS, weight_files_of
from diskprefix.runtime.files.gguf.gguf_file import model_stem, part_paths, require_gguf
from diskprefix.runtime.files.manifests import is_blob
from diskprefix.units import format_size


def is_embedded(model: str | None) -> bool:
    return model is None or (model == EMBEDDED.name and not os.path.isdir(model))


def is_embedded_file(path: Path) -> bool:
    """Returns whether this is the embedded model's own file. Raises `OSError`."""
    own = path_of(None)
    return own is not None and path.exists() and path.samefile(own)


def path_of(model: str | None) -> Path | None:
    """Returns the folder or the `.gguf` file of what --model says, None if it is not on this machine. Raises
    `ModelError` as `own_path`."""
    if model is None or is_embedded(model):
        return next((cache_home() / "models" / EMBEDDED.requirement).glob("*.gguf"), None)
    return own_path(model) or cached_model(model)


def own_path(model: str) -> Path | None:
    """Returns the folder or the file of a path, or of a model that another program has under this name. None for other
    names, and for models in the hub's cache, because the hub may have a newer version.

    A folder with one `.gguf` model, and none in safetensors, means that model. Raises `ModelError` if it has several,
    or if the other program's model cannot be served.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return _model_in(path)
    if os.path.exists(path):
        return path
    if cached_model(model) is not None or (model_found := found_model(model)) is None:
        return None
    if model_found.problem:
        raise ModelError(f"{model_found.owner}'s model {model}: {model_found.problem}")
    return model_found.parts[0]


def _model_in(folder: Path) -> Path:
    files = list[Path]()
    with suppress(OSError):
        is_whole = (folder / "config.json").is_file() and any(folder.glob(SAFETENSORS))
        files = [] if is_whole else gguf_models_in(folder)
    if len(files) > 1:
        sizes = ", ".join(f"{escaped(file.name)} ({format_size(_num_bytes(part_paths(file)))})" for file in files)
        raise ModelError(f"{folder} holds {len(files)} models; give the path of one: {sizes}")
    return files[0] if files else folder


def plain_name(model: str) -> str:
    """Returns the name under which a model is served that --model names: a file's without its extension. The embedded
    model's file has that model's name, however it is named."""
    path = Path(os.path.expanduser(model))
    if not os.path.exists(path):
        return model
    with suppress(ModelError, OSError):
        path = own_path(model) or path
        if is_embedded_file(path):
            return EMBEDDED.name
    return path.resolve().name if path.is_dir() else model_stem(path)


def require_named(model: str | None, flag: str, *, with_weights: bool = False) -> None:
    """Raises `ModelError` with the nearest name if there is no such path, or a name without a slash is not on this
    machine. `with_weights`: files that are missing in a folder are noticed, too, and a file that is no model."""
    if model is None or is_embedded(model):
        return
    path = Path(os.path.expanduser(model))
    is_gguf = path.suffix.lower() == ".gguf"
    try:
        located = path_of(model) if model.strip() else None
    except ModelError as error:
        raise ModelError(f"{flag}: {error.message}") from error
    if located is not None and located.is_dir():
        if with_weights:
            weight_files_of(located)
    elif located is not None:
        if located == path and not (is_gguf or is_blob(path)):
            raise ModelError(f"{flag}: {model} is a file; give the folder that holds the model, or a .gguf file")
        if with_weights:
            require_gguf(located, flag)
    elif is_gguf or not model.strip() or model.startswith(("./", "../", "/", "~")):
        raise ModelError(f"{flag}: no such file or folder: {model!r}{_nearest(model, _models_beside(path))}")
    elif "/" not in model:
        here = (*(name for name, _ in cached_models()), *(model_found.names[0] for model_found in found_models()))
        near = _nearest(model, [EMBEDDED.name, *_models_beside(path), *here, *short_names()])
        raise ModelError(
            f"{flag}: {model!r} is no file or folder here and no model of `diskprefix list`; names of the hub are "
            f"ORG/NAME; {short_names_hint(model)}{near}"
        )


def _models_beside(path: Path) -> Iterator[str]:
    """Yields the names of the models in the folder in which a model was looked for."""
    with suppress(OSError):
        for entry in sorted(path.parent.iterdir()):
            if is_gguf_model(entry.name) or (entry / "config.json").is_file():
                yield entry.name


def _nearest(model: str, names: Iterator[str] | list[str]) -> str:
    folder, _, name = model.rpartition("/")
    if (near := nearest(name, names)) is None:
        return ""
    # A path is written as the user has begun it.
    return f"; the nearest is {escaped(os.path.join(folder or model[: model.find('/') + 1], near))}"


def name_faster(folder: Path, files: list[Path], report: Report) -> None:
    """Reports a smaller `.gguf` model next to the weight `files` that are served. It would be faster on a CPU."""
    served = _num_bytes(files)
    sizes = {path: _num_bytes(part_paths(path)) for path in gguf_models_in(folder)}
    smaller = {path: size for path, size in sizes.items() if size < served}
    if smaller:
        best = escaped(str(max(smaller, key=lambda path: smaller[path])))
        report(f"serving the safetensors of {folder}; a .gguf file there is smaller, so it is faster: --model {best}")


def _num_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
