"""A GGUF file, converted once into a folder of safetensors. README.md describes the folder and how it is written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from diskprefix.errors import ModelError
from diskprefix.model.load.fingerprint import remembered_digest
from diskprefix.model.load.memory import available_ram_bytes, require_memory
from diskprefix.printable import first_line
from diskprefix.progress import Report, progress_bar
from diskprefix.settings import cache_home
from diskprefix.store.folder import sync
from diskprefix.tokens import file_digest
from diskprefix.trusted_path import distrusted_by_root
from diskprefix.units import format_size

CONVERSION_FORMAT = 1
"""The format of converted folders. Increase it when the conversion makes other files: older folders are then made
again."""

MANIFEST = "manifest.json"
SUFFIXES = {"native": "", "auto": "-quants.2", "int8": "-int8.2", "int4": "-int4.2"}
"""Ends of the folder's name, by the form of the weights. The number changes with the layout of quants in memory."""
_LOCK, _PARTIAL = ".lock-", ".partial-"
"""Prefixes of a model's name: the file that is locked while the model is made, and the folder that it is made in."""
_GGUF = "model.load.gguf"
_OVERHEAD_BYTES = 256 * 1024**2
"""Memory for the metadata, and space on the disk for the tokenizer."""
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}$")

# Values of tokenizer.ggml.pre by how they cut text before BPE (llama.cpp, src/llama-vocab.cpp).
_CUT_AS_GPT2 = frozenset({"default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
_CUT_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def converted_folder(gguf: Path, report: Report, weights: str = "native") -> Path:
    """Returns the folder of the model in `gguf`, which is converted on first use. `weights` is that of `convert`.
    Raises `ModelError` if the file cannot be read or converted, or its conversion does not fit in memory or on disk."""
    if _ONE_OF_SEVERAL.search(gguf.stem):
        raise ModelError(f"{gguf} is one part of a split model; join the parts first (llama-gguf-split --merge)")
    try:
        digest = remembered_digest(gguf)
    except OSError as error:
        raise ModelError(f"cannot read {gguf}: {error.strerror}") from error
    name = f"{gguf.stem[:100]}-{digest[:12]}{SUFFIXES[weights]}"
    return build_once(name, lambda work: convert(gguf, work, report, weights), report)


def build_once(name: str, build: Callable[[Path], Path], report: Report) -> Path:
    """Returns the finished model folder `name`, and makes it with `build` if there is none.

    `build` takes an empty folder to work in and returns the folder inside it that holds the model's files. It may be
    interrupted at any point, and other processes may do the same at the same time.
    """
    models = cache_home() / "models"
    folder = models / name
    if problem := distrusted_by_root(folder):
        raise ModelError(
            f"the cache folder {models}: {problem}, who could exchange it; run this as that user, or set "
            "XDG_CACHE_HOME to a folder of root's"
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


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Raises `ModelError` with both figures if the disk of `folder` has less than `needed_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"not enough disk space in {folder.parent}: about {format_size(needed_bytes)} needed, {format_size(free)} "
            f"free; free some, or set XDG_CACHE_HOME to a folder on a larger disk"
        )


def convert(gguf: Path, work: Path, report: Report, weights: str = "native") -> Path:
    """Converts `gguf` to safetensors and a tokenizer in `work/model`. Returns that folder.

    `weights` is `native` (all bfloat16), `auto` (the quants of the file where `gguf_quants` reads them), or `int8` or
    `int4` (the others are quantised anew). Raises `ModelError` if it cannot be read or does not fit, `OSError` if the
    disk fills up.
    """
    source, made = work / "source", work / "model"
    source.mkdir()
    made.mkdir()
    # In a folder of its own: the folder of the original may hold files of other models.
    (source / _GGUF).symlink_to(gguf.resolve())
    try:
        with progress_bar(f"converting {gguf.name}", 100, report) as advance:
            quiet_transformers()
            _convert(source, made, gguf.name, weights, advance, report)
    except ModelError:
        raise
    except Exception as error:
        # Three libraries read a foreign file, so any error may come. A full disk is told apart from the others.
        if shutil.disk_usage(work).free < 1024**2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise ModelError(f"cannot convert {gguf}: {first_line(error)}") from error
    return made


def _convert(
    source: Path, made: Path, name: str, weights: str, advance: Callable[[float], None], report: Report
) -> None:
    """Converts, and reports progress in per cent. The metadata (vocabulary and merges) takes most of the time."""
    from gguf import GGUFReader
    from transformers import AutoConfig

    reader = GGUFReader(source / _GGUF)
    facts = _facts(reader)
    needed = 4 * facts["elements"] + _OVERHEAD_BYTES
    advice = "free some, or give --model a folder with safetensors"
    require_memory(needed, available_ram_bytes(), what=f"converting {name}", advice=advice)
    advance(20)
    with _loading(reader, lambda fraction: advance(60 + 40 * fraction)):
        config = AutoConfig.from_pretrained(source, gguf_file=_GGUF, trust_remote_code=False)
        advance(40)
        tokenizer = _load_tokenizer(source, config, facts, report)
        model = _load_dequantised(source, config)
        if len(facts["stop_ids"]) > 1:
            # transformers reads only the end of text from a GGUF, not the end of a turn.
            model.generation_config.eos_token_id = facts["stop_ids"]
        require_disk(made.parent, sum(p.numel() * p.element_size() for p in model.parameters()) + _OVERHEAD_BYTES)
        tokenizer.save_pretrained(made)
        if weights == "native":
            model.save_pretrained(made)
    if weights != "native":
        from diskprefix.model.quants.gguf_quants import quants_of
        from diskprefix.model.quants.quantised import quantise_and_save

        quantise_and_save(model, weights, made, report, quants_of(reader))


def _facts(reader: Any) -> dict[str, Any]:
    """Returns the values that transformers does not read: the element count, the pre-tokenizer, further stop tokens."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    stops = [value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "elements": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "tokenizer": value("tokenizer.ggml.model"),
        "pre": value("tokenizer.ggml.pre"),
        "stop_ids": list(dict.fromkeys(int(stop) for stop in stops if stop is not None)),
    }


def _load_tokenizer(source: Path, config: Any, facts: dict[str, Any], report: Report) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, config=config, gguf_file=_GGUF, trust_remote_code=False)
    backend = tokenizer.backend_tokenizer
    if facts["tokenizer"] != "gpt2" or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return tokenizer
    # transformers uses GPT-2's rule for every pre-tokenizer that it does not know.
    if facts["pre"] in _CUT_DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif facts["pre"] is not None and facts["pre"] not in _CUT_AS_GPT2:
        report(f"warning: the tokenizer's rule {facts['pre']!r} is not known; some text may give other tokens")
    return tokenizer


def _load_dequantised(source: Path, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        gguf_file=_GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        trust_remote_code=False,
    )
    if info["missing_keys"]:
        raise ModelError(f"the file lacks tensors of the model: {', '.join(sorted(info['missing_keys'])[:3])}")
    return model


@contextmanager
def _loading(reader: Any, advance: Callable[[float], None]) -> Iterator[None]:
    """Has the progress bars of transformers report to `advance` (a fraction of 1) while it loads a GGUF, and gives it
    the `reader` that has parsed the file. Otherwise it would parse the file twice more, which takes seconds."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.utils import logging

    def counted(items: Any, *_: Any, **__: Any) -> Iterator[Any]:
        items = list(items)
        for done, item in enumerate(items, start=1):
            yield item
            advance(done / len(items))

    own_bar, own_reader = legacy.tqdm, gguf.GGUFReader
    previous = logging.set_tqdm_hook(lambda _, args, kwargs: counted(*args, **kwargs))
    legacy.tqdm, gguf.GGUFReader = counted, lambda *_: reader
    try:
        yield
    finally:
        legacy.tqdm, gguf.GGUFReader = own_bar, own_reader
        logging.set_tqdm_hook(previous)


def quiet_transformers() -> None:
    """Turns off the notices and progress bars of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    from transformers.utils import logging

    if not os.environ.get("TRANSFORMERS_VERBOSITY"):
        logging.set_verbosity_error()
    logging.disable_progress_bar()
