"""The `config.json` of a published checkpoint, and quants that are not served. Nothing here needs torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.printable import first_line

_QUANTS_IN_NAME = re.compile(
    r"-(awq|gptq|fp8|int[48]|w\d+a\d+|4bit|8bit|mxfp4|nvfp4|bnb|quantized\.\w+)\b.*", re.IGNORECASE
)
"""The end of the name of a checkpoint in quants."""


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration in a folder. Raises `ModelError` if it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration of {folder}: {first_line(error)}") from error
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a configuration that is about text."""
    thinker = config.get("thinker_config")
    found = config.get("text_config") or (thinker.get("text_config") if isinstance(thinker, dict) else None)
    return found if isinstance(found, dict) else config


def require_plain_weights(name: str, config: Mapping[str, Any]) -> None:
    """Raises `ModelError` for a checkpoint that was published quantised, and names the `.gguf` file to take instead.
    `config` is its `config.json`, `name` its name on the hub or its folder."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not found:
        return
    method = str(found.get("quant_method") or "an unknown method") if isinstance(found, dict) else "an unknown method"
    owner, _, model = name.rpartition("/")
    file = f"{owner if owner and '/' not in owner else 'ORG'}/{_QUANTS_IN_NAME.sub('', model)}-GGUF"
    raise ModelError(
        f"{name}: weights quantised with {method} are not served; take a .gguf file of the model, such as that of "
        f"`diskprefix pull {file}`"
    )
