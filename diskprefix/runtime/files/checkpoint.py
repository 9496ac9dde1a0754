"""A checkpoint in a folder: its `config.json`, which files belong to it, and its tensors, which are read one by one.
Every offset in a header is compared with the size of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from diskprefix.errors import ModelError
from diskprefix.printable import first_line, shown
from diskprefix.runtime.files.lfs_pointer import fault_or_pointer
from diskprefix.runtime.plan.families.types.known_types import TYPES

if TYPE_CHECKING:
    import numpy as np

SAFETENSORS, FILE, INDEX = "*.safetensors", "model.safetensors", "model.safetensors.index.json"
_MOST_HEADER_BYTES = 10**8
"""safetensors refuses longer headers."""
_NO_INNER_PATH = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]|(?:^|/)(?:\.{0,2}|[A-Za-z]:[^/]*)(?:/|$)")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_BITS = {"F4": 4, "BOOL": 8, "C64": 64}
MXFP4, BLOCKS, SCALES = "MXFP4", "_blocks", "_scales"
"""The quants of gpt-oss, and the ends of the names of their tensors."""
_QUANTS_IN_NAME = re.compile(
    r"-(awq|gptq|fp8|int[48]|w\d+a\d+|4bit|8bit|mxfp4|nvfp4|bnb|quantized\.\w+)\b.*", re.IGNORECASE
)
"""The end of the name of a checkpoint in quants."""


class StoredTensor(Struct, frozen=True):
    """A tensor of type `kind` (`BF16`, `F32`, …). `offset` is in bytes from the start of its file, `num_bytes` its size
    there. Of a tensor on the hub only the header is known."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0
    file: Path = Path()

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def read_into(self, out: np.ndarray, first: int = 0) -> None:
        """Fills an array with its bytes, from byte `first` on. Raises `ModelError` if the file is cut short.

        The file is not mapped: a page of a mapped one that is cut short meanwhile would end the process.
        """
        view, done = out.reshape(-1).view("uint8").data, 0
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.offset + first)
            while done < len(view) and (size := source.readinto(view[done:])):
                done += size
        if done < len(view):
            raise ModelError(f"{self.file} ends within {self.name}; fetch or copy it again")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder, without the same weights in another format (`consolidated`)."""
    files = sorted(folder.glob(SAFETENSORS))
    read = [file for file in files if not file.match("consolidated*.safetensors")]
    return read if any(file.match("model*.safetensors") for file in read) else files


def weight_files_of(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder. Raises `ModelError` if there are none, or not all."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no model: there is no config.json{_hint(folder)}")
    index = folder / INDEX
    shards = shards_of(index) if index.is_file() else []
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(shards)} weight files, for example {missing[0]}")
    files = require_weights(folder)
    return [*files, *(name for name in checkpoint_files(folder, files) if name not in files)]


def require_weights(folder: Path) -> list[Path]:
    """Returns the safetensors of a folder. Raises `ModelError` if there are none."""
    if files := weight_files(folder):
        return files
    hint = "; pickled weights are not read: convert them to safetensors (`save_pretrained` of transformers does)"
    is_pickled = any(folder.glob("pytorch_model*.bin"))
    raise ModelError(f"{folder} holds no weights: there is no {SAFETENSORS}{hint if is_pickled else _hint(folder)}")


def _hint(folder: Path) -> str:
    is_adapter = (folder / "adapter_config.json").is_file()
    return "; it holds an adapter: give the folder of the merged model" if is_adapter else ""


def checkpoint_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Returns the files of one checkpoint: a folder may hold the same weights twice, under other names. Raises
    `ModelError` if its index is damaged."""
    if folder / FILE in files:
        return [folder / FILE]
    index = folder / INDEX
    return [folder / shard for shard in shards_of(index)] if index.is_file() else list(files)


def shards_of(index: Path) -> list[str]:
    """Returns the names of the files that an index names. Raises `ModelError` if it is damaged, or if a name leads out
    of the folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(require_inner_path(str(name)) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is damaged; fetch or copy it again") from error


def require_inner_path(name: str) -> str:
    """Returns a file name that a listing or an index gives, relative to its folder. Raises `ValueError` if it could
    lead out of the folder, on any system, or holds control characters."""
    if _NO_INNER_PATH.search(name):
        raise ValueError(f"{shown(name)!r} is not the name of a file inside the folder")
    return name


def stored_tensors(folder: Path, files: Sequence[Path]) -> list[StoredTensor]:
    """Returns the tensors that transformers would load. Raises `ModelError` if a file is damaged or cut short, or if
    two files have a tensor of one name."""
    tensors: dict[str, StoredTensor] = {}
    for file in checkpoint_files(folder, files):
        for tensor in tensors_in(file):
            if (other := tensors.setdefault(tensor.name, tensor)) is not tensor:
                raise ModelError(f"{file} and {other.file.name} both hold {shown(tensor.name)}: they are not one model")
    return list(tensors.values())


def tensors_in(file: Path) -> list[StoredTensor]:
    """Returns the tensors of a safetensors file. Raises `ModelError` if it is damaged or cut short."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = msgspec.json.decode(content.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
        return list(_placed(file, entries, 8 + size))
    except (OSError, ValueError, msgspec.MsgspecError, OverflowError, RecursionError) as error:
        fault = fault_or_pointer(file, first_line(error))
        raise ModelError(f"{file} is damaged or cut short ({fault}); fetch or copy it again") from error


