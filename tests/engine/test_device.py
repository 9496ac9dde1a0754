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
NOT_LOST = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: said by somebody else"),
    InvalidRequest("messages: 'CUDA error: device-side assert triggered' is no role"),
    NonFiniteLogits("the logits are not finite"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_an_error_of_the_driver_means_a_lost_device(error: Exception) -> None:
    assert is_device_lost(error)


@pytest.mark.parametrize("error", NOT_LOST, ids=str)
def test_memory_and_errors_of_one_request_do_not(error: Exception) -> None:
    assert not is_device_lost(error)


def test_an_error_raised_while_a_lost_device_was_handled_counts() -> None:
    def fail() -> None:
        try:
            raise LOST[0]
        finally:
            raise KeyError("cleaned up")

    with pytest.raises(KeyError) as raised:
        fail()
    assert is_device_lost(raised.value)
