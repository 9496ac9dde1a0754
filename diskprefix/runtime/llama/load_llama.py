"""Loads a `.gguf` file into llama.cpp's library: its tokenizer, its layers on a device, its identity."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from diskprefix.errors import ModelError, SettingsError
from diskprefix.identity import Fingerprint, canonical
from diskprefix.kernel_settings import processor
from diskprefix.model_identity import weights_digest
from diskprefix.native.compute_threads import num_threads
from diskprefix.printable import first_line
from diskprefix.progress import Report
from diskprefix.runtime.fetch.alternatives import require_fit
from diskprefix.runtime.files.chat_template import read_template
from diskprefix.runtime.files.fit import ModelNeeds, TokenState
from diskprefix.runtime.files.gguf.gguf_file import block_of, forget_headers, offer_packs, part_paths, read_tensors
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.runtime.llama.devices import device_named
from diskprefix.runtime.llama.llama_context import CPU, LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_library import Device, Library, open_library
from diskprefix.runtime.llama.llama_rehearsal import rehearsed
from diskprefix.runtime.llama.llama_runtime import LlamaRuntime
from diskprefix.runtime.load.loader import LoadedModel, clock_into, find_model
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.runtime.runtime_options import RuntimeOptions
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

_LONG_FACTORS = "rope_factors_long.weight"
_DENSE_HERE = frozenset({"minimax-m3"})
"""Architectures whose indexer the library does not use in contexts as ours."""
_ENVIRONMENT = re.compile("(GGML|LLAMA)_[A-Z0-9_]+")
_HARMLESS = frozenset({"GGML_NO_BACKTRACE", "LLAMA_CPP_LIB_PATH"})
_KEPT_FREE_BYTES = 768 << 20
"""The memory of a device that weights and rows leave free, for buffers to compute with."""
_TOKENS_ON_DEVICE = 16_384
"""The tokens for whose rows a device keeps room when layers are given to it."""
MAKE_ROOM = "Fewer bits or a smaller --context make room there; --gpu-layers N decides it"
_KV_BYTES = {"auto": 2.0, "q8": 34 / 32}
_NOT_PORTABLE = frozenset({"golden", "device", "threads", "cpu"})


class LlamaConfig(Struct, frozen=True):
    """A configuration with the fields that the runtime reads."""

    model_type: str
    max_position_embeddings: int

    def get_text_config(self, decoder: bool = False) -> LlamaConfig:
        """Returns itself: it is a model of text."""
        del decoder
        return self


class LoadedLlama(Struct, frozen=True):
    """A model that the library computes, its identity, and the digest of the library. The `reason` of `loaded` says why
    its state is not cached, "" if it is."""

    loaded: LoadedModel
    runtime: LlamaRuntime
    fingerprint: Fingerprint
    build: str


class _Shape(Struct, frozen=True):
    """The sizes of a model by its metadata: blocks, bytes of the weights of a block and of all weights, bytes of the
    rows of a token in a block, positions."""

    num_blocks: int
    block_bytes: int
    all_bytes: int
    row_bytes: int
    positions: int

    @property
    def num_layers(self) -> int:
        """The number of layers that can be given to a device: the blocks, and the head as one more."""
        return self.num_blocks + 1

    @classmethod
    def of(cls, metadata: Metadata, kv_type: str) -> _Shape:
        blocks = max(1, int(metadata.get("block_count", 1)))
        sizes = {tensor.name: tensor.num_bytes for tensor in metadata.tensors.values()}
        in_blocks = sum(size for name, size in sizes.items() if block_of(name) >= 0)
        heads = _most(metadata, "attention.head_count_kv") or _most(metadata, "attention.head_count")
        dim = int(metadata.get("embedding_length", 0)) // max(1, _most(metadata, "attention.head_count"))
        width = sum(int(metadata.get(f"attention.{part}_length", dim)) for part in ("key", "value"))
        rows = int(heads * width * _KV_BYTES[kv_type])
        positions = int(metadata.get("context_length", 0)) or 1 << 20
        return cls(blocks, in_blocks // blocks, sum(sizes.values()), rows, positions)


class Placement(Struct, frozen=True):
    """The layers that a device computes: `num_layers` of `of_layers`, where the head counts as one. `needs` are
    those of main memory."""

    device: Device | None
    num_layers: int
    of_layers: int
    needs: ModelNeeds

    @property
    def is_whole(self) -> bool:
        """No layer is left over for the CPU beside a device."""
        return self.device is None or self.num_layers >= self.of_layers

    @property
    def line(self) -> str:
        """The placement in one line."""
        if self.device is None:
            return "the CPU computes all layers"
        if self.is_whole:
            return f"{self.device.name} computes all {self.of_layers} layers"
        free = f" ({format_size(self.device.free_bytes)} are free)" if self.device.free_bytes else ""
        return f"{self.device.name}{free} computes {self.num_layers} of {self.of_layers} layers, and the CPU the others"


class _File(Struct, frozen=True):
    """A `.gguf` file with its name for clients, and what its header says."""

    path: Path
    name: str
    parts: Sequence[Path]
    metadata: Metadata
    shape: _Shape


def load_llama(settings: RuntimeOptions, progress: Report) -> LoadedLlama:
    """Loads the model of `settings` into the library, after a rehearsal. Raises `SettingsError` and `ModelError`, each
    with a message of one line."""
    _require_possible(settings)
    template = read_template(settings.chat_template)
    timings = dict[str, float]()
    clock = clock_into(timings)
    with clock("imports"):
        library = open_library()
        device = device_named(library, settings.device)
    with clock("source"):
        file = _read_file(settings, progress)
    with clock("tokenizer"):
        tokenizer = read_tokenizer(file.path, template)
    placement = _placement(file, settings, device)
    if settings.gpu_layers is None and not placement.is_whole:
        log.warning("[llama] %s. %s", placement.line, MAKE_ROOM)
    options = _options(file, settings, placement)
    fit = require_fit(placement.needs, available_ram_bytes(), settings)
    with clock("digest"):
        digest, build = _digests(library, file)
    named = _named(digest, options, device)
    rehearsal = rehearsed(file.path, options, canonical({**named, "build": build}), progress)
    progress("loading the weights")
    with clock("weights"):
        model = LlamaModel(library, file.path, options, device)
    placed = rehearsal.placed(model)
    free_bytes = available_ram_bytes if device is None else partial(_free_bytes, library, device)
    runtime = LlamaRuntime(*(model, rehearsal.form, placed), max_contexts=settings.max_sequences, free_bytes=free_bytes)
    forget_headers()
    dtype = next((group.dtype for group in runtime.layout.groups), "float32")
    loaded = LoadedModel(
        config=LlamaConfig(file.metadata.architecture, model.num_positions),
        dtype=dtype,
        device="cpu" if device is None else device.name,
        runtime=None,
        model=None,
        reason=rehearsal.reason,
        encoder=None,
        stops=file.metadata.reply_tokens.stops,
        suppressed=file.metadata.reply_tokens.suppressed,
        tokenizer=tokenizer,
        processor=None,
        name=settings.served_model_name or file.name,
        origin=file.path,
        weights_digest=digest,
        fit=fit,
        timings=timings,
        read_modules=_no_modules,
        finish=lambda: None,
        in_memory=_ended(),
    )
    fingerprint = _fingerprint(named, rehearsal.golden, settings)
    return LoadedLlama(loaded, runtime, fingerprint, build)


def cells_of(metadata: Metadata, context: int | None) -> tuple[int, int]:
    """Returns the least and the most cells of a context, 0 for no limit. With two tables of RoPE factors, the library
    takes the one for long texts in contexts that are larger than the original length: all contexts must be alike."""
    original = int(metadata.get("rope.scaling.original_context_length", 0))
    if _LONG_FACTORS not in metadata.tensors or not original:
        return 0, 0
    positions = int(metadata.get("context_length", 0)) or original
    return (0, original) if min(context or positions, positions) <= original else (original + 1, 0)


def _read_file(settings: RuntimeOptions, progress: Report) -> _File:
    path, name = find_model(settings.model, progress)
    offer_packs(path, progress)
    if not path.is_file():
        raise SettingsError(f"--runtime llama reads .gguf files, and {path} is none; choose --runtime plan or grid")
    parts = part_paths(path)
    metadata = Metadata(*read_tensors(parts))
    metadata.require_texts()
    if metadata.architecture in _DENSE_HERE:
        log.warning("[llama] the model attends to all tokens: the library chooses none in contexts for two sequences")
    return _File(path, name, parts, metadata, _Shape.of(metadata, settings.kv_type))


def _digests(library: Library, file: _File) -> tuple[str, str]:
    """Returns the digests of the weights and of the library."""
    try:
        return weights_digest([], file.parts), library.build
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {first_line(error)}") from error


def _ended() -> Future[None]:
    ended = Future[None]()
    ended.set_result(None)
    return ended


def _no_modules() -> NoReturn:
    raise AssertionError("the library computes the model")


def _require_possible(settings: RuntimeOptions) -> None:
    """Raises `SettingsError` for settings that the library does not know."""
    wrong = {
        "--draft-model": settings.draft_model is not None,
        "--dtype": settings.dtype != "auto",
        "--weights": settings.weights != "auto",
        "--kernels": settings.kernels != "auto",
        "--rows": settings.rows != "8",
        "--speculative": settings.speculative in ("mtp", "ngram"),
    }
    for flag, is_set in wrong.items():
        if is_set:
            raise SettingsError(f"{flag}: it has no effect with --runtime llama; leave it out")


def _free_bytes(library: Library, device: Device) -> int:
    now = next((other for other in library.devices() if other.name == device.name), device)
    # Some drivers do not know.
    return now.free_bytes or 1 << 62


def _most(metadata: Metadata, key: str) -> int:
    try:
        return int(metadata.get(key, 0))
    except ModelError:
        # One number for each block.
        return int(max(metadata.numbers(key), default=0))


def placement_of(settings: RuntimeOptions) -> Placement:
    """Returns which layers of the model of `settings`, which is on this machine, a device would compute now, and what
    main memory the rest takes. Raises `SettingsError` and `ModelError`."""
    device = device_named(open_library(), settings.device)
    return _placement(_read_file(settings, lambda _line: None), settings, device)


def _placement(file: _File, settings: RuntimeOptions, device: Device | None) -> Placement:
    num_layers = _num_layers(settings, file.shape, device)
    return Placement(device, num_layers, file.shape.num_layers, _needs(file, num_layers, settings))


def _options(file: _File, settings: RuntimeOptions, placement: Placement) -> LlamaOptions:
    least_cells, most_cells = cells_of(file.metadata, settings.context)
    return LlamaOptions(
        step=settings.block_size,
        kv_type=settings.kv_type,
        num_threads=num_threads(),
        num_layers=placement.num_layers,
        device=CPU if placement.device is None else placement.device.name,
        least_cells=least_cells,
        most_cells=most_cells,
    )


def _num_layers(settings: RuntimeOptions, shape: _Shape, device: Device | None) -> int:
    """Returns how many layers the device computes: all of them and the head, or as many as have room there."""
    if device is None:
        if settings.gpu_layers:
            raise SettingsError("--gpu-layers: llama.cpp's library has no GPU; leave it out")
        return 0
    if settings.gpu_layers is not None:
        return min(settings.gpu_layers, shape.num_layers)
    if not device.free_bytes:
        return shape.num_layers
    tokens = min(settings.context or _TOKENS_ON_DEVICE, shape.positions)
    of_block = shape.block_bytes + shape.row_bytes * tokens
    rest = shape.all_bytes - shape.num_blocks * shape.block_bytes
    left = device.free_bytes - _KEPT_FREE_BYTES - rest
    if left >= shape.num_blocks * of_block:
        return shape.num_layers
    fitting = max(0, (left + rest) // of_block) if of_block else shape.num_layers
    return min(fitting, shape.num_blocks)


def _needs(file: _File, num_layers: int, settings: RuntimeOptions) -> ModelNeeds:
    """Returns the needs of main memory: weights that no device has, and pages."""
    shape = file.shape
    state = TokenState(
        per_token=shape.row_bytes * shape.num_blocks,
        positions=min(shape.positions, settings.context or shape.positions),
    )
    weights = {"file": shape.all_bytes * (shape.num_layers - num_layers) // shape.num_layers}
    return ModelNeeds(name=f"{file.path.name} in llama.cpp", weights=weights, state=state)


def _named(digest: str, options: LlamaOptions, device: Device | None) -> dict[str, str]:
    """Returns everything that changes the numbers of a model in the library, but the library itself."""
    environment = {
        name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name) and name not in _HARMLESS
    }
    values: dict[str, Any] = {"kv_type": options.kv_type, "step": options.step, "layers": options.num_layers}
    values["flash_attention"] = options.has_flash_attention
    values |= {"least_cells": options.least_cells} if options.least_cells else {}
    return {
        "engine": "llama",
        "weights_digest": digest,
        "options": canonical(values),
        "device": CPU if device is None else f"{device.name}: {device.description}",
        "threads": str(options.num_threads),
        "cpu": processor(),
        "environment": canonical(environment),
    }


def _fingerprint(named: Mapping[str, str], golden: str, settings: RuntimeOptions) -> Fingerprint:
    """Returns the identity of the numbers. The library counts by what it computes, `golden`, so a build of other bytes
    and equal bits keeps the cache."""
    fields = {**named, "golden": golden, "mode": settings.fingerprint}
    return Fingerprint(fields, _NOT_PORTABLE if settings.fingerprint == "portable" else frozenset())
