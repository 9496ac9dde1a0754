"""Which errors mean that the accelerator is lost."""

from __future__ import annotations

import pytest
import torch

from diskprefix.engine.device import is_device_lost
from diskprefix.errors import InvalidRequest, NonFiniteLogits

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


FAILING_PROBE = torch.AcceleratorError("CUDA error: device-side assert triggered")


class Probe:
    """Stands in for the operation on the device."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.failure: Exception | None = FAILING_PROBE

    def __call__(self) -> None:
        self.num_calls += 1
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    probe = Probe()
    monkeypatch.setattr("diskprefix.engine.device.probe_devices", probe)
    return probe


@pytest.mark.parametrize("error", LOST, ids=str)
def test_an_error_of_the_driver_means_a_lost_device_if_the_device_fails_again(error: Exception, probe: Probe) -> None:
    assert is_device_lost(error)
    assert probe.num_calls == 1


@pytest.mark.parametrize("error", [*OF_ONE_CALL, *LOST], ids=str)
def test_an_error_of_the_driver_concerns_one_request_if_the_device_works(error: Exception, probe: Probe) -> None:
    probe.failure = None
    assert not is_device_lost(error)
    assert probe.num_calls == 1


@pytest.mark.parametrize("error", NOT_LOST, ids=str)
def test_memory_and_errors_of_one_request_do_not_even_try_the_device(error: Exception, probe: Probe) -> None:
    assert not is_device_lost(error)
    assert probe.num_calls == 0


def test_a_device_without_memory_for_the_trial_is_not_lost(probe: Probe) -> None:
    probe.failure = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    assert not is_device_lost(LOST[0])


def raised_while_handling(first: Exception, second: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise second
    except type(second) as error:
        return error


@pytest.mark.usefixtures("probe")
def test_an_error_that_follows_from_one_of_the_driver_counts() -> None:
    caused = KeyError("cleaned up")
    caused.__cause__ = LOST[0]
    assert is_device_lost(caused)
    assert is_device_lost(raised_while_handling(LOST[0], RuntimeError("cleaned up")))


def test_an_error_of_another_kind_raised_while_one_of_the_driver_was_handled_does_not_count(probe: Probe) -> None:
    assert not is_device_lost(raised_while_handling(LOST[0], ValueError("no such size")))
    assert probe.num_calls == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process may use a GPU")
def test_a_process_without_memory_on_a_device_has_none_to_lose() -> None:
    assert not is_device_lost(LOST[0])
