"""A GGUF file, converted once into a folder of safetensors. README.md describes the folder and how it is written."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from diskprefix.errors import ModelError
from diskprefix.model.load.fingerprint import remembered_digest, weights_digest
from diskprefix.model.load.fit import Check, ModelNeeds, fitted, needs_of_gguf
from diskprefix.model.load.gguf_file import (
    file_stamp,
    model_stem,
    part_paths,
    read_tensors,
)
from diskprefix.model.load.gguf_header import GgufHeader
from diskprefix.model.load.gguf_rope import scale_positions
from diskprefix.model.load.imports import without_tracer
from diskprefix.model.load.kinds import LATER_TOKENS, ModelKind, not_served
from diskprefix.model.load.memory import available_ram_bytes, trim_heap
from diskprefix.native.library import has_rows
from diskprefix.printable import first_line
from diskprefix.progress import Report, progress_bar
from diskprefix.settings import cache_home
from diskprefix.store.folder import sync
from diskprefix.tokens import file_digest
from diskprefix.trusted_path import distrusted_by_root
from diskprefix.units import format_size

CONVERSION_FORMAT = 4
"""The format of converted folders. Increase it when the conversion makes other files: older folders are then made
again."""

MANIFEST = "manifest.json"
SUFFIXES = {"auto": "-quants.3", "native": "", "int8": "-int8.4", "int4": "-int4.4"}
"""By the form of the weights. The number changes with the layout of quants in memory."""
_LOCK, _PARTIAL = ".lock-", ".partial-"
"""Prefixes of a model's name: the file that is locked while the model is made, and the folder that it is made in."""


def enough_to_make(needs: ModelNeeds) -> None:
    """The check that there is memory for a conversion. Raises `ModelError`."""
    found = fitted(needs, available_ram_bytes(), 0)
    if needs.making_bytes > found.free_bytes:
        raise ModelError(found.refusal())


def converted_folder(gguf: Path, report: Report, weights: str = "native", check: Check = enough_to_make) -> Path:
    """Returns the folder of the model in `gguf`, which is converted on first use. `weights` is that of `convert`.
    Raises `ModelError` if the file cannot be read or converted, or the space on the disk or `check` says that it does
    not fit."""
    return build_once(_folder_name(gguf, weights), lambda work: convert(gguf, work, report, weights, check), report)


def suffix_of(weights: str) -> str:
    """Returns the end of a folder's name for the form of its weights."""
    return SUFFIXES[weights] + ("-rows" if weights != "native" and has_rows() else "")


def finished_folder(gguf: Path, weights: str) -> Path | None:
    """Returns the folder of the model in `gguf` if it is converted. Raises `ModelError` if the file cannot be read."""
    if not _has_made(gguf, suffix_of(weights)):
        return None
    folder = cache_home() / "models" / _folder_name(gguf, weights)
    return folder if is_finished(folder) else None


def converted_folders(gguf: Path) -> list[Path]:
    """Returns all folders that were made of the model in `gguf`. Raises `ModelError` if the file cannot be read."""
    forms = [form for form in SUFFIXES if _has_made(gguf, suffix_of(form))]
    folders = (cache_home() / "models" / _folder_name(gguf, form) for form in forms)
    return [folder for folder in folders if folder.is_dir()]


def _has_made(gguf: Path, suffix: str) -> bool:
    """Returns whether a folder may be made of the model in `gguf`, which has to be read to know it."""
    return any((cache_home() / "models").glob(f"{glob.escape(model_stem(gguf)[:100])}-*{suffix}"))


def _folder_name(gguf: Path, weights: str) -> str:
    parts = part_paths(gguf)
    try:
        digest = remembered_digest(gguf) if len(parts) == 1 else weights_digest(parts)
    except OSError as error:
        raise ModelError(f"cannot read {gguf}: {error.strerror}") from error
    return f"{model_stem(gguf)[:100]}-{digest[:12]}{suffix_of(weights)}"


def build_once(name: str, build: Callable[[Path], Path], report: Report) -> Path:
    """Returns the finished model folder `name`, and makes it with `build` if there is none.

    `build` takes an empty folder to work in and returns the folder inside it that holds the model's files. It may be
    interrupted at any point, and other processes may do the same at the same time.
    """
    models = cache_home() / "models"
    folder = models / name
    if problem := distrusted_by_root(folder):
        raise ModelError(
            f"the cache folder {models}: {problem}; run this as that user, or set XDG_CACHE_HOME to a folder of root's"
        )
    _remove_leftovers(models)
    if is_finished(folder):
        return folder
    with _failures_explained(models):
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{_LOCK}{name}", report):
            if is_finished(folder):
                return folder
            if folder.exists():
                report(f"{folder} is incomplete, damaged or of another version; making it again")
            work = models / f"{_PARTIAL}{name}"
            try:
                # Of a process that was killed while this one waited.
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                _publish(build(work), folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                trim_heap()
            report(f"kept in {folder}")
    return folder


def is_finished(folder: Path) -> bool:
    """Returns whether `folder` is a complete, undamaged model of the present format. Digests are remembered."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != CONVERSION_FORMAT or not manifest["files"]:
            return False
        return all(
            (folder / name).stat().st_size == entry["size"] and remembered_digest(folder / name) == entry["digest"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(made: Path, folder: Path) -> None:
    files = sorted(path for path in made.iterdir() if path.is_file())
    entries = {path.name: {"size": path.stat().st_size, "digest": file_digest(path)} for path in files}
    manifest = made / MANIFEST
    manifest.write_text(json.dumps({"format": CONVERSION_FORMAT, "files": entries}, indent=2), encoding="utf-8")
    for path in files:
        # safetensors writes 0600.
        path.chmod(manifest.stat().st_mode)
    for path in (*files, manifest, made):
        sync(path)
    if folder.exists():
        folder.replace(made.with_name("replaced"))
    made.replace(folder)
    sync(folder.parent)


def _open_lock(file: Path) -> IO[bytes]:
    """Raises `OSError` if the file cannot be opened or is a symbolic link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(file, flags, 0o600), "r+b")


