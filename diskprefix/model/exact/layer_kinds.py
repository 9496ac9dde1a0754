"""The layers that a measurement runs: one of each kind.

Whether a model computes exactly is decided by its kinds of layers, not by how many it has. Two layers are of one kind
if their modules have the same classes and attributes, weights of the same shapes and forms, the same replacements
(`model.exact.invariant`), equal entries in the lists of the configuration, and state of the same form. In a sample, the
layers that were not chosen return what they get.

A trial shows whether the chosen layers compute the same without the others, and whether all layers of a kind call the
same operators. Otherwise all layers are run, as with layers that use each other's keys.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.model.exact.rows import is_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN = frozenset({"layer_idx", "address"})
"""Attributes that differ in all layers: the number of a layer, and where something lies in memory."""
_INPUT = "hidden_states"
ALIGNMENT = 64
"""Kernels may differ by where a tensor begins in a line of the caches."""


@dataclass(frozen=True, eq=False)
class LayerSample:
    """Layers of a model, by their numbers. `sizes` tells for each of all layers how many values it returns, 0 if not as
    a tuple. `row_bytes` are those that the chosen layers return for a token, 0 if they are not recorded."""

    layers: nn.ModuleList
    chosen: tuple[int, ...]
    sizes: Sequence[int] = ()
    row_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return len(self.chosen) == len(self.layers)

    def token_bytes(self, layout: Layout) -> int:
        """Returns how many bytes of a token are compared between two runs, beside logits."""
        if self.is_whole:
            return layout.bytes_per_token
        specs = (spec for group in layout.groups for spec in group.specs if spec.layer in self.chosen)
        return self.row_bytes + sum(spec.bytes_per_token for spec in specs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Gives a context in which the model computes with the chosen layers only."""
        others = {str(number): self.layers[number] for number in range(len(self.layers)) if number not in self.chosen}
        try:
            for name, layer in others.items():
                self.layers._modules[name] = _Passing(layer, self.sizes[int(name)])
            yield
        finally:
            self.layers._modules.update(others)

    @contextmanager
    def recorded(self) -> Iterator[LayerRecord]:
        """Gives a context that records what the chosen layers return, unless these are all."""
        with _recording(self.layers, () if self.is_whole else self.chosen) as record:
            yield record


