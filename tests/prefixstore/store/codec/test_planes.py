from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.native import build, library
from diskprefix.prefixstore.store.codec.planes import (
    BF16,
    FP16,
    FP32,
    Bytes,
    FloatFormat,
    join,
    join_with,
    join_with_numpy,
    split,
    split_with,
    split_with_numpy,
)

Split: TypeAlias = Callable[[FloatFormat, Bytes], tuple[int, Bytes] | None]
Join: TypeAlias = Callable[[FloatFormat, int, memoryview, Bytes], bool]

FORMATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Without a compiler these tests fail."""
    if not build.is_complete("runnable"):
        build.build("runnable")
        library.planes.cache_clear()


def kinds() -> dict[str, tuple[Split, Join]]:
    """Numpy's, and those of each variant of the compiled ones that this CPU has."""
    found: dict[str, tuple[Split, Join]] = {"numpy": (split_with_numpy, join_with_numpy)}
    for variant in library.VARIANTS:
        if (operators := library.planes(variant)) is not None:
            found[variant] = (partial(split_with, operators), partial(join_with, operators))
    assert "baseline" in found
    return found


def random_values(form: FloatFormat, num_rows: int, width: int, spread: float, seed: int) -> Bytes:
    """Normal numbers, the rows of which differ in scale; with a large spread, nearly all exponents there are. Shape
    [rows, bytes]."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((num_rows, width)) * np.exp2(spread * random.standard_normal((num_rows, width)))
    with np.errstate(over="ignore"):
        singles = (values * np.exp2(random.integers(-4, 5, (num_rows, 1)))).astype(np.float32)
        words: npt.NDArray[np.generic] = singles
        if form is BF16:
            words = (singles.view(np.uint32) >> 16).astype(np.uint16)
        elif form is FP16:
            words = singles.astype(np.float16)
    return words.view(np.uint8).reshape(num_rows, -1)


def guarded(shape: tuple[int, ...], guard: int) -> tuple[Bytes, Bytes]:
    """Rows that lie apart, and the memory around them."""
    wide = np.full((shape[0], guard + shape[1] + guard), 0xA5, np.uint8)
    return wide[:, guard : guard + shape[1]], wide


def is_untouched(wide: Bytes, guard: int) -> bool:
    return not guard or bool((wide[:, :guard] == 0xA5).all() and (wide[:, -guard:] == 0xA5).all())


shapes = st.tuples(st.integers(1, 4), st.sampled_from([1, 7, 63, 64, 65, 130, 1000, 2047, 2048, 2049, 2112, 4200]))


@given(
    st.sampled_from(sorted(FORMATS)),
    shapes,
    st.sampled_from([0.0, 1.0, 4.0]),
    st.integers(0, 9),
    st.sampled_from([0, 6]),
)
def test_all_write_the_same_bytes_and_read_what_was_written(
    name: str, shape: tuple[int, int], spread: float, seed: int, guard: int
) -> None:
    form = FORMATS[name]
    values, wide = guarded((shape[0], shape[1] * form.item_bytes), guard)
    values[...] = random_values(form, *shape, spread, seed)
    wanted = split_with_numpy(form, values)
    for one_split, one_join in kinds().values():
        found = one_split(form, values)
        assert (found is None) == (wanted is None)
        if found is None or wanted is None:
            continue
        assert found[0] == wanted[0]
        assert (found[1] == wanted[1]).all()
        assert len(found[1]) < values.size
        out, around = guarded(values.shape, guard)
        assert one_join(form, found[0], found[1].data, out)
        assert (out == values).all()
        assert is_untouched(around, guard)
    assert is_untouched(wide, guard)


@given(st.data(), st.sampled_from(sorted(FORMATS)), shapes, st.integers(0, 9))
def test_all_refuse_the_same_damage_and_read_the_same_from_the_rest(
    data: st.DataObject, name: str, shape: tuple[int, int], seed: int
) -> None:
    """Nothing but the rows is written to, whatever the data is."""
    form = FORMATS[name]
    values = random_values(form, *shape, 0.5, seed)
    bits, stored = split_with_numpy(form, values) or (3, values.reshape(-1).copy())
    damaged = stored.copy()
    # Most of the data is the rest, any of which is right: the lists behind it are hit more often.
    begins = data.draw(st.sampled_from([0, len(damaged) // form.item_bytes, max(0, len(damaged) - 200)]))
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(begins, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    bits = data.draw(st.one_of(st.just(bits), st.integers(0, 6), st.just(2**32 - 1)))
    # A copy of its own size, so that a tool that watches memory sees each read behind it.
    given_data = bytes(damaged[:size])
    read = {}
    for kind, (_, one_join) in kinds().items():
        out, around = guarded(values.shape, 5)
        is_right = one_join(form, bits, memoryview(given_data), out)
        assert is_untouched(around, 5)
        read[kind] = bytes(out) if is_right else None
    assert len(set(read.values())) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_exponent_and_what_is_no_number_survives(name: str) -> None:
    form = FORMATS[name]
    if form is FP32:
        words = np.arange(0, 1 << 32, 65_521, dtype=np.uint32).astype("<u4")
        calm = np.full(1 << 18, 0x3F800001, "<u4")
    else:
        words = np.arange(1 << 16, dtype=np.uint16).astype("<u2").astype("<u2")
        calm = np.full(1 << 18, 0x3C01, "<u2")
    values = np.concatenate([words, calm]).view(np.uint8).reshape(1, -1)
    for one_split, one_join in kinds().values():
        found = one_split(form, values)
        assert found is not None
        out = np.zeros_like(values)
        assert one_join(form, found[0], found[1].data, out)
        assert (out == values).all()


def test_the_bytes_are_those_that_the_page_says() -> None:
    """70 values in a row: a whole group and a part of one. Exponents 127, 126 and one exception."""
    words = np.full((1, 70), 0xBFC1, "<u2")  # -1.5078125: the sign, exponent 127, fraction 65
    words[0, 3] = 0x3F00  # 0.5: exponent 126
    words[0, 66] = 0x4700  # 32768: exponent 142
    bits, data = split(BF16, words.view(np.uint8)) or (0, np.empty(0, np.uint8))
    assert bits == 1
    rest = np.full(70, 0x80 | 65, np.uint8)
    rest[[3, 66]] = 0
    # With one bit, code 0 is the base and 1 an exception: there are two.
    codes = np.array([1 << 3, 1 << 2], "<u8")
    assert bytes(data) == bytes(rest) + bytes(codes) + b"\2\0" + bytes([127]) + bytes([126, 142])


def test_more_bits_are_taken_where_they_make_it_shorter() -> None:
    few, some, many = (random_values(BF16, 1, 4096, spread, 1) for spread in (0.0, 1.0, 3.0))
    few = (few.view("<u2") & 0x807F | 127 << 7).view(np.uint8)
    assert [(split(BF16, values) or (0,))[0] for values in (few, some, many)] == [1, 3, 4]


def test_the_marks_of_fp16_stand_beside_the_codes() -> None:
    words = np.full((1, 64), 0x3C00, "<u2")
    words[0, 1], words[0, 2], words[0, 3] = 0x3D07, 0x3E00, 0xBC00  # fraction bit 8 and the rest, bit 9, the sign
    bits, data = split(FP16, words.view(np.uint8)) or (0, np.empty(0, np.uint8))
    rest = np.zeros(64, np.uint8)
    rest[1] = 7
    assert bits == 1
    assert bytes(data) == bytes(rest) + bytes(np.array([0, 2, 4, 8], "<u8")) + b"\0\0" + bytes([15])


def test_what_is_no_data_of_planes_is_refused() -> None:
    with pytest.raises(StoreCorrupt, match="10 bytes are no 64 values in planes"):
        join(BF16, 3, memoryview(bytes(10)), np.empty((1, 128), np.uint8))


def test_without_the_compiled_operators_numpy_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_values(BF16, 2, 3000, 0.0, 1)
    wanted = split(BF16, values)
    monkeypatch.setattr(library, "planes", lambda: None)
    found = split(BF16, values)
    assert found is not None
    assert wanted is not None
    assert (found[1] == wanted[1]).all()
    out = np.zeros_like(values)
    join(BF16, found[0], found[1].data, out)
    assert (out == values).all()
