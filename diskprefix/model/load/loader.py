"""Loads the model that --model names: the embedded default, a local folder, a .gguf file, a hub id or one with a
quant."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from diskprefix import hooks
from diskprefix.errors import DiskPrefixError, ModelError, SettingsError
from diskprefix.model.load.alternatives import require_fit
from diskprefix.model.load.embedded import EMBEDDED, embedded_folder
from diskprefix.model.load.fingerprint import weights_digest
from diskprefix.model.load.fit import (
    ROOM_BYTES,
    Check,
    Fit,
    ModelNeeds,
    needs_of_folder,
)
from diskprefix.model.load.gguf import converted_folder, enough_to_make, finished_folder, quiet_transformers
from diskprefix.model.load.gguf_file import MATRICES, file_stamp, model_stem, part_paths
from diskprefix.model.load.hub import HubListing, fetched_model
from diskprefix.model.load.imports import without_tracer
from diskprefix.model.load.kinds import ModelKind, require_served_kind
from diskprefix.model.load.media import MediaProcessor
from diskprefix.model.load.memory import (
    available_bytes,
    available_ram_bytes,
    explain_out_of_memory,
    use_gpu,
)
from diskprefix.model.load.named_model import is_embedded, name_faster, require_named, weight_files_of
from diskprefix.model.load.tokenizer import read_template, read_tokenizer, read_tokenizer_ahead
from diskprefix.printable import first_line
from diskprefix.progress import Report
from diskprefix.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from diskprefix.model.quants.file_matrix import FileMatrix
    from diskprefix.model.quants.matrix_packing import MatrixPacking

log = logging.getLogger("diskprefix")

Clock: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Measures a step of the load."""

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A decoder model in evaluation mode on its device.

    `media` is None for a model of text alone. `name` is the name for clients. `timings` holds seconds by step: `source`
    (with download and conversion), `imports`, `quantising`, `digest`, `tokenizer` (with the processor), `weights`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    media: MediaProcessor | None
    name: str
    origin: Path
    """The folder or the `.gguf` file that the user has."""
    weights_digest: str
    fit: Fit
    """How it fits into the memory that was free before it was loaded."""
    timings: dict[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class _ModelSource:
    """The files of a model, and how they are loaded. `files` are those of the weights, in the form `weights`. `gguf`
    are the parts of a .gguf file whose quants are not in `files`."""

    folder: Path
    origin: Path
    name: str
    files: list[Path]
    gguf: list[Path]
    matrices: dict[str, FileMatrix]
    config: PreTrainedConfig
    kind: ModelKind
    dtype: torch.dtype
    device: torch.device
    weights: str

    def __str__(self) -> str:
        return f"{self.folder.name} as {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, kw_only=True, eq=False)
class BegunPacking:
    """The packing of the matrices of a `.gguf` file. `stamps` are those of its parts, and `free_bytes` the memory that
    was free, both before it began."""

    stamps: dict[Path, tuple[int, int, int]]
    free_bytes: int
    packing: MatrixPacking

    @classmethod
    def of(cls, parts: list[Path], matrices: Iterable[FileMatrix]) -> BegunPacking:
        """Raises `ModelError` without the compiled operators, `OSError`, `MemoryError`."""
        from diskprefix.model.quants.matrix_packing import MatrixPacking
        from diskprefix.model.quants.products import compiled

        found = compiled()
        stamps, free_bytes = {part: file_stamp(part) for part in parts}, available_ram_bytes()
        return cls(stamps=stamps, free_bytes=free_bytes, packing=MatrixPacking(found, matrices))


def begin_packing(settings: Settings) -> BegunPacking | None:
    """Begins to pack the matrices of a `.gguf` file for `load_model`, beside the import of transformers. Returns None
    for other models, for a file that is not converted yet, and where memory is short. An error is left to
    `load_model`."""
    path = Path(os.path.expanduser(settings.model or ""))
    is_file = path.suffix.lower() == ".gguf" and os.path.isfile(path) and _DEVICE.fullmatch(settings.device)
    if not is_file or settings.weights == "native" or settings.dtype not in ("auto", "bfloat16"):
        return None
    with suppress(DiskPrefixError, OSError, MemoryError):
        # Nothing here imports transformers.
        from diskprefix.model.quants.file_matrix import load_matrices
        from diskprefix.model.quants.matrix_packing import packed_bytes

        folder = finished_folder(path, settings.weights)
        if folder is not None and pick_device(settings.device).type == "cpu":
            matrices = {matrix.key: matrix for matrix in load_matrices(folder, part_paths(path)).values()}.values()
            if matrices and packed_bytes(matrices) + ROOM_BYTES <= available_ram_bytes():
                return BegunPacking.of(part_paths(path), matrices)
    return None


def load_model(
    settings: Settings,
    progress: Report,
    flag: str = "--model",
    *,
    begun: BegunPacking | None = None,
) -> LoadedModel:
    """Finds, fetches, converts, checks and loads the model that `settings` name.

    `progress` takes lines of text for people, `flag` is what named the model. `begun` is what `begin_packing` returned
    for the same settings. Raises `ModelError` if it cannot be found, fetched or read, or does not fit in memory, and
    `SettingsError` for --device and --chat-template, each with a message of one line.
    """
    timings: dict[str, float] = {}

    @contextmanager
    def clock(step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        timings[step] = timings.get(step, 0.0) + time.perf_counter() - started

    template = read_template(settings.chat_template)

    def check(needs: ModelNeeds) -> Fit:
        free_bytes = available_bytes(pick_device(settings.device)) if begun is None else begun.free_bytes
        return require_fit(needs, free_bytes, settings)

    with ExitStack() as failing:
        if begun is not None:
            failing.callback(begun.packing.stop)
        source = _source(settings, progress, clock, flag, check)
        progress("loading the weights")
        folder, files = source.folder, source.files
        fit = check(_needs(source))
        keys = {matrix.key for matrix in source.matrices.values()}
        if begun is not None and ([*begun.stamps] != source.gguf or begun.packing.keys != keys):
            begun.packing.stop()
            begun = None
        with clock("weights"), _load_failures(folder):
            # It goes on beside digest and tokenizer.
            if source.gguf and begun is None:
                begun = BegunPacking.of(source.gguf, source.matrices.values())
                failing.callback(begun.packing.stop)
            stamps = {file: file_stamp(file) for file in files} | ({} if begun is None else begun.stamps)
            model = _read_model(source)
        with clock("digest"), _load_failures(folder):
            digest = weights_digest([*files, *folder.glob(MATRICES)], source.gguf)
        with clock("tokenizer"):
            tokenizer = read_tokenizer(folder, template)
            media = _load_media(folder, source.config, source.kind) if source.kind.is_multimodal else None
        with clock("weights"), _load_failures(folder):
            _finish(model, source, None if begun is None else begun.packing)
            for file, stamp in stamps.items():
                if file_stamp(file) != stamp:
                    raise ModelError(f"{file} was changed while it was read; start again")
    name = settings.served_model_name or source.name
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        media=media,
        name=name,
        origin=source.origin,
        weights_digest=digest,
        fit=fit,
        timings=timings,
    )


def _needs(source: _ModelSource) -> ModelNeeds:
    """Returns what a model needs whose files are made."""
    dtype = str(source.dtype).removeprefix("torch.")
    needs = needs_of_folder(source.files[0].parent, source.files, "native", dtype)
    weights = dict(needs.weights)
    for matrix in {matrix.key: matrix for matrix in source.matrices.values()}.values():
        weights[str(matrix.kind)] = weights.get(str(matrix.kind), 0) + prod(matrix.packed_shape)
    return replace(needs, name=str(source), weights=weights)


def _source(
    settings: Settings, progress: Report, clock: Clock, flag: str = "--model", check: Check = enough_to_make
) -> _ModelSource:
    # Wrong settings are reported before anything slow happens.
    if not _DEVICE.fullmatch(settings.device):
        raise SettingsError(f"--device: {settings.device!r} is not one of auto, cpu, cuda, cuda:N, xpu, mps")
    weights_of = partial(pick_weights, settings.weights, settings.dtype, settings.device)
    if settings.weights in ("int8", "int4"):
        weights_of()
    with clock("source"):

        def before_fetch(listing: HubListing) -> None:
            check(listing.needs(weights_of(), settings.dtype))

        folder, name, gguf = _find(
            settings.model, progress, weights_of, flag=flag, check=check, before_fetch=before_fetch
        )
        files = weight_files_of(folder)
    with clock("imports"):
        device = pick_device(settings.device)
        use_gpu(device)
        if weights_of() == "auto" and not gguf:
            name_faster(folder, files, progress)
        quiet_transformers()
        config = _read_config(folder)
        with _load_failures(folder):
            kind = require_served_kind(folder, config)
            weights = weights_of()
            dtype = _pick_dtype(settings.dtype, config, weights)
    with clock("quantising"), _load_failures(folder):
        from diskprefix.model.quants.file_matrix import load_matrices
        from diskprefix.model.quants.quantising import weight_files_in

        matrices = load_matrices(folder, gguf)
        if matrices and device.type != "cpu":
            raise SettingsError(f"--weights: {weights} of a .gguf file is for the CPU; add --weights native")
        if matrices and not gguf:
            raise ModelError(f"{folder} was made of a .gguf file and lacks what is in it; give that file")
        files = weight_files_in(weights, folder, files, config, kind, dtype, device, progress, check)
    return _ModelSource(
        folder=folder,
        origin=gguf[0] if gguf else folder,
        name=name,
        files=files,
        gguf=gguf if matrices else [],
        matrices=matrices,
        config=config,
        kind=kind,
        dtype=dtype,
        device=device,
        weights=weights,
    )


def import_model(settings: Settings) -> None:
    """Imports the code of a model, and reads its tokenizer for `load_model`. An error is left to that."""
    with suppress(DiskPrefixError, OSError):
        template = read_template(settings.chat_template)
        source = _source(settings, lambda _line: None, lambda _step: nullcontext())
        read_tokenizer_ahead(source.folder, template)
        # transformers compiles a thousand patterns of names before it loads the first weights.
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping(source.config.model_type)


def load_tokenizer(model: str | None, chat_template: Path | None, progress: Report) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a model with its chat template. The weights of a hub id are not fetched. `model` and the
    errors are those of `load_model`. A .gguf file and the embedded model are converted on first use."""
    template = read_template(chat_template)
    folder, _, _ = _find(model, progress, partial(pick_weights, "auto", "auto", "auto"), with_weights=False)
    quiet_transformers()
    return read_tokenizer(folder, template)


def _find(
    model: str | None,
    progress: Report,
    pick_weights: Callable[[], str],
    *,
    with_weights: bool = True,
    flag: str = "--model",
    check: Check = enough_to_make,
    before_fetch: Callable[[HubListing], None] = lambda _listing: None,
) -> tuple[Path, str, list[Path]]:
    """Returns the folder that holds the model's files, the model's name, and the parts of the .gguf file that holds
    what the folder does not. What is made of such a file has the form that `pick_weights` returns."""
    require_named(model, flag)
    if model is None or is_embedded(model):
        folder = embedded_folder(progress, weights=pick_weights())
        return folder, EMBEDDED.name, [*folder.glob("*.gguf")]
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        # What was made of a .gguf file needs that file beside it.
        return path, path.resolve().name, sorted(path.glob("*.gguf")) if (path / MATRICES).is_file() else []
    if os.path.isfile(path):
        made = converted_folder(path, progress, pick_weights(), check)
        return made, model_stem(path), part_paths(path)
    found = fetched_model(model, progress, flag, before_fetch, with_weights=with_weights)
    if found.is_dir():
        return found, model, []
    return converted_folder(found, progress, pick_weights(), check), model, part_paths(found)


def _read_config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        wants_code = "trust_remote_code" in str(error)
        reason = "it comes with code of its own, which diskprefix does not run" if wants_code else first_line(error)
        raise ModelError(f"cannot read the configuration of {folder}: {reason}") from error


def pick_device(name: str) -> torch.device:
    import torch

    kind, _, index = name.partition(":")
    counts = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "xpu": torch.xpu.device_count() if torch.xpu.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if kind == "auto":
        kind = next((one for one, count in counts.items() if count), "cpu")
    if int(index or 0) >= counts.get(kind, 1):
        seen = ", ".join(f"{count} {one}" for one, count in counts.items() if count) or "no GPU"
        raise SettingsError(f"--device: there is no {name}; torch sees {seen}")
    return torch.device(kind, int(index or 0)) if kind in ("cuda", "xpu") else torch.device(kind)


def pick_weights(name: str, dtype: str, device_name: str) -> str:
    """Returns the form that weights get: `native`, `int8`, `int4`, or `auto` for the quants of a .gguf file."""
    from diskprefix.native.library import operators

    device, is_compiled = pick_device(device_name), operators() is not None
    if name == "native":
        return name
    if name == "auto":
        is_kept = device.type == "cpu" and is_compiled
        return name if is_kept and dtype in ("auto", "bfloat16") else "native"
    if device.type != "cpu":
        raise SettingsError(f"--weights: {name} needs a CPU, and the device is {device}; add --device cpu")
    if dtype not in ("auto", "bfloat16"):
        raise SettingsError(f"--weights: {name} computes in bfloat16, not in --dtype {dtype}")
    if not is_compiled:
        raise SettingsError(f"--weights: {name} needs the compiled operators; add --weights native")
    return name


def _pick_dtype(name: str, config: PreTrainedConfig, weights: str) -> torch.dtype:
    import torch

    if name == "auto" and weights in ("int8", "int4"):
        return torch.bfloat16
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    own = config.dtype or config.get_text_config(decoder=True).dtype
    return own if isinstance(own, torch.dtype) else torch.float32


def _load_media(folder: Path, config: PreTrainedConfig, kind: ModelKind) -> MediaProcessor | None:
    problem = "it generates in a way of its own, which diskprefix does not follow" if kind.has_own_generate else None
    media = hooks.open_media(folder, config, problem)
    if media is not None and media.problem is not None:
        log.warning("this model is served for text only: %s", media.problem)
    return media


def _finish(model: PreTrainedModel, source: _ModelSource, packing: MatrixPacking | None) -> None:
    """Makes a model ready to compute whose weights are read, but for what is packed."""
    from diskprefix.model.quants.quantised import prepare, take_matrices
    from diskprefix.model.quants.quantising import generation_config_of

    if packing is not None:
        take_matrices(model, source.matrices, packing)
    prepare(model)
    own = generation_config_of(source.folder) if source.files[0].parent != source.folder else None
    if own is not None:
        model.generation_config = own
    model.requires_grad_(False)
    model.eval()


def _read_model(source: _ModelSource) -> PreTrainedModel:
    """Returns the model as transformers puts it together, without what is packed."""
    from diskprefix.model.load.placing import placing
    from diskprefix.model.load.stored_tensors import stored_tensors
    from diskprefix.model.quants.parameter_stream import require_whole
    from diskprefix.model.quants.quantised import describe, is_quantised

    folder, files, config, device = source.folder, source.files, source.config, source.device
    with _load_failures(folder), ExitStack() as context:
        if device.type == "cpu":
            context.enter_context(without_tracer())
            context.enter_context(placing(stored_tensors(files[0].parent, files)))
        if is_quantised(files):
            describe(config, files)
        model, info = source.kind.loader.from_pretrained(
            files[0].parent,
            config=config,
            dtype=source.dtype,
            device_map=None if device.type == "cpu" else {"": device},
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Without this, a mismatch is only logged. It is refused below.
            ignore_mismatched_sizes=True,
        )
    require_whole(info, f"the weights in {folder}")
    return model


@contextmanager
def _load_failures(folder: Path) -> Iterator[None]:
    """Turns what transformers, safetensors or torch raise for a model's files into a `ModelError` of one line."""
    try:
        with explain_out_of_memory(f"{folder.name} does not fit in memory"):
            yield
    except DiskPrefixError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load the model in {folder}: {first_line(error)}") from error