class _Entry(Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def _placed(file: Path, entries: Mapping[str, _Entry], begin: int) -> Iterator[StoredTensor]:
    """Yields the tensors of a file, whose content starts at byte `begin`. Raises `ValueError` unless they fill it
    without holes and overlaps, as the library safetensors requires, and `OSError`."""
    end, total = 0, file.stat().st_size - begin
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        (first, last), num_bytes = entry.data_offsets, _num_bytes(entry.dtype, entry.shape)
        if first != end or last - first != num_bytes or last > total:
            raise ValueError(
                f"{shown(name)} has {num_bytes} bytes and lies at {first} to {last}; "
                f"those before it end at {end}, the file at {total}"
            )
        yield StoredTensor(name, entry.dtype, entry.shape, num_bytes, begin + first, file)
        end = last
    if end != total:
        raise ValueError(f"its tensors end at {end}, the file at {total}")


def _num_bytes(kind: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor. Raises `ValueError` for a type whose name does not say its bits."""
    digits = "".join(letter for letter in kind.partition("_")[0] if letter.isdigit())
    bits = _BITS.get(kind) or int(digits)
    return prod(shape) * bits // 8


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Returns the configuration in a folder. Raises `ModelError` if it cannot be read."""
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"), object_hook=_special_float)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        fault = fault_or_pointer(folder / name, first_line(error))
        raise ModelError(f"cannot read the configuration of {folder}: {fault}") from error
    return config


def _special_float(values: dict[str, Any]) -> Any:
    """Returns infinity for the object that transformers writes for it."""
    special = values.get("__float__") if len(values) == 1 else None
    return float(special) if special in ("Infinity", "-Infinity", "NaN") else values


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a configuration that is about text."""
    thinker = config.get("thinker_config")
    text = config.get("text_config") or (thinker.get("text_config") if isinstance(thinker, dict) else None)
    return text if isinstance(text, dict) else config


def number_type(asked: str, config: Mapping[str, Any]) -> str:
    """Returns the type of numbers of a model: the one that `--dtype` asks for, or that its `config.json` says. Raises
    `ModelError` for a type in which nothing computes."""
    if asked != "auto":
        return asked
    parts, usual = (config, text_config(config)), "bfloat16" if is_mxfp4(config) else "float32"
    dtype = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), usual)
    if dtype not in _DTYPES:
        raise ModelError(
            f"the configuration's dtype is {shown(repr(dtype))}, in which no model computes; choose another --dtype"
        )
    return str(dtype)


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is of a gpt-oss with experts in MXFP4, which plans take."""
    method = config.get("quantization_config")
    if not isinstance(method, dict) or method.get("quant_method") != MXFP4.lower():
        return False
    record = TYPES.get(str(config.get("model_type")))
    return record is not None and record.experts is not None and record.experts.published_mxfp4


def require_plain_weights(name: str, config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a checkpoint that was published quantised, unless it is a gpt-oss in MXFP4. The message
    names the `.gguf` file to take instead.
    `config` is its `config.json`, `name` its name on the hub or its folder."""
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not quantization or is_mxfp4(config):
        return
    raise quantised(name, quantization)


def quantised(name: str, quantization: Any, why: str = "") -> ModelError:
    """Returns the error for a checkpoint in quants. `quantization` is its `quantization_config`; `why` says why the
    quants of gpt-oss are not served."""
    method = (
        str(quantization.get("quant_method") or "an unknown method")
        if isinstance(quantization, dict)
        else "an unknown method"
    )
    owner, _, model = name.rpartition("/")
    file = f"{owner if owner and '/' not in owner else 'ORG'}/{_QUANTS_IN_NAME.sub('', model)}-GGUF"
    return ModelError(
        f"{name}: weights quantised with {method} are not served{why}; take a .gguf file of the model, such as that of "
        f"`diskprefix pull {file}`"
    )
