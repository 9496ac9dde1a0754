"""What msgspec finds wrong with a line of JSON, in words for who wrote it."""

from __future__ import annotations

import re

import msgspec

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "int | float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most"}

_PLACE = re.compile(r"(?P<message>.*) - at `\$\.?(?P<place>.*)`")
_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<found>[^`]+)`")
_BOUND = re.compile(r"Expected `[^`]+` (?P<how>>=|<=) (?P<limit>\S+)")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]+)`")
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)")


def plain_words(error: Exception) -> str:
    """`key: what is wrong` for an error of `msgspec.json.decode`; of other errors, what they say themselves."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not valid UTF-8"
    if not isinstance(error, msgspec.DecodeError):
        return str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"it is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
    placed = _PLACE.fullmatch(str(error))
    message, place = placed.group("message", "place") if placed else (str(error), "")
    if missing := _MISSING.fullmatch(message):
        return f"{place}.{missing['key']}: is missing".lstrip(".")
    return f"{place}: {_explained(message)}" if place else f"it {_explained(message)}"


def _explained(message: str) -> str:
    if wrong_type := _TYPE.fullmatch(message):
        return f"must be {_named(wrong_type['wanted'])}, not {_named(wrong_type['found'])}"
    if bound := _BOUND.fullmatch(message):
        return f"must be {_BOUNDS[bound['how']]} {bound['limit']}"
    if choice := _CHOICE.fullmatch(message):
        return f"{choice['value']} is not one of the words that may stand here"
    return f"{message[:1].lower()}{message[1:]}"


def _named(types: str) -> str:
    """`int | null` → `a whole number or null`."""
    return _TYPES.get(types) or " or ".join(_TYPES.get(name, name) for name in types.split(" | "))
