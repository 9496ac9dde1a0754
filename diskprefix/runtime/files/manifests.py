"""The manifests of Ollama and llama.cpp: how these programs call the models in their folders, and which files make one.

Nothing is written there. `daemon/cli/README.md` describes the folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct, field

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.units import format_size

_MOST_BYTES = 1 << 22
"""A manifest has a few kilobytes."""
_DIGEST = re.compile("sha256[:-][0-9a-f]{64}", re.IGNORECASE)
_OF_OLLAMAS_SERVICE = "/usr/share/ollama/.ollama/models"
_OF_LISTS = "application/vnd.ollama.manifest.list.v2+json"
_Files: TypeAlias = tuple[list[Path], list[Path], "dict[str, Any] | str"]
"""The parts, the projectors and the parameters of a `FoundModel`."""


class FoundModel(Struct, kw_only=True):
    """A model of another program, its `owner`, by the `names` that it has there. `parts`: its folder, or its `.gguf`
    file, at least the first part. `projectors`: its encoders of pictures. `parameters`: what Ollama keeps beside it, or
    why this cannot be read. Without parts, `problem` says why."""

    owner: str
    names: list[str]
    parts: list[Path] = field(default_factory=list)
    projectors: list[Path] = field(default_factory=list)
    parameters: dict[str, Any] | str = field(default_factory=dict)
    problem: str = ""


def is_blob(file: Path) -> bool:
    """Returns whether a file is one of Ollama's, which are called by their digests."""
    return _DIGEST.fullmatch(file.name) is not None and file.parent.name == "blobs"


def manifest_of(gguf: Path) -> FoundModel | None:
    """Returns the model to which a `.gguf` file belongs by a manifest, of several one with a projector, None if no
    manifest names the file."""
    return max(_models_with(gguf), key=lambda model: len(model.projectors), default=None)


def parameters_of(gguf: Path, name: str | None) -> dict[str, Any] | str:
    """Returns the parameters of the model of Ollama to which a `.gguf` file belongs, of several the one with this
    `name`, or why they cannot be read."""
    models = _models_with(gguf)
    named = [model for model in models if {name, f"{name}:latest"}.intersection(model.names)]
    return (named or models)[0].parameters if models else {}


def _models_with(gguf: Path) -> list[FoundModel]:
    models = llama_cpp_models(gguf.parent)
    if is_blob(gguf):
        # The folder of the blobs may be a link to another disk.
        roots = dict.fromkeys((gguf.parents[1], *ollama_roots()))
        models = [model for root in roots if _is_same(root / "blobs", gguf.parent) for model in ollama_models(root)]
    return [model for model in models if gguf.name in {part.name for part in model.parts}]


def _is_same(folder: Path, other: Path) -> bool:
    with suppress(OSError):
        return folder.samefile(other)
    return False


def ollama_roots() -> list[Path]:
    """Returns the folders in which Ollama keeps models: the user's and its service's."""
    own = os.environ.get("OLLAMA_MODELS") or "~/.ollama/models"
    return [Path(os.path.expanduser(root)) for root in (own, _OF_OLLAMAS_SERVICE)]


def ollama_models(root: Path) -> list[FoundModel]:
    """Returns the models in a folder of Ollama. Those that share all their files, and have the same parameters, are
    one, with several names."""
    named: dict[str, Path] = {}
    # The newer folder has links to blobs.
    for file in (path for place in ("manifests-v2", "manifests") for path in sorted((root / place).glob("*/*/*/*"))):
        host, namespace, model, tag = file.parts[-4:]
        # As `ollama list` shows it.
        of_library = f"{namespace}/{model}:{tag}".removeprefix("library/")
        if not tag.startswith("."):
            named.setdefault(of_library if host == "registry.ollama.ai" else f"{host}/{namespace}/{model}:{tag}", file)
    models: dict[object, FoundModel] = {}
    for name, file in named.items():
        made = _made("Ollama", name, file, partial(_blobs_of, root / "blobs"))
        content = (*made.parts, *made.projectors, json.dumps(made.parameters, sort_keys=True)) if made.parts else name
        if (known := models.setdefault(content, made)) is not made:
            known.names += made.names
    return [*models.values()]


