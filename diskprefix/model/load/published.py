"""The `config.json` of a published checkpoint: what it leaves out, and quants that are not served. Nothing here needs
torch."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.memo import Memo
from diskprefix.printable import first_line

_QUANTS_IN_NAME = re.compile(
    r"-(awq|gptq|fp8|int[48]|w\d+a\d+|4bit|8bit|mxfp4|nvfp4|bnb|quantized\.\w+)\b.*", re.IGNORECASE
)
"""The end of the name of a checkpoint in quants."""
_PROGRAM = "import json, sys; from {} import understood; print(json.dumps(understood(json.load(sys.stdin))))"
_understood = Memo("configurations", version=1)


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


def understood_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a `config.json` that is about text as transformers understands it: published ones lack what
    their class takes for granted, and may be in an older form. Returns it as it is if transformers knows no such model.

    The answer is remembered. A process that has not imported transformers stays small: it asks another one.
    """
    if "model_type" not in config:
        return text_config(config)
    text = json.dumps([config, version("transformers")], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    known = _understood.get(key)
    if isinstance(known, dict):
        return known
    found = understood(config) if "transformers" in sys.modules else _understood_elsewhere(config)
    if found is None:
        return text_config(config)
    _understood.put(key, found)
    return found


def understood(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the numbers and the kinds of layers of a `config.json`, with defaults, or None."""
    from transformers import AutoConfig

    try:
        text = text_config(AutoConfig.for_model(**config).to_dict())
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the load says so
        return None
    return {name: value for name, value in text.items() if isinstance(value, int) or name == "layer_types"}


def _understood_elsewhere(config: Mapping[str, Any]) -> dict[str, Any] | None:
    command = [sys.executable, "-P", "-c", _PROGRAM.format(__name__)]
    try:
        ended = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, check=True)
        found: dict[str, Any] | None = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
    return found
