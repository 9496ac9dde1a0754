"""The row of a model in lists: its files, its quantization, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diskprefix.daemon.catalogue.catalogue import KnownModel, file_bytes, needs
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.fit import Fit, fitted
from diskprefix.runtime.files.gguf.gguf_file import QUANT, model_stem, part_paths, read_tensors
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS


def fit_of(settings: Settings) -> Fit | None:
    """Returns how the model of the settings fits into the free memory, None if its needs are not known."""
    needed = needs(settings)
    return None if needed is None else fitted(needed, available_ram_bytes(), settings.kv_memory)


def row_of(known: KnownModel) -> dict[str, Any]:
    """Returns the row of a model in `list` and `show`, for JSON."""
    row: dict[str, Any] = {
        "name": known.name,
        "aliases": known.aliases,
        "origin": known.origin,
        "source": known.source,
        "path": None if known.path is None else str(known.path),
        "pin": known.pin,
        "idle_unload_s": known.idle_unload_s,
        **dict.fromkeys(("kind", "file_bytes", "needed_bytes", "context", "fits", "problem")),
    }
    try:
        fit = fit_of(known.settings)
        if fit is None or known.path is None:
            return row
        num_bytes = file_bytes(known.path)
    except (ModelError, OSError) as error:
        return row | {"problem": first_line(error)}
    return row | {
        "kind": _kind(known.path, fit.needs.weights),
        "file_bytes": num_bytes,
        "needed_bytes": fit.needed_bytes,
        "context": fit.context,
        "fits": fit.is_enough,
    }


def _kind(path: Path, weights: Mapping[str, int]) -> str | None:
    """Returns the quantization that a file's name or header says, or else the form of most weights: a Q4_K_M has
    matrices in several forms."""
    if path.is_file():
        if named := QUANT.search(model_stem(path)):
            return named[1].upper()
        from gguf import LlamaFileType

        with suppress(ValueError):
            header, _ = read_tensors(part_paths(path))
            return str(LlamaFileType(header.values.get("general.file_type")).name).removeprefix("MOSTLY_")
    return max(weights, key=lambda form: (form in FILE_FORMS, weights[form]), default=None)
