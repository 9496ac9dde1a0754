"""The tensors and files of a repository of the Hugging Face hub, from its listing and the headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diskprefix.model.load.fit import ModelNeeds, needs_of_checkpoint, state_of_config
from diskprefix.model.load.safetensors_header import StoredShape
from diskprefix.model.load.served_tensors import whole_file


@dataclass(frozen=True)
class HubListing:
    """The tensors of a repository's safetensors, its configuration, and the sizes of its `.gguf` files by name."""

    repo: str
    stored: Sequence[StoredShape]
    config: Mapping[str, Any]
    gguf: Mapping[str, int]

    def needs(self, weights: str, dtype: str) -> ModelNeeds:
        return needs_of_checkpoint(self.repo, self.stored, self.config, weights, dtype)

    def other_forms(self, weights: str) -> Iterator[tuple[str, ModelNeeds]]:
        """Yields fewer bits, and the repository's `.gguf` files, each with how it is asked for."""
        for form in ("int8", "int4"):
            if form != weights:
                yield f"--weights {form}", self.needs(form, "auto")
        state = state_of_config(self.config, 2)
        for name, size in sorted(self.gguf.items(), key=lambda found: -found[1]):
            yield f"the file {name}", ModelNeeds(name=name, tensors=[whole_file(name, size)], state=state)


def listing_of(repo: str) -> HubListing | None:
    """Returns the listing of a repository, None if the hub does not give it. Nothing is downloaded but headers."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    api = HfApi()
    try:
        found = api.get_safetensors_metadata(repo)
        cached = try_to_load_from_cache(repo, "config.json")
        file = cached if isinstance(cached, str) else api.hf_hub_download(repo, "config.json")
        config = json.loads(Path(file).read_text(encoding="utf-8"))
        info = api.model_info(repo, files_metadata=True)
    except Exception:  # noqa: BLE001 - it only comes before the download, which says what is wrong
        return None
    stored = [
        StoredShape(name, str(one.dtype), tuple(one.shape), 0, one.data_offsets[1] - one.data_offsets[0])
        for file in found.files_metadata.values()
        for name, one in file.tensors.items()
    ]
    files = {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
    return HubListing(
        repo, stored, config, {name: size for name, size in files.items() if size and name.endswith(".gguf")}
    )


def is_fetched(repo: str, patterns: Sequence[str], ignored: Sequence[str]) -> bool:
    """Returns whether the files of a repository that fit the patterns are on this machine, or the hub cannot tell."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo, allow_patterns=[*patterns], ignore_patterns=[*ignored], dry_run=True)
    except Exception:  # noqa: BLE001 - the download says what is wrong
        return True
    return not any(file.will_download for file in found)
