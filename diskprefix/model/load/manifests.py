"""The manifests of Ollama and llama.cpp: the names of the models in their folders, and which files make one model.

Nothing is written there. `README.md` describes the folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_header import read_header
from diskprefix.printable import first_line, shown

_MOST_BYTES = 1 << 22
"""A manifest has a few kilobytes."""
_DIGEST = re.compile("sha256[:-][0-9a-f]{64}", re.IGNORECASE)
_OF_LISTS, _OF_LAYERS = "application/vnd.ollama.manifest.list.v2+json", "application/vnd.ollama.image."
_DEFAULT_HOST, _DEFAULT_NAMESPACE = "registry.ollama.ai", "library"


@dataclass(kw_only=True)
class ManifestModel:
    """A model of a manifest: its `names`, the first part of its `.gguf` file or all parts, and its encoders of
    pictures. `problem` says why it cannot be served."""

    names: list[str]
    parts: list[Path] = field(default_factory=list)
    projectors: list[Path] = field(default_factory=list)
    problem: str = ""


def is_blob(file: Path) -> bool:
    """Returns whether a file is one of Ollama's, which are called by their digests."""
    return _DIGEST.fullmatch(file.name) is not None and file.parent.name == "blobs"


def manifest_of(gguf: Path) -> ManifestModel | None:
    """Returns the model to which a `.gguf` file belongs by a manifest, None if no manifest names it. Raises
    `ModelError` if the model cannot be served."""
    models = ollama_models(gguf.parents[1]) if is_blob(gguf) else llama_cpp_models(gguf.parent)
    found = next((model for model in models if gguf in model.parts), None)
    if found is not None and found.problem:
        raise ModelError(f"{found.names[0]}: {found.problem}")
    return found


# -- Ollama ----------------------------------------------------------------------------------------------------------


def ollama_models(root: Path) -> list[ManifestModel]:
    """Returns the models in a folder of Ollama. Those that share all their files are one, with several names."""
    named: dict[str, Path] = {}
    # The newer folder has links to blobs.
    for folder in (root / "manifests-v2", root / "manifests"):
        for file in sorted(folder.glob("*/*/*/*")):
            if not file.name.startswith(".") and not file.is_dir():
                named.setdefault(_ollama_name(*file.parts[-4:]), file)
    found: dict[tuple[object, ...], ManifestModel] = {}
    for name, file in named.items():
        model = _of_layers(root / "blobs", file, name)
        files = (name,) if model.problem else (*model.parts, *model.projectors)
        if (known := found.setdefault(files, model)) is not model:
            known.names += model.names
    return [*found.values()]


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """Returns a name as `ollama list` shows it."""
    is_default = host == _DEFAULT_HOST
    owner = "" if is_default and namespace == _DEFAULT_NAMESPACE else f"{namespace}/"
    return f"{'' if is_default else host + '/'}{owner}{model}:{tag}"


def _of_layers(blobs: Path, file: Path, name: str) -> ManifestModel:
    found = ManifestModel(names=[name])
    try:
        layers = _layers(blobs, file)
        found.parts, found.projectors = layers.get("model", []), layers.get("projector", [])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        found.problem = f"its manifest {file} cannot be read ({first_line(error)}); `ollama pull {name}` mends it"
        return found
    missing = [blob.name for blob in (*found.parts, *found.projectors) if not os.path.isfile(blob)]
    if not found.parts:
        found.problem = "its manifest names no .gguf file: it is one of MLX, or of Ollama's cloud"
    elif "adapter" in layers:
        found.problem = "it has an adapter, and adapters are not served"
    elif missing:
        found.problem = f"{missing[0]} is missing in {blobs}; `ollama pull {name}` fetches it again"
    elif len(found.parts) > 1:
        try:
            found.parts.sort(key=lambda blob: int(read_header(blob).values["split.no"]))
        except (ModelError, OSError, LookupError) as error:
            found.problem = f"its {len(found.parts)} files are not the parts of one model ({first_line(error)})"
    return found


def _layers(blobs: Path, file: Path) -> dict[str, list[Path]]:
    """Returns the blobs of a manifest by the last word of their type. Raises `OSError`, `ValueError`, `LookupError`,
    `TypeError` and `AttributeError`."""
    manifest = _read(file)
    if manifest.get("mediaType") == _OF_LISTS:
        by_runner = {str(one.get("runner", "")).lower(): one for one in manifest["manifests"]}
        manifest = next((by_runner[runner] for runner in ("ollama", "llamacpp", "") if runner in by_runner), {})
        if "digest" in manifest:
            manifest = _read(_blob(blobs, manifest["digest"]))
    found: dict[str, list[Path]] = {}
    for layer in manifest.get("layers", []):
        found.setdefault(layer["mediaType"].removeprefix(_OF_LAYERS), []).append(_blob(blobs, layer["digest"]))
    return found


def _blob(blobs: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{shown(digest)!r} is not a digest")
    return blobs / digest.lower().replace(":", "-")


# -- llama.cpp -------------------------------------------------------------------------------------------------------


def llama_cpp_models(folder: Path) -> Iterator[ManifestModel]:
    """Yields the models of llama.cpp's own cache that have a manifest. Newer versions use the hub's layout."""
    for file in sorted(folder.glob("manifest=*=*=*.json")):
        _, user, repo, tag, *more = file.name.removesuffix(".json").split("=")
        if more:
            continue
        found = ManifestModel(names=[f"{user}/{repo}" if tag == "latest" else f"{user}/{repo}:{tag}"])
        try:
            manifest = _read(file)
            files = [(manifest.get(key) or {}).get("rfilename") for key in ("ggufFile", "mmprojFile")]
            # All files lie in one folder: this is how llama.cpp tells those of two repositories apart.
            part, projector = (one and folder / f"{user}_{repo}_{one}".replace("/", "_") for one in files)
            found.parts, found.projectors = [part] if part else [], [projector] if projector else []
        except (OSError, ValueError, TypeError, AttributeError) as error:
            found.problem = f"its manifest {file} cannot be read ({first_line(error)})"
        missing = [one for one in (*found.parts, *found.projectors) if not os.path.isfile(one)]
        if missing or not (found.parts or found.problem):
            found.problem = f"{missing[0] if missing else 'a .gguf file'} is missing; `diskprefix pull` fetches it"
        yield found


def _read(file: Path) -> Mapping[str, Any]:
    """Raises `OSError`, and `ValueError` for what is no object of JSON."""
    with file.open("rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    found = json.loads(content) if len(content) <= _MOST_BYTES else None
    if not isinstance(found, dict):
        raise ValueError("it is no object of JSON")
    return found
