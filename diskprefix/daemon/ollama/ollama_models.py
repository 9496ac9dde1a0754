"""Models in the form of Ollama's lists, made from the cards of `/v1/models`. The router imports it: no pydantic."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from diskprefix.daemon.catalogue.catalogue import file_bytes
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.runtime.files.gguf.gguf_file import QUANT, model_stem, read_tensors
from diskprefix.units import parse_duration
from diskprefix.version import __version__

Json: TypeAlias = dict[str, Any]

VERSION = {"version": "0.13.0", "diskprefix": __version__}
"""The release of Ollama whose API this is: clients refuse older ones."""
INSTEAD = {
    "pull": "fetch a model with `diskprefix pull NAME`",
    "push": "models are not published from here",
    "create": "the settings of a model are those of `diskprefix serve` and of models.toml",
    "copy": "give the model an alias in models.toml",
    "delete": "remove a model with `diskprefix rm NAME`",
    "blobs": "serve a file with `diskprefix serve --model FILE`",
    "embeddings": "call /api/embed",
}
_CAPABILITIES = {"completion": "completion", "tool_use": "tools", "reasoning": "thinking", "vision": "vision"}
_FOR_EVER_S = 100 * 365 * 86400.0
_BETWEEN = re.compile(r"(?<=[a-z])(?=[\d.])", re.ASCII)
"""The position between the parts of a duration in Go's form: `1h30m`."""


def keep_alive_seconds(value: str | float) -> float:
    """Returns the seconds of a `keep_alive`, infinite if it is negative. Ollama's Go clients send `1h30m0s`. Raises
    `InvalidRequest`."""
    text = str(value)
    unsigned = text[1:] if text[1:2].isdigit() and text[0] == "-" else text
    try:
        seconds = float(unsigned)
    except ValueError:
        try:
            seconds = sum(parse_duration(part, param="keep_alive") for part in _BETWEEN.split(unsigned))
        except DiskPrefixError as error:
            raise InvalidRequest(error.message, param="keep_alive") from error
    return math.inf if text != unsigned or not seconds >= 0 else seconds


def require_served(path: str) -> None:
    """Raises `InvalidRequest` with advice for a route of Ollama that is refused."""
    route = path.removeprefix("/api/").partition("/")[0]
    if path.startswith("/api/") and route in INSTEAD:
        raise InvalidRequest(f"/api/{route} is not served here; {INSTEAD[route]}")


def facts_of(path: Path | None) -> Json:
    """Returns the fields of `/api/tags` for a model's folder or `.gguf` file. Reads headers only, so the digest is not
    of the content. Unreadable fields are empty."""
    family, label, quant, size, written_at = "", "", "", 0, 0.0
    is_file = path is not None and path.is_file()
    with suppress(AttributeError, DiskPrefixError, OSError, RecursionError, ValueError):
        if path is None:
            raise FileNotFoundError
        written_at = path.stat().st_mtime
        if is_file:
            header, form = read_tensors([path])[0], QUANT.search(model_stem(path))
            family, label = header.shown("general.architecture"), header.shown("general.size_label")
            quant = form[1].upper() if form else ""
        else:
            family = str(json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
        size = file_bytes(path)
    details: Json = {"parent_model": "", "format": "gguf" if is_file else "safetensors", "family": family}
    details |= {"families": [family] if family else [], "parameter_size": label, "quantization_level": quant}
    digest = hashlib.sha256(f"{path} {size} {written_at}".encode()).hexdigest()
    return {"modified_at": utc(written_at), "size": size, "digest": digest, "details": details}


def tag(card: Mapping[str, Any], facts: Json) -> Json:
    """Returns a model as `/api/tags` lists it."""
    return {"name": card["id"], "model": card["id"]} | facts


def running(card: Mapping[str, Any], facts: Json, num_bytes: int, idle_s: float = _FOR_EVER_S) -> Json:
    """Returns a model as `/api/ps` lists it: with its bytes of memory, and when it is unloaded, in `idle_s` seconds."""
    in_memory = {"size": num_bytes, "size_vram": 0, "expires_at": utc(time.time() + min(idle_s, _FOR_EVER_S))}
    return tag(card, facts) | in_memory | {"context_length": card.get("context_length", 0)}


def shown_model(card: Mapping[str, Any], facts: Json) -> Json:
    """Returns the answer of `/api/show`."""
    family = facts["details"]["family"]
    info = {"general.architecture": family, "general.basename": card["id"]}
    return {
        "modified_at": facts["modified_at"],
        "details": facts["details"],
        "parameters": "\n".join(_parameter_lines(card.get("default_parameters", {}))),
        "template": "",
        "model_info": info | {f"{family}.context_length": card.get("context_length", 0)},
        "capabilities": [_CAPABILITIES[name] for name in card.get("capabilities", ()) if name in _CAPABILITIES],
    }


def _parameter_lines(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yields the parameters as Ollama shows them: name and value, a line for each stop string."""
    for name, value in parameters.items():
        own = "repeat_penalty" if name == "repetition_penalty" else name
        for text in map(json.dumps, value) if isinstance(value, list) else [f"{value:g}"]:
            yield f"{own:<30} {text}"


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
