"""The options of the configurations of each type of model that has a plan.

`tests/runtime/plan/option_table.py` generates `option_defaults.json` from transformers' classes. Each type has
`options`, with letters for the types that a value may have, and a default; other `names` of options; `unread` options,
which no plan reads; the base of its rotary embedding (`theta`); and its `class`. Models with encoders have the type of
their `text` model. In `flat` configurations, the whole model has the options of the text model, and the text model
may tie the embeddings (`tied_by_text`). A type that transformers has no class of has `without_class`. Options that
change no number are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("option_defaults.json")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def has_type(kind: str) -> bool:
    """Returns whether a type is known."""
    return kind in _table()


def class_of(kind: str) -> str:
    """Returns the name of transformers' class for the text models of a type, "" if there is none."""
    return str(_table()[kind].get("class", ""))


def text_of(kind: str, named: Any) -> str:
    """Returns the type of the text decoder of a model with encoders; "" for a text model. `named` is the type that the
    configuration gives its text model."""
    entry = _table()[kind]
    return str(named or entry["text"]) if entry.get("any_text") else str(entry.get("text", ""))


def has_trait(kind: str, trait: str) -> bool:
    """Returns whether models of a type with encoders have a trait (`flat` or `tied_by_text`), or whether a type has
    `without_class`."""
    return trait in _table()[kind]


def levels_of(kind: str) -> Sequence[int]:
    """Returns the layers of an encoder whose outputs are added after the first layers of the decoder."""
    levels: Sequence[int] = _table()[kind].get("levels", ())
    return levels


@cache
def options_of(kind: str) -> Mapping[str, tuple[str, Any]]:
    """Returns the options of a type: letters for the types of their values, and the default."""
    options = _table()[kind]["options"].items()
    return {name: (letters, default) for key, default in options for name, _, letters in [key.partition(":")]}


def other_names(kind: str) -> Mapping[str, str]:
    """Returns other names of options, and the options that they name."""
    names: Mapping[str, str] = _table()[kind].get("names", {})
    return names


def unread_options(kind: str) -> Sequence[str]:
    """Returns the options that no plan reads."""
    names: str = _table()[kind].get("unread", "")
    return names.split()


def base_of(kind: str) -> float:
    """Returns the default base of the rotary embedding."""
    return float(_table()[kind].get("theta", 10000.0))


def is_declared(kind: str, name: str) -> bool:
    """Returns whether configurations of a type have an option of this name."""
    return name in options_of(kind) or name in other_names(kind)
