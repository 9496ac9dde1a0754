"""The configuration of a model that has a plan, with the names and the defaults of transformers.

The options of each type are in `families/type_table.py`. What follows from other options is in
`families/derived_options.py` and `families/rotary_options.py`. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.model.families.derived_options import OLDER_LAYERS, derive
from diskprefix.model.families.rotary_options import set_rotary
from diskprefix.model.families.type_table import (
    base_of,
    has_trait,
    levels_of,
    options_of,
    other_names,
    read_undeclared,
    text_of,
)
from diskprefix.printable import first_line, shown

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "b": ((bool,), "true or false"),
    "d": ((dict,), "an object"),
    "f": ((int, float), "a number"),
    "i": ((int,), "a whole number"),
    "l": ((list, tuple), "a list"),
    "n": ((type(None),), "null"),
    "s": ((str,), "a text"),
}
_KINDS_OF_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"),
}


class ModelConfig:
    """A configuration of a decoder, or of a model with encoders and the `text_config` of its decoder. Its attributes
    are the options that its type declares, those that follow from them, and those of `type_table.read_undeclared`.
    transformers' code reads no others, so a plan must not see them either: only `to_dict` returns them."""

    model_type: str
    layer_types: list[str]
    num_hidden_layers: int
    tie_word_embeddings: bool
    context: int | None = None
    """The longest sequence that is served (`--context`), None for all positions of the model. It decides which factors
    positions have that have some for long and for short texts."""
    _names: Sequence[str] = ()
    """The options of a decoder, without those that always follow from others."""
    _undeclared: Mapping[str, Any] = {}
    """What else the configuration of a decoder says."""
    _given: Mapping[str, Any] | None = None
    """What a model with encoders was given."""

    def __init__(self, values: Mapping[str, Any], per_layer: Mapping[int, Mapping[str, Any]]) -> None:
        self.__dict__.update((name, value) for name, value in values.items() if not hasattr(ModelConfig, name))
        self._per_layer = per_layer

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ModelConfig:
        """Returns the configuration of a model from what a `config.json` says. Raises `ModelError` for options of other
        types, and for ones that exclude each other."""
        kind = given["model_type"]
        of_text = text_within(given)
        if text := text_of(kind, of_text.get("model_type")):
            return cls._whole(given, ModelConfig.of({**of_text, "model_type": text}))
        aliases = other_names(kind)
        own = deepcopy({name: default for name, (_, default) in options_of(kind).items()})
        extra = deepcopy({aliases.get(name, name): value for name, value in given.items()})
        named = dict.fromkeys((*own, *extra))
        own |= {name: extra.pop(name) for name in own.keys() & extra.keys()}
        try:
            _check_types(kind, own)
            derive(kind, own, extra)
            set_rotary(kind, base_of(kind), own, extra)
            per_layer = {int(number): found for number, found in (extra.pop("per_layer_config", None) or {}).items()}
            values = {name: extra[name] for name in read_undeclared(kind) if name in extra}
            values |= {"model_type": kind, **own}
            values |= {alias: values[name] for alias, name in aliases.items() if name in values}
            _check_layers(values)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"the options of the {kind} model do not fit together: {first_line(error)}") from error
        found = cls(values, per_layer)
        found._names, found._undeclared = [*named], {name: extra[name] for name in extra.keys() - values.keys()}
        return found

    @classmethod
    def _whole(cls, given: Mapping[str, Any], text: ModelConfig) -> ModelConfig:
        """Returns the configuration of a model with encoders, of which nothing is derived."""
        kind = given["model_type"]
        aliases, levels = other_names(kind), "deepstack_visual_indexes"
        named = {aliases.get(name, name): value for name, value in given.items()}
        values = {name: named.get(name, default) for name, (_, default) in options_of(kind).items()}
        _check_types(kind, values)
        if has_trait(kind, "tied_by_text") and getattr(text, "tie_word_embeddings", False):
            values["tie_word_embeddings"] = True
        values |= {alias: values[name] for alias, name in aliases.items() if name in values}
        vision = {**(given.get("vision_config") or {})}
        # The encoders of other types have no levels, whatever is said of them.
        vision[levels] = vision.get(levels, levels_of(kind)) if levels_of(kind) else ()
        parts = {
            "text_config": text,
            "vision_config": SimpleNamespace(**vision),
            "architectures": given.get("architectures"),
        }
        found = cls({"model_type": kind, **values, **parts}, {})
        found._given = given
        return found

    def get_text_config(self, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 (as transformers' have it)
        """Returns the part about text."""
        found = self.__dict__.get("text_config")
        return found if isinstance(found, ModelConfig) else self

    def to_dict(self) -> dict[str, Any]:
        """Returns what a `config.json` would say."""
        if self._given is not None:
            return {**self._given, "text_config": self.get_text_config().to_dict()}
        said = {name: getattr(self, name) for name in self._names if hasattr(self, name)}
        found = {"model_type": self.model_type} | deepcopy({**self._undeclared, **said})
        if self._per_layer:
            found["per_layer_config"] = {number: {**found} for number, found in self._per_layer.items()}
        return found

    @property
    def is_heterogeneous(self) -> bool:
        """True if layers may have options of their own."""
        return bool(self._per_layer)

    @property
    def per_layer_attributes(self) -> set[str]:
        """The options that layers have of their own."""
        return {name for found in self._per_layer.values() for name in found}

    @property
    def per_layer_config(self) -> LayerConfigs:
        """The configuration of each layer."""
        return LayerConfigs(self, self._per_layer)


def text_within(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the text of a model with encoders: those of older configurations stand among its own."""
    if (found := given.get("text_config")) or not has_trait(given["model_type"], "flat"):
        return found or {}
    names = {*options_of(text_of(given["model_type"], None)), "rope_scaling", "rope_theta"}
    return {name: value for name, value in given.items() if name in names}


class LayerConfigs:
    """The configurations of the layers of a model, by their number or kind."""

    def __init__(self, config: ModelConfig, per_layer: Mapping[int, Mapping[str, Any]]) -> None:
        self._config, self._per_layer = config, per_layer

    def __getitem__(self, layer: int | str) -> ModelConfig:
        number = self._config.layer_types.index(layer) if isinstance(layer, str) else layer
        found = copy(self._config)
        found.__dict__.update(self._per_layer.get(number, {}))
        return found


def _check_types(kind: str, own: Mapping[str, Any]) -> None:
    """Raises `ModelError` for an option of another type."""
    for name, (letters, _) in options_of(kind).items():
        value, is_bool = own[name], isinstance(own[name], bool)
        if not any(isinstance(value, _TYPES[one][0]) and (not is_bool or one == "b") for one in letters):
            expected = " or ".join(_TYPES[one][1] for one in letters)
            raise ModelError(f"the configuration's {name} is {shown(repr(value))}, not {expected}")


def _check_layers(values: dict[str, Any]) -> None:
    """Calls the kinds of layers as today. Raises `ModelError` if one is not known, or if not each layer has one."""
    count, kinds = values["num_hidden_layers"], values.get("layer_types")
    if kinds is None:
        return
    values["layer_types"] = kinds = [OLDER_LAYERS.get(one, one) for one in kinds]
    if unknown := {*kinds} - _KINDS_OF_LAYERS:
        raise ModelError(f"the configuration has layers of a kind that is not known: {shown(min(unknown))}")
    for name in ("layer_types", "mlp_layer_types"):
        if values.get(name) is not None and len(values[name]) != count:
            raise ModelError(f"the configuration has {count} layers, and {name} has {len(values[name])}")
    if "sliding_attention" in kinds and (values.get("sliding_window") or 0) <= 0:
        raise ModelError(
            f"the configuration has layers with a window, and a sliding_window of {values.get('sliding_window')}"
        )
