"""The sandbox of chat templates. A template is code that comes with a model: Jinja2's sandbox hides the process.

A template may take time and memory without bound all the same: the daemon is `degraded` while one does. Only the
shortest ways to take all memory of the machine at once (`'x' * 2**31`) are closed.
"""

from __future__ import annotations

from typing import Any

from jinja2 import sandbox

_MOST = 1 << 24
"""Characters, items or bits that one multiplication may make."""
_MOST_RANGE = 1 << 15


class BoundedSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Raises `OverflowError` for a multiplication or a power that would make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        else:
            times, many = (left, right) if isinstance(left, int) else (right, left)
            size = times * len(many) if isinstance(times, int) and isinstance(many, str | list | tuple) else 0
        if size > _MOST:
            raise OverflowError("a template may not make as much in one operation")
        return super().call_binop(context, operator, left, right)


def bound_templates() -> None:
    """Has transformers render chat templates in the bounded sandbox, with shorter ranges."""
    from transformers.utils import chat_template_utils

    sandbox.MAX_RANGE = _MOST_RANGE
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox
