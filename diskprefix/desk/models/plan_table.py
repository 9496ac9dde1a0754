"""The plan of a model for people: `diskprefix show NAME --plan`. It shows the plan's own calls, with the field names of
`native/source/interface.h`. A weight has the name of the parameter at its address."""

from __future__ import annotations

import ctypes
import re
from array import array
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, pairwise
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import asdict

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.native import address_of, calls
from diskprefix.native.matrix import Matrix
from diskprefix.prefixstore.kv.numbers import dtype_of
from diskprefix.printable import first_line
from diskprefix.runtime.load.loader import unread_weights
from diskprefix.runtime.plan.operands import HeadMatrices, Weight
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.planned import PlanRuntime, plan_layout
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.weights import Weights

_LEFT_OUT = ("num_rows", "num_runs", "num_threads", "num_matrices", "table", "value_table")
"""Fields that each step sets, or that another column shows."""
_NEUTRAL = (("factor", 1), ("each", 1))
_LAYOUT = ("stride", "row_bytes", "head_bytes", "kept", "kept_decay", "kept_beta")
"""Suffixes of the fields that describe the layout in memory."""
_WORDS: Mapping[str, Mapping[int, str]] = {
    "dtype": {calls.FLOAT32: "float32", calls.BFLOAT16: "bfloat16"},
    "scores": {number: name for name, number in calls.SCORES.items()},
    "kind": (
        norms := {calls.ROUNDED: "", calls.UNROUNDED: "unrounded", calls.ONE_MORE: "one more", calls.LAYER: "layer"}
    ),
    "norm_kind": norms,
    "function": (functions := {number: name for name, number in calls.FUNCTIONS.items()}),
    "up_function": functions,
}
"""The names of the values of fields that are enumerations."""
_NAMED_BY_WEIGHT = ("Lookup", "Pick", "Norm", "Product", "DenseProduct")
"""Operators whose outputs are named after their weights. Other outputs are named after the operator."""


def step_of(settings: Settings) -> dict[str, Any]:
    """Returns the parts of a model's step, or the reason why it has no plan, for JSON. Reads no weights. Raises
    `ModelError` and `SettingsError`."""
    unread = unread_weights(settings)
    if isinstance(unread, str):
        return {"reason": unread, "parts": []}
    weights, config = unread
    try:
        plan = PlanRuntime(
            weights, config, plan_layout(weights, config, settings.kv_type), settings.block_size
        ).runner.plan
    except ValueError as error:
        raise ModelError(f"the weights do not fit together ({first_line(error)}): {weights.misfit()}") from error
    return {"reason": "", "parts": parts_of(plan, weights)}


def show_step(step: Mapping[str, Any]) -> None:
    """Prints the parts that `step_of` returned."""
    for part in step["parts"]:
        click.echo(f"\nplan, {part['of']}")
        for operation in part["operations"]:
            moved = f"{', '.join(operation['reads'])} → {', '.join(operation['writes'])}"
            weights = [f"{of['name']} {of['shape']} {' or '.join(of['forms'])}" for of in operation["weights"]]
            numbers = ", ".join(f"{name} {value}" for name, value in operation["numbers"].items())
            click.echo(f"  {operation['operator']:<15} {'; '.join(filter(None, (moved, *weights, numbers)))}")


def parts_of(plan: ComputePlan, weights: Weights) -> list[dict[str, Any]]:
    """Returns the operations before the layers, of one layer of each kind, and after the layers. Layers of one kind
    differ only in the forms of their weights."""
    names = _names(weights)
    outside = _Reader(plan, names, {plan.hidden.address: "hidden", plan.logits.address: "logits"})
    ends = [0, *chain.from_iterable((layer.start, layer.stop) for layer in plan.layers), len(plan.operations)]
    kinds: dict[str, tuple[str, list[int], list[dict[str, Any]]]] = {}
    for number, (start, stop) in enumerate(pairwise(ends)):
        layer, is_layer = divmod(number, 2)
        reader = _Reader(plan, names, {**outside.buffers}) if is_layer else outside
        operations = [reader.read(made.call, made.kept) for made in plan.operations[start:stop]]
        of = "layers" if is_layer else f"before layer {layer}" if layer < len(plan.layers) else "after the layers"
        forms = [weight.pop("form") for operation in operations for weight in operation["weights"]]
        _, layers, shown = kinds.setdefault(f"{of} {operations}", (of, [], operations))
        layers += [layer] * is_layer
        for weight, form in zip((weight for operation in shown for weight in operation["weights"]), forms, strict=True):
            weight["forms"] = [*dict.fromkeys((*weight.get("forms", ()), form))]
    return [
        {"of": f"{of} {', '.join(_spans(layers))}".rstrip(), "layers": layers, "operations": operations}
        for of, layers, operations in kinds.values()
        if operations
    ]


def _spans(layers: Sequence[int]) -> Iterator[str]:
    """Yields each range of consecutive numbers, such as `0-3` or `7`."""
    firsts = [layer for layer in layers if layer - 1 not in layers]
    lasts = [layer for layer in layers if layer + 1 not in layers]
    for first, last in zip(firsts, lasts, strict=True):
        yield str(first) if first == last else f"{first}-{last}"


class _Reader:
    """Reads calls in order. `buffers` has the names of the buffers seen so far, by address."""

    def __init__(self, plan: ComputePlan, names: Mapping[int, str], buffers: dict[int, str]) -> None:
        self._plan, self._names, self.buffers = plan, names, buffers
        self._starts = sorted(plan.buffers)

    def read(self, call: ctypes.Structure, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns an operation: what it reads and writes, its weights and its numbers."""
        operator, known = type(call).__name__.removesuffix("Call").removeprefix("Planned"), _weights(operands)
        reads, writes, in_place = list[str](), list[str](), list[str]()
        weights, numbers = list[dict[str, Any]](), dict[str, Any]()
        for name, value, is_address in _fields(call):
            if not is_address:
                numbers |= self._number(name, value)
            elif value in known:
                at, shape, form = known[value]
                weights.append({"name": self._names.get(at, name), "shape": shape, "form": form})
            elif (start := self._start(value)) is None:
                reads.append(name)
            elif start in self.buffers and not name.startswith("out"):
                reads.append(self._named(start, value))
                in_place = in_place or reads[-1:]
            else:
                by_weight = operator in _NAMED_BY_WEIGHT and len(writes) < len(weights)
                self._name(start, weights[len(writes)]["name"] if by_weight else operator.lower())
                writes.append(self._named(start, value))
        writes = writes or in_place
        if (table := getattr(call, "table", -1)) >= 0:
            (writes if hasattr(call, "to") else reads).append(f"memory {table}")
        return {"operator": operator, "reads": reads, "writes": writes, "weights": weights, "numbers": numbers}

    def _start(self, address: int) -> int | None:
        """Returns the start of the buffer that contains an address, None if no buffer does."""
        start = self._starts[max(0, bisect(self._starts, address) - 1)]
        return start if 0 <= address - start < len(self._plan.buffers[start]) else None

    def _name(self, start: int, name: str) -> None:
        """Names a buffer that has no name yet."""
        taken = self.buffers.values()
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        self.buffers.setdefault(start, next(candidate for candidate in numbered if candidate not in taken))

    def _named(self, start: int, address: int) -> str:
        """Returns the name of a buffer, with the index of the element at `address` unless it is the first."""
        first = (address - start) // self._plan.item_bytes
        return self.buffers[start] + (f"[{first}:]" if first else "")

    def _number(self, name: str, value: float) -> dict[str, str | float]:
        """Returns a field that is no address, or {} if it does not change the result."""
        if name in _LEFT_OUT or name.endswith(_LAYOUT) or (name, value) in (*_NEUTRAL, ("dtype", self._plan.dtype)):
            return {}
        rounded = value if isinstance(value, int) else float(f"{value:.6g}")
        shown = _WORDS[name][int(value)] if name in _WORDS else rounded
        return {name: shown} if shown else {}


def _fields(call: ctypes.Structure) -> Iterator[tuple[str, Any, bool]]:
    """Yields the fields that are set, and whether they are addresses. Rows in pages are left out."""
    for name, kind, *_ in call._fields_:
        value = getattr(call, name)
        if isinstance(value, ctypes.Structure):
            yield from () if isinstance(value, calls.PagedRowsCall | calls.StatePlace) else _fields(value)
        elif isinstance(value, ctypes.Array):
            yield from ((name, element, True) for element in value if element)
        elif kind is not ctypes.c_void_p or value:
            yield name, value, kind is ctypes.c_void_p


def _weights(made_of: Any) -> dict[int, tuple[int, list[int], str]]:
    """Returns address, shape and form of each weight, by the address that calls pass."""
    weights: dict[int, tuple[int, list[int], str]] = {}
    for operand in _flat(made_of):
        match operand:
            case Matrix():
                shape = [operand.rows, operand.columns]
                weights[operand.address] = address_of(operand.weights), shape, _form(operand.form)
            case Weight():
                weights[operand.address] = address_of(operand.kept), [*operand.shape], dtype_of(operand.kept)
            case HeadMatrices():
                shape = [operand.heads, operand.outer, operand.inner]
                weights[operand.address] = address_of(operand.kept), shape, dtype_of(operand.kept)
            case array() if operand and operand[0] in weights:
                # The addresses of the experts' matrices, which came before it.
                at, shape, form = weights[operand[0]]
                weights[operand.buffer_info()[0]] = at, [len(operand), *shape], form
    return weights


def _flat(made_of: Any) -> Iterator[Any]:
    if isinstance(made_of, list | tuple):
        yield from chain.from_iterable(map(_flat, made_of))
        return
    yield made_of
    if isinstance(made_of, Struct):
        yield from _flat([*asdict(made_of).values()])


def _form(form: Any) -> str:
    """Returns the common name of a form. Several quantization types of files become one form."""
    names = [name for name, file_form in FILE_FORMS.items() if file_form == form]
    return " or ".join(names) or str(form)


def _names(weights: Weights) -> dict[int, str]:
    """Returns the names of weights by address. The name of a layer's weight omits the layer and its part."""
    names = {}
    for path, tensor in weights.named():
        name = path.removesuffix(".weight")
        of_layer = re.search(r"layers\.\d+\.(?:\w+\.)?(.+)", name)
        names[address_of(tensor)] = of_layer[1] if of_layer else name.rpartition(".")[2]
    return names
