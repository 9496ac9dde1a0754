"""The tokenizer of a model folder, with its chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load.gguf_file import file_stamp
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ahead: dict[Hashable, PreTrainedTokenizerFast] = {}
"""Tokenizers that a spare process read before its turn, by template and the files of the folder."""


def read_template(path: Path | None) -> str | None:
    """Returns the text of `--chat-template`. Raises `SettingsError`."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--chat-template: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--chat-template: {path} is not UTF-8 text") from error


def read_tokenizer(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a folder: the one that was read ahead, unless a file of the folder was written since.
    `template` replaces its chat template. Raises `ModelError`, and `SettingsError` for a bad template."""
    tokenizer = None
    with suppress(OSError):
        tokenizer = _ahead.pop(_stamps(folder, template), None)
    return _read(folder, template) if tokenizer is None else tokenizer


def read_tokenizer_ahead(folder: Path, template: str | None) -> None:
    """Reads a tokenizer for the next `read_tokenizer`. Raises the same errors, and `OSError`."""
    # First: a file may be written while it is read.
    key = _stamps(folder, template)
    _ahead[key] = _read(folder, template)


def _stamps(folder: Path, template: str | None) -> Hashable:
    return template, tuple(sorted((entry.path, *file_stamp(Path(entry.path))) for entry in os.scandir(folder)))


def _read(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = first_line(error) if (folder / "tokenizer.json").is_file() else "there is no tokenizer.json"
        raise ModelError(f"cannot read the tokenizer of {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder} has no fast tokenizer (tokenizer.json), which diskprefix needs")
    if template is not None:
        _override_template(tokenizer, template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = _processors_template(folder)
    return tokenizer


def _override_template(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    if fault := fault_of_template(tokenizer):
        raise SettingsError(f"--chat-template: {fault}")


def fault_of_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Returns the line of the chat template that does not parse, and why; None if all does."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {first_line(error)}"
    except (TemplateError, TypeError, ValueError):
        pass  # The template compiles. It may need other messages than those of this trial.
    return None


def _processors_template(folder: Path) -> str | None:
    """Returns the chat template of an older multimodal model, from a file that only processors read."""
    try:
        content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None
