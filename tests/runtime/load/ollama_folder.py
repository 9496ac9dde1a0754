"""A folder of Ollama, as its server writes it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.ollama.manifest.list.v2+json"
IMAGE = "application/vnd.ollama.image"


class OllamaFolder:
    """The folder that Ollama's server writes: `manifests/HOST/NAMESPACE/MODEL/TAG`, and `blobs/sha256-DIGEST`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def blob(self, content: bytes) -> Path:
        file = self.root / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
        file.write_bytes(content)
        return file

    def layer(self, kind: str, content: bytes) -> dict[str, Any]:
        digest = self.blob(content).name.replace("-", ":")
        return {"mediaType": f"{IMAGE}.{kind}", "digest": digest, "size": len(content)}

    def manifest(self, *layers: dict[str, Any]) -> dict[str, Any]:
        config = self.layer("x", b'{"model_format":"gguf","model_family":"llama"}')
        config["mediaType"] = "application/vnd.docker.container.image.v1+json"
        return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": list(layers)}

    def add(self, name: str, *layers: dict[str, Any]) -> None:
        self.write(name, json.dumps(self.manifest(*layers)))

    def write(self, name: str, manifest: str) -> None:
        path, _, tag = name.rpartition(":")
        file = self.root / "manifests" / path / tag
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(manifest)

    def link(self, name: str, manifest: dict[str, Any]) -> None:
        """As newer versions do: the manifest is a blob, and its name a link to it."""
        path, _, tag = name.rpartition(":")
        file = self.root / "manifests-v2" / path / tag
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(self.blob(json.dumps(manifest).encode()), file.parent))
