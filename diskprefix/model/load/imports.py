"""Imports transformers without libraries that are never used here.

A model's class comes with `torch._dynamo`, sympy and torch's package for several machines. A start of the
embedded model took 3.2 s on two cores; with them it took 1.3 s and 80 MiB more. Stand-ins replace the first two, and
save that only together. The last is said not to be there. An attribute that a stand-in does not have loads the real
module.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _mark(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator that does nothing, with or without arguments."""
    return function if callable(function) else _mark


class _Symbol:
    """sympy's class of symbols. While sympy is not imported, no object is one."""


_TRACER, _SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
_MARKS = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _mark)
"""Decorators that tell the tracer how to compile a function. What is not compiled does not need them."""
_CONDITIONS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_QUESTIONED = {f"{_TRACER}.utils": {"is_compile_supported": lambda _device: False}}
"""What torchvision imports from a module of the tracer."""
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(_CONDITIONS, bool),
    "has_guarding_hint": lambda _number: True,
    "guarding_hint_or_throw": lambda number: number,
    "size_hint": lambda number, **_: number,  # in torch 2.10, for the one above
    "is_nested_int": lambda _number: False,
    "sym_and": lambda *conditions: all(conditions),
    "sym_or": lambda *conditions: any(conditions),
    "sym_eq": operator.eq,
}
"""Functions that torch calls on sizes that may be symbols, for sizes that are all numbers."""

_replacing = threading.RLock()
"""Held while names of other packages are replaced. Two loads that overlap would leave the first one's functions."""


def import_transformers() -> None:
    """Imports torch, transformers and what all its decoders need, unless transformers is imported. It then works as
    with a torch that was built without its package for several machines."""
    if "transformers" in sys.modules:
        return
    with without_tracer(), _without_distributed():
        importlib.import_module("transformers.models.auto.modeling_auto")
        importlib.import_module("transformers.modeling_layers")


@contextmanager
def without_tracer() -> Iterator[None]:
    """Gives a context without the tracer and sympy for code of torch and transformers that compiles nothing: imports,
    and a model that is made without memory for its weights, where torch computes shapes in Python. One thread at a
    time: another one waits."""
    import torch

    tracer = _StandIn(_TRACER, _MARKS, file=torch.__file__)
    stand_ins = [tracer, *(_StandIn(*module) for module in _QUESTIONED.items()), _StandIn(_SHAPES, _NUMBERS)]
    stand_ins.append(_StandIn("sympy", {"Basic": _Symbol}))
    with _replacing:
        for stand_in in stand_ins:
            sys.modules.setdefault(stand_in.__name__, stand_in)
        try:
            yield
        finally:
            for stand_in in stand_ins:
                if sys.modules.get(stand_in.__name__) is stand_in:
                    del sys.modules[stand_in.__name__]


class _StandIn(ModuleType):
    """A stand-in for a package, with its submodules and the attributes in `known`. Any other loads the real package."""

    def __init__(self, name: str, known: dict[str, Any] | None = None, *, file: str | None = None) -> None:
        """`file` is the `__init__.py` of the package above, for a package whose submodules are imported."""
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__ = [os.path.join(os.path.dirname(file), name.rpartition(".")[2])] if file else []
        self.__dict__.update(known or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # The real package brings its own modules.
        for one in (self.__name__, *_QUESTIONED):
            if one.startswith(self.__name__) and isinstance(sys.modules.get(one), _StandIn):
                del sys.modules[one]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _without_distributed() -> Iterator[None]:
    """Gives a context in which torch says that it was built without `torch.distributed`. transformers asks once."""
    import torch.distributed

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
