"""Loads the model that --model names: the embedded default, a local folder, a .gguf file, a hub id or one with a
quant."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import DiskPrefixError, ModelError, SettingsError
from diskprefix.file_system import file_stamp
from diskprefix.model_identity import known_weights_digest, weights_digest
from diskprefix.native.library import choose, operators
from diskprefix.prefixstore.kv.numbers import item_bytes
from diskprefix.printable import first_line
from diskprefix.progress import Report
from diskprefix.runtime.fetch.alternatives import require_fit
from diskprefix.runtime.fetch.embedded import EMBEDDED, embedded_file
from diskprefix.runtime.fetch.hub import HubListing, fetched_model
from diskprefix.runtime.fetch.named_model import is_embedded, name_faster, own_path, plain_name, require_named
from diskprefix.runtime.files.chat_template import read_template
from diskprefix.runtime.files.checkpoint import (
    is_mxfp4,
    number_type,
    quantised,
    read_config,
    require_plain_weights,
    stored_tensors,
    weight_files_of,
)
from diskprefix.runtime.files.fit import Fit, ModelNeeds, needs_of_file_model, needs_of_folder
from diskprefix.runtime.files.generation_config import reply_tokens
from diskprefix.runtime.files.gguf.gguf_file import forget_headers, offer_packs, part_paths
from diskprefix.runtime.files.kinds import ModelKind, config_of_plan, kind_of_plan, plan_config, require_served_kind
from diskprefix.runtime.files.read_tokenizer import check_parts, read_tokenizer
from diskprefix.runtime.files.tokenizer import Tokenizer
from diskprefix.runtime.imports import INSTALL, transformers_quietly
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.runtime.memory import available_bytes, explain_out_of_memory, use_gpu
from diskprefix.runtime.pictures import open_pictures
from diskprefix.runtime.pictures.picture_processor import PictureProcessor, PicturesModel
from diskprefix.runtime.plan.draft_layer import further_layers, has_known_draft_layer
from diskprefix.runtime.plan.model_config import ModelConfig
from diskprefix.runtime.plan.reply_tokens import ReplyTokens
from diskprefix.runtime.runtime_options import RuntimeOptions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from diskprefix.runtime.files.file_matrix import MatrixPacking
    from diskprefix.runtime.files.gguf.gguf import GgufModel
    from diskprefix.runtime.plan.planned import PlanRuntime
    from diskprefix.runtime.plan.weights import Weights

log = logging.getLogger("diskprefix")

Clock: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Measures a step of the load."""

_FOR_GPUS = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]", re.MULTILINE)
"""What torch says of a build for GPUs."""
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


class LoadedModel(Struct, frozen=True, kw_only=True, eq=False):
    """A decoder model: its `runtime` if it has a plan, or else its `model`, the modules of transformers on `device`.

    `config` is the configuration of the whole model: ours, or transformers'. `reason` says why it has no plan.
    `encoder` returns the modules that encode pictures, which are read at the first call; it is None for a model that
    takes none, and so is its `processor`. `stops` are tokens that end a reply, `suppressed` those that never come.
    `name` is the name for clients. `timings` holds seconds by step: `source` (with download), `imports`, `digest`,
    `tokenizer` (with the processor), `weights`.
    """

    config: Any
    dtype: str
    device: str
    runtime: PlanRuntime | None
    model: PreTrainedModel | None
    reason: str
    encoder: Callable[[], PreTrainedModel] | None
    stops: list[int]
    suppressed: list[int]
    tokenizer: Tokenizer
    processor: PictureProcessor | None
    name: str
    origin: Path
    """The folder or the `.gguf` file that the user has."""
    weights_digest: str
    fit: Fit
    """How it fits into the memory that was free before it was loaded."""
    timings: dict[str, float]
    read_modules: Callable[[], PreTrainedModel]
    finish: Callable[[], None]
    """Returns when all weights are in memory. Raises the errors of `load_model`."""
    in_memory: Future[None]
    """The end of `finish`."""
    drop_packed: Callable[[], None] = lambda: None
    """Lets go of packed weights, when the model does not compute by its plan."""
    keep_weights: Callable[[], Iterator[None]] = lambda: iter(())
    """Writes for later starts what this start has packed, a piece at a time (see `PackedFiles.keep`). For after
    `in_memory`."""

    @property
    def weights(self) -> Weights | None:
        return None if self.runtime is None else self.runtime.weights


