"""The plan of a model for people: `diskprefix show NAME --plan`. It is read from the calls of the plan itself, by the
names of `native/source/interface.h`. Weights are called like the parameters that lie at their addresses."""

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

from diskprefix.errors import ModelError
from diskprefix.kv.numbers import dtype_of
from diskprefix.model.load.loader import unread_weights
from diskprefix.model.operands import HeadMatrices, Weight
from diskprefix.model.plan import ComputePlan
from diskprefix.model.planned import PlanRuntime, plan_layout
from diskprefix.model.quants.quant_form import FILE_FORMS
from diskprefix.model.weights import Weights
from diskprefix.native import address_of, calls
from diskprefix.native.matrix import Matrix
from diskprefix.printable import first_line
from diskprefix.settings import Settings

_LEFT_OUT = ("num_rows", "num_runs", "num_threads", "num_matrices", "table", "value_table")
"""Fields that each step sets, or that are shown otherwise."""
_NEUTRAL = (("factor", 1), ("each", 1))
_LAYOUT = ("stride", "row_bytes", "head_bytes", "kept", "kept_decay", "kept_beta")
"""Ends of the names of fields that say how numbers lie in memory."""
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
"""What the numbers of fields stand for."""
_NAMED_BY_WEIGHT = ("Lookup", "Pick", "Norm", "Product", "DenseProduct")
"""Operators whose results have the names of their weights. Those of others have the name of the operator."""


def step_of(settings: Settings) -> dict[str, Any]:
    """Returns the parts of a step of a model, and why it has no plan if it has none, for JSON. Reads no weights. Raises
    `ModelError` and `SettingsError`."""
    found = unread_weights(settings)
    if isinstance(found, str):
        return {"reason": found, "parts": []}
    weights, config = found
    try:
        plan = PlanRuntime(weights, config, plan_layout(weights, config, settings.kv_type), settings.block_size).plan
    except ValueError as error:
        raise ModelError(f"the weights do not fit together ({first_line(error)}): {weights.misfit()}") from error
    return {"reason": "", "parts": parts_of(plan, weights)}


def show_step(step: Mapping[str, Any]) -> None:
    """Prints the parts that `step_of` returned."""
    for part in step["parts"]:
        click.echo(f"\nplan, {part['of']}")
        for one in part["operations"]:
            moved = f"{', '.join(one['reads'])} → {', '.join(one['writes'])}"
            weights = [f"{of['name']} {of['shape']} {' or '.join(of['forms'])}" for of in one["weights"]]
            numbers = ", ".join(f"{name} {value}" for name, value in one["numbers"].items())
            click.echo(f"  {one['operator']:<12} {'; '.join(filter(None, (moved, *weights, numbers)))}")


def parts_of(plan: ComputePlan, weights: Weights) -> list[dict[str, Any]]:
    """Returns what comes before the layers, one layer of each kind, and what follows. Layers of one kind differ in the
    forms of their weights alone."""
    names = _names(weights)
    outside = _Reader(plan, names, {plan.hidden.address: "hidden", plan.logits.address: "logits"})
    ends = [0, *chain.from_iterable((layer.start, layer.stop) for layer in plan.layers), len(plan.made_of)]
    kinds: dict[str, tuple[str, list[int], list[dict[str, Any]]]] = {}
    for number, (start, stop) in enumerate(pairwise(ends)):
        layer, is_layer = divmod(number, 2)
        reader = _Reader(plan, names, {**outside.buffers}) if is_layer else outside
        operations = [reader.read(*made) for made in plan.made_of[start:stop]]
        of = "layers" if is_layer else f"before layer {layer}" if layer < len(plan.layers) else "behind the layers"
        forms = [weight.pop("form") for one in operations for weight in one["weights"]]
        _, layers, shown = kinds.setdefault(f"{of} {operations}", (of, [], operations))
        layers += [layer] * is_layer
        for weight, form in zip((weight for one in shown for weight in one["weights"]), forms, strict=True):
            weight["forms"] = [*dict.fromkeys((*weight.get("forms", ()), form))]
    return [
        {"of": f"{of} {', '.join(_spans(layers))}".rstrip(), "layers": layers, "operations": operations}
        for of, layers, operations in kinds.values()
        if operations
    ]


