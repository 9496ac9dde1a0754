"""The sandbox of chat templates. A template is code that comes with a model: Jinja2's sandbox hides the process.

A render ends after `LIMIT_S`, and where nobody waits for it: each pass of a loop and each call of a macro looks at the
clock. A template may take memory without bound all the same: only the shortest ways to take all of the machine's at
once (`'x' * 2**31`) are closed.

Templates are written for transformers. So its tags, filters and functions are here, with the same results and errors
(`chat_template_utils.py`).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, sandbox
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from diskprefix.thread_work import CHAT_TEMPLATE, begin_step

LIMIT_S = 30.0
"""Seconds that a render may take: many times the duration for the largest conversation."""
_MOST = 1 << 24
"""Characters, items or bits that one multiplication may make."""
sandbox.MAX_RANGE = 1 << 15


class BoundedSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Raises `OverflowError` for a multiplication or a power that would make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Limit, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def write(self, template: Template, values: Mapping[str, Any]) -> str:
        """Returns the output of a template of this sandbox. Raises `TemplateError` after `LIMIT_S`, `NobodyWaits`, and
        whatever the template raises."""
        _of_thread.began_at = time.monotonic()
        _of_thread.ends_at = min(_of_thread.began_at + LIMIT_S, getattr(_of_thread, "all_end_at", math.inf))
        try:
            return template.render(values)
        finally:
            _of_thread.ends_at = math.inf

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        limit: Any = self.extensions[_Limit.identifier]
        repeated: Any
        for repeated in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            repeated.body.insert(0, limit.node(repeated.lineno))
        return template

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
    """The tag around the model's output. transformers masks it for training; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


_of_thread = threading.local()


@contextmanager
def renders_end_after(seconds: float) -> Iterator[None]:
    """Ends renders of this thread that last longer than a number of seconds, and renders that begin later."""
    _of_thread.all_end_at = time.monotonic() + seconds
    try:
        yield
    finally:
        _of_thread.all_end_at = math.inf


class _Limit(Extension):
    """Checks the clock wherever a template may repeat something, because Jinja2 has no limit."""

    def node(self, line: int) -> nodes.Node:
        return nodes.ExprStmt(self.call_method("_look")).set_lineno(line)

    def _look(self) -> None:
        begin_step(CHAT_TEMPLATE)
        if (now := time.monotonic()) > getattr(_of_thread, "ends_at", math.inf):
            took_s = now - _of_thread.began_at
            raise TemplateError(f"it was ended after {took_s:.0f} s, and might never have ended by itself")


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
