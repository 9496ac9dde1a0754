"""Reads the tokenizer of a model folder or a `.gguf` file, with its chat template."""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.gguf.file_tokenizer import make_tokenizer
from diskprefix.model.load.chat_template import fault_of_template
from diskprefix.model.load.folder_tokenizer import folder_tokenizer
from diskprefix.model.load.gguf_file import file_stamp, part_paths, read_tensors
from diskprefix.model.load.tokenizer import Tokenizer
from diskprefix.printable import first_line

_ahead: dict[Hashable, Tokenizer] = {}
"""Tokenizers that a spare process read before its turn, by template and files."""


def read_tokenizer(model: Path, template: str | None) -> Tokenizer:
    """Returns the tokenizer of a folder or a `.gguf` file: the one that was read ahead, unless a file was written
    since. `template` replaces its chat template. Raises `ModelError`, and `SettingsError` for a bad template."""
    tokenizer = None
    with suppress(OSError):
        tokenizer = _ahead.pop(_stamps(model, template), None)
    return _read(model, template) if tokenizer is None else tokenizer


def read_tokenizer_ahead(model: Path, template: str | None) -> None:
    """Reads a tokenizer for the next `read_tokenizer`. Raises the same errors, and `OSError`."""
    # First: a file may be written while it is read.
    key = _stamps(model, template)
    _ahead[key] = _read(model, template)


def _stamps(model: Path, template: str | None) -> Hashable:
    paths = [model] if model.is_file() else [Path(entry.path) for entry in os.scandir(model)]
    return template, tuple(sorted((str(path), *file_stamp(path)) for path in paths))


def _read(model: Path, template: str | None) -> Tokenizer:
    if model.is_file():
        try:
            tokenizer = make_tokenizer(read_tensors(part_paths(model))[0])
        except OSError as error:
            raise ModelError(f"cannot read {model}: {first_line(error)}") from error
    else:
        tokenizer = folder_tokenizer(model)
    if template is not None:
        tokenizer.chat_template = template
        if fault := fault_of_template(template):
            raise SettingsError(f"--chat-template: {fault}")
    return tokenizer
