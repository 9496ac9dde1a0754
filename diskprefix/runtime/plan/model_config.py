"""The configuration of a model that has a plan, with transformers' names and defaults.

The options of each type are in `families/type_table.py`. Options that follow from others are set by
`families/derived_options.py` and `families/rotary_options.py`. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.printable import first_line, shown
from diskprefix.runtime.plan.families.declared import read_undeclared
from diskprefix.runtime.plan.families.derived_options import OLDER_LAYERS, derive
from diskprefix.runtime.plan.families.rotary_options import set_rotary
from diskprefix.runtime.plan.families.type_table import base_of, has_trait, levels_of, options_of, other_names, text_of

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
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "indexed_attention", "conv"),
    *("hybrid", "moe", "mlp"),
}


class ModelConfig:
    """A configuration of a decoder, or of a model with encoders and the `text_config` of its decoder.

    Its attributes are the options that its type declares, options that follow from them, and the options of
    `declared.read_undeclared`. transformers' code reads no others, so a plan must not see them either: only `to_dict`
    returns them.
    """

    model_type: str
    layer_types: list[str]
    num_hidden_layers: int
    tie_word_embeddings: bool
    context: int | None = None
    """The longest sequence that is served (`--context`), None for all positions of the model. Rotary embeddings with
    factors for long and for short texts choose by it."""
    _names: Sequence[str] = ()
    """The options of a decoder, except options that always follow from others."""
    _undeclared: Mapping[str, Any] = {}
    """The other keys of a decoder's configuration."""
    _given: Mapping[str, Any] | None = None
    """The configuration of a model with encoders, as it was given."""

    def __init__(self, values: Mapping[str, Any], per_layer: Mapping[int, Mapping[str, Any]]) -> None:
        self.__dict__.update((name, value) for name, value in values.items() if not hasattr(ModelConfig, name))
        self._per_layer = per_layer

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ModelConfig:
        """Returns the configuration of a model from the content of a `config.json`. Raises `ModelError` for options of
        wrong types, and for options that exclude each other."""
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
            per_layer = {int(number): config for number, config in (extra.pop("per_layer_config", None) or {}).items()}
            values = {name: extra[name] for name in read_undeclared(kind) if name in extra}
            values |= {"model_type": kind, **own}
            values |= {alias: values[name] for alias, name in aliases.items() if name in values}
            _check_layers(values)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"the options of the {kind} model do not fit together: {first_line(error)}") from error
        config = cls(values, per_layer)
        config._names, config._undeclared = [*named], {name: extra[name] for name in extra.keys() - values.keys()}
        return config

    @classmethod
    def _whole(cls, given: Mapping[str, Any], text: ModelConfig) -> ModelConfig:
        """Returns the configuration of a model with encoders. Derives no options of the encoders."""
        kind = given["model_type"]
        aliases, levels = other_names(kind), "deepstack_visual_indexes"
        named = {aliases.get(name, name): value for name, value in given.items()}
        values = {name: named.get(name, default) for name, (_, default) in options_of(kind).items()}
        _check_types(kind, values)
        if has_trait(kind, "tied_by_text") and getattr(text, "tie_word_embeddings", False):
            values["tie_word_embeddings"] = True
        values |= {alias: values[name] for alias, name in aliases.items() if name in values}
        vision = {**(given.get("vision_config") or {})}
        # Encoders of other types have no levels, whatever the configuration says.
        vision[levels] = vision.get(levels, levels_of(kind)) if levels_of(kind) else ()
        parts = {
            "text_config": text,
            "vision_config": SimpleNamespace(**vision),
            "architectures": given.get("architectures"),
        }
        whole = cls({"model_type": kind, **values, **parts}, {})
        whole._given = given
        return whole

    def get_text_config(self, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 (as transformers' have it)
        """Returns the configuration of the text decoder."""
        text = self.__dict__.get("text_config")
        return text if isinstance(text, ModelConfig) else self

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a `config.json` for this model."""
        if self._given is not None:
            return {**self._given, "text_config": self.get_text_config().to_dict()}
        said = {name: getattr(self, name) for name in self._names if hasattr(self, name)}
        values = {"model_type": self.model_type} | deepcopy({**self._undeclared, **said})
        if self._per_layer:
            values["per_layer_config"] = {number: {**values} for number, values in self._per_layer.items()}
        return values

    @property
    def is_heterogeneous(self) -> bool:
        """True if some options differ between layers."""
        return bool(self._per_layer)

    @property
    def per_layer_attributes(self) -> set[str]:
        """The names of options that differ between layers."""
        return {name for options in self._per_layer.values() for name in options}

    @property
    def per_layer_config(self) -> LayerConfigs:
        """The configuration of each layer."""
        return LayerConfigs(self, self._per_layer)


def text_within(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the text decoder of a model with encoders. In older configurations, they are among the
    options of the whole model."""
    if (text := given.get("text_config")) or not has_trait(given["model_type"], "flat"):
        return text or {}
    names = {*options_of(text_of(given["model_type"], None)), "rope_scaling", "rope_theta"}
    return {name: value for name, value in given.items() if name in names}


class LayerConfigs:
    """The configurations of the layers of a model, by their number or kind."""

    def __init__(self, config: ModelConfig, per_layer: Mapping[int, Mapping[str, Any]]) -> None:
        self._config, self._per_layer = config, per_layer

    def __getitem__(self, layer: int | str) -> ModelConfig:
        number = self._config.layer_types.index(layer) if isinstance(layer, str) else layer
        config = copy(self._config)
        config.__dict__.update(self._per_layer.get(number, {}))
        return config


def _check_types(kind: str, own: Mapping[str, Any]) -> None:
    """Raises `ModelError` for an option of a wrong type."""
    for name, (letters, _) in options_of(kind).items():
        value, is_bool = own[name], isinstance(own[name], bool)
        if not any(isinstance(value, _TYPES[letter][0]) and (not is_bool or letter == "b") for letter in letters):
            expected = " or ".join(_TYPES[letter][1] for letter in letters)
            raise ModelError(f"the configuration's {name} is {shown(repr(value))}, not {expected}")


def _check_layers(values: dict[str, Any]) -> None:
    """Sets the current names of the kinds of layers. Raises `ModelError` for an unknown kind, or a wrong number of
    kinds."""
    count, kinds = values["num_hidden_layers"], values.get("layer_types")
    if kinds is None:
        return
    values["layer_types"] = kinds = [OLDER_LAYERS.get(kind, kind) for kind in kinds]
    if unknown := {*kinds} - _KINDS_OF_LAYERS:
        raise ModelError(f"the configuration has layers of a kind that is not known: {shown(min(unknown))}")
    for name in ("layer_types", "mlp_layer_types"):
        if values.get(name) is not None and len(values[name]) != count:
            raise ModelError(f"the configuration has {count} layers, and {name} has {len(values[name])}")
    if "sliding_attention" in kinds and (values.get("sliding_window") or 0) <= 0:
        raise ModelError(
            f"the configuration has layers with a window, and a sliding_window of {values.get('sliding_window')}"
        )
