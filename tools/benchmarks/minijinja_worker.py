"""Renders chat templates with minijinja: a request and its answer are a line of JSON each.

Runs in an environment of its own. Blocks are trimmed, methods of Python's types work, and `tojson`, `raise_exception`
and `strftime_now` are transformers', as servers in Rust set minijinja up for chat templates.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

from minijinja import Environment


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    functions = {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, filters={"tojson": _tojson}, globals=functions, auto_escape_callback=_none
    )
    source = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["source"] != source:
                environment.add_template("chat", request["source"])
                source = request["source"]
            answer = {"text": environment.render_template("chat", **request["values"])}
        except Exception as error:  # noqa: BLE001 (a template raises anything)
            source = None
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def _none(_name: str) -> None:
    return None


if __name__ == "__main__":
    main()
