"""Reads the tokenizer of a model folder or a `.gguf` file, with its chat template."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import tokenizers

from diskprefix.errors import ModelError, SettingsError
from diskprefix.memo import Memo
from diskprefix.printable import first_line
from diskprefix.runtime.files.chat_template import fault_of_template
from diskprefix.runtime.files.folder_tokenizer import folder_tokenizer
from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer, parts_are_exact
from diskprefix.runtime.files.gguf.gguf_file import forget_headers, part_paths, read_tensors
from diskprefix.runtime.files.tokenizer import Tokenizer

_CHECKED = Memo("tokenizers", version=1)
"""By the digest of a `.gguf` file: the version of the library that made its tokenizer whole, and whether parts of its
vocabulary then gave the same tokens."""


def read_tokenizer(model: Path, template: str | None, digest: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a folder or a `.gguf` file. `template` replaces its chat template. With the `digest` of
    the model, its vocabulary may be in parts (see `check_parts`). Raises `ModelError`, and `SettingsError` for a bad
    template."""
    if model.is_file():
        try:
            in_parts = digest is not None and _CHECKED.get(digest) == [tokenizers.__version__, True]
            tokenizer = make_tokenizer(read_tensors(part_paths(model))[0], in_parts=in_parts)
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


def check_parts(model: Path, whole: Tokenizer, digest: str) -> None:
    """Notes whether later starts may make parts of the vocabulary of a `.gguf` file, whose tokenizer is `whole`. The
    file has been read before."""
    known = _CHECKED.get(digest)
    if not model.is_file() or (isinstance(known, list) and known[:1] == [tokenizers.__version__]):
        return
    with suppress(ModelError, OSError):
        header = read_tensors(part_paths(model))[0]
        _CHECKED.put(digest, [tokenizers.__version__, parts_are_exact(header, whole)])
    forget_headers()


def _require_usable(tokenizer: Tokenizer, model: Path) -> None:
    """Raises `ModelError` for a tokenizer that was read and cannot encode."""
    try:
        tokenizer.encode("a")
    except BaseException as error:
        # A panic of the library is no `Exception`, and would end the thread that loads without a word.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelError(f"the tokenizer of {model} cannot be used: {first_line(error)}") from error
