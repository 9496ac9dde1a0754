"""A device of its own type, `stub`, whose memory is main memory: what crosses between the two is counted, as are the
operations for which a host waits on a GPU. Kernels in Triton are interpreted. `StubRecorder` records its operations,
and does them again on the same memory, as a graph of a GPU does.

It is of the whole process: `python -m tests.accelerator.stub_steps` uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import GridExecutor

NAME = "stub"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
counts: Counter[str] = Counter()
"""Of `uploads`, `downloads` and `waits`; a download is a wait too, and an upload that blocks."""
_WAITING = frozenset({
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "_unique2",
    "unique_dim", "repeat_interleave", "allclose", "histc",
})  # fmt: skip
"""Operators whose result, or whose size, the host must know."""
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that compute nothing: another one writes to their memory, and may have changed its size."""
_recorded: list[list[Callable[[], None]]] = []
"""What is being recorded."""


class StubTensor(torch.Tensor):
    """A tensor of the device. `content` has its numbers; views share their memory."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> StubTensor:
        assert not isinstance(inner, StubTensor), "nested"
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.content = inner
        return made

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.content.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes an operator of torch on the numbers, and counts."""
    everything = tree.tree_leaves((args, kwargs))
    leaves = [leaf for leaf in everything if isinstance(leaf, torch.Tensor)]
    name, devices = func.overloadpacket.__name__, [leaf for leaf in everything if isinstance(leaf, torch.device)]
    on_stub = any(isinstance(leaf, StubTensor) for leaf in leaves)
    to_stub = devices[0].type == NAME if devices else on_stub or not leaves
    _count(name, args, kwargs, on_stub=on_stub, to_stub=to_stub)
    crosses = name in ("_to_copy", "to", "copy_")
    if on_stub and not crosses and any(leaf.ndim and not isinstance(leaf, StubTensor) for leaf in leaves):
        raise RuntimeError(f"{func}: tensors of two devices")
    inner, options = tree.tree_map(_inner, (args, kwargs))
    if crosses and name != "copy_" and on_stub != to_stub:
        # Not a view of it, whatever dtype is wanted.
        inner = (inner[0].clone(), *inner[1:])
    found = func(*inner, **options)
    if _recorded:
        if not to_stub or (crosses and not all(isinstance(leaf, StubTensor) for leaf in leaves)):
            raise RuntimeError(f"{func} cannot be recorded: it is not only of the device")
        if name not in _UNWRITTEN:
            _recorded[-1].append(lambda: _again(func, inner, options, found))
    return (
        tree.tree_map(lambda one: StubTensor(one) if isinstance(one, torch.Tensor) else one, found)
        if to_stub
        else found
    )


def _count(name: str, args: Any, kwargs: dict[str, Any], *, on_stub: bool, to_stub: bool) -> None:
    is_waiting = on_stub and (name in _WAITING or (name == "index" and _has_mask(args)))
    if name == "copy_" and isinstance(args[0], StubTensor) != isinstance(args[1], StubTensor):
        counts["uploads" if isinstance(args[0], StubTensor) else "downloads"] += 1
        is_waiting = not (isinstance(args[0], StubTensor) and (len(args) > 2 and args[2]))
    elif name in ("_to_copy", "to") and on_stub != to_stub:
        counts["uploads" if to_stub else "downloads"] += 1
        is_waiting = not (to_stub and (kwargs.get("non_blocking") or args[3:4] == (True,)))
    elif name in ("_local_scalar_dense", "item") and on_stub:
        counts["downloads"] += 1
    counts["waits"] += is_waiting
    if is_waiting and _recorded:
        raise RuntimeError(f"{name} cannot be recorded: the host waits for it")


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _inner(one: Any) -> Any:
    if isinstance(one, torch.device):
        return torch.device("cpu")
    return one.content if isinstance(one, StubTensor) else one


def _again(func: Any, args: Any, kwargs: dict[str, Any], first: Any) -> None:
    """Computes an operator once more, into the memory of its first result."""
    found = tree.tree_leaves(func(*args, **kwargs))
    for one, kept in zip(found, tree.tree_leaves(first), strict=True):
        if isinstance(one, torch.Tensor) and one.data_ptr() != kept.data_ptr():
            kept.copy_(one)


_library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_library.fallback(lambda func, *args, **kwargs: _computed(func, args, kwargs), "PrivateUse1")
_launch = GridExecutor.__call__


def _launched(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    if any(isinstance(one, torch.Tensor) and not isinstance(one, StubTensor) for one in args):
        raise RuntimeError("a kernel got main memory")
    inner, options = tree.tree_map(_inner, (args, kwargs))
    _launch(self, *inner, **options)
    if _recorded:
        _recorded[-1].append(lambda: _launch(self, *inner, **options))


GridExecutor.__call__ = _launched
patch.object(torch.accelerator, "synchronize", lambda *_: counts.update(waits=1)).start()


class _Generator(torch.Generator):
    """Random numbers for the device: torch has none for devices in Python."""

    def __new__(cls, device: Any = None) -> _Generator:
        del device
        return super().__new__(cls)


patch.object(torch, "Generator", _Generator).start()
_tensor = torch.tensor


def _tensor_on(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """Makes a tensor of Python's numbers, which torch cannot for a device in Python."""
    found = _tensor(data, **options)
    return found if device is None else found.to(device)


patch.object(torch, "tensor", _tensor_on).start()
# Views of its tensors cannot be made in one mode of tensors that were made in another.
patch.object(torch, "inference_mode", lambda _mode=True: torch.no_grad()).start()


class StubRecorder:
    """Records what the device computes. Nothing of it may wait, or use main memory."""

    num_replays = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        _recorded.append([])
        try:
            found = compute()
        finally:
            steps = _recorded.pop()

        def replay() -> None:
            self.num_replays += 1
            for step in steps:
                step()

        return found, replay


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """Moves a model to the device, and returns it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(StubTensor(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = StubTensor(buffer.detach())
    return model
