"""Repositories of the Hugging Face hub: their listing, fetching them, and their files on this machine."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from msgspec import Struct

from diskprefix.errors import ModelError
from diskprefix.printable import first_line, shown
from diskprefix.progress import Report, progress_bar
from diskprefix.runtime.fetch.hub_library import COMMIT, checked_library
from diskprefix.runtime.fetch.made_once import require_disk
from diskprefix.runtime.files.checkpoint import (
    SAFETENSORS,
    StoredTensor,
    checkpoint_files,
    require_inner_path,
    weight_files_of,
)
from diskprefix.runtime.files.fit import ROOM_BYTES, ModelNeeds, TokenState, needs_of_checkpoint, state_of
from diskprefix.runtime.files.gguf.gguf_file import QUANT, first_parts, model_stem, packs_folder, part_paths
from diskprefix.runtime.files.projector import preferred_projectors
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.runtime.runtime_options import EMBEDDED_NAME
from diskprefix.units import counted, format_size

_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_SMALL = [*_FILES, "*.md", "LICENSE*", ".gitattributes"]
_SUBFOLDERS = ["[!1]*/*", "1[!_]*/*"]
"""All but those such as `1_Pooling`, which say how an embedding is made."""
_TWICE = ["consolidated*.safetensors"]
"""The weights once more, in another format."""
_PLAIN = re.compile(r"(?:^|[-._])(?:BF16|FP?16|FP?32)$", re.IGNORECASE)
_NO_MODEL = re.compile("mmproj|imatrix", re.IGNORECASE)
_BESIDE_BYTES = 1 << 30
"""Memory for KV that the chosen quant must leave, in addition to weights and computation."""
_CREDENTIALS = re.compile(r"//[^/\s]*@")
"""In the address of a mirror."""


class HubListing(Struct, frozen=True):
    """A repository: its tensors in safetensors, its configuration, its `.gguf` files, and the `quant` that was asked
    for."""

    repo: str
    stored: Sequence[StoredTensor]
    config: Mapping[str, Any]
    gguf: Mapping[str, int]
    quant: str = ""

    def needs(self, dtype: str, weights: str = "auto") -> ModelNeeds:
        if self.quant:
            weights_bytes = {self.quant: _sizes(self.gguf)[self.quant]}
            if num_bytes := _projector_bytes(self.gguf, self.quant):
                weights_bytes["mmproj"] = num_bytes
            return ModelNeeds(name=f"{self.repo}:{self.quant}", weights=weights_bytes, state=TokenState(0))
        return needs_of_checkpoint(self.repo, self.stored, self.config, dtype, weights)

    def other_forms(self) -> Iterator[tuple[str, ModelNeeds]]:
        """Yields the repository's `.gguf` files, each with how it is asked for."""
        state = state_of(self.repo, self.config, 2)
        for quant, size in reversed(_sizes(self.gguf).items()):
            yield f"--model {self.repo}:{quant}", ModelNeeds(name=quant, weights={quant: size}, state=state)


