"""Chat templates: the text of `--chat-template`, and whether one parses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diskprefix.errors import SettingsError
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
