"""An architecture of `.gguf` files: a configuration, and the tensors of which each parameter is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

from msgspec import Struct, field

from diskprefix.errors import ModelError
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.gguf.names import NAMES
from diskprefix.model.gguf.sources import Array, Sources, TensorSource
from diskprefix.model.load.gguf_header import FileTensor


class SourcedParameter(Struct, frozen=True):
    """A parameter's source, with the tensors of the file. `is_bias`: rows have one number each."""

    source: TensorSource
    tensors: tuple[FileTensor, ...]
    is_bias: bool

    @property
    def is_matrix(self) -> bool:
        """True if rows of the file are rows of the parameter, and nothing else happens to them."""
        return not self.is_bias and self.source.values is None and min(len(one.shape) for one in self.tensors) > 1

    @property
    def names(self) -> str:
        return " and ".join(tensor.name for tensor in self.tensors)

    def part_of(self, config: Any) -> Any:
        """Returns the part of a model's configuration that the source takes."""
        is_of_encoder = self.tensors[0].name.startswith(OF_ENCODERS) and hasattr(config, "vision_config")
        return config.vision_config if is_of_encoder else config.get_text_config()

    def rows(self, config: Any, arrays: Iterable[Array]) -> Array:
        """Returns the rows of the parameter, from an array for each tensor. Raises `ModelError` if tensors have other
        shapes than those of the model, so that their rows cannot be moved."""
        try:
            return self.source.rows(self.part_of(config), *arrays)
        except (ValueError, IndexError, TypeError, ArithmeticError) as error:
            raise self._misshapen() from error

    def columns(self, config: Any) -> tuple[int, int, int] | None:
        """Returns the sizes of the source's `columns`, None if the file has them in the parameter's order. Raises
        `ModelError` if the tensors have other columns."""
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
OF_ENCODERS = ("v.", "mm.")
"""The beginning of names of tensors of encoders."""
_LAYER = re.compile(r"^\w+\.layers\.(\d+)\.(.+)")
_DRAFT_LAYER = re.compile(r"^\w+\.draft_layer\.(?:mtp_block\.)?(.+)")
_ENDING = re.compile(r"(.+)(\.weight|\.bias|_bias)")


class Architecture(Struct, frozen=True, kw_only=True, dict=True):
    """An architecture that becomes transformers' model of the type `model_type`.

    `fixed` are values of its configuration that no file has, and `config` returns those that it makes of the metadata
    and of what is in the configuration already. `gate` is how its routers make weights of scores, as files count it.
    `own` are keys that most architectures have in common and that `config` reads in another way.
    """

    model_type: str
    sources: Sources = field(default_factory=dict)
    """Those that are not as in `NAMES`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    config: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = lambda _metadata, _found: {}
    gate: int | None = None
    own: Collection[str] = ()
    unused: Collection[str] = ()
    """Tensors that a file may have, and that no model has. Names within a layer stand for each layer."""
    is_rotary: bool = True
    """False without rotary positions. Files may have their sizes all the same."""
    layers: re.Pattern[str] = _LAYER
    """The names of parameters in layers: number and name within the layer."""
    block: str = "blk"
    encoder: EncoderArchitecture | None = None
    """The source of the parameters that are not of the model of text."""

    @cached_property
    def changed(self) -> Collection[str]:
        """Those whose numbers are changed, so that no quants of theirs can be computed with."""
        found = _sources_in({**NAMES, **self.sources})
        return {name for one in found if one.values is not None and not one.is_of_heads for name in one.tensors}

    def parts_of(self, parameters: Iterable[str], tensors: Mapping[str, FileTensor]) -> dict[str, SourcedParameter]:
        """Returns what each parameter is made of. Raises `ModelError` if a tensor is missing, or not used."""
        found = {name: self.part_of(name, tensors) for name in parameters}
        self.require_used(tensors, {tensor.name for part in found.values() for tensor in part.tensors})
        return found

    def require_used(self, tensors: Iterable[str], used: Collection[str]) -> None:
        """Raises `ModelError` if a tensor is not used."""
        if surplus := [name for name in tensors if name not in used and _BLOCK.sub("", name) not in self.unused]:
            raise ModelError(f"nothing in the model takes these tensors of the file: {', '.join(surplus[:3])}")

    def part_of(self, name: str, tensors: Mapping[str, FileTensor]) -> SourcedParameter:
        """Returns what a parameter is made of. Raises `ModelError` if a tensor is missing."""
        if self.encoder is not None and not name.startswith((self.encoder.text, "lm_head.")):
            return self.encoder.part_of(name, tensors)
        if self.encoder is not None:
            name = name.replace(self.encoder.text, "model.", 1)
        block, inner = "", name
        if layer := self.layers.fullmatch(name):
            block, inner = f"{self.block}.{layer[1]}.", layer[2]
        elif draft := _DRAFT_LAYER.fullmatch(name):
            block, inner = next(one.partition("nextn.")[0] for one in tensors if ".nextn." in one), draft[1]
        stem, end = inner, ".weight"
        if not self._sources(inner) and (found := _ENDING.fullmatch(inner)) is not None:
            stem, end = found[1], found[2].replace("_bias", ".bias")
        missing = ""
        for source in self._sources(stem):
            at = "" if source.is_of_model else block
            names = [_name_in(tensors, f"{at}{tensor}", end) for tensor in source.tensors]
            if all(one in tensors for one in names):
                return SourcedParameter(source, tuple(tensors[one] for one in names), is_bias=end == ".bias")
            missing = missing or next(one for one in names if one not in tensors)
        raise ModelError(f"the file lacks the tensor {missing}" if missing else f"no tensor of the file is {name}")

    def _sources(self, stem: str) -> list[TensorSource]:
        return _several(self.sources.get(stem) or NAMES.get(stem) or ())


class EncoderArchitecture(Architecture, frozen=True, kw_only=True):
    """The part of a model that is in a file beside that of its text, whose parameters begin with `text` in the whole
    model."""

    block: str = "v.blk"
    text: str = "model.language_model."


def _sources_in(sources: Sources) -> Iterator[TensorSource]:
    return (one for found in sources.values() for one in _several(found))


def _several(found: _Source) -> list[TensorSource]:
    of_one = found if isinstance(found, tuple) else (found,)
    return [TensorSource((one,)) if isinstance(one, str) else one for one in of_one]


def _name_in(tensors: Mapping[str, FileTensor], stem: str, end: str) -> str:
    """Returns the name of a tensor, which may be without an ending."""
    return stem if stem in tensors and end == ".weight" else f"{stem}{end}"
