"""The sandbox of chat templates, with bounds. A template is code that comes with a model. Jinja2's sandbox hides the
process from it, but one expression (`'x' * 2**31`) could take all memory of the machine.

Only what one operation makes is bounded. A template whose loops do not end makes the daemon `degraded`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2 import Template, sandbox

_MOST = 1 << 24
"""Characters, items or bits that one operation may make."""
_MOST_WIDTH = 1 << 10
_MOST_RANGE = 1 << 15
_WIDE = re.compile(r"%(?:\([^()%]*\))?[-#0 +.\d]*(?:\*|\d{5})")
_WIDE_FIELD = re.compile(r"\{[^{}:]*:[^{}]*(?:\{|\d{5})")
"""In texts to format with `%` and with `format`: a width of five digits and more, or one that a value gives."""
_FILTERS = ("batch", "center", "indent", "join", "slice", "tojson", "wordwrap")
"""Filters with widths and separators."""


class BoundedSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Raises `OverflowError` for an operation, a filter or a method that would make much of little."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def from_string(self, source: Any, *args: Any, **options: Any) -> Template:
        # Not earlier: transformers gives the environment filters of its own.
        checks = dict.fromkeys(_FILTERS, _require_narrow) | {"format": _require_format, "replace": _require_replaced}
        self.filters |= {name: _checked(self.filters[name], check) for name, check in checks.items()}
        return super().from_string(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _require_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
        elif isinstance(left, int) or isinstance(right, int):
            times, many = (left, right) if isinstance(left, int) else (right, left)
            _require(times * len(many) if isinstance(many, str | list | tuple) else 0)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        if (wrapped := super().wrap_str_format(value)) is not None:
            _require_format(value.__self__, wide=_WIDE_FIELD)
        return wrapped

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        match getattr(function, "__self__", None), getattr(function, "__name__", ""):
            case str() as text, "replace":
                _require_replaced(text, *args, **options)
            case str() as text, "join":
                _require_narrow(None, text)
            case str() | int(), "center" | "ljust" | "rjust" | "zfill" | "expandtabs" | "to_bytes":
                _require_narrow(None, *args, **options)
        return super().call(context, function, *args, **options)


def bound_templates() -> None:
    """Has transformers render chat templates in the bounded sandbox, with shorter ranges."""
    from transformers.utils import chat_template_utils

    sandbox.MAX_RANGE = _MOST_RANGE
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Returns a filter whose value and arguments are checked first."""
    # Some get the environment, or the context of the evaluation, before the value.
    start = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        check(*args[start:], **options)
        return function(*args, **options)

    return bounded


def _require(number: int) -> None:
    if number > _MOST:
        raise OverflowError("a template may not make as much in one operation")


def _require_narrow(_value: Any, *args: Any, **options: Any) -> None:
    for one in (*args, *options.values()):
        if (one if isinstance(one, int) else len(one) if isinstance(one, str) else 0) > _MOST_WIDTH:
            raise OverflowError(f"a template may have no width or separator above {_MOST_WIDTH}")


def _require_format(text: Any, *_args: Any, wide: re.Pattern[str] = _WIDE, **_options: Any) -> None:
    if isinstance(text, str) and wide.search(text):
        raise OverflowError("a template may have no width of more than four digits, nor one that a value gives")


def _require_replaced(text: Any, old: Any = "", new: Any = "", *_args: Any, **_options: Any) -> None:
    _require(str(text).count(str(old)) * len(str(new)))
