"""The tokenizer of a model folder or a `.gguf` file, with its chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load.chat_template import fault_of_template
from diskprefix.model.load.gguf_file import file_stamp, part_paths, read_tensors
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ahead: dict[Hashable, PreTrainedTokenizerFast] = {}
"""Tokenizers that a spare process read before its turn, by template and files."""


def read_tokenizer(model: Path, template: str | None) -> PreTrainedTokenizerFast:
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


def _read(model: Path, template: str | None) -> PreTrainedTokenizerFast:
    if model.is_file():
        from diskprefix.model.gguf.file_tokenizer import make_tokenizer

        try:
            tokenizer = make_tokenizer(read_tensors(part_paths(model))[0])
        except OSError as error:
            raise ModelError(f"cannot read {model}: {first_line(error)}") from error
    else:
        tokenizer = _of_folder(model)
    if template is not None:
        tokenizer.chat_template = template
        if fault := fault_of_template(template):
            raise SettingsError(f"--chat-template: {fault}")
    elif not tokenizer.chat_template and model.is_dir():
        tokenizer.chat_template = _processors_template(model)
    return tokenizer


def _of_folder(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = first_line(error) if (folder / "tokenizer.json").is_file() else "there is no tokenizer.json"
        raise ModelError(f"cannot read the tokenizer of {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder} has no fast tokenizer (tokenizer.json), which diskprefix needs")
    return tokenizer


def _processors_template(folder: Path) -> str | None:
    """Returns the chat template of an older multimodal model, from a file that only processors read."""
    try:
        content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None
