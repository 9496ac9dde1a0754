"""An architecture of `.gguf` files: the configuration of its models, and the sources of their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from msgspec import Struct, field

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.names import NAMES
from diskprefix.runtime.files.gguf.sources import Array, Sources, TensorSource


class SourcedParameter(Struct, frozen=True):
    """A parameter's source, with the tensors of a file. `is_bias`: each row is one number."""

    source: TensorSource
    tensors: tuple[FileTensor, ...]
    is_bias: bool

    @property
    def is_matrix(self) -> bool:
        """True if the parameter consists of unchanged rows of the file."""
        return not self.is_bias and self.source.values is None and min(len(tensor.shape) for tensor in self.tensors) > 1

    @property
    def names(self) -> str:
        return " and ".join(tensor.name for tensor in self.tensors)

    def part_of(self, config: Any) -> Any:
        """Returns the part of a model's configuration that the source needs: the encoder's or the text decoder's."""
        is_of_encoder = self.tensors[0].name.startswith(OF_PICTURES) and hasattr(config, "vision_config")
        return config.vision_config if is_of_encoder else config.get_text_config()

    def rows(self, config: Any, arrays: Iterable[Array]) -> Array:
        """Returns the rows of the parameter, from an array for each tensor. Raises `ModelError` if the shapes of the
        tensors do not fit the model."""
        try:
            return self.source.rows(self.part_of(config), *arrays)
        except (ValueError, IndexError, TypeError, ArithmeticError) as error:
            raise self._misshapen() from error

    def columns(self, config: Any) -> tuple[int, int, int] | None:
        """Returns the sizes that the source's `columns` gives, None if the columns of the file are in order. Raises
        `ModelError` if the tensors have another number of columns."""
        if self.source.columns is None:
            return None
        sizes = self.source.columns(self.part_of(config))
        if any(prod(sizes) != tensor.shape[-1] for tensor in self.tensors):
            raise self._misshapen()
        return sizes

    def _misshapen(self) -> ModelError:
        return ModelError(f"the tensors have other shapes than those of the model: {self.names}")


_Source: TypeAlias = str | TensorSource | tuple[str | TensorSource, ...]

_BLOCK = re.compile(r"^blk\.\d+\.")
OF_PICTURES = ("v.", "mm.")
"""The prefixes of the names of tensors of encoders of pictures."""
OF_ENCODERS = (*OF_PICTURES, "a.", "resampler.")
"""The prefixes of the names of all encoders' tensors. A file of text may hold them too, as Ollama's do."""
_LAYER = re.compile(r"^\w+\.layers\.(\d+)\.(.+)")
_DRAFT_LAYER = re.compile(r"^\w+\.draft_layer\.(?:mtp_block\.)?(.+)")
_ENDING = re.compile(r"(.+)(\.weight|\.bias|_bias)")


class Architecture(Struct, frozen=True, kw_only=True, dict=True):
    """An architecture that becomes transformers' model of the type `model_type`.

    `fixed` has options that no file contains. `config(metadata, options)` returns further options, from the metadata
    and the options so far. `gate` is the number in files for the function of its routers. `own` has common keys that
    `config` reads in another way.
    """

    model_type: str
    sources: Sources = field(default_factory=dict)
    """The sources that differ from `NAMES`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    config: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = lambda _metadata, _options: {}
    gate: int | None = None
    own: Collection[str] = ()
    unused: Collection[str] = ()
    """Tensors that a file may have and no model uses. Names within a layer apply to all layers."""
    listed: Mapping[str, str] = {}
    """Keys of arrays with a number for each block, and the tensors that become of them. The keys are without the name
    of the architecture."""
    is_rotary: bool = True
    """False without rotary embedding. Files may have its keys nevertheless."""
    layers: re.Pattern[str] = _LAYER
    """The pattern of names of parameters in layers: its groups are the layer's number and the name within the layer."""
    block: str = "blk"
    encoder: EncoderArchitecture | None = None
    """The architecture of the encoder, for a model that has one."""

    @cached_property
    def changed(self) -> Collection[str]:
        """The tensors whose numbers are changed, so that their quants cannot be kept."""
        sources = _sources_in({**NAMES, **self.sources})
        changing = (source for source in sources if source.values is not None and not source.is_of_heads)
        return {name for source in changing for name in source.tensors}

    def parts_of(self, parameters: Iterable[str], tensors: Mapping[str, FileTensor]) -> dict[str, SourcedParameter]:
        """Returns the source of each parameter. Raises `ModelError` if a tensor is missing, or not used."""
        parts = {name: self.part_of(name, tensors) for name in parameters}
        self.require_used(tensors, {tensor.name for part in parts.values() for tensor in part.tensors})
        return parts

    def require_used(self, tensors: Iterable[str], used: Collection[str]) -> None:
        """Raises `ModelError` if a tensor is not used."""
        if surplus := [name for name in tensors if name not in used and _BLOCK.sub("", name) not in self.unused]:
            raise ModelError(f"nothing in the model takes these tensors of the file: {', '.join(surplus[:3])}")

    def part_of(self, name: str, tensors: Mapping[str, FileTensor]) -> SourcedParameter:
        """Returns the source of a parameter. Raises `ModelError` if a tensor is missing."""
        if self.encoder is not None and not name.startswith((self.encoder.text, "lm_head.")):
            return self.encoder.part_of(name, tensors)
        if self.encoder is not None:
            name = name.replace(self.encoder.text, "model.", 1)
        block, inner = "", name
        if layer := self.layers.fullmatch(name):
            block, inner = f"{self.block}.{layer[1]}.", layer[2]
        elif draft := _DRAFT_LAYER.fullmatch(name):
            block, inner = next(tensor.partition("nextn.")[0] for tensor in tensors if ".nextn." in tensor), draft[1]
        stem, end = inner, ".weight"
        if not self._sources(inner) and (ending := _ENDING.fullmatch(inner)) is not None:
            stem, end = ending[1], ending[2].replace("_bias", ".bias")
        missing = ""
        for source in self._sources(stem):
            at = "" if source.is_of_model else block
            names = [_name_in(tensors, f"{at}{tensor}", end) for tensor in source.tensors]
            if all(tensor in tensors for tensor in names):
                return SourcedParameter(source, tuple(tensors[tensor] for tensor in names), is_bias=end == ".bias")
            missing = missing or next(tensor for tensor in names if tensor not in tensors)
        raise ModelError(f"the file lacks the tensor {missing}" if missing else f"no tensor of the file is {name}")

    def _sources(self, stem: str) -> list[TensorSource]:
        return _several(self.sources.get(stem) or NAMES.get(stem) or ())


class EncoderArchitecture(Architecture, frozen=True, kw_only=True):
    """The encoder of a model, which is in its own file. `text` is the prefix of the text decoder's parameters in the
    whole model."""

    block: str = "v.blk"
    text: str = "model.language_model."


def _sources_in(sources: Sources) -> Iterator[TensorSource]:
    return (source for given in sources.values() for source in _several(given))


def _several(given: _Source) -> list[TensorSource]:
    choices = given if isinstance(given, tuple) else (given,)
    return [TensorSource((choice,)) if isinstance(choice, str) else choice for choice in choices]


def _name_in(tensors: Mapping[str, FileTensor], stem: str, end: str) -> str:
    """Returns the name of a tensor. The ending `.weight` may be missing in files."""
    return stem if stem in tensors and end == ".weight" else f"{stem}{end}"
