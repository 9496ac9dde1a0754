"""A repository of the Hugging Face hub: what its listing and headers say of its tensors, and how it is fetched."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.load.fit import ModelNeeds, needs_of_checkpoint, state_of_config
from diskprefix.model.load.safetensors_header import StoredShape
from diskprefix.model.load.served_tensors import whole_file
from diskprefix.printable import first_line
from diskprefix.progress import Report

_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_WEIGHTS = "*.safetensors"
_PICKLED = ["pytorch_model*.bin"]
_SUBFOLDERS = ["*/*"]


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


def _is_fetched(repo: str, patterns: Sequence[str]) -> bool:
    """Returns whether the files of a repository that fit the patterns are on this machine, or the hub cannot tell."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo, allow_patterns=[*patterns], ignore_patterns=_SUBFOLDERS, dry_run=True)
    except Exception:  # noqa: BLE001 - the download says what is wrong
        return True
    return not any(file.will_download for file in found)


def fetched_folder(
    repo: str, progress: Report, flag: str, before: Callable[[HubListing], None], *, with_weights: bool
) -> Path:
    """Returns the folder of the newest snapshot of `repo`; if the hub cannot be reached, that in the hub's cache.

    `before` is called before weights are fetched. Raises `ModelError`; `flag` is what named the model.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    progress(f"looking for {repo} on the Hugging Face hub")
    # The root error of httpx is not an OSError. The hub library imports it under this name.
    network_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
        wanted = [*_FILES, _WEIGHTS] if with_weights else _FILES
        if with_weights and not _is_fetched(repo, wanted) and (listing := listing_of(repo)) is not None:
            before(listing)
        folder = Path(snapshot_download(repo, allow_patterns=wanted, ignore_patterns=_SUBFOLDERS))
        if with_weights and not any(folder.glob(_WEIGHTS)):
            snapshot_download(repo, allow_patterns=_PICKLED, ignore_patterns=_SUBFOLDERS)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"cannot fetch {repo!r} from the hub: access must be granted first; ask for it on the model's page and log "
            f"in (hf auth login), or give a local folder"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{flag}: {repo!r} is neither an existing file or folder nor a hub id (org/name)") from error
    except (OSError, RuntimeError, network_error) as error:
        raise ModelError(
            f"cannot fetch {repo!r} from the hub: {_reason(error)}; check the name and the network, or give a "
            f"local folder"
        ) from error
    return folder


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            return first_line(error.__cause__)
        offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        where = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return f"{where}, and its cache on this machine holds no complete copy"
    return first_line(error)
