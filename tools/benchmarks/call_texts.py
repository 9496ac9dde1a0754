"""A call as the chat template of each family writes it, made from the family's description."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diskprefix.daemon.chat.output.call_values import BARE_KEY
from diskprefix.daemon.chat.output.families import Family

_PLACEHOLDERS = re.compile("NAME|ARGUMENTS|INDEX|IS_TEXT|TYPE|KEY|VALUE")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TYPES |= {type(None): "null"}


def json_type(value: object) -> str:
    """Returns the type that a JSON schema names for `value`."""
    return _TYPES[type(value)]


def call_text(family: Family, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns the text of one or more calls: name and arguments."""
    texts = [_call(family, family.whole_call, index, *call) for index, call in enumerate(calls)]
    before, after = (_filled(text, {"NAME": calls[0][0]}) for text in (family.before, family.after))
    return f"{before}{family.between.join(texts)}{after}"


def arguments_text(family: Family, arguments: Mapping[str, Any]) -> str:
    """Returns the arguments in the syntax of the family."""
    if family.body in ("objects", "json"):
        return as_json(arguments)
    items = sorted(arguments.items()) if family.body == "braces" else arguments.items()
    texts = [argument_text(family, key, value) for key, value in items]
    if family.body == "braces":
        return f"{{{','.join(texts)}}}"
    return ", ".join(texts) if family.body == "python" else "".join(texts)


def argument_text(family: Family, key: str, value: Any) -> str:
    """Returns one argument of a family whose arguments are not JSON."""
    values = {"KEY": key, "VALUE": value_text(family, value), "TYPE": json_type(value).replace("integer", "number")}
    if family.body == "braces":
        values["KEY"] = _bare(key)
    return _filled(family.argument, values | {"IS_TEXT": str(isinstance(value, str)).lower()})


def value_text(family: Family, value: Any) -> str:
    """Returns a value in the syntax of the family."""
    if family.body == "braces":
        return _in_braces(family.quotes, value)
    if family.body == "python":
        return _in_python(value)
    if family.body == "elements":
        return _in_elements(family.quotes, value)
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(family: Family, template: str, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    named = as_json(name) if family.body == "objects" else name
    values = {"NAME": named, "ARGUMENTS": arguments_text(family, arguments), "INDEX": str(index)}
    return _filled(template, values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDERS.sub(lambda match: values.get(match[0], match[0]), template)


def _bare(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else as_json(key)


def _in_braces(quotes: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quotes}{value}{quotes}"
    if isinstance(value, dict):
        members = (
            f"{key if BARE_KEY.fullmatch(key) else as_json(key)}:{_in_braces(quotes, value[key])}" for key in value
        )
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(_in_braces(quotes, each) for each in value)}]"
    return as_json(value)


def _in_python(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(key)}: {_in_python(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_python, value))}]"
    return repr(value) if value is None or isinstance(value, bool) else as_json(value)


def _in_elements(prefix: str, value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{prefix}<{key}>{_in_elements(prefix, each)}{prefix}</{key}>" for key, each in value.items())
    if isinstance(value, list):
        return "".join(f"{prefix}<item>{_in_elements(prefix, each)}{prefix}</item>" for each in value)
    return value if isinstance(value, str) else as_json(value)
