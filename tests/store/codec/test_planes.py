from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from diskprefix.store.codec.planes import BF16, FP16, FP32, FloatFormat


@pytest.mark.parametrize(
    ("float_format", "words", "exponents", "rest"),
    [
        (BF16, np.array([0x3F80, 0xBFC1, 0x8000, 0xFFC0], "<u2"), [127, 127, 0, 255], [0, 0x80 | 0x41, 0x80, 0xC0]),
        (FP16, np.array([0x3C00, 0xBEEF], "<u2"), [0x3C, 0xBE], [0x00, 0xEF]),
        (FP32, np.array([0x3F800000, 0xBFC12345], "<u4"), [127, 127], [0, 0x80 | 0x41, 0, 0, 0x45, 0x23]),
    ],
)
def test_planes_hold_what_the_format_says(
    float_format: FloatFormat, words: npt.NDArray[np.unsignedinteger], exponents: list[int], rest: list[int]
) -> None:
    planes = float_format.split(words.view(np.uint8).data)
    assert [plane.tolist() for plane in planes] == [exponents, rest]


@pytest.mark.parametrize("float_format", [BF16, FP16, FP32])
def test_taking_apart_and_putting_together_gives_the_same_bytes(float_format: FloatFormat) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (5, 4096 * float_format.item_bytes), np.uint8)
    exponents, rest = float_format.split(raw.reshape(-1).data)
    assert exponents.size + rest.size == raw.size
    out = np.zeros((5, 2 * raw.shape[1]), np.uint8)
    float_format.join(exponents, rest, out[:, : raw.shape[1]])
    assert (out[:, : raw.shape[1]] == raw).all()
    assert not out[:, raw.shape[1] :].any()
