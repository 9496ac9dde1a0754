"""What Python says of structures and numbers that it shares with the operators is what the headers say of them."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from diskprefix.native import build, calls, library, matrix, packing
from diskprefix.runtime.plan import plan

HEADERS = {path.name: re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in build.SOURCES.glob("*.h")}
NUMBERS = dict(re.findall(r"\b([A-Z][A-Z_0-9]+) = (\d+)\b", " ".join(HEADERS.values())))
MEMBERS = {
    name: [member.strip() for member in body.split(";") if member.strip()]
    for name, body in re.findall(r"\bstruct (\w+) \{(.*?)\n\};", HEADERS["interface.h"], re.DOTALL)
}
"""The declarations in each structure."""
OTHER_NAMES = {"PagedRows": "Rows", "Operations": "Plan", "_Table": "Operators"}
"""The names in `interface.h` of structures that have another one in Python."""


def in_header(name: str) -> Iterator[tuple[str, str]]:
    """The fields of a structure in `interface.h` with those of structures inside: the name of each, and `q` (int64),
    `d` (float64) or `P` (an address), as in the module `struct`."""
    for member in MEMBERS[name]:
        if function := re.search(r"\(\*(\w+)\)", member):
            yield function[1], "P"
            continue
        kind, declared = re.fullmatch(r"(?:const )?(\w+)\b(.*)", member, re.DOTALL).groups()  # type: ignore[union-attr]
        for one in declared.split(","):
            field, count = re.search(r"(\w+)\s*(?:\[(\w+)\])?$", one).groups()  # type: ignore[union-attr]
            if "*" in one:
                yield from [(field, "P")] * int(NUMBERS[count] if count else 1)
            elif kind in MEMBERS:
                yield from ((f"{field}.{inner}", code) for inner, code in in_header(kind))
            else:
                yield field, {"int64_t": "q", "double": "d"}[kind]


def in_python(kind: type[ctypes.Structure]) -> Iterator[tuple[str, str]]:
    for field, inner, *_ in kind._fields_:
        if issubclass(inner, ctypes.Structure):
            yield from ((f"{field}.{name}", code) for name, code in in_python(inner))
        else:
            # Arrays are of addresses.
            code = {ctypes.c_int64: "q", ctypes.c_double: "d"}.get(inner, "P")
            yield from [(field.rstrip("_"), code)] * getattr(inner, "_length_", 1)


STRUCTURES = [one for one in vars(calls).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)]


@pytest.mark.parametrize("kind", [*STRUCTURES, library.PlanesCall, library._Table])
def test_a_structure_has_the_fields_of_the_header(kind: type[ctypes.Structure]) -> None:
    name = kind.__name__.removesuffix("Call")
    assert [*in_python(kind)] == [*in_header(OTHER_NAMES.get(name, name))]


def test_each_kind_of_operation_has_the_structure_that_the_source_reads() -> None:
    read = re.findall(r"case (\w+):\s+return .*?(?:set<(\w+)>|\((?:const )?(\w+)\*\))\(?operation", HEADERS["plan.h"])
    of_source = {getattr(calls, kind): one or other for kind, one, other in read}
    assert of_source == {kind: call.__name__.removesuffix("Call") for kind, call in calls.CALLS.items()}
    assert list(calls.CALLS) == list(range(len(calls.CALLS)))


@pytest.mark.parametrize(
    ("packed", "name"),
    [
        (matrix._MATRIX, "Matrix"),
        (packing._PACKING, "Packing"),
    ],
)
def test_packed_fields_have_the_types_of_the_header(packed: struct.Struct, name: str) -> None:
    codes = re.sub(r"(\d+)(\w)", lambda found: found[2] * int(found[1]), packed.format.replace(" ", ""))
    assert codes == "@" + "".join(code for _, code in in_header(name))


def test_enumerators_equal_those_of_the_headers() -> None:
    own: dict[str, Any] = {name: number for name, number in vars(calls).items() if isinstance(number, int)}
    own |= {name.upper(): number for name, number in calls.FUNCTIONS.items()} | {"MAX_ROTARY": plan._MAX_ROTARY}
    own |= {pairing.name: pairing.value for pairing in calls.Pairing}
    own |= {{"sigmoid": "OF_SIGMOID"}.get(name, name.upper()): number for name, number in calls.SCORES.items()}
    own |= {f"IN_{name.upper()}".replace("IN_SHARED", "SHARED"): number for name, number in matrix._SCALES.items()}
    assert own == {name: int(NUMBERS[name]) for name in own}
