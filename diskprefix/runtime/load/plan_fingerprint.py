"""The identity of the numbers that a plan computes: weights, options, forms, and the bits of the build.

Neither versions nor sources are in it, nor the number of threads: where they change bits, `bits` differs.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import NODEFAULT, Struct
from msgspec.structs import asdict, fields

from diskprefix.identity import Fingerprint, canonical
from diskprefix.native import address_of
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.load.bits import bits_of_build
from diskprefix.runtime.load.code_digest import code_digest
from diskprefix.runtime.plan.config import DecoderConfig
from diskprefix.runtime.plan.operands import Buffer, HeadMatrices, TableRows, Weight
from diskprefix.runtime.plan.plan import ComputePlan

_IN_MEMORY = ("places", "states")
"""The places of a layer's state, which the layout describes."""
_SMALL_BYTES = 1 << 20


def fingerprint_of_plan(
    config: DecoderConfig,
    plans: Sequence[ComputePlan],
    operators: Operators,
    *,
    weights_digest: str,
    dtype: str,
    mode: str = "strict",
) -> Fingerprint:
    """Returns everything that changes the numbers of the `plans` of a model with these options. `configuration` is a
    digest of the options that are not at their defaults. `forms` is one of all that the calls keep: the forms of
    weights, vectors and tables that were computed of them at the start, and numbers that no option says, such as some
    epsilons. In mode `portable` the root has our code in the place of the bits, so machines with other kernels share
    it."""
    named = {
        "weights_digest": weights_digest,
        "configuration": _digest(canonical(options(config)).encode()),
        "forms": _digest(*sorted(_described(operation.kept) for plan in plans for operation in plan.operations)),
        "dtype": dtype,
        "bits": bits_of_build(operators),
        "code": code_digest(),
        "mode": mode,
    }
    return Fingerprint(named, frozenset({"bits" if mode == "portable" else "code"}))


def options(value: Any) -> Any:
    """Returns options as JSON types. Options at their defaults are left out, so an option that a later version adds
    changes nothing for models without it."""
    if isinstance(value, np.ndarray):
        return _digest(f"{value.dtype} {value.shape} ".encode(), value.tobytes())
    if isinstance(value, Struct):
        defaults = _defaults(type(value))
        return {
            name: options(option)
            for name, option in asdict(value).items()
            if name not in _IN_MEMORY and (isinstance(option, np.ndarray) or option != defaults[name])
        }
    if isinstance(value, Mapping):
        return {str(key): options(option) for key, option in value.items()}
    return [options(option) for option in value] if isinstance(value, tuple | list) else value


@cache
def _defaults(kind: type[Struct]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is NODEFAULT else field.default_factory()
        for field in fields(kind)
    }


def _described(kept: Any) -> bytes:
    """Returns a description of an object that a call keeps, as far as it changes numbers: the form of weights, matrices
    and tables, and the content of small ones, which may be computed at the start; the fields of other structs.
    Addresses and buffers do not count."""
    if isinstance(kept, Weight | np.ndarray):
        return _form(kept)
    if isinstance(kept, Matrix):
        bias = b"" if kept.bias is None else _form(kept.bias)
        return f"matrix {kept.rows} {kept.columns} {kept.form} ".encode() + bias
    if isinstance(kept, TableRows):
        return f"table {kept.rows} {kept.width} {kept.stored}".encode()
    if isinstance(kept, HeadMatrices):
        sizes = f"{kept.heads} {kept.inner} {kept.outer} {kept.stride} {kept.is_transposed} {kept.kept.itemsize}"
        return f"matrices {sizes}".encode()
    if kept is None or isinstance(kept, Buffer | array):
        return b""
    if isinstance(kept, Struct):
        names = ((field.name, getattr(kept, field.name)) for field in fields(type(kept)))
        return _digest(
            type(kept).__name__.encode(), *(name.encode() + _described(held) for name, held in names)
        ).encode()
    if isinstance(kept, tuple | list):
        return _digest(*map(_described, kept)).encode()
    return repr(kept).encode()


def _form(kept: Weight | np.ndarray) -> bytes:
    numbers = kept.kept if isinstance(kept, Weight) else kept
    num_bytes = math.prod(kept.shape) * numbers.itemsize
    form = f"{tuple(kept.shape)} {numbers.dtype} ".encode()
    if num_bytes > _SMALL_BYTES:
        return form
    address = kept.address if isinstance(kept, Weight) else address_of(kept)
    return form + hashlib.sha256(ctypes.string_at(address, num_bytes)).digest()


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode() + part)
    return digest.hexdigest()[:32]