def llama_cpp_models(folder: Path) -> list[FoundModel]:
    """Returns the models of llama.cpp's own cache that have a manifest. Newer versions use the hub's layout."""
    models = []
    for file in sorted(folder.glob("manifest=*=*=*.json")):
        user, repo, tag = file.name.removesuffix(".json").split("=", 3)[1:]
        name = f"{user}/{repo}" if tag == "latest" else f"{user}/{repo}:{tag}"
        models.append(_made("llama.cpp", name, file, partial(_files_of, folder, f"{user}_{repo}")))
    return models


def _made(owner: str, name: str, manifest: Path, files: Callable[[dict[str, Any]], _Files]) -> FoundModel:
    try:
        parts, projectors, parameters = files(_read_manifest(manifest))
        for file in (*parts, *projectors):
            if not os.path.isfile(file):
                raise ValueError(f"{file} is missing; fetch the model again with {owner}")
    except (ModelError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return FoundModel(owner=owner, names=[name], problem=f"its manifest {manifest}: {first_line(error)}")
    return FoundModel(owner=owner, names=[name], parts=parts, projectors=projectors, parameters=parameters)


def _blobs_of(blobs: Path, manifest: dict[str, Any]) -> _Files:
    if manifest.get("mediaType") == _OF_LISTS:
        by_runner = {str(part.get("runner", "")).lower(): part for part in manifest["manifests"]}
        manifest = next((by_runner[runner] for runner in ("ollama", "llamacpp", "") if runner in by_runner), {})
        if "digest" in manifest:
            manifest = _read_manifest(_blob(blobs, manifest["digest"]))
    layers = [
        (layer["mediaType"].rpartition(".")[2], _blob(blobs, layer["digest"])) for layer in manifest.get("layers", [])
    ]
    if any(kind == "adapter" for kind, _ in layers):
        raise ValueError("it has an adapter, and adapters are not served")
    parts, projectors, parameters = (
        [blob for kind, blob in layers if kind == wanted] for wanted in ("model", "projector", "params")
    )
    if not parts:
        raise ValueError("it names no .gguf file: the model is one of MLX, or of Ollama's cloud")
    if len(parts) > 1:
        parts.sort(key=lambda blob: int(read_header(blob).values.get("split.no", 0)))
    return parts, projectors, _parameters_in(parameters)


def _parameters_in(blobs: list[Path]) -> dict[str, Any] | str:
    """Returns the parameters in the layers of a model, or why they cannot be read: it is served without them."""
    try:
        return {key: value for blob in blobs for key, value in _read_manifest(blob).items()}
    except (OSError, ValueError, RecursionError) as error:
        return first_line(error)


def _blob(blobs: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise ValueError("a digest in it is none")
    return blobs / digest.lower().replace(":", "-")


def _files_of(folder: Path, repo: str, manifest: dict[str, Any]) -> _Files:
    # All files lie in one folder; llama.cpp separates repositories like this.
    files = [manifest["ggufFile"], manifest.get("mmprojFile")]
    first, *more = [folder / f"{repo}_{part['rfilename']}".replace("/", "_") for part in files if part]
    return [first], more, {}


def _read_manifest(file: Path) -> dict[str, Any]:
    """Raises `OSError`, `RecursionError`, and `ValueError` for content that is not a JSON object."""
    if not file.is_file():
        raise ValueError("it is no file")
    with file.open("rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {format_size(_MOST_BYTES)}")
    manifest = json.loads(content)
    if not isinstance(manifest, dict):
        raise ValueError("it is no object of JSON")
    return manifest