def listing_of(model: str) -> HubListing | None:
    """Returns the listing of a repository, None if the hub does not give it. Only headers are downloaded."""
    api = checked_library().HfApi()
    repo, quant = split_name(model)
    try:
        commit, every = repository_files(repo)
        files = {name: size for name, size in every.items() if size}
        if quant:
            return HubListing(repo, (), {}, files, choose_quant(repo, files, quant, 0)[0])
        metadata = api.get_safetensors_metadata(repo, revision=commit)
        config = json.loads(Path(api.hf_hub_download(repo, "config.json", revision=commit)).read_text(encoding="utf-8"))
    except Exception:  # noqa: BLE001 - it only comes before the download, which says what is wrong
        return None
    stored = [
        StoredTensor(name, str(tensor.dtype), tuple(tensor.shape), tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]
    return HubListing(repo, stored, config, files)


# -- quants ----------------------------------------------------------------------------------------------------------


def split_name(model: str) -> tuple[str, str]:
    """Returns repository and quant of `org/name:quant`. Without one, the quant is empty."""
    repo, _, quant = model.partition(":")
    return repo, quant


def repository_files(repo: str) -> tuple[str, dict[str, int]]:
    """Returns the newest commit of a repository and its files with their sizes. Raises the library's errors, and
    `ValueError` for a commit or a file name that could lead out of the cache."""
    info = checked_library().HfApi().model_info(repo, files_metadata=True)
    # The library asks the hub once more, and checks nothing, if the revision does not have exactly 40 digits.
    if not COMMIT.fullmatch(str(info.sha)):
        raise ValueError(f"its newest commit is {shown(str(info.sha))!r}, which is no digest")
    return str(info.sha), {
        require_inner_path(sibling.rfilename): int(sibling.size or 0) for sibling in info.siblings or ()
    }


def quants_in(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the `.gguf` files of each quant, all parts of it in their order. A file whose name does not end in a
    quant, or is not the only one of that quant, goes by its own name. Encoders of pictures (`mmproj`) are no models."""
    models = first_parts(name for name in names if is_gguf_model(name))
    matches = {first: QUANT.search(model_stem(Path(first))) for first in models}
    quants = {first: match[1].upper() for first, match in matches.items() if match}
    number = Counter(quants.values())
    return {
        quants[first] if number[quants.get(first, "")] == 1 else first.removesuffix(".gguf"): parts
        for first, parts in models.items()
    }


def is_gguf_model(name: str) -> bool:
    """Returns whether a file name is the name of a model or of a part of a model."""
    return name.lower().endswith(".gguf") and not _NO_MODEL.search(name.rpartition("/")[2])


def _sizes(files: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of quants, the smallest first."""
    sizes = {quant: sum(files[name] for name in names) for quant, names in quants_in(list(files)).items()}
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def _projector_of(files: Mapping[str, int], quant: str) -> str | None:
    """Returns the file with the encoder of pictures that is fetched with a quant, from the same folder."""
    first, *_ = quants_in(list(files))[quant]
    beside = [name for name in files if name.rpartition("/")[0] == first.rpartition("/")[0]]
    return next(iter(preferred_projectors(beside, first)), None)


def _projector_bytes(files: Mapping[str, int], quant: str) -> int:
    return files.get(_projector_of(files, quant) or "", 0)


def _is_called(asked: str, quant: str, file: str) -> bool:
    """Returns whether a quant is asked for, by its name or by the name of its (first) file."""
    name = asked.lower().removesuffix(".gguf")
    return name == quant.lower() or f"/{file}".lower().endswith(f"/{name}.gguf")


def _quant_called(asked: str, names: Sequence[str]) -> str | None:
    """Returns the quant of these files that is asked for, None if there is none."""
    return next((quant for quant, parts in quants_in(names).items() if _is_called(asked, quant, parts[0])), None)


def choose_quant(repo: str, files: Mapping[str, int], asked: str, free_bytes: int) -> tuple[str, str]:
    """Returns a quant, and the reason: the one that is `asked` for, or else the one with the most bits that fits into
    the free memory. 16 bits and more take twice the time and memory of 8, so they are the last choice. `files` are the
    repository's files with their sizes. Raises `ModelError` if there is no such quant, or none fits."""
    sizes = _sizes(files)
    listed = ", ".join(f"{quant} ({format_size(size)})" for quant, size in sizes.items())
    if asked:
        if (file := _quant_called(asked, list(files))) is None:
            raise ModelError(f"{repo} has no quant {asked!r}; it has {listed or 'no .gguf files'}")
        return file, "as asked for"
    most = free_bytes - ROOM_BYTES - _BESIDE_BYTES
    fitting = sorted(quant for quant, size in sizes.items() if size + _projector_bytes(files, quant) <= most)
    if not fitting:
        raise ModelError(f"no quant of {repo} fits into {format_size(free_bytes)} of free memory; it has {listed}")
    best = max(fitting, key=lambda quant: (not _PLAIN.search(quant), sizes[quant]))
    reason = f"the best of {len(sizes)} that fits into {format_size(free_bytes)} of free memory"
    return best, reason if len(sizes) > 1 else "the only one"


# -- what is on this machine -----------------------------------------------------------------------------------------


def cached_models(cache: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yields the models in the hub's cache, each with its name (`org/name`, or `org/name:quant`) and its folder or the
    first part of its `.gguf` file. Models with a missing file are left out, and repositories that cannot be read.
    `cache`: another folder with the same layout."""
    from huggingface_hub import constants

    for folder in sorted(Path(cache or constants.HF_HUB_CACHE).glob("models--*")):
        models: dict[str, Path] = {}
        with suppress(OSError):
            for snapshot in _snapshots(folder):
                for name, files in _models_in(snapshot):
                    models.setdefault(name, files[0] if ":" in name else snapshot)
        yield from models.items()


def _models_in(snapshot: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yields the models in a snapshot of a repository, each with its name and the files of its weights."""
    repo = "/".join(snapshot.parents[1].name.split("--")[1:])
    if is_model_folder(snapshot):
        yield repo, [*snapshot.glob(SAFETENSORS)]
    names = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf") if file.is_file()]
    for quant, parts in quants_in(sorted(names)).items():
        yield f"{repo}:{quant}", [snapshot / part for part in parts]


def cached_model(model: str) -> Path | None:
    """Returns the path of a model that is on this machine. Without a name of a quant it is the largest one here."""
    repo, quant = split_name(model)
    cached = [(split_name(name)[1], path) for name, path in cached_models() if split_name(name)[0] == repo]
    asked = [path for own, path in cached if (_is_called(quant, own, str(path)) if quant else not own)]
    if quant or asked:
        return next(iter(asked), None)
    sizes = {path: sum(part.stat().st_size for part in part_paths(path)) for _, path in cached}
    return max(sizes, key=lambda path: sizes[path], default=None)


def _snapshots(folder: Path) -> list[Path]:
    """Returns the snapshots of a repository, the newest of its main branch first."""
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = ""
    snapshots = sorted(
        (folder / "snapshots").glob("*/"), key=lambda snapshot: (snapshot.name == main, snapshot.stat().st_mtime)
    )
    return snapshots[::-1]


def gguf_models_in(folder: Path) -> list[Path]:
    """Returns the `.gguf` models in a folder, of a split one the first part. Raises `OSError`."""
    files = (path.name for path in folder.iterdir() if is_gguf_model(path.name) and path.is_file())
    return [folder / first for first in first_parts(files)]


def is_model_folder(folder: Path) -> bool:
    """Returns whether a folder holds a configuration and all files of the weights."""
    try:
        files = weight_files_of(folder)
    except ModelError:
        return False
    is_named = checkpoint_files(folder, files) != files
    return is_named or sum(map(len, first_parts(file.name for file in files).values())) == len(files)


# -- removing --------------------------------------------------------------------------------------------------------


def files_to_remove(models: Collection[str]) -> tuple[set[Path], list[Path]]:
    """Returns what to remove from the hub's cache with these models: their weights in all snapshots, as far as no other
    file has the same content, the `mmproj` files with the last model of a repository, and the folders of the
    repositories in which nothing but small files would be left."""
    from huggingface_hub import constants

    gone, repositories = set[Path](), []
    for folder in Path(constants.HF_HUB_CACHE).resolve().glob("models--*"):
        models_cached = [model for snapshot in _snapshots(folder) for model in _models_in(snapshot)]
        own = {_or_link(file, folder) for name, files in models_cached if name in models for file in files}
        if not own:
            continue
        if all(name in models for name, _ in models_cached):
            projectors = (snapshot.rglob("*mmproj*.gguf") for snapshot in _snapshots(folder))
            own |= {_or_link(file, folder) for files in projectors for file in files}
        others = {file for file in (folder / "snapshots").rglob("*") if not file.is_dir()} - own
        kept, blobs = {_content(file) for file in others}, set((folder / "blobs").glob("*"))
        # Of a link to elsewhere, remove only the link: its target is the user's.
        gone |= own | ({_content(file) for file in own} & blobs - kept)
        # Also what another program fetches meanwhile.
        unknown = blobs - kept - gone
        if not unknown and all(any(fnmatch(file.name, pattern) for pattern in _SMALL) for file in others):
            repositories.append(folder)
    return gone, repositories


def _or_link(file: Path, folder: Path) -> Path:
    """Returns a file of a snapshot, or the link below `folder` through which it is reached."""
    return next((parent for parent in file.parents if folder in parent.parents and parent.is_symlink()), file)


def _content(file: Path) -> Path:
    """Returns the target of a link in a snapshot, or the file itself. A target that is a link is not resolved."""
    return Path(os.path.abspath(file.parent / os.readlink(file))) if file.is_symlink() else file


# -- fetching --------------------------------------------------------------------------------------------------------


def fetched_model(
    model: str,
    progress: Report,
    flag: str,
    before: Callable[[HubListing], None],
    *,
    with_weights: bool,
    with_packs: bool = False,
) -> Path:
    """Returns the folder of the newest snapshot of a repository, or the first part of a quant: of the one that `model`
    names, or of the best one if the repository has nothing else. If the hub does not answer, the cached snapshot is
    used.

    `before` is called before weights are fetched. `with_packs`: the packs beside a quant are fetched too. Raises
    `ModelError`; `flag` is what named the model."""
    library = checked_library(begins=True)
    repo, quant = split_name(model)
    progress(f"looking for {model} on the Hugging Face hub")
    here = cached_model(model)
    with _explaining_failures(repo, flag):
        try:
            commit, files = repository_files(repo)
        except (OSError, _network_error()):
            # Nothing is fetched without a listing, because the listing is what was checked.
            if here is not None:
                return here
            if not (quant or with_weights):
                with suppress(library.errors.LocalEntryNotFoundError):
                    return Path(library.snapshot_download(repo, allow_patterns=_FILES, local_files_only=True))
            raise
        top = [name for name in files if "/" not in name]
        weights = [SAFETENSORS] if any(fnmatch(name, SAFETENSORS) for name in top) else []
        is_gone = quant and _quant_called(quant, list(files)) is None
        if here is not None and here.is_file() and (is_gone or not (quant or weights or with_packs)):
            progress(f"{model}: {here.name} is on this machine")
            return here
        if quant or (not weights and any(map(is_gguf_model, files))):
            return _fetched_quant(repo, commit, quant, files, progress, before, with_packs=with_packs)

        def before_weights() -> None:
            if with_weights and (listing := listing_of(repo)) is not None:
                before(listing)

        patterns = [*_FILES, *weights] if with_weights else _FILES
        ignored = _TWICE if any(fnmatch(name, "model*.safetensors") for name in top) else ()
        return _fetched(repo, commit, patterns, progress, before_weights, ignored=[*_SUBFOLDERS, *ignored])


def _network_error() -> type[Exception]:
    """Returns the root error of httpx, which is not an OSError. The hub library imports it under this name."""
    from huggingface_hub import errors

    http_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    return http_error


def _fetched_quant(
    repo: str,
    commit: str,
    quant: str,
    files: Mapping[str, int],
    progress: Report,
    before: Callable[[HubListing], None],
    *,
    with_packs: bool,
) -> Path:
    """Returns the first part of a quant, fetched. `files` are the repository's files with their sizes."""
    chosen, reason = choose_quant(repo, files, quant, available_ram_bytes())
    names = quants_in(list(files))[chosen]
    listing = HubListing(repo, (), {}, files, chosen)
    progress(f"{repo}: {chosen}, {format_size(sum(files[name] for name in names))}, {reason}")
    if projector := _projector_of(files, chosen):
        progress(f"pictures need {projector}, {format_size(files[projector])}, which is fetched too")
        names.append(projector)
    beside = packs_folder(names[0])
    packs = [name for name in files if name.rpartition("/")[0] == beside and name.endswith(".safetensors")]
    if packs:
        size = format_size(sum(files[name] for name in packs))
        asked = "they are fetched too" if with_packs else "`diskprefix pull --packs` fetches them"
        progress(f"{repo} has {counted(len(packs), 'file')} of prompts for it, {size}; {asked}")
        names += packs if with_packs else []
    folder = _fetched(repo, commit, [escape(name) for name in names], progress, lambda: before(listing), ignored=())
    if not all((folder / name).is_file() for name in names):
        raise ModelError(f"{repo} was changed while it was fetched; fetch it again")
    return folder / names[0]


def _fetched(
    repo: str,
    commit: str,
    patterns: Sequence[str],
    progress: Report,
    before: Callable[[], None],
    *,
    ignored: Sequence[str],
) -> Path:
    """Returns the folder of the snapshot of a commit with the files that fit the patterns. `before` is called if some
    are fetched. The library goes on with a connection that breaks."""
    library = checked_library()
    constants, file_download = library.constants, library.file_download
    get: Any = partial(
        library.snapshot_download,
        repo,
        allow_patterns=[*patterns],
        ignore_patterns=[*ignored],
        tqdm_class=_counting(lambda _num_bytes: None),
    )
    # The commit that was listed, whatever comes meanwhile. With a name, the library would take it for the newest here.
    files = get(revision=commit, dry_run=True)
    new_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    if any(file.will_download for file in files):
        before()
        require_disk(Path(constants.HF_HUB_CACHE), new_bytes, "HF_HOME")
        with progress_bar(f"fetching {repo}", new_bytes, progress, in_bytes=True) as advance:
            get(revision=commit, tqdm_class=_counting(advance))
    folder = Path(get(revision=commit))
    with suppress(OSError):
        # That of the main branch now, for other programs too.
        file_download._cache_commit_hash_for_specific_revision(str(folder.parents[1]), "main", commit)
    return folder


def _counting(advance: Callable[[float], None]) -> type[Any]:
    """Returns a bar of the library's that shows nothing, and gives the bytes that have arrived to `advance`."""
    from huggingface_hub.utils.tqdm import tqdm

    class CountedBytes(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._num_bytes = 0.0
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                self._num_bytes += n or 0
                advance(self._num_bytes)

    return CountedBytes


@contextmanager
def _explaining_failures(repo: str, flag: str) -> Iterator[None]:
    """Turns what `huggingface_hub` raises for a repository into a `ModelError`. `flag` is what named the model."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"cannot fetch {repo!r} from the hub: access must be granted first; ask for it on the model's page and log "
            f"in (hf auth login), or give a local folder"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(
            f"{flag}: {shown(repo)!r} is neither an existing file or folder nor a hub id (org/name)"
        ) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot fetch {repo!r} from the hub: its listing is malformed ({first_line(error)})"
        ) from error
    except (OSError, RuntimeError, ValueError, _network_error()) as error:
        reason, advice = _reason(error)
        problem = f"cannot fetch {repo!r} from the hub: {_CREDENTIALS.sub('//', reason)}"
        raise ModelError(f"{problem}; {advice}, or give a .gguf file or a folder by its path") from error


_EMBEDDED = f"`diskprefix serve --model {EMBEDDED_NAME}` serves a small one from the Python package index"


def _reason(error: Exception) -> tuple[str, str]:
    """Returns why a repository cannot be fetched, and what to do."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private", "check the name"
    is_offline = any(isinstance(raised, errors.OfflineModeIsEnabled) for raised in (error, cause))
    is_not_here = isinstance(error, errors.LocalEntryNotFoundError)
    unanswered = cause if is_not_here and cause else error
    if is_offline or (isinstance(unanswered, _network_error()) and not isinstance(unanswered, errors.HfHubHTTPError)):
        where = "HF_HUB_OFFLINE is set" if is_offline else f"the hub cannot be reached ({first_line(unanswered)})"
        advice = "unset it" if is_offline else "check the network, name a mirror with HF_ENDPOINT=URL"
        return f"{where}, and no complete copy is on this machine", f"{advice}; {_EMBEDDED}"
    is_wrapped = cause is not None and (is_not_here or isinstance(error, errors.DryRunError))
    return first_line(cause if cause is not None and is_wrapped else error), "check the name and the network"