class _ModelSource(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The files of a model, and how they are loaded. `path` is its folder or, with `gguf`, the first part of its
    `.gguf` file. `files` are the files of the weights."""

    path: Path
    name: str
    files: list[Path]
    gguf: GgufModel | None
    config: Any
    """The configuration: ours, or the one of transformers' class."""
    kind: ModelKind
    dtype: str
    device: str
    weights: str
    """`auto` if the quants of a `.gguf` file, or of gpt-oss, are kept, or else `native`."""
    kv_type: str
    context: int | None
    reason: str
    """Why it has no plan."""
    packed_files: PackedFiles | None
    """Where packed weights stay for later starts."""

    @cached_property
    def whole(self) -> PreTrainedConfig:
        """The whole configuration of transformers."""
        return _read_config(self.path) if self.gguf is None else self.gguf.whole

    def needs(self) -> ModelNeeds:
        name = f"{self.path.name} as {self.dtype} on {self.device}"
        if self.gguf is not None:
            needs = needs_of_file_model(self.gguf, name, self.weights, item_bytes(self.dtype))
        else:
            uses = self.kind.has_draft_layer
            needs = replace(
                needs_of_folder(self.path, self.files, self.dtype, self.weights, uses_draft_layer=uses), name=name
            )
        return needs.of(self.kv_type, self.context)

    def digest(self) -> str:
        return weights_digest(*self._digested)

    @property
    def _digested(self) -> tuple[Sequence[Path], Sequence[Path]]:
        return (self.files, ()) if self.gguf is None else ((), self.gguf.parts)

    def reply_tokens(self) -> ReplyTokens:
        """Returns the tokens that end a reply, and those that never come. Raises `ModelError`."""
        if self.gguf is not None:
            return self.gguf.metadata.reply_tokens
        return reply_tokens(self.path)

    @cached_property
    def packing(self) -> MatrixPacking | None:
        """Packs quants, if the model's are kept, and maps those that an earlier start has packed. Raises `ModelError`
        without the operators."""
        if self.weights != "auto":
            return None
        from diskprefix.runtime.files.file_matrix import MatrixPacking
        from diskprefix.runtime.plan.quants.forms import compiled

        # A digest that must be computed first would cost more than packing.
        digest = None if self.packed_files is None else known_weights_digest(*self._digested)
        if self.packed_files is None or digest is None:
            return MatrixPacking(compiled())
        return MatrixPacking(compiled(), self.packed_files.opened(digest, compiled()))

    def drop_packed(self) -> None:
        """Lets go of what was packed."""
        if self.packing is not None:
            self.packing.drop()

    def keep(self, digest: str, in_memory: Future[None], tokenizer: Tokenizer) -> Iterator[None]:
        """Notes for later starts whether parts of the vocabulary are exact. Writes what was packed, a piece at a time,
        unless the load has failed."""
        check_parts(self.path, tokenizer, digest)
        yield
        is_whole = in_memory.done() and in_memory.exception() is None
        if self.packed_files is not None and self.packing is not None and self.packing.has_packed and is_whole:
            yield from self.packed_files.keep(digest, self.files, self.packing)

    def decoder_weights(self, *, is_unread: bool = False) -> Weights:
        """Returns the weights for a plan. For the arguments see `GgufWeights`."""
        if self.gguf is not None:
            return self.gguf.decoder_weights(self.dtype, self.packing, is_unread=is_unread)
        from diskprefix.runtime.files.folder_weights import FolderWeights

        tensors, has_draft_layer = stored_tensors(self.path, self.files), self.kind.has_draft_layer
        return FolderWeights(
            *(tensors, self.config, self.dtype),
            has_draft_layer=has_draft_layer,
            is_unread=is_unread,
            packing=self.packing,
        )

    def take(self, weights: Weights, page_tokens: int) -> PlanRuntime:
        """Makes a plan, and begins to read its weights. Raises `ModelError` if some are missing, or have other
        shapes."""
        from diskprefix.prefixstore.kv.layout import is_out_of_memory
        from diskprefix.runtime.plan.planned import PlanRuntime, plan_layout

        try:
            layout = plan_layout(weights, self.config, self.kv_type)
            runtime = PlanRuntime(weights, self.config, layout, page_tokens)
            runtime.prepare()
        except Exception as error:
            if isinstance(error, DiskPrefixError | OSError) or is_out_of_memory(error):
                raise
            raise ModelError(
                f"{self.path}: its weights do not fit together ({first_line(error)}): {weights.misfit()}"
            ) from error
        return runtime

    def for_modules(self) -> _ModelSource:
        """Returns the source of a model that computes by modules: without its draft layer and without quants."""
        if self.kind.has_draft_layer:
            log.info("[model] its draft layer is not used: only models that have a plan use theirs")
        kind = replace(self.kind, has_draft_layer=False)
        gguf = None if self.gguf is None else self.gguf.without_draft_layer()
        return replace(self, kind=kind, gguf=gguf, weights="native")

    def modules(self, *, are_of_encoder: bool = False) -> PreTrainedModel:
        """Returns the modules of the model, or of its encoder of pictures alone, ready to compute. Raises
        `ModelError`."""
        from diskprefix.runtime.files.parameters import Source, load_parameters, stored

        kind = replace(self.kind, is_encoder=are_of_encoder)
        with _load_failures(self.path):
            sources: dict[str, Source]
            if self.gguf is None:
                sources = {tensor.name: partial(stored, tensor) for tensor in stored_tensors(self.path, self.files)}
            else:
                sources = self.gguf.parameters(kind, self.dtype)
            of, weights = kind.model_class(self.whole), f"the weights in {self.path}"
            config = kind.config_of_class(self.whole)
            model = load_parameters(of, config, sources, weights, self.dtype, self.device)
        return model.requires_grad_(False).eval()

    def encoder(self, stamps: Mapping[Path, tuple[int, int, int]]) -> PreTrainedModel:
        """Returns the modules of the encoder of pictures from files that had these stamps. Raises `ModelError`."""
        modules = self.modules(are_of_encoder=True)
        _require_unchanged(stamps)
        return modules


def load_model(settings: RuntimeOptions, progress: Report, flag: str = "--model") -> LoadedModel:
    """Loads a model completely. Arguments and errors as `begin_load`."""
    loaded = begin_load(settings, progress, flag)
    loaded.finish()
    return loaded


def begin_load(settings: RuntimeOptions, progress: Report, flag: str = "--model") -> LoadedModel:
    """Finds, fetches and checks the model that `settings` name, and begins to read its weights.

    `progress` takes lines of text for people, `flag` is what named the model. Raises `ModelError` if it cannot be
    found, fetched or read, or does not fit in memory, and `SettingsError` for --device, --kernels, --rows and
    --chat-template, each with a message of one line.
    """
    timings: dict[str, float] = {}
    clock, check = clock_into(timings), partial(_require_fit, settings)
    template = read_template(settings.chat_template)
    with ExitStack() as failing:
        source = _source(settings, progress, clock, flag, check)
        progress("loading the weights")
        fit = check(source.needs())
        with clock("weights"), _load_failures(source.path):
            stamps = {file: file_stamp(file) for file in source.files}
            encoder = cache(source.modules if source.reason else partial(source.encoder, stamps))
            model = encoder() if source.reason else None
            runtime = None if source.reason else _begin_plan(source, settings.block_size, failing)
        with clock("digest"), _load_failures(source.path):
            digest, of_replies = source.digest(), source.reply_tokens()
        with clock("tokenizer"):
            tokenizer = read_tokenizer(source.path, template, digest)
            forget_headers()
            processor = _load_processor(source, tokenizer, encoder) if source.kind.is_multimodal else None
        failing.pop_all()

    def read_rest() -> None:
        with clock("weights"), _load_failures(source.path):
            if runtime is not None:
                runtime.weights.finish_reading()
            _require_unchanged(stamps)

    finish, in_memory = _done_once(read_rest)
    if runtime is not None:
        runtime.wait = in_memory.result
    return LoadedModel(
        config=source.config,
        dtype=source.dtype,
        device=source.device,
        runtime=runtime,
        model=model,
        reason=source.reason,
        encoder=None if processor is None or processor.problem is not None else encoder,
        stops=of_replies.stops,
        suppressed=of_replies.suppressed,
        tokenizer=tokenizer,
        processor=processor,
        name=settings.served_model_name or source.name,
        origin=source.path,
        weights_digest=digest,
        fit=fit,
        timings=timings,
        read_modules=lambda: source.for_modules().modules(),
        finish=finish,
        in_memory=in_memory,
        drop_packed=source.drop_packed,
        keep_weights=partial(source.keep, digest, in_memory, tokenizer),
    )


def _require_fit(settings: RuntimeOptions, needs: ModelNeeds) -> Fit:
    return require_fit(needs, available_bytes(pick_device(settings.device)), settings)


def clock_into(timings: dict[str, float]) -> Clock:
    """Returns a clock that adds the seconds of a step to its sum in `timings`."""

    @contextmanager
    def clock(step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        timings[step] = timings.get(step, 0.0) + time.perf_counter() - started

    return clock


def _begin_plan(source: _ModelSource, page_tokens: int, failing: ExitStack) -> PlanRuntime:
    """Makes the plan of a model, and begins to read and pack its weights. If the load fails later, `failing` stops the
    packing."""
    if source.packing is not None:
        failing.callback(source.packing.stop)
    return source.take(source.decoder_weights(), page_tokens)


def _done_once(work: Callable[[], None]) -> tuple[Callable[[], None], Future[None]]:
    """Returns a function that does the work at its first call, and raises the error of the work at every call, and the
    future of the work's end."""
    end = Future[None]()

    def finish() -> None:
        if not end.done():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (it is raised below)
                end.set_exception(error)
            else:
                end.set_result(None)
        end.result()

    return finish, end


def unread_weights(settings: RuntimeOptions) -> tuple[Weights, Any] | str:
    """Returns the weights and the configuration of a model that has a plan, or why it has none. The weights are not
    read: their memory has any numbers, and takes no room as long as nothing is written there. Raises `ModelError` and
    `SettingsError`."""
    source = _source(settings, lambda _line: None, lambda _step: nullcontext())
    if source.reason:
        return source.reason
    with _load_failures(source.path):
        return replace(source, packed_files=None).decoder_weights(is_unread=True), source.config


def _source(
    settings: RuntimeOptions,
    progress: Report,
    clock: Clock,
    flag: str = "--model",
    check: Callable[[ModelNeeds], object] = lambda _needs: None,
) -> _ModelSource:
    # Wrong settings are reported before anything slow happens.
    if not _DEVICE.fullmatch(settings.device):
        raise SettingsError(f"--device: {settings.device!r} is not one of auto, cpu, cuda, cuda:N, xpu, mps")
    choose(settings.kernels, settings.rows)
    with clock("source"):

        def before_fetch(listing: HubListing) -> None:
            check(listing.needs(settings.dtype, settings.weights).of(settings.kv_type, settings.context))

        path, name = find_model(settings.model, progress, flag=flag, before_fetch=before_fetch)
        is_file = path.is_file()
        if is_file:
            offer_packs(path, progress)
        files = part_paths(path) if is_file else weight_files_of(path)
    with clock("imports"):
        device = pick_device(settings.device)
        use_gpu(device)
        weights = _pick_weights(settings, device)
        if weights == "auto" and not is_file:
            name_faster(path, files, progress)
        # Only models that are exact at every token use it.
        uses_draft_layer = settings.uses_draft_layer and device == "cpu" and operators() is not None
        read = partial(_read_file, path, progress) if is_file else partial(_read_folder, path, files)
        with _load_failures(path):
            headers = read(uses_draft_layer=uses_draft_layer)
        config = headers.config
        text = config.get_text_config(decoder=True)
        if isinstance(text, ModelConfig):
            text.context = settings.context
        from diskprefix.runtime.load.self_check import known_reason

        dtype = number_type(settings.dtype, headers.given or {"dtype": "bfloat16"})
        source = _ModelSource(
            path=path,
            name=name,
            files=headers.files,
            gguf=headers.gguf,
            config=config,
            kind=headers.kind,
            dtype=dtype,
            device=device,
            weights=weights,
            kv_type=settings.kv_type,
            context=settings.context,
            reason=_no_plan(settings, known_reason(config, dtype, device.partition(":")[0])),
            packed_files=PackedFiles.of(settings.packed_weights),
        )
        if source.reason:
            require_own_type(settings, source.reason)
            if is_mxfp4(headers.given):
                raise quantised(str(path), headers.given["quantization_config"], f" without a plan ({source.reason})")
        return source.for_modules() if source.reason else source


def _no_plan(settings: RuntimeOptions, reason: str) -> str:
    """Returns why the model gets no plan: a `reason`, or because `--runtime` asks for another. Raises
    `SettingsError` if it asks for a plan and there is none."""
    if settings.runtime == "plan" and reason:
        raise SettingsError(f"--runtime plan: this model has none: {reason}; leave --runtime out")
    return "--runtime grid asks for transformers' modules" if settings.runtime == "grid" else reason


class _Headers(Struct, frozen=True, kw_only=True, eq=False):
    """The configuration, kind and files of a model, which are known before its weights are read. `given` is the
    `config.json` of a folder; it is empty for a `.gguf` file, whose headers are in `gguf`."""

    config: Any
    kind: ModelKind
    files: list[Path]
    gguf: GgufModel | None = None
    given: dict[str, Any] = {}


def _read_file(path: Path, progress: Report, *, uses_draft_layer: bool) -> _Headers:
    """Reads the headers of a `.gguf` file and its further parts."""
    from diskprefix.runtime.files.gguf.gguf import GgufModel

    gguf = GgufModel.read(path, progress, uses_draft_layer=uses_draft_layer)
    return _Headers(config=gguf.config, kind=gguf.kind, files=gguf.parts, gguf=gguf)


def _read_folder(path: Path, files: list[Path], *, uses_draft_layer: bool) -> _Headers:
    """Reads the configuration in a model folder. Imports transformers only for a model without a plan."""
    given = read_config(path)
    require_plain_weights(str(path), given)
    if (config := config_of_plan(path, given)) is not None:
        kind = kind_of_plan(config)
    else:
        whole = _read_config(path)
        kind = require_served_kind(path, whole)
        config = plan_config(kind.config_of_class(whole))
    if uses_draft_layer and _has_draft_layer(path, files, config):
        kind = replace(kind, has_draft_layer=True)
    return _Headers(config=config, kind=kind, files=files, given=given)


def require_own_type(settings: RuntimeOptions, reason: str) -> None:
    """Raises `SettingsError` for a `--kv-type` of a model that has no plan, for a `reason`."""
    if settings.kv_type != "auto":
        raise SettingsError(f"--kv-type {settings.kv_type} is for models with a plan, this one has none: {reason}")


def load_tokenizer(model: str | None, chat_template: Path | None, progress: Report) -> Tokenizer:
    """Returns the tokenizer of a model without reading weights. `model` and errors as in `load_model`."""
    template = read_template(chat_template)
    path, _ = find_model(model, progress, with_weights=False)
    return read_tokenizer(path, template)


def find_model(
    model: str | None,
    progress: Report,
    *,
    with_weights: bool = True,
    flag: str = "--model",
    before_fetch: Callable[[HubListing], None] = lambda _listing: None,
) -> tuple[Path, str]:
    """Returns the folder or the `.gguf` file of a model, and the model's name. Arguments and errors as `begin_load`."""
    require_named(model, flag)
    if model is None or is_embedded(model):
        return embedded_file(progress), EMBEDDED.name
    if (path := own_path(model)) is None:
        path = fetched_model(model, progress, flag, before_fetch, with_weights=with_weights)
    return path, plain_name(model)


def _read_config(folder: Path) -> PreTrainedConfig:
    auto_config = transformers_quietly().AutoConfig
    try:
        return auto_config.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        wants_code = "trust_remote_code" in str(error)
        reason = "it comes with code of its own, which diskprefix does not run" if wants_code else first_line(error)
        raise ModelError(f"cannot read the configuration of {folder}: {reason}") from error


def pick_device(name: str) -> str:
    """Returns the device that --device names. Raises `SettingsError` if there is none."""
    kind, _, index = name.partition(":")
    counts = {} if kind == "cpu" or (kind == "auto" and not _may_have_gpus()) else _gpus()
    if kind == "auto":
        kind = next((kind for kind, count in counts.items() if count), "cpu")
    if int(index or 0) >= counts.get(kind, 1):
        seen = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no GPU"
        raise SettingsError(f"--device: there is no {name}; torch sees {seen}")
    return f"{kind}:{int(index or 0)}" if kind in ("cuda", "xpu") else kind


def _may_have_gpus() -> bool:
    """Returns whether torch may see a GPU: it takes a second to import, and many builds of it are for CPUs alone."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with suppress(OSError):
        build = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        return sys.platform == "darwin" or _FOR_GPUS.search(build) is not None
    return True


def _gpus() -> dict[str, int]:
    if find_spec("torch") is None:
        return {}
    import torch

    return {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "xpu": torch.xpu.device_count() if torch.xpu.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }


def _pick_weights(settings: RuntimeOptions, device: str) -> str:
    """Returns `auto` where the quants of a `.gguf` file, or of gpt-oss, are kept, or else `native`."""
    can_keep = device == "cpu" and settings.dtype in ("auto", "bfloat16") and operators() is not None
    return settings.weights if can_keep else "native"


def _load_processor(source: _ModelSource, tokenizer: Tokenizer, read_encoder: Callable[[], object]) -> PictureProcessor:
    kind, pictures = source.kind, None if source.gguf is None else source.gguf.pictures
    make = None
    if pictures is not None:
        from diskprefix.runtime.files.gguf.file_processor import make_processor

        make = partial(make_processor, pictures, tokenizer)

    def problem() -> str | None:
        if kind.has_own_generate:
            return "it generates in a way of its own, which diskprefix does not follow"
        from diskprefix.runtime.pictures.vision_encoder import VisionEncoder

        return VisionEncoder.problem(kind.model_class(source.whole))

    files = sorted(source.path.iterdir()) if source.gguf is None else source.files
    model = PicturesModel(source.path, files, lambda: source.whole, problem, read_encoder, make)
    processor = open_pictures(model)
    if processor.problem is not None:
        log.warning("this model is served for text only: %s", processor.problem)
    return processor


def _require_unchanged(stamps: Mapping[Path, tuple[int, int, int]]) -> None:
    for file, stamp in stamps.items():
        if file_stamp(file) != stamp:
            raise ModelError(f"{file} was changed while it was read; start again")


def _has_draft_layer(folder: Path, files: Sequence[Path], config: Any) -> bool:
    """Returns whether a folder has a draft layer that can be used."""
    text = config.get_text_config(decoder=True)
    if not has_known_draft_layer(text.model_type):
        return False
    further = further_layers((tensor.name for tensor in stored_tensors(folder, files)), text.num_hidden_layers)
    return any(own is not None for own in further.values())


@contextmanager
def _load_failures(path: Path) -> Iterator[None]:
    """Turns what transformers, safetensors or torch raise for a model's files into a `ModelError` of one line."""
    try:
        with explain_out_of_memory(f"{path.name} does not fit in memory"):
            yield
    except DiskPrefixError:
        raise
    except ModuleNotFoundError as error:
        raise ModelError(f"serving {path} needs {error.name}, which is not installed: {INSTALL}") from error
    except Exception as error:
        raise ModelError(f"cannot load the model in {path}: {first_line(error)}") from error
