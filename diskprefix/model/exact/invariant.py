"""Makes a model compute the same bits for a token however the prompt is cut: its products, experts and attention.

`install` changes a loaded model in place, and can be undone. `model.exact.self_check` finds out whether it has worked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diskprefix.model.exact import latent
from diskprefix.model.exact.attention import attend
from diskprefix.model.exact.fused import Parts, names_in
from diskprefix.model.exact.mixtures import experts
from diskprefix.model.exact.observed import observing
from diskprefix.model.exact.patterns import NAME
from diskprefix.model.exact.recurrent import with_scans
from diskprefix.model.exact.rows import each_times, in_whole_vectors, is_curve, linear, spread_of_rows, times
from diskprefix.native.blocks import AttentionBlock, Gated, Norm
from diskprefix.native.library import Operators, described, operators

_KERNELS = ("_attn_implementation_internal", "_experts_implementation_internal")
_REPLACED = ("forward", "expand_kv")
"""Methods that others take the place of."""
_OF_A_TOKEN = frozenset({"matmul", "std"})
"""Functions of `_Rows` that forwards and their methods call by these names."""

_NUMBER_BY_NUMBER = frozenset({
    *(nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Mish, nn.ELU, nn.LogSigmoid),
    *(activations.GELUTanh, activations.NewGELUActivation, activations.GELUActivation, activations.SiLUActivation),
    *(activations.FastGELUActivation, activations.QuickGELUActivation, activations.ClippedGELUActivation),
    *(activations.AccurateGELUActivation, activations.MishActivation, activations.LaplaceActivation),
    *(activations.SqrtSoftplusActivation, activations.XIELUActivation),
})  # fmt: skip


_installed: WeakKeyDictionary[PreTrainedModel, ExitStack] = WeakKeyDictionary()
"""The models that were changed, and how it is undone."""
_Methods: TypeAlias = list[tuple[nn.Module, str, Callable[..., Any]]]
_sees_calls: ContextVar[bool] = ContextVar("sees_calls", default=False)
"""True within a module whose calls of torch are seen by `_Rows`."""
_methods: WeakKeyDictionary[PreTrainedModel, dict[str, _Methods]] = WeakKeyDictionary()
"""The replacements for methods of a model's modules, by the kernels that compute them."""


def install(model: PreTrainedModel) -> None:
    """Gives the model's decoder our attention, experts and products. Needs the compiled operators."""
    undo = _installed[model] = ExitStack()
    config = model.config.get_text_config(decoder=True)
    methods = _methods.setdefault(model, {})
    if described() not in methods:
        methods[described()] = _methods_of(model, config)
    for kernel in _KERNELS:
        if hasattr(config, kernel):
            undo.callback(setattr, config, kernel, getattr(config, kernel))
            setattr(config, kernel, NAME)
    for module, name, method in methods[described()]:
        undo.callback(delattr, module, name)
        vars(module)[name] = method


def _methods_of(model: PreTrainedModel, config: Any) -> _Methods:
    """Returns replacements for methods of modules. A module that already has another forward keeps it."""
    compiled = operators()
    assert compiled is not None, "no model is exact at every token without them"
    parts, found = Parts(compiled), dict[nn.Module, Callable[..., Any]]()
    try:
        # What is larger is compared with what its own parts compute.
        for forward_of in (partial(_forward_of, parts, compiled), parts.larger):
            with observing(config):
                for module in model.modules():
                    forward = None if "forward" in vars(module) else forward_of(module)
                    if forward is not None:
                        found[module] = vars(module)["forward"] = forward
    finally:
        for module in found:
            del vars(module)["forward"]
    expansions = ((module, latent.expansion_of(module)) for module in model.modules())
    return [
        *((module, "forward", forward) for module, forward in found.items()),
        *((module, "expand_kv", partial(latent.remember, one)) for module, one in expansions if one is not None),
    ]


def uninstall(model: PreTrainedModel) -> bool:
    """Undoes `install`. Returns whether the model was changed."""
    installed = _installed.pop(model, None)
    if installed is not None:
        installed.close()
    return installed is not None


def is_installed(model: PreTrainedModel) -> bool:
    """Returns whether the model computes as `install` makes it."""
    return model in _installed


