"""Names the cause of a difference between two prompts. Pure functions of their texts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from diskprefix.chat.normalisers import NORMALISERS
from diskprefix.chat.template_input import common_chars

_WORD = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?")
_NAME = re.compile(r'"name": ?"([^"]*)"')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_DAYS = "mon|tue|wed|thu|fri|sat|sun|monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_MONTHS = (
    "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|january|february|march|april|june|july|august|september|october"
    "|november|december"
)
_DATE = re.compile(
    rf"\b\d{{4}}-\d{{1,2}}-\d{{1,2}}\b|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b|\b(?:{_DAYS}|{_MONTHS})\b", re.I
)
_FORMAT = {normaliser.name: normaliser for normaliser in NORMALISERS}


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
    mine, theirs = line_at(new, at), line_at(old, at)
    if _FORMAT["billing-header"].is_in(mine):
        return Cause("billing-header", "a header line that the client changes in each request", _on("billing-header"))
    if any(_FORMAT["total-tokens"].is_in(line) for line in (mine, theirs)):
        return Cause("total-tokens", "a count of tokens that the client lowers in each request", _on("total-tokens"))
    # A nudge behind the system prompt: the last line of the shorter one is there in both.
    if any(_FORMAT["hoisted-nudges"].is_in(text[at:].lstrip("\n").partition("\n")[0]) for text in (new, old)):
        return Cause("hoisted-nudges", "a nudge behind the system prompt", _on("hoisted-nudges"))
    if _masked(mine) == _masked(theirs):
        return _changed_value(mine, theirs)
    # Each of the two lines is found later in the other text, so they changed places.
    if _is_moved(new[at:], old[at:], mine, theirs):
        if _FORMAT["tool-order"].is_in(mine):
            return Cause("tool-order", "the same tools in another order", _on("tool-order"))
        return Cause("order", "the same lines in another order", "keep the order of what the prompt is made of")
    if Counter(mine) == Counter(theirs) and len(mine) > 2:
        if _NAME.findall(mine) != _NAME.findall(theirs):
            # Some templates write all tools on one line.
            return Cause("tool-order", "the same tools in another order", _on("tool-order"))
        if _FORMAT["schema-keys"].is_in(mine):
            return Cause("schema-keys", "the keys of a tool's schema in another order", _on("schema-keys"))
        return Cause("order", "the same words in another order", "keep the order of what the prompt is made of")
    if theirs and f"\n{theirs}\n" in f"{new[at:]}\n":
        return Cause("inserted", "text that was not there before", LATER)
    if mine and f"\n{mine}\n" in f"{old[at:]}\n":
        return Cause("removed", "text that is left out now", "keep it, or leave it out always")
    return Cause("text", "another text", "")


LATER = "put what changes behind what stays: into the last message, not into the system prompt"


def _on(name: str) -> str:
    return f"serve --normalise {name}=on undoes the change"


def _changed_value(mine: str, theirs: str) -> Cause:
    """Returns the cause for two lines that differ in numbers, dates or ids only."""
    if _FORMAT["clock"].is_in(mine) and _DATE.sub("", mine) != mine and _DATE.findall(mine) != _DATE.findall(theirs):
        return Cause("date", "a date that changes", LATER)
    if _FORMAT["clock"].is_in(mine):
        return Cause("clock", "a time of day that changes", _on("clock"))
    if _DATE.search(mine):
        return Cause("date", "a date that changes", LATER)
    if _NUMBER.sub("0", mine) == _NUMBER.sub("0", theirs):
        return Cause("number", "a number that changes", LATER)
    return Cause("id", "an id that changes in each request", LATER)


def _masked(line: str) -> str:
    """Returns a line without its dates, ids and numbers."""
    return _NUMBER.sub("0", _WORD.sub(_without_id, _DATE.sub("@", line))).replace("#", "0")


def _without_id(word: re.Match[str]) -> str:
    """Returns `#` for an id: parts of four hex digits and more, or a digit and seven more characters."""
    text = word[0]
    first = next((index for index, char in enumerate(text) if char.isdigit()), len(text))
    is_hex = first < len(text) and all(len(part) >= 4 and set(part) <= _HEX_DIGITS for part in text.split("-"))
    return "#" if is_hex or len(text) - first >= 8 else text


def _is_moved(new: str, old: str, mine: str, theirs: str) -> bool:
    if mine == theirs or not mine.strip() or not theirs.strip():
        return False
    # The template may have added a marker after the last line.
    return mine in old and theirs in new
