"""Reads the tokenizer of a model folder or a `.gguf` file, with its chat template."""

from __future__ import annotations

from pathlib import Path

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.gguf.file_tokenizer import make_tokenizer
from diskprefix.model.load.chat_template import fault_of_template
from diskprefix.model.load.folder_tokenizer import folder_tokenizer
from diskprefix.model.load.gguf_file import part_paths, read_tensors
from diskprefix.model.load.tokenizer import Tokenizer
from diskprefix.printable import first_line


def read_tokenizer(model: Path, template: str | None) -> Tokenizer:
    """Returns the tokenizer of a folder or a `.gguf` file. `template` replaces its chat template. Raises `ModelError`,
    and `SettingsError` for a bad template."""
    if model.is_file():
        try:
            tokenizer = make_tokenizer(read_tensors(part_paths(model))[0])
            tokenizer.name_or_path = str(model)
        except OSError as error:
            raise ModelError(f"cannot read {model}: {first_line(error)}") from error
    else:
        tokenizer = folder_tokenizer(model)
    _require_usable(tokenizer, model)
    if template is not None:
        tokenizer.chat_template = template
        if fault := fault_of_template(template):
            raise SettingsError(f"--chat-template: {fault}")
    return tokenizer


def _require_usable(tokenizer: Tokenizer, model: Path) -> None:
    """Raises `ModelError` for a tokenizer that was read and cannot encode."""
    try:
        tokenizer.backend_tokenizer.encode_batch(["a"])
    except BaseException as error:
        # A panic of the library is no `Exception`, and would end the thread that loads without a word.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelError(f"the tokenizer of {model} cannot be used: {first_line(error)}") from error
