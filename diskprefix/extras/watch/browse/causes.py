"""Names the cause of a difference between two prompts. Pure functions of their texts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diskprefix.chat.normalisers import NORMALISERS
from diskprefix.chat.template_input import common_chars

LATER = "put what changes behind what stays: into the last message, not into the system prompt"
_NAME = re.compile(r'"name": ?"([^"]*)"')
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?")
_VALUE = re.compile(
    r"\b(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
    r"|jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:tember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b|(?<![\w-])[\w-]*\d[\w.:,/-]*\b",
    re.IGNORECASE,
)
"""A day, a month, or a word with a digit."""
_FORMAT = {normaliser.name: normaliser for normaliser in NORMALISERS}
_CHANGES = {
    "billing-header": "a header line that the client changes in each request",
    "total-tokens": "a count of tokens that the client lowers in each request",
    "hoisted-nudges": "a nudge behind the system prompt",
    "clock": "a time of day that changes",
    "tool-order": "the same tools in another order",
    "schema-keys": "the keys of a tool's schema in another order",
}
"""The changes that a normaliser of this name undoes."""


@dataclass(frozen=True)
class Cause:
    """A cause for people. `kind` is a stable word for programs. `advice` is empty if there is nothing to do."""

    kind: str
    text: str
    advice: str = ""


def line_at(text: str, index: int) -> str:
    """Returns the line of `text` that contains the character `index`."""
    end = text.find("\n", index)
    return text[text.rfind("\n", 0, index) + 1 : end if end >= 0 else None]


def cause_between(new: str, old: str) -> Cause:
    """Returns the cause of the first difference between `new` and `old`, judged by its line and the text after it. The
    texts must differ."""
    at = common_chars(new, old)
    mine, theirs, new, old = line_at(new, at), line_at(old, at), new[at:], old[at:]
    has_same_words = _VALUE.sub("#", mine) == _VALUE.sub("#", theirs)
    # Each of the two lines is found later in the other text, or has the characters of the other one.
    is_moved = mine != theirs and bool(mine.strip() and theirs.strip()) and mine in old and theirs in new
    is_reordered = not has_same_words and (is_moved or (len(mine) > 2 and sorted(mine) == sorted(theirs)))
    if (name := _normaliser(mine, theirs, (new, old), is_reordered=is_reordered)) is not None:
        return Cause(name, _CHANGES[name], f"serve --normalise {name}=on undoes the change")
    if has_same_words:
        return Cause("value", "a date, a number or an id that changes", LATER)
    if is_reordered:
        return Cause("order", "the same words in another order", "keep the order of what the prompt is made of")
    if theirs and f"\n{theirs}\n" in f"{new}\n":
        return Cause("inserted", "text that was not there before", LATER)
    if mine and f"\n{mine}\n" in f"{old}\n":
        return Cause("removed", "text that is left out now", "keep it, or leave it out always")
    return Cause("text", "another text")


def _normaliser(mine: str, theirs: str, behind: tuple[str, str], *, is_reordered: bool) -> str | None:
    """Returns the name of the normaliser that makes two lines one, None if there is none."""

    def has(name: str, *texts: str) -> bool:
        return any(map(_FORMAT[name].is_in, texts))

    if has("billing-header", mine):
        return "billing-header"
    if has("total-tokens", mine, theirs):
        return "total-tokens"
    # The last line of the shorter prompt is there in both.
    if has("hoisted-nudges", *(text.lstrip("\n").partition("\n")[0] for text in behind)):
        return "hoisted-nudges"
    if has("clock", mine) and _TIME.sub("", mine) == _TIME.sub("", theirs):
        return "clock"
    if is_reordered and _NAME.findall(mine) != _NAME.findall(theirs):
        return "tool-order"
    return "schema-keys" if is_reordered and has("schema-keys", mine) else None
