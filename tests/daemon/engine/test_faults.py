"""A request that fails leaves the other requests and the memory as if it had never come. A lost device ends all."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.daemon.engine.detokenize import TextStream
from diskprefix.daemon.engine.device import is_device_lost
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Engine, Loop
from diskprefix.daemon.engine.request import ErrorEvent
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.daemon.engine.served_model import ServedModel
from diskprefix.errors import DeviceLost, InvalidRequest, ModelError, NonFiniteLogits, NotReady
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store import opening
from diskprefix.prefixstore.store.compact import require_unused
from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.folder import DATA, LOCK
from diskprefix.prefixstore.store.opening import DAMAGED
from diskprefix.runtime import choose_runtime as choosing
from diskprefix.runtime.load.loader import begin_load
from tests.daemon.engine.driving import (
    Client,
    after_steps,
    alone,
    load,
    request,
    run_together,
    running,
    tokens,
    wait_until_idle,
)
from tests.prefixstore.store.building import open_store
from tests.waiting import wait_for

# The start.


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_model_is_loaded_while_the_file_of_the_store_is_checked(
    is_damaged: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_loaded, check = threading.Event(), Environment.require_survivable

    def check_later(env: Environment) -> None:
        assert has_loaded.wait(60)
        check(env)

    def loaded(*arguments: Any, **options: Any) -> Any:
        found = begin_load(*arguments, **options)
        has_loaded.set()
        return found

    open_store(tmp_path / "kv").close()
    (tmp_path / "kv" / LOCK).write_bytes(b"")
    if is_damaged:
        os.truncate(tmp_path / "kv" / DATA, 2 * mmap.PAGESIZE)
    monkeypatch.setattr(opening, "_LARGE_BYTES", 0)
    monkeypatch.setattr(Environment, "require_survivable", check_later)
    monkeypatch.setattr(choosing, "begin_load", loaded)
    engine = load(folder, tmp_path / "kv")
    assert engine.cache.store.problem is None
    assert (tmp_path / "kv" / DAMAGED).exists() == is_damaged


def test_a_model_that_cannot_be_loaded_leaves_the_folder_free_once_the_check_has_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, check = threading.Event(), Environment.require_survivable

    def check_later(env: Environment) -> None:
        assert has_failed.wait(60)
        check(env)

    def failing(*_arguments: Any, **_options: Any) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(opening, "_LARGE_BYTES", 0)
    monkeypatch.setattr(Environment, "require_survivable", check_later)
    monkeypatch.setattr(choosing, "begin_load", failing)
    with pytest.raises(ModelError):
        load(folder, tmp_path / "kv")
    has_failed.set()
    wait_for(lambda: not any(thread.name == "store-opening" for thread in threading.enumerate()))
    require_unused(tmp_path / "kv")


# One request.


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv")
    yield engine
    assert not engine.pages.running
    assert engine.pages.check() == []


def replies(client: Client) -> list[list[int]]:
    assert client.done
    return [client.tokens_of(choice) for choice in range(client.ticket.request.sampling.n)]


def fail_for(patch: pytest.MonkeyPatch, owner: type, name: str, is_bad: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if is_bad(*args):
            raise ZeroDivisionError("a bug")
        return real(*args, **kwargs)

    patch.setattr(owner, name, failing)


def is_of_the_bad_one(*args: Any) -> bool:
    """Tells whether the arguments of a call belong to the request of 333 tokens."""
    for given in args:
        prompt = getattr(given, "prompt", None) or getattr(getattr(given, "request", None), "prompt", None) or given
        length = len(getattr(prompt, "token_ids", prompt if isinstance(prompt, np.ndarray) else ()))
        if length == 333 or (isinstance(given, KVSequence) and given.num_tokens == 333):
            return True
    return False


def is_first_call() -> Callable[..., bool]:
    calls = iter([True])
    return lambda *_: next(calls, False)


def is_sampler_of_the_bad_one(patch: pytest.MonkeyPatch) -> Callable[..., bool]:
    bad, init = list[Sampler](), Sampler.__init__

    def noted(self: Sampler, params: Any, prompt: Any, *others: Any) -> None:
        init(self, params, prompt, *others)
        bad.extend([self] * (len(prompt) == 333))

    patch.setattr(Sampler, "__init__", noted)
    return lambda sampler, *_: sampler in bad


PLACES: list[tuple[type, str]] = [
    *(
        (CachedRequest, name)
        for name in (
            "__init__",
            "begin_restore",
            "adopt_restore",
            "choose",
            "after_step",
            "publish",
            "publish_reply",
            "close",
        )
    ),
    (ServedModel, "record_request"),
    (TextStream, "event"),
    *((Sampler, name) for name in ("__init__", "sample", "logprobs")),
    (PageCache, "set_ready"),
    (PageCache, "keep_logits"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_an_error_anywhere_fails_one_request(
    owner: type, name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [request(tokens(100 + seed, seed), n=2) for seed in range(2)]
    expected = [replies(alone(engine, one)) for one in good]
    with monkeypatch.context() as patch:
        is_bad = is_of_the_bad_one
        if name in ("sample", "logprobs"):
            is_bad = is_sampler_of_the_bad_one(patch)
        if name == "event":
            is_bad = is_first_call()
        fail_for(patch, owner, name, is_bad)
        clients = run_together(engine, [request(tokens(333, 9), n=3), *good])
    (error,) = [event for client in clients for event in client.events if isinstance(event, ErrorEvent)]
    assert "internal error" in error.error.message
    if name != "event":
        assert [replies(client) for client in clients[1:]] == expected
    assert not engine.pages.running
    assert engine.pages.check() == []
    (after,) = run_together(engine, [good[0]])
    assert replies(after) == expected[0]


def test_a_client_that_cannot_be_told_anything_harms_nobody(engine: Engine) -> None:
    def deaf(_: object) -> None:
        raise RuntimeError("Event loop is closed")

    inbox = Inbox(engine.serve)
    for seed in range(3):
        inbox.submit(request(tokens(200, seed)), deaf)
    inbox.submit(request(np.empty(0, np.int32)), deaf)
    client = Client(inbox, request(tokens(100)))
    inbox.start()
    wait_until_idle(inbox)
    inbox.stop(0)
    assert client.done


def test_leaving_that_fails_harms_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, CachedRequest, "save_partial", lambda *_: True)
    with running(engine) as inbox:
        with inbox._changed:
            gone, client = (Client(inbox, request(tokens(length))) for length in (1500, 100))
        after_steps(monkeypatch, 1, gone.ticket.cancel)
        wait_until_idle(inbox)
    assert client.done


# All requests.


def test_an_error_of_no_request_ends_the_engine_and_tells_everybody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "_take_in", lambda _: 1 // 0)
    fatal: list[DeviceLost] = []
    inbox = Inbox(engine.serve, fatal.append)
    client = Client(inbox, request(tokens(10)))
    inbox.start()
    assert inbox.stop(30)
    (event,) = client.events
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, NotReady)
    assert "failed unexpectedly" in fatal[0].message


@pytest.mark.parametrize("name", ["begin_restore", "adopt_restore", "choose", "after_step", "publish", "publish_reply"])
def test_a_lost_device_ends_all_requests_in_any_state(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise DeviceLost("it is gone")

    fatal: list[DeviceLost] = []
    inbox = Inbox(engine.serve, fatal.append)
    clients = [Client(inbox, request(tokens(100 + 300 * seed, seed), n=2)) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(CachedRequest, name, lost)
        inbox.start()
        inbox._thread.join(60)
    assert not inbox._thread.is_alive()
    assert len(fatal) == 1
    assert all(isinstance(client.events[-1], ErrorEvent) for client in clients)
    for sequence in list(engine.pages.running):
        engine.pages.end_sequence(sequence, keep=False)


# Which errors mean that the device is lost.

LOST = [
    torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("unspecified launch failure"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered"),
]
OF_ONE_CALL = [
    torch.AcceleratorError("CUDA error: invalid argument"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a tensor"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
]
NOT_LOST = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: said by somebody else"),
    InvalidRequest("messages: 'CUDA error: device-side assert triggered' is no role"),
    NonFiniteLogits("the logits are not finite"),
]


def raised_while_handling(first: Exception, second: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise second
    except type(second) as error:
        return error


def caused_by(first: Exception) -> Exception:
    error = KeyError("cleaned up")
    error.__cause__ = first
    return error


FOLLOWING = [caused_by(LOST[0]), raised_while_handling(LOST[0], RuntimeError("cleaned up"))]
NOT_FOLLOWING = raised_while_handling(LOST[0], ValueError("no such size"))
FAILS = torch.AcceleratorError("CUDA error: device-side assert triggered")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


@pytest.mark.parametrize(
    ("error", "trial", "is_tried", "is_lost"),
    [
        *((error, FAILS, True, True) for error in (*LOST, *FOLLOWING)),
        *((error, None, True, False) for error in (*OF_ONE_CALL, *LOST)),
        *((error, FAILS, False, False) for error in (*NOT_LOST, NOT_FOLLOWING)),
        (LOST[0], NO_MEMORY, True, False),
    ],
    ids=str,
)
def test_a_device_is_lost_if_its_driver_fails_and_a_trial_fails_too(
    error: Exception, trial: Exception | None, is_tried: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of memory and of one request do not even try the device."""
    tried: list[None] = []

    def probe() -> None:
        tried.append(None)
        if trial is not None:
            raise trial

    monkeypatch.setattr("diskprefix.daemon.engine.device.probe_devices", probe)
    assert is_device_lost(error) == is_lost
    assert len(tried) == is_tried


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process may use a GPU")
def test_a_process_without_memory_on_a_device_has_none_to_lose() -> None:
    assert not is_device_lost(LOST[0])