def _spans(layers: Sequence[int]) -> Iterator[str]:
    """Yields `0-3` or `7` for numbers that follow each other."""
    firsts = [one for one in layers if one - 1 not in layers]
    lasts = [one for one in layers if one + 1 not in layers]
    for first, last in zip(firsts, lasts, strict=True):
        yield str(first) if first == last else f"{first}-{last}"


class _Reader:
    """Reads calls in their order. `buffers` has the names of the buffers that are known, by their addresses."""

    def __init__(self, plan: ComputePlan, names: Mapping[int, str], buffers: dict[int, str]) -> None:
        self._plan, self._names, self.buffers = plan, names, buffers
        self._starts = sorted(plan.buffers)

    def read(self, call: ctypes.Structure, made_of: Sequence[Any]) -> dict[str, Any]:
        """Returns an operation: what it reads and writes, its weights and its numbers."""
        operator, known = type(call).__name__.removesuffix("Call").removeprefix("Planned"), _weights(made_of)
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
        """Returns the address of the buffer in which an address is, None if it is in none."""
        start = self._starts[max(0, bisect(self._starts, address) - 1)]
        return start if 0 <= address - start < len(self._plan.buffers[start]) else None

    def _name(self, start: int, name: str) -> None:
        """Names a buffer that has no name yet."""
        taken = self.buffers.values()
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        self.buffers.setdefault(start, next(one for one in numbered if one not in taken))

    def _named(self, start: int, address: int) -> str:
        """Returns the name of a buffer, with the number of the first number at an address behind its start."""
        first = (address - start) // self._plan.item_bytes
        return self.buffers[start] + (f"[{first}:]" if first else "")

    def _number(self, name: str, value: float) -> dict[str, str | float]:
        """Returns a field that is no address, nothing if it says nothing of what is computed."""
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
            yield from ((name, one, True) for one in value if one)
        elif kind is not ctypes.c_void_p or value:
            yield name, value, kind is ctypes.c_void_p


def _weights(made_of: Any) -> dict[int, tuple[int, list[int], str]]:
    """Returns, by the addresses that calls have, where weights lie, their shapes and their forms."""
    found: dict[int, tuple[int, list[int], str]] = {}
    for one in _flat(made_of):
        match one:
            case Matrix():
                found[one.address] = address_of(one.weights), [one.rows, one.columns], _form(one.form)
            case Weight():
                found[one.address] = address_of(one.kept), [*one.shape], dtype_of(one.kept)
            case HeadMatrices():
                shape = [one.heads, one.outer, one.inner]
                found[one.address] = address_of(one.kept), shape, dtype_of(one.kept)
            case array() if one and one[0] in found:  # The addresses of the matrices of experts, which came before it.
                at, shape, form = found[one[0]]
                found[one.buffer_info()[0]] = at, [len(one), *shape], form
    return found


def _flat(made_of: Any) -> Iterator[Any]:
    if isinstance(made_of, list | tuple):
        yield from chain.from_iterable(map(_flat, made_of))
        return
    yield made_of
    if isinstance(made_of, Struct):
        yield from _flat([*asdict(made_of).values()])


def _form(form: Any) -> str:
    """Returns what people call a form. Some types of quants in files become one form."""
    names = [name for name, one in FILE_FORMS.items() if one == form]
    return " or ".join(names) or str(form)


def _names(weights: Weights) -> dict[int, str]:
    """Returns the names of weights by their addresses, those of layers within a part of the layer."""
    found = {}
    for path, tensor in weights.named():
        name = path.removesuffix(".weight")
        of_layer = re.search(r"layers\.\d+\.(?:\w+\.)?(.+)", name)
        found[address_of(tensor)] = of_layer[1] if of_layer else name.rpartition(".")[2]
    return found
