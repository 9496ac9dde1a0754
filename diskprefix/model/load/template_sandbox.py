"""The sandbox of chat templates. A template is code that comes with a model: Jinja2's sandbox hides the process.

A template may take time and memory without bound all the same: the daemon is `degraded` while one does. Only the
shortest ways to take all memory of the machine at once (`'x' * 2**31`) are closed.

Templates are written for transformers. So its tags, filters and functions are here, with the same results and errors
(`chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes, sandbox
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

_MOST = 1 << 24
"""Characters, items or bits that one multiplication may make."""
sandbox.MAX_RANGE = 1 << 15


class BoundedSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Raises `OverflowError` for a multiplication or a power that would make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        else:
            times, many = (left, right) if isinstance(left, int) else (right, left)
            size = times * len(many) if isinstance(times, int) and isinstance(many, str | list | tuple) else 0
        if size > _MOST:
            raise OverflowError("a template may not make as much in one operation")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The tag around what the model writes. transformers masks it for training; here it is what is inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Stands for `dict`, whose attributes a template must not reach."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Refuses attributes of Python's own."""

    def __init__(*args: Any, **items: Any) -> None:
        # A template may name an attribute `self`.
        attributes = dict(*args[1:], **items)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
