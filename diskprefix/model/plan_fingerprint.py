"""The identity of the numbers that a plan computes: weights, options, forms, and the bits of the build.

Neither versions nor sources are in it, nor the number of threads: where they change bits, `bits` differs.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from msgspec import NODEFAULT, Struct
from msgspec.structs import asdict, fields

from diskprefix.identity import Fingerprint, canonical
from diskprefix.model.bits import bits_of_build
from diskprefix.model.config import DecoderConfig
from diskprefix.model.load.kernel_settings import code_digest
from diskprefix.model.operands import HeadMatrices, Weight
from diskprefix.model.plan import ComputePlan
from diskprefix.native import address_of
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix

_IN_MEMORY = ("places", "states")
"""Where a layer has its state, which the layout says."""
_SMALL_BYTES = 1 << 20


def fingerprint_of_plan(
    config: DecoderConfig,
    plan: ComputePlan,
    operators: Operators,
    *,
    weights_digest: str,
    dtype: str,
    mode: str = "strict",
) -> Fingerprint:
    """Returns everything that changes the numbers of a plan with these options: `configuration` is a digest of those
    that are not at their defaults, `forms` one of the forms of the weights, and of the vectors and tables that were
    computed of them at the start. In mode `portable` the root has our code in the place of the bits, so machines with
    other kernels share it."""
    named = {
        "weights_digest": weights_digest,
        "configuration": _digest(canonical(options(config)).encode()),
        "forms": _digest(*sorted({_described(one) for _, kept in plan.made_of for one in _leaves(kept)})),
        "dtype": dtype,
        "bits": bits_of_build(operators),
        "code": code_digest(),
        "mode": mode,
    }
    return Fingerprint(named, frozenset({"bits" if mode == "portable" else "code"}))


def options(value: Any) -> Any:
    """Returns options in types of JSON, of a class only those that are not at their defaults: an option that a later
    version adds changes nothing for models without it."""
    if isinstance(value, np.ndarray):
        return _digest(f"{value.dtype} {value.shape} ".encode(), value.tobytes())
    if isinstance(value, Struct):
        defaults = _defaults(type(value))
        return {
            name: options(found)
            for name, found in asdict(value).items()
            if name not in _IN_MEMORY and (isinstance(found, np.ndarray) or found != defaults[name])
        }
    if isinstance(value, Mapping):
        return {str(key): options(one) for key, one in value.items()}
    return [options(one) for one in value] if isinstance(value, tuple | list) else value


@cache
def _defaults(kind: type[Struct]) -> dict[str, Any]:
    return {
        one.name: one.default if one.default_factory is NODEFAULT else one.default_factory() for one in fields(kind)
    }


def _leaves(kept: Any) -> Iterator[Any]:
    """Yields the weights and tables among what a call keeps."""
    if isinstance(kept, Weight | Matrix | HeadMatrices | np.ndarray):
        yield kept
    elif isinstance(kept, Struct):
        yield from _leaves([*asdict(kept).values()])
    elif isinstance(kept, tuple | list):
        for one in kept:
            yield from _leaves(one)


def _described(weight: Any) -> bytes:
    """Returns the form of a weight; a small one with its content, which the start may have computed."""
    if isinstance(weight, Matrix):
        return f"matrix {weight.rows} {weight.columns} {weight.form}".encode()
    if isinstance(weight, HeadMatrices):
        return f"matrices {weight.heads} {weight.inner} {weight.outer} {weight.kept.itemsize}".encode()
    kept = weight.kept if isinstance(weight, Weight) else weight
    num_bytes = math.prod(kept.shape) * kept.itemsize
    form = f"{tuple(kept.shape)} {kept.itemsize} ".encode()
    if num_bytes > _SMALL_BYTES:
        return form
    address = weight.address if isinstance(weight, Weight) else address_of(kept)
    return form + hashlib.sha256(ctypes.string_at(address, num_bytes)).digest()


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)} ".encode() + part)
    return found.hexdigest()[:32]
