"""The options of a decoder's configuration that its type declares: transformers' modules read no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diskprefix.runtime.plan.families.type_table import is_declared
from diskprefix.runtime.plan.families.types.known_types import TYPES

_OF_ALL = ("chunk_size_feed_forward", "is_encoder_decoder", "tie_word_embeddings")
"""Options of transformers' common class of configurations, which all types have."""


def read_undeclared(kind: str) -> Sequence[str]:
    """Returns the options that the code of a type's modules reads and its class does not declare."""
    return (*_OF_ALL, "head_dim") if TYPES[kind].head_dim_undeclared else _OF_ALL


def is_option(kind: str, name: str) -> bool:
    """Returns whether models of a type have an option of this name, declared or derived from others."""
    return is_declared(kind, name) or name in read_undeclared(kind) or name in TYPES[kind].derives


def option(config: Any, name: str, default: Any = None) -> Any:
    """Returns an option, or `default` if the type has none of this name."""
    return getattr(config, name, default) if is_option(config.model_type, name) else default


def first_of(config: Any, names: str, default: Any) -> Any:
    """Returns the first option of these names that is not None."""
    values = (option(config, name) for name in names.split())
    return next((value for value in values if value is not None), default)
