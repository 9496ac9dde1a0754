"""Chat templates: the text of `--chat-template`, whether one parses, and what one writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskprefix.errors import SettingsError
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from jinja2 import Template

    from diskprefix.runtime.files.template_sandbox import BoundedSandbox

SET_BY_THE_DAEMON = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"),
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs", "kwargs"),
    }
)
"""Variables that no client may set: variables of templates, and other arguments of transformers' function."""
_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands after the last message while it is rendered. The blank shows whether the template strips messages."""


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
    """Returns the line of a chat template that does not compile, and why; None if all does. It writes nothing."""
    from jinja2 import TemplateSyntaxError

    try:
        _compiled(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {first_line(error)}"
    except RecursionError:
        return "it is nested too deeply"
    return None


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text that a template writes, as transformers' `apply_chat_template` does. `variables` are all others
    that the template sees. Raises `ValueError` for messages that it cannot take, and whatever the template raises."""
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    listed = [_for_template(message) for message in messages]
    end = _mark_end(listed[-1], template) if continue_final_message else ""
    given = {"messages": listed, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    text = _environment().write(_compiled(template), {**(variables or {}), **given})
    return _until_end(text, end) if continue_final_message else text


@cache
def _environment() -> BoundedSandbox:
    from diskprefix.runtime.files.template_sandbox import BoundedSandbox

    return BoundedSandbox()


@cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without empty fields, and with its reasoning under the names that templates know."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next(
        (present[name] for name in ("reasoning_content", "thinking", "reasoning") if name in present), None
    )
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any], template: str) -> str:
    """Puts the mark after the last text of a message. Returns that text."""
    if (content := message.get("content")) is None:
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in template:
        raise ValueError(
            'continue_final_message is set to "content" but this is not an accepted field in the chat_template'
        )
    if not isinstance(content, list | tuple):
        message["content"] = content + _END
        return str(content)
    last = next((number for number in reversed(range(len(content))) if "text" in content[number]), None)
    if last is None:
        raise ValueError(
            "continue_final_message is set but we could not find any text to continue in the final message!"
        )
    text = str(content[last]["text"])
    message["content"] = [*content[:last], {**content[last], "text": text + _END}, *content[last + 1 :]]
    return text


def _until_end(text: str, end: str) -> str:
    """Returns the text up to the mark. `end` is the text before that."""
    at = text.rfind(_END.strip())
    if at < 0 or end.strip() not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after "
            "applying the chat template! This can happen if the chat template deletes portions of "
            "the final message. Please verify the chat template and final message in your chat to "
            "ensure they are compatible."
            f"Final message to continue: {end.strip()}\nRendered chat:\n{text}"
        )
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()
