"""The purpose of a model besides replies, as its own files say: embeddings with their pooling, or a reranker.

The files: those of sentence-transformers (`modules.json`, `1_Pooling/config.json`, `1_LogitScore/config.json`), or the
header of a `.gguf` file (`pooling_type`, `add_eos_token`, `tokenizer.chat_template.rerank`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diskprefix.errors import InvalidRequest
from diskprefix.model.load.gguf_header import read_header

Pooling: TypeAlias = Literal["last", "mean", "rank"]

_OF_GGUF: dict[int, Pooling] = {1: "mean", 3: "last", 4: "rank"}
_OF_MODULES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_PLAIN_MODULES = frozenset({"Transformer", "Normalize", "Pooling", "LogitScore"})


@dataclass(frozen=True)
class Purpose:
    """`end_id` ends each text whose tokenizer does not add it. `labels` are the tokens for yes and no of a reranker,
    and `template` its prompt with {query} and {document}; None if the files do not say. `problem` says why the pooling
    in the files cannot be computed."""

    pooling: Pooling = "last"
    end_id: int | None = None
    labels: tuple[int, int] | None = None
    template: str | None = None
    problem: str | None = None


@lru_cache(maxsize=8)
def purpose_of(origin: Path, setting: str) -> Purpose:
    """Returns the purpose of the model in a folder or a `.gguf` file; `setting` is `--pooling`. A decoder whose files
    say nothing is pooled by its last token. Raises `InvalidRequest` if its files ask for what is not computed here."""
    found = _of_file(origin) if origin.is_file() else _of_folder(origin)
    if setting != "auto":
        pooling: Pooling = "mean" if setting == "mean" else "rank" if setting == "rank" else "last"
        return replace(found, pooling=pooling)
    if found.problem is not None:
        raise InvalidRequest.at("model", f"{found.problem}; if that is wrong, start with --pooling last or mean")
    return found


def _of_file(file: Path) -> Purpose:
    values = read_header(file).values
    number = values.get(f"{values.get('general.architecture')}.pooling_type", 0)
    end_id, template = values.get("tokenizer.ggml.eos_token_id"), values.get("tokenizer.chat_template.rerank")
    return Purpose(
        pooling=_OF_GGUF.get(number, "last"),
        end_id=end_id if values.get("tokenizer.ggml.add_eos_token") and isinstance(end_id, int) else None,
        template=template if isinstance(template, str) else None,
        problem=f"its file asks for pooling of type {number}" if number and number not in _OF_GGUF else None,
    )


def _of_folder(folder: Path) -> Purpose:
    modules = _json(folder / "modules.json")
    if not isinstance(modules, list):
        return Purpose()
    paths = {str(one.get("type")).rpartition(".")[2]: str(one.get("path")) for one in modules if isinstance(one, dict)}
    if unknown := sorted(paths.keys() - _PLAIN_MODULES):
        return Purpose(problem=f"its modules.json asks for {', '.join(unknown)}")
    if "LogitScore" in paths:
        score = _json(folder / paths["LogitScore"] / "config.json")
        yes, no = (score.get(f"{name}_token_id") if isinstance(score, dict) else None for name in ("true", "false"))
        if isinstance(yes, int) and isinstance(no, int):
            return Purpose("rank", labels=(yes, no))
        return Purpose("rank", problem="its LogitScore does not name a token for yes and one for no")
    if "Pooling" not in paths:
        return Purpose()
    config = _json(folder / paths["Pooling"] / "config.json")
    modes = _modes(config) if isinstance(config, dict) else []
    if len(modes) == 1 and modes[0] in _OF_MODULES:
        return Purpose(_OF_MODULES[modes[0]])
    return Purpose(problem=f"its files ask for the pooling {' and '.join(modes) or 'of a file that is not there'}")


def _modes(config: dict[str, Any]) -> list[str]:
    """Returns the names of the pooling modes: of sentence-transformers 6, or of earlier versions."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [str(one) for one in mode] if isinstance(mode, list) else [str(mode)]
    return [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True and "_mode_" in name]


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
