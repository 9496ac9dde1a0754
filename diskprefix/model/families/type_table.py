"""The options of the configurations of each type of model that has a plan.

`option_defaults.json` is made of transformers' classes by `tests/model/option_table.py`. Each type has `options`, with
letters for the types that a value may have, and a default; other `names` of options; `unread` ones, which no plan
knows; the base of its positions (`theta`); and its `class`. Models with encoders have the type of their `text`, whose
options stand among theirs in `flat` configurations, and may tie the embeddings (`tied_by_text`). Options that change no
number are missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear minicpm3 mistral4 youtu"
"""The types with latent attention."""
_OF_ALL = ("chunk_size_feed_forward", "is_encoder_decoder", "tie_word_embeddings")
"""What transformers' common class of configurations has, so all types have it."""
_WITH_HEAD_DIM = """
    bamba bitnet cohere dots1 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo glm4_moe granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared lfm2 lfm2_moe nanochat olmo olmo2 olmo3 olmo_hybrid
    olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3_moe smollm3 starcoder2
"""
"""Types whose class does not declare `head_dim`, and whose modules read it all the same. Published configurations have
it, such as those of Qwen3-30B-A3B (128 in a width of 2,048 with 32 heads) and GLM-4.5."""
TABLE = Path(__file__).with_name("option_defaults.json")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def has_type(kind: str) -> bool:
    """Returns whether a type is known."""
    return kind in _table()


def class_of(kind: str) -> str:
    """Returns the name of transformers' class of models of a type, "" without one for text."""
    return str(_table()[kind].get("class", ""))


def text_of(kind: str, named: Any) -> str:
    """Returns the type of the decoder of a model with encoders, whose part about text is of the type `named`; "" for a
    model of text."""
    entry = _table()[kind]
    return str(named or entry["text"]) if entry.get("any_text") else str(entry.get("text", ""))


def has_trait(kind: str, trait: str) -> bool:
    """Returns whether models with encoders of a type are `flat` or `tied_by_text`."""
    return trait in _table()[kind]


def levels_of(kind: str) -> Sequence[int]:
    """Returns the layers of an encoder whose output is added behind the first layers of the decoder."""
    found: Sequence[int] = _table()[kind].get("levels", ())
    return found


@cache
def options_of(kind: str) -> Mapping[str, tuple[str, Any]]:
    """Returns the options of a type: letters for the types of their values, and the default."""
    options = _table()[kind]["options"].items()
    return {name: (letters, default) for key, default in options for name, _, letters in [key.partition(":")]}


def other_names(kind: str) -> Mapping[str, str]:
    """Returns other names of options."""
    found: Mapping[str, str] = _table()[kind].get("names", {})
    return found


def read_undeclared(kind: str) -> Sequence[str]:
    """Returns options that the class of a type does not declare, and that the code of its modules reads."""
    return (*_OF_ALL, "head_dim") if kind in _WITH_HEAD_DIM.split() else _OF_ALL


def unread_options(kind: str) -> Sequence[str]:
    """Returns the options that no plan knows."""
    found: str = _table()[kind].get("unread", "")
    return found.split()


def base_of(kind: str) -> float:
    """Returns the base of rotary positions where a configuration says none."""
    return float(_table()[kind].get("theta", 10000.0))


def is_declared(kind: str, name: str) -> bool:
    """Returns whether configurations of a type have an option of this name."""
    return name in options_of(kind) or name in other_names(kind)
