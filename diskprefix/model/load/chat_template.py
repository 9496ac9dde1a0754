"""Chat templates: the text of `--chat-template`, and whether one parses."""

from __future__ import annotations

from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.model.load.template_sandbox import bound_templates
from diskprefix.printable import first_line


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


def fault_of_template(template: str) -> str | None:
    """Returns the line of a chat template that does not compile, and why; None if all does. Nothing of it is run."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils import chat_template_utils

    bound_templates()
    try:
        # The environment of another template, with the tags that transformers adds. `raw`: Python's source is enough.
        chat_template_utils._compile_jinja_template("").environment.compile(template, raw=True)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {first_line(error)}"
    except RecursionError:
        return "it is nested too deeply"
    return None