def recognised(model: PreTrainedModel) -> str:
    """Returns which parts of an installed model the compiled operators compute in one call, for people."""
    methods: list[Any] = [method for _, _, method in _methods[model][described()]]
    kinds = Counter(type(part) for one in methods for part in (getattr(one, "func", None), *getattr(one, "args", ())))
    return f"{kinds[AttentionBlock]} attention blocks, {kinds[Gated]} gated products, {kinds[Norm]} norms"


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Gives a context in which the model computes as transformers made it."""
    was_installed = uninstall(model)
    try:
        yield
    finally:
        if was_installed:
            install(model)


def _forward_of(parts: Parts, compiled: Operators, module: nn.Module) -> Callable[..., Any] | None:
    """Returns what replaces a module's forward, None if that need not change."""
    if (with_ours := with_scans(module, compiled)) is not None:
        return partial(_with_rows, with_ours, module)
    if (forward := parts.smallest(module)) is not None:
        return forward
    if type(module) is torch.nn.Linear:
        return partial(_linear, module._parameters)
    if type(module) in _NUMBER_BY_NUMBER:
        return partial(in_whole_vectors, partial(type(module).forward, module))
    if _has_matrices(module) or any(map(_has_matrices, module.children())) or _names(module):
        return partial(_with_rows, type(module).forward, module)
    return None


def _has_matrices(module: torch.nn.Module) -> bool:
    """Returns whether a module has matrices of its own: a router, or experts outside transformers' interface."""
    if type(module) is torch.nn.Linear or isinstance(module, torch.nn.Embedding):
        return False
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _names(module: torch.nn.Module) -> bool:
    """Returns whether the forward of a module itself, or a method that it names, calls one of `_OF_A_TOKEN` or one with
    several codes, such as a gate's sigmoid. Squares are not meant: they have one code."""
    names = names_in(type(module).forward)
    owners = {type(module), *map(type, module.children())}
    methods = [vars(owner).get(name) for owner in owners for name in names if name not in _REPLACED]
    named = names.union(*map(names_in, methods))
    return any(name in _OF_A_TOKEN or (name != "pow" and is_curve(name, torch.float32)) for name in named)


def _linear(parameters: Mapping[str, Any], rows: torch.Tensor) -> torch.Tensor:
    # Not by the module's attributes, which a module finds slowly.
    return linear(rows, parameters["weight"], parameters["bias"])


def _with_rows(forward: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _sees_calls.get():
        # The mode of the module that this one is within.
        return forward(module, *args, **kwargs)
    token = _sees_calls.set(True)
    try:
        with _Rows():
            return forward(module, *args, **kwargs)
    finally:
        _sees_calls.reset(token)


class _Rows(TorchFunctionMode):
    """Computes products with matrices by `model.exact.rows`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Each call of torch comes here, so what most of them are is remembered.
        if _is_left_alone(func):
            return func(*args, **(kwargs or {}))
        # Functions of torch name `inplace` as they come here.
        kwargs = (
            {name: value for name, value in kwargs.items() if (name, value) != ("inplace", False)} if kwargs else {}
        )
        if func in _BY_ROWS and (found := _by_rows(func, args, kwargs)) is not None:
            return found
        if not kwargs and args and isinstance(args[0], torch.Tensor):
            is_split = is_curve(getattr(func, "__name__", ""), args[0].dtype)
            if is_split and not any(map(torch.is_tensor, args[1:])):
                return in_whole_vectors(func, *args)
        return func(*args, **kwargs)


_MATMUL = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})
_STD = frozenset({torch.std, torch.Tensor.std})
_BY_ROWS = frozenset({functional.linear, torch.addmm, torch.bmm, *_MATMUL, *_STD})


@lru_cache(maxsize=4096)
def _is_left_alone(func: Any) -> bool:
    """Returns whether torch computes this function, whatever it is called with."""
    return func not in _BY_ROWS and not is_curve(getattr(func, "__name__", ""), None)


def _by_rows(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the result of one of `_BY_ROWS`, None if torch may compute it."""
    if func is functional.linear:
        return linear(*args, **kwargs)
    if func in _MATMUL:
        if args[1].ndim == 2:
            return times(*args, **kwargs)
        return each_times(*args) if min(args[0].ndim, args[1].ndim) > 2 and not kwargs else None
    if func in _STD:
        return spread_of_rows(func, *args, **kwargs)
    if kwargs:
        return None
    if func is torch.addmm:
        return times(args[1], args[2], args[0])
    return each_times(*args)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
