"""The tensors of a GGUF file, or of all parts of a split one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from threading import Lock
from typing import Any

from msgspec.structs import replace

from diskprefix.errors import ModelError
from diskprefix.file_system import file_stamp
from diskprefix.progress import Report
from diskprefix.runtime.files.gguf.gguf_header import MAGIC, FileTensor, GgufHeader, read_header, require_beginning
from diskprefix.runtime.files.lfs_pointer import fault_or_pointer
from diskprefix.runtime.files.manifests import is_blob, manifest_of
from diskprefix.units import counted

_PART = re.compile(r"(?P<model>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")
QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|FP?16|FP?32|MXFP4|NVFP4)(?:_[A-Z0-9]+)*)$", re.IGNORECASE)
"""The quant at the end of a file's name."""
_reading = Lock()
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")


def block_of(name: str) -> int:
    """Returns the number of the block that has a tensor; -1 for one outside of the blocks."""
    match = _BLOCK.match(name)
    return -1 if match is None else int(match[1])


def within_block(name: str) -> str:
    """Returns the name of a tensor within its block, without its ending."""
    return _BLOCK.sub("", name).removesuffix(".weight")


def part_paths(gguf: Path) -> list[Path]:
    """Returns all parts of the model that `gguf` is, or is a part of. Raises `ModelError` if one is missing."""
    if is_blob(gguf):
        of_blob = manifest_of(gguf)
        return [gguf] if of_blob is None else of_blob.parts
    match = _PART.fullmatch(gguf.stem)
    if match is None:
        return [gguf]
    if not 1 <= int(match["part"]) <= int(match["parts"]):
        raise ModelError(
            f"{gguf}: there is no part {int(match['part'])} of {int(match['parts'])}; give a part of the split model"
        )
    names = _part_names(match, gguf.suffix)
    for name in names:
        if not (gguf.parent / name).is_file():
            raise ModelError(f"{gguf} is one part of a split model, and {name} is missing in the same folder")
    return [gguf.parent / name for name in names]


def _part_names(match: re.Match[str], suffix: str) -> list[str]:
    count = int(match["parts"])
    return [f"{match['model']}-{part:05}-of-{count:05}{suffix}" for part in range(1, count + 1)]


def first_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns all parts of the models among these names, by the first part. Models that are not whole are left out."""
    known, models = set(names), dict[str, list[str]]()
    for name in sorted(known):
        suffix = Path(name).suffix
        match = _PART.fullmatch(name.removesuffix(suffix))
        if match is not None and int(match["parts"]) > len(known):
            continue
        parts = [name] if match is None else _part_names(match, suffix)
        if name == parts[0] and known.issuperset(parts):
            models[name] = parts
    return models


def model_stem(gguf: PurePath) -> str:
    """Returns the name of the file without its extension, and without the number of the part."""
    match = _PART.fullmatch(gguf.stem)
    return gguf.stem if match is None else match["model"]


def packs_folder(gguf: str) -> str:
    """Returns the name of the folder beside a `.gguf` file that may have packs: prompts that were computed with it."""
    path = PurePosixPath(gguf)
    return str(path.with_name(f"{model_stem(path)}.prefixes"))


def offer_packs(gguf: Path, progress: Report) -> None:
    """Reports the packs beside a `.gguf` file, if there are any. `diskprefix import` takes their folder."""
    folder = Path(packs_folder(str(gguf)))
    with suppress(OSError):
        if packs := list(folder.glob("*.safetensors")):
            has = f"{counted(len(packs), 'file')} of prompts"
            progress(f"{folder} has {has} for this model; add them: diskprefix import {shlex.quote(str(folder))}")


def read_tensors(parts: Sequence[Path]) -> tuple[GgufHeader, list[FileTensor]]:
    """Returns the header of the first part, and the tensors of all of them. Those of two models are remembered. Raises
    `ModelError` if a part is damaged or the parts do not belong to one model, and `OSError`."""
    # The threads of a start ask for one header at the same time.
    with _reading:
        return _read_tensors(tuple(parts), tuple(map(file_stamp, parts)))


@lru_cache(maxsize=2)
def _read_tensors(parts: tuple[Path, ...], _stamps: tuple[Any, ...]) -> tuple[GgufHeader, list[FileTensor]]:
    headers = [read_header(part) for part in parts]
    tensors = [tensor for header in headers for tensor in header.tensors]
    if len(parts) > 1:
        _require_one_model(parts, headers, tensors)
    return headers[0], with_factors(tensors)


def with_factors(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Returns the tensors, with the factors of NVFP4 tensors from their tensors `.scale`. Leaves out tensors
    `.input_scale`, which are for 4-bit products on GPUs. Raises `ModelError` unless factors are one number, or one for
    each expert."""
    by_name, kept, taken = {tensor.name: tensor for tensor in tensors}, list[FileTensor](), set[str]()
    for tensor in tensors:
        stem = tensor.name.removesuffix(".weight")
        if tensor.kind == "NVFP4" and stem != tensor.name:
            taken |= {f"{stem}.scale", f"{stem}.input_scale"}
            tensor = replace(tensor, factors=_factors_of(tensor, by_name.get(f"{stem}.scale")))
        kept.append(tensor)
    return [tensor for tensor in kept if tensor.name not in taken]


def _factors_of(tensor: FileTensor, factors: FileTensor | None) -> FileTensor | None:
    if factors is None:
        return None
    allowed = {1, tensor.shape[0]} if len(tensor.shape) > 2 else {1}
    if factors.kind != "F32" or factors.num_elements not in allowed:
        wanted = " or ".join(map(str, sorted(allowed)))
        raise ModelError(
            f"cannot read {factors.file}: the tensor {factors.name} has {factors.num_elements} numbers of type "
            f"{factors.kind}; {tensor.name} needs {wanted} of type F32"
        )
    return factors


def forget_headers() -> None:
    """Frees what `read_tensors` remembers: a vocabulary takes tens of MiB."""
    _read_tensors.cache_clear()


def require_gguf(file: Path, flag: str) -> None:
    """Raises `ModelError` if a file that `flag` names does not begin as a `.gguf` file. The rest of the header is read
    with the model."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(len(MAGIC))
        if begin == MAGIC:
            require_beginning(file)
            return
    except OSError as error:
        raise ModelError(f"{flag}: cannot read {file}: {error.strerror}") from error
    except ModelError as error:
        raise ModelError(f"{flag}: {error.message}") from error
    fault = fault_or_pointer(file, "a .gguf file begins with the letters GGUF")
    raise ModelError(f"{flag}: {file} is no model: {fault}")


def _require_one_model(parts: Sequence[Path], headers: Sequence[GgufHeader], tensors: Sequence[FileTensor]) -> None:
    total = headers[0].values.get("split.tensors.count")
    for number, (part, header) in enumerate(zip(parts, headers, strict=True)):
        split = [header.values.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
        if split != [number, len(parts), total]:
            raise ModelError(f"{part} is not part {number + 1} of {len(parts)} of the same model as the others")
    seen: dict[str, FileTensor] = {}
    for tensor in tensors:
        if (other := seen.setdefault(tensor.name, tensor)) is not tensor:
            raise ModelError(
                f"{tensor.file} and {other.file} both hold the tensor {tensor.name}: they are not one model"
            )
    if len(tensors) != total:
        raise ModelError(
            f"{parts[0]} and its other parts hold {len(tensors)} tensors of {total}: they are not one model"
        )
