"""The pooling of a model's embeddings, as its own files say.

The files: those of sentence-transformers (`modules.json`, `1_Pooling/config.json`), or the header of a `.gguf` file
(`pooling_type`, `add_eos_token`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diskprefix.errors import InvalidRequest, ModelError
from diskprefix.model.load.gguf_header import read_header
from diskprefix.printable import first_line

Pooling: TypeAlias = Literal["last", "mean"]

_OF_GGUF: dict[int, Pooling] = {1: "mean", 3: "last"}
_OF_MODULES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_PLAIN_MODULES = frozenset({"Transformer", "Normalize", "Pooling"})


@dataclass(frozen=True)
class Purpose:
    """`end_id` ends each text whose tokenizer does not add it. `problem` says why what the files ask for cannot be
    computed."""

    pooling: Pooling = "last"
    end_id: int | None = None
    problem: str | None = None

    def require(self) -> None:
        """Raises `InvalidRequest` if there is a problem."""
        if self.problem is not None:
            raise InvalidRequest.at("model", self.problem)


def read_purpose(origin: Path) -> Purpose:
    """Returns the purpose of the model in a folder or a `.gguf` file. A decoder whose files say nothing is pooled by
    its last token."""
    try:
        return _of_file(origin) if origin.is_file() else _of_folder(origin)
    except OSError as error:
        return Purpose(problem=f"one of its files cannot be read: {error.strerror}")
    except (ModelError, RecursionError, ValueError) as error:
        return Purpose(problem=f"its files cannot be read: {first_line(error)}")


def _of_file(file: Path) -> Purpose:
    header = read_header(file)
    values, architecture = header.values, header.values.get("general.architecture")
    number = values.get(f"{architecture}.pooling_type", 0)
    problem = f"its file asks for pooling of type {number}" if number and number not in _OF_GGUF else None
    end_id = values.get("tokenizer.ggml.eos_token_id")
    return Purpose(
        pooling=_OF_GGUF.get(number, "last"),
        end_id=end_id if values.get("tokenizer.ggml.add_eos_token") and isinstance(end_id, int) else None,
        problem=problem,
    )


def _of_folder(folder: Path) -> Purpose:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Purpose()
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ValueError("its modules.json is not a list of objects")
    paths = {str(one.get("type")).rpartition(".")[2]: folder / str(one.get("path")) for one in modules}
    if unknown := sorted(paths.keys() - _PLAIN_MODULES):
        return Purpose(problem=f"its modules.json asks for {', '.join(unknown)}")
    if "Pooling" not in paths:
        return Purpose()
    modes = _modes(_config_in(paths["Pooling"]))
    if len(modes) == 1 and modes[0] in _OF_MODULES:
        return Purpose(_OF_MODULES[modes[0]])
    return Purpose(problem=f"its files ask for {' and '.join(modes) or 'no'} pooling")


def _config_in(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder.name}/config.json is not an object")
    return config


def _modes(config: dict[str, Any]) -> list[str]:
    """Returns the names of the pooling modes: of sentence-transformers 6, or of earlier versions."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(one) for one in mode] if isinstance(mode, list) else [str(mode)]
    return [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True and "_mode_" in name]
