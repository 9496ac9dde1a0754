"""Reads how to pool a model's embeddings: from the files of sentence-transformers (`modules.json`,
`1_Pooling/config.json`), or from the header of a `.gguf` file (`pooling_type`, `add_eos_token`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct

from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.runtime.files.gguf.metadata import Metadata

Pooling: TypeAlias = Literal["last", "mean"]

_OF_GGUF: dict[int, Pooling] = {1: "mean", 3: "last"}
_OF_MODULES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_PLAIN_MODULES = frozenset({"Transformer", "Normalize", "Pooling"})


class Purpose(Struct, frozen=True):
    """The pooling of a model. `end_id` is the token that ends each text. `problem` says why this pooling cannot be
    computed."""

    pooling: Pooling = "last"
    end_id: int | None = None
    problem: str | None = None

    def require(self) -> None:
        """Raises `InvalidRequest` if there is a problem."""
        if self.problem is not None:
            raise InvalidRequest.at("model", self.problem)


def read_purpose(origin: Path) -> Purpose:
    """Returns the purpose of the model in a folder or a `.gguf` file: pooling by the last token unless files say
    otherwise."""
    try:
        return _of_file(origin) if origin.is_file() else _of_folder(origin)
    except OSError as error:
        return Purpose(problem=f"one of its files cannot be read: {error.strerror}")
    except (ModelError, RecursionError, ValueError) as error:
        return Purpose(problem=f"its files cannot be read: {first_line(error)}")


def _of_file(file: Path) -> Purpose:
    metadata = Metadata(read_header(file), ())
    number = metadata.get("pooling_type", 0)
    problem = f"its file asks for pooling of type {number}" if number and number not in _OF_GGUF else None
    end_id = metadata.token("eos") if metadata.tokenizer_flag("add_eos_token", default=False) else None
    return Purpose(_OF_GGUF.get(number, "last"), end_id, problem)


def _of_folder(folder: Path) -> Purpose:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Purpose()
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError("its modules.json is not a list of objects")
    paths = {str(module.get("type")).rpartition(".")[2]: folder / str(module.get("path")) for module in modules}
    if unknown := sorted(paths.keys() - _PLAIN_MODULES):
        return Purpose(problem=f"its modules.json asks for {', '.join(unknown)}")
    if "Pooling" not in paths:
        return Purpose()
    modes = _modes(paths["Pooling"])
    if len(modes) == 1 and modes[0] in _OF_MODULES:
        return Purpose(_OF_MODULES[modes[0]])
    return Purpose(problem=f"its files ask for {' and '.join(modes) or 'no'} pooling")


def _modes(folder: Path) -> list[str]:
    """Returns the pooling modes in `config.json` of sentence-transformers 6 or an earlier version."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder.name}/config.json is not an object")
    mode = config.get("pooling_mode")
    if mode is not None:
        return list(map(str, mode)) if isinstance(mode, list) else [str(mode)]
    return [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True and "_mode_" in name]