@contextmanager
def _lock(file: Path, report: Report) -> Iterator[None]:
    with _open_lock(file) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another diskprefix is preparing this model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_leftovers(models: Path) -> None:
    """Removes the partial folders of processes that have ended, whose locks are free."""
    for leftover in models.glob(f"{_PARTIAL}*"):
        lock = leftover.with_name(_LOCK + leftover.name.removeprefix(_PARTIAL))
        with suppress(OSError), _open_lock(lock) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _failures_explained(models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk of {models} is full; free some space, or set XDG_CACHE_HOME to a folder on a larger disk"
            ) from error
        raise ModelError(
            f"cannot write the cache folder {models}: {reason}; make it writable, set XDG_CACHE_HOME to a folder that "
            f"is, or give --model a local folder"
        ) from error


def require_disk(folder: Path, needed_bytes: int, variable: str = "XDG_CACHE_HOME") -> None:
    """Raises `ModelError` with both figures if the disk of `folder`, which `variable` sets, has less than
    `needed_bytes` free."""
    free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    if free < needed_bytes:
        raise ModelError(
            f"not enough disk space in {folder.parent}: about {format_size(needed_bytes)} needed, {format_size(free)} "
            f"free; free some, or set {variable} to a folder on a larger disk"
        )


def convert(gguf: Path, work: Path, report: Report, weights: str = "native", check: Check = enough_to_make) -> Path:
    """Converts `gguf` to safetensors and a tokenizer in `work/model`. Returns that folder.

    `weights` is `native` (all bfloat16), `auto` (the quants of the file where `quant_form` has them), or `int8` or
    `int4` (the others are quantised anew). Raises `ModelError` if it cannot be read or `check` does, `OSError` if the
    disk fills up.
    """
    made = work / "model"
    made.mkdir()
    try:
        with progress_bar(f"converting {gguf.name}", 100, report) as advance, without_tracer():
            quiet_transformers()
            _convert(gguf, made, weights, advance, report, check)
    except ModelError:
        raise
    except Exception as error:
        # Three libraries read a foreign file, so any error may come. A full disk is told apart from the others.
        if shutil.disk_usage(work).free < 1024**2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise ModelError(f"cannot convert {gguf}: {first_line(error)}") from error
    return made


def _convert(
    gguf: Path,
    made: Path,
    weights: str,
    advance: Callable[[float], None],
    report: Report,
    check: Check,
) -> None:
    """Converts, and reports progress in per cent."""
    from diskprefix.model.gguf.configuration import make_configuration, require_rotary
    from diskprefix.model.gguf.file_tokenizer import make_tokenizer
    from diskprefix.model.gguf.known_families import architecture_of
    from diskprefix.model.gguf.metadata import Metadata

    parts = part_paths(gguf)
    header, tensors = read_tensors(parts)
    _require_causal(gguf, header)
    needs = needs_of_gguf(gguf, weights)
    check(needs)
    require_disk(made.parent, needs.disk_bytes)
    advance(2)
    metadata = Metadata(header, tensors)
    architecture = architecture_of(metadata)
    if predictors := metadata.get("nextn_predict_layers", 0):
        report(f"{gguf.name}: {predictors} of its blocks predict further tokens, which is not used")
    config = make_configuration(architecture, metadata)
    used = scale_positions(config, metadata, tensors, report)
    advance(4)
    make_tokenizer(header).save_pretrained(made)
    advance(8)
    # It imports the code of all models.
    from diskprefix.model.quants.gguf_conversion import GgufConversion
    from diskprefix.model.quants.quantised import save_configurations

    model = _skeleton(config)
    require_rotary(model, architecture, metadata)
    total = sum(tensor.num_elements for tensor in tensors)
    others = [tensor for tensor in tensors if tensor.name not in used]
    before = [file_stamp(part) for part in parts]
    GgufConversion(model, architecture, others, weights, made, lambda done: advance(8 + 92 * done / total)).run()
    if [file_stamp(part) for part in parts] != before:
        raise ModelError(f"{gguf} was changed while it was converted; start again")
    stops = dict.fromkeys(metadata.token(kind) for kind in ("eos", "eot", "eom"))
    stops.pop(None, None)
    if len(stops) > 1:
        model.generation_config.eos_token_id = list(stops)
    save_configurations(model, made)


def _skeleton(config: Any) -> Any:
    """Returns the model, without weights, on torch's meta device."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    # A few decoders of text are registered among models with pictures alone.
    is_of_text = type(config) in AutoModelForCausalLM._model_mapping
    loader = AutoModelForCausalLM if is_of_text else AutoModelForMultimodalLM
    return ModelKind(loader, is_multimodal=False, has_own_generate=False).skeleton(config)


def _require_causal(gguf: Path, header: GgufHeader) -> None:
    """Raises `ModelError` for a model such as EmbeddingGemma or GTE-Qwen2."""
    architecture = header.values.get("general.architecture")
    if header.values.get(f"{architecture}.attention.causal", True) is False:
        raise not_served(gguf, str(architecture), LATER_TOKENS)


def quiet_transformers() -> None:
    """Turns off the notices and progress bars of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    from transformers.utils import logging

    if not os.environ.get("TRANSFORMERS_VERBOSITY"):
        logging.set_verbosity_error()
    logging.disable_progress_bar()