def sample_of(model: PreTrainedModel, layout: Layout, run: Callable[[], object]) -> LayerSample:
    """Returns a layer of each kind, and the first two of the commonest, so that one follows its like; or all layers if
    a trial does not show that these are enough. `run` runs the model over a few tokens of a new sequence.

    Raises what `run` raises with all layers.
    """
    layers = _layers_of(model, layout)
    if layers is None:
        return LayerSample(nn.ModuleList(), ())
    kinds = _kinds_of(model, layers, layout)
    whole, chosen = LayerSample(layers, tuple(range(len(layers)))), _first_of_each(kinds)
    if len(chosen) == len(layers):
        return whole
    with _OperatorsOfLayers() as operators, _recording(layers, whole.chosen, operators=operators) as expected:
        run()
    if not operators.are_those_of(kinds) or not expected.is_usual(len(layers)):
        return whole
    rows = [expected.outputs[number][0] for number in chosen]
    row_bytes = sum(out.numel() // out.shape[-2] * out.dtype.itemsize for out in rows)
    sample = LayerSample(layers, chosen, [expected.sizes[number] for number in whole.chosen], row_bytes)
    try:
        with sample.alone(), _recording(layers, chosen, inputs=expected.inputs) as found:
            run()
    except Exception as error:  # layers of any age and author may need the others in any way
        if is_out_of_memory(error):
            raise
        return whole
    return sample if all(_are_equal(found.outputs[i], expected.outputs[i]) for i in chosen) else whole


def _layers_of(model: PreTrainedModel, layout: Layout) -> nn.ModuleList | None:
    """Returns the layers of a model that has one list of them, and as many layers of state; else None."""
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    found = [layers for layers in lists if len(layers) == len(layout.layers)]
    modules = [module for layers in found for layer in layers for module in layer.modules()]
    # A module of several layers is one of all of them.
    return found[0] if len(found) == 1 and len({*map(id, modules)}) == len(modules) else None


def _first_of_each(kinds: Sequence[int]) -> tuple[int, ...]:
    ((commonest, _),) = Counter(kinds).most_common(1)
    before: Counter[int] = Counter()
    chosen = []
    for number, kind in enumerate(kinds):
        if before[kind] < 1 + (kind == commonest):
            chosen.append(number)
        before[kind] += 1
    return tuple(chosen)


def _are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# -- which kind ------------------------------------------------------------------------------------------------------


def _kinds_of(model: PreTrainedModel, layers: nn.ModuleList, layout: Layout) -> list[int]:
    """Returns the number of each layer's kind."""
    config = model.config.get_text_config(decoder=True)
    lists = [one for one in vars(config).values() if isinstance(one, list | tuple) and len(one) == len(layers)]
    specs = [spec for group in layout.groups for spec in group.specs]
    states = [spec for state_group in layout.states for spec in state_group.specs]
    known: dict[Hashable, int] = {}
    kinds = []
    for number, layer in enumerate(layers):
        kind = (
            description_of(layer),
            tuple(repr(one[number]) for one in lists),
            layout.layers[number],
            tuple((spec.part, spec.form) for spec in specs if spec.layer == number),
            tuple((spec.part, spec.index, spec.form) for spec in states if spec.layer == number),
        )
        kinds.append(known.setdefault(kind, len(known)))
    return kinds


def description_of(module: nn.Module) -> Hashable:
    """Returns a value that is equal for modules of one kind."""
    return _Description().of(module)


class _Description:
    """Describes an object with all that it consists of, apart from the numbers in its tensors. What it does not know is
    described by its identity."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Hashable:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return type(value).__name__, value
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        # With the object, so that no other gets its address.
        self._seen[id(value)] = len(self._seen), value
        return type(value).__qualname__, type(value).__module__, self._inside(value)

    def _inside(self, value: Any) -> Hashable:
        match value:
            case torch.Tensor():
                place = 0 if value.is_meta else value.data_ptr() % ALIGNMENT
                return value.dtype, str(value.device), tuple(value.shape), value.stride(), place
            case Mapping():
                return tuple((self.of(key), self.of(one)) for key, one in value.items() if key not in _OWN)
            case list() | tuple():
                return tuple(map(self.of, value))
            case set() | frozenset():
                return frozenset(map(self.of, value))
            case partial():
                return self.of(value.func), self.of(value.args), self.of(value.keywords)
            case FunctionType():
                cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
                return id(value.__code__), self.of(cells), self.of(value.__defaults__), self.of(value.__kwdefaults__)
            case MethodType():
                return self.of(value.__self__), self.of(value.__func__)
            case ctypes.Array():
                return ctypes.sizeof(value)
        is_shared = isinstance(value, type | PreTrainedConfig) or not hasattr(value, "__dict__")
        return id(value) if is_shared else self.of(vars(value))


# -- the trial -------------------------------------------------------------------------------------------------------


class _Passing(nn.Module):
    """A layer that returns what it gets. Its attributes are those of the layer in whose place it is."""

    def __init__(self, layer: nn.Module, size: int) -> None:
        # Not as its children.
        vars(self)["_layer"], vars(self)["_size"] = layer, size
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = _input_of(args, kwargs)
        size = vars(self)["_size"]
        return (rows, *[None] * (size - 1)) if size else rows


def _input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get(_INPUT)


class _OperatorsOfLayers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators that each layer calls, with the types and the dimensions of their tensors. Those of
    `model.exact.rows` are left out: a product is prepared by the first layer that needs it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer: int | None = None
        self.of: dict[int, set[Any]] = defaultdict(set)

    def are_those_of(self, kinds: Sequence[int]) -> bool:
        """Returns whether layers of one kind called the same operators."""
        return all(self.of[number] == self.of[kinds.index(kind)] for number, kind in enumerate(kinds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.layer is not None and not is_ours.get():
            tensors = ((one.dtype, one.ndim) for one in args if isinstance(one, torch.Tensor))
            self.of[self.layer].add((func, *tensors))
        return func(*args, **(kwargs or {}))


@dataclass
class LayerRecord:
    """The rows that layers got and returned, by their numbers, for each step. `sizes` is that of `LayerSample`. Nothing
    is recorded while `is_paused`."""

    inputs: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[int, int] = field(default_factory=dict)
    unusual: set[int] = field(default_factory=set)
    is_paused: bool = False

    def is_usual(self, num_layers: int) -> bool:
        """Returns whether all layers take rows first, and return as many, with nothing else."""
        return not self.unusual and len(self.sizes) == num_layers

    def content(self) -> bytes:
        """Returns the bytes of all rows that were returned."""
        rows = (torch.cat(found, dim=-2).contiguous() for _, found in sorted(self.outputs.items()))
        return b"".join(one.cpu().view(torch.uint8).numpy().tobytes() for one in rows)

    def begin(self, number: int, rows: Any) -> None:
        if isinstance(rows, torch.Tensor) and rows.ndim > 1:
            self.inputs[number].append(rows.clone())
        else:
            self.unusual.add(number)

    def end(self, number: int, out: Any) -> None:
        rows, *others = out if isinstance(out, tuple) and out else (out,)
        is_tensor = isinstance(rows, torch.Tensor) and number not in self.unusual
        if not is_tensor or rows.shape != self.inputs[number][-1].shape or any(one is not None for one in others):
            self.unusual.add(number)
            return
        self.outputs[number].append(rows.clone())
        self.sizes[number] = len(out) if isinstance(out, tuple) else 0


@contextmanager
def _recording(
    layers: nn.ModuleList,
    numbers: Sequence[int],
    *,
    inputs: Mapping[int, Sequence[torch.Tensor]] | None = None,
    operators: _OperatorsOfLayers | None = None,
) -> Iterator[LayerRecord]:
    """Gives a context that records the layers with these numbers. They get the `inputs` if these are given."""
    record = LayerRecord()

    def before(number: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if record.is_paused:
            return args, kwargs
        if inputs is not None:
            rows = inputs[number][len(record.inputs[number])].clone()
            args, kwargs = ((rows, *args[1:]), kwargs) if args else (args, kwargs | {_INPUT: rows})
        record.begin(number, _input_of(args, kwargs))
        if operators is not None:
            operators.layer = number
        return args, kwargs

    def after(number: int, _: nn.Module, _args: Any, out: Any) -> None:
        if operators is not None:
            operators.layer = None
        if not record.is_paused:
            record.end(number, out)

    with ExitStack() as hooks:
        for number in numbers:
            # After the hooks of others, which may be of accelerate's.
            hooks.callback(layers[number].register_forward_pre_hook(partial(before, number), with_kwargs=True).remove)
            hooks.callback(layers[number].register_forward_hook(partial(after, number)).remove)
        yield record
