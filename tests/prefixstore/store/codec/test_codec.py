from __future__ import annotations

import mmap
import os
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.errors import StoreCorrupt
from diskprefix.native import library
from diskprefix.prefixstore.store.codec.codec import (
    Codec,
    Element,
    Piece,
    _is_in_memory,
    address,
    decode_piece,
    decompress,
    encode_piece,
    is_finite,
    piece_seed,
    populate,
)
from diskprefix.prefixstore.store.codec.planes import BF16, Bytes, split
from diskprefix.tokens import checksum

HEADER_BYTES = 48
NAME = bytes(range(16))
SEED = piece_seed(NAME, 3)

FLOATS = {Element.BF16: 2, Element.FP16: 2, Element.FP32: 4, Element.FP8_E4M3: 1, Element.FP8_E5M2: 1}
"""Bytes of one value."""


def normal_values(element: Element, num_rows: int, row: int) -> Bytes:
    """The look of a model's state: normally distributed, each row with a scale of its own; shape [rows, bytes]."""
    random = np.random.default_rng(7)
    values = random.standard_normal((num_rows, row)) * np.exp(random.standard_normal((num_rows, 1)))
    match element:
        case Element.BF16:
            words: npt.NDArray[np.generic] = upper_half(values.astype(np.float32))
        case Element.FP16:
            words = values.astype(np.float16)
        case Element.FP32:
            words = values.astype(np.float32)
        case Element.FP8_E5M2:
            words = (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
        case _:
            words = as_e4m3(values)
    return words.view(np.uint8).reshape(num_rows, -1)


def upper_half(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def as_e4m3(values: npt.NDArray[np.float64]) -> Bytes:
    """Sign, exponent with bias 7, three bits of fraction; what is too small becomes zero, what is too large is cut."""
    fraction, exponent = np.frexp(np.abs(values))
    code = (exponent + 6).clip(0, 15) << 3 | (fraction * 16).astype(np.int64) & 7
    signs = np.signbit(values).astype(np.uint8) << 7
    return np.asarray(np.where(exponent + 6 < 1, 0, code) | signs, dtype=np.uint8)


def form_of(raw: Bytes, element: Element) -> Piece:
    return Piece(raw.shape[0], raw.shape[1], element)


def view_of(raw: bytes | npt.NDArray[Any]) -> memoryview:
    return memoryview(raw) if isinstance(raw, bytes) else raw.reshape(-1).view(np.uint8).data


def decoded(stored: memoryview, piece: Piece, seed: int | None = SEED) -> bytes:
    """Decode into rows that lie apart, as in the arena, and see that nothing was written between them."""
    guard = 6
    wide = np.full((piece.num_rows, guard + piece.row_bytes + guard), 0xA5, np.uint8)
    out = wide[:, guard : guard + piece.row_bytes]
    decode_piece(stored, piece, seed, out)
    assert (wide[:, :guard] == 0xA5).all()
    assert (wide[:, guard + piece.row_bytes :] == 0xA5).all()
    return out.tobytes()


def encoded(raw: bytes | npt.NDArray[Any], piece: Piece, codec: Codec) -> memoryview:
    return memoryview(bytes(encode_piece(view_of(raw), piece, codec, SEED)))


def assert_survives(raw: bytes | npt.NDArray[Any], piece: Piece, codec: Codec) -> memoryview:
    stored = encoded(raw, piece, codec)
    raw_bytes = bytes(view_of(raw))
    assert len(stored) <= piece.max_bytes == HEADER_BYTES + len(raw_bytes)
    assert decoded(stored, piece) == raw_bytes
    assert stored[17] == piece.element
    return stored


def with_header(data: bytes, *, raw_bytes: int, bits: int = 0, codec: int, element: int = Element.BF16) -> memoryview:
    """A piece with any header and a checksum that is right for it."""
    rest = struct.pack("<IIBB30x", raw_bytes, bits, codec, element) + data
    return memoryview(struct.pack("<Q", checksum(rest, SEED)) + rest)


rows_of_bytes = st.integers(0, 9).flatmap(
    lambda rows: st.integers(0, 67).flatmap(
        lambda row: st.tuples(st.just(rows), st.just(row), st.binary(min_size=rows * row, max_size=rows * row))
    )
)


@given(rows_of_bytes, st.sampled_from(Element), st.sampled_from(Codec))
def test_any_bytes_of_any_form_survive(form: tuple[int, int, bytes], element: Element, codec: Codec) -> None:
    num_rows, row_bytes, raw = form
    assert_survives(raw, Piece(num_rows, row_bytes, element), codec)


@given(
    st.integers(1, 5),
    st.integers(1, 9000),
    st.sampled_from(sorted(FLOATS)),
    st.sampled_from(Codec),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_values_with_any_share_of_noise_survive(
    num_rows: int, row: int, element: Element, codec: Codec, noise: float, seed: int
) -> None:
    values = normal_values(element, num_rows, row)
    random = np.random.default_rng(seed)
    raw = np.where(random.random(values.shape) < noise, random.integers(0, 256, values.shape, np.uint8), values)
    assert_survives(raw, Piece(num_rows, raw.shape[1], element), codec)


@pytest.mark.parametrize("highest", [0, 1, 5, 13])
@pytest.mark.parametrize("element", [Element.BF16, Element.FP32])
def test_the_lowest_and_the_largest_exponents_in_one_run_survive(element: Element, highest: int) -> None:
    random = np.random.default_rng(0)
    exponents = random.integers(0, highest + 1, 4 * 2048)
    exponents[::500], exponents[1::500] = 254, 255
    upper = exponents << 7 | random.integers(0, 1 << 7, len(exponents))
    raw = upper.astype("<u2") if element == Element.BF16 else upper.astype("<u4") << 16
    stored = assert_survives(raw, Piece(4, raw.nbytes // 4, element), Codec.PLANES)
    # Half of the bytes of these float32 are 0: with few exponents, zstd makes the whole smaller.
    assert stored[16] == Codec.PLANES or (element == Element.FP32 and highest < 2)


@pytest.mark.parametrize("element", [Element.BF16, Element.FP16, Element.FP32])
@pytest.mark.parametrize(("num_rows", "row"), [(3, 300_000), (700, 1_001), (1, 262_144), (2, 1)])
def test_pieces_larger_than_what_is_joined_at_a_time_survive(element: Element, num_rows: int, row: int) -> None:
    assert_survives(
        normal_values(element, num_rows, row), Piece(num_rows, row * FLOATS[element], element), Codec.PLANES
    )


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("element", [Element.BF16, Element.FP16, Element.FP32])
def test_neither_the_stored_piece_nor_the_memory_it_goes_to_must_be_aligned(element: Element, offset: int) -> None:
    raw = normal_values(element, 3, 2001)
    piece = form_of(raw, element)
    stored = memoryview(bytes(offset) + bytes(encoded(raw, piece, Codec.PLANES)))[offset:]
    memory = np.zeros(offset + raw.size, np.uint8)
    decode_piece(stored, piece, SEED, memory[offset:].reshape(raw.shape))
    assert (memory[offset:].reshape(raw.shape) == raw).all()


@pytest.mark.parametrize(
    ("element", "codec", "ratio"),
    [
        (Element.BF16, Codec.PLANES, 1.42),
        (Element.BF16, Codec.ZSTD, 1.2),
        (Element.FP16, Codec.PLANES, 1.12),
        (Element.FP32, Codec.PLANES, 1.17),
        (Element.FP8_E4M3, Codec.PLANES, 1.14),
        (Element.FP8_E5M2, Codec.PLANES, 1.35),
    ],
)
def test_what_models_compute_shrinks(element: Element, codec: Codec, ratio: float) -> None:
    raw = normal_values(element, 16, 16_384)
    stored = assert_survives(raw, form_of(raw, element), codec)
    assert raw.size / len(stored) > ratio
    assert stored[16] == (Codec.ZSTD if FLOATS[element] == 1 else codec)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("element", Element)
def test_noise_is_stored_raw(element: Element, codec: Codec) -> None:
    raw = np.random.default_rng(0).bytes(1 << 18)
    stored = assert_survives(raw, Piece(8, 1 << 15, element), codec)
    assert stored[16] == Codec.RAW
    assert bytes(stored[HEADER_BYTES:]) == raw


def test_what_hardly_shrinks_is_stored_raw() -> None:
    raw = np.random.default_rng(0).bytes(1 << 18) + bytes(1 << 12)
    assert_survives(raw, piece := Piece(1, len(raw), Element.BYTES), Codec.ZSTD)
    assert encoded(raw, piece, Codec.ZSTD)[16] == Codec.RAW


@pytest.mark.parametrize("element", [Element.BF16, Element.FP16, Element.FP32])
def test_values_that_shrink_far_more_as_a_frame_are_one(element: Element) -> None:
    row_bytes = FLOATS[element] * 16_384
    noise = normal_values(element, 4, 16_384)
    piece = Piece(4, row_bytes, element)
    assert encoded(noise, piece, Codec.PLANES)[16] == Codec.PLANES
    # Half of the rows again: a frame is shorter, but not so much that it is worth its slower decoding.
    again = np.concatenate([noise[:2], noise[:2]])
    assert assert_survives(again, piece, Codec.PLANES)[16] == Codec.PLANES
    stored = assert_survives(np.zeros_like(noise), piece, Codec.PLANES)
    assert stored[16] == Codec.ZSTD
    assert len(stored) < 1000


def test_rows_that_end_within_a_value_are_not_taken_apart() -> None:
    stored = assert_survives(bytes(3 * 1001), Piece(3, 1001, Element.BF16), Codec.PLANES)
    assert stored[16] == Codec.ZSTD


def test_a_raw_piece_has_the_documented_bytes() -> None:
    stored = bytes(encode_piece(memoryview(b"abcdef"), Piece(2, 3, Element.FP16), Codec.RAW, SEED))
    assert stored[8:48] == struct.pack("<IIBB", 6, 0, 0, 2) + bytes(30)
    assert stored[48:] == b"abcdef"
    assert struct.unpack_from("<Q", stored)[0] == checksum(stored[8:], SEED)


def test_a_piece_in_planes_has_the_documented_bytes() -> None:
    values = normal_values(Element.BF16, 2, 2048)
    stored = bytes(encoded(values, form_of(values, Element.BF16), Codec.PLANES))
    bits, data = split(BF16, values) or (0, values)
    assert stored[8:48] == struct.pack("<IIBB", 8192, bits, Codec.PLANES, Element.BF16) + bytes(30)
    assert stored[48:] == bytes(data)


def test_a_compressed_piece_is_one_zstd_frame() -> None:
    stored = encoded(bytes(5000), Piece(5, 1000, Element.BYTES), Codec.ZSTD)
    assert zstandard.ZstdDecompressor().decompress(stored[48:]) == bytes(5000)


def test_a_piece_in_the_place_of_another_does_not_verify() -> None:
    piece = Piece(4, 100, Element.BYTES)
    stored = memoryview(encode_piece(memoryview(bytes(400)), piece, Codec.RAW, piece_seed(NAME, 0)))
    for seed in (piece_seed(NAME, 1), piece_seed(NAME[::-1], 0)):
        with pytest.raises(StoreCorrupt, match="checksum"):
            decoded(stored, piece, seed)
    decoded(stored, piece, piece_seed(NAME, 0))


def test_what_something_else_verifies_has_no_checksum_and_is_decoded_without() -> None:
    raw = bytes(range(200)) * 2
    piece = Piece(4, 100, Element.BYTES)
    stored = encode_piece(memoryview(raw), piece, Codec.RAW, None)
    assert stored[:8] == bytes(8)
    assert decoded(memoryview(stored), piece, None) == raw
    with pytest.raises(StoreCorrupt, match="checksum"):
        decoded(memoryview(stored), piece, SEED)


def test_seeds_of_many_nodes_and_pieces_differ() -> None:
    random = np.random.default_rng(1)
    names = [random.bytes(16) for _ in range(100)] + [b"\xff" * 16]
    seeds = {piece_seed(name, index) for name in names for index in range(50)}
    assert len(seeds) == 101 * 50
    assert max(seeds) < 2**64


@pytest.mark.parametrize("codec", Codec)
def test_no_flipped_bit_no_cut_and_no_extension_goes_unnoticed(codec: Codec) -> None:
    raw = normal_values(Element.BF16, 2, 300)
    piece = form_of(raw, Element.BF16)
    stored = encoded(raw, piece, codec)
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupt):
            decoded(memoryview(damaged), piece)
    for cut in [*(stored[:end] for end in range(len(stored))), memoryview(bytes(stored) + b"\0")]:
        with pytest.raises(StoreCorrupt):
            decoded(cut, piece)


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def claiming(num_bytes: int) -> bytes:
    """A frame of one empty block whose header claims that much content."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", num_bytes) + b"\x01\x00\x00"


PIECE = Piece(4, 512, Element.BF16)
"""1 024 values, in four runs of four groups."""


def planes_of_zeros(*, codes: bytes = bytes(128), counts: bytes = bytes(8)) -> bytes:
    """The data of `PIECE` with codes of one bit."""
    return bytes(1024) + codes + counts + bytes(4)


LIES = {
    "more raw bytes": with_header(bytes(2048), raw_bytes=2**32 - 1, codec=Codec.RAW),
    "fewer raw bytes": with_header(bytes(2048), raw_bytes=2, codec=Codec.RAW),
    "too little raw data": with_header(bytes(2047), raw_bytes=2048, codec=Codec.RAW),
    "too much raw data": with_header(bytes(2049), raw_bytes=2048, codec=Codec.RAW),
    "no data": with_header(b"", raw_bytes=2048, codec=Codec.RAW),
    "an unknown codec": with_header(bytes(2048), raw_bytes=2048, codec=3),
    "an unknown element": with_header(bytes(2048), raw_bytes=2048, codec=Codec.RAW, element=7),
    "no frame": with_header(b"no frame", raw_bytes=2048, codec=Codec.ZSTD),
    "an empty frame": with_header(b"", raw_bytes=2048, codec=Codec.ZSTD),
    "half a frame": with_header(frame(np.random.default_rng(2).bytes(2048))[:1000], raw_bytes=2048, codec=Codec.ZSTD),
    "a frame and more": with_header(frame(bytes(2048)) + b"more", raw_bytes=2048, codec=Codec.ZSTD),
    "two frames": with_header(frame(bytes(2048)) * 2, raw_bytes=2048, codec=Codec.ZSTD),
    "a frame of less": with_header(frame(bytes(2047)), raw_bytes=2048, codec=Codec.ZSTD),
    "a bomb": with_header(frame(bytes(1 << 24)), raw_bytes=2048, codec=Codec.ZSTD),
    "a frame that claims what it lacks": with_header(claiming(2048), raw_bytes=2048, codec=Codec.ZSTD),
    "a huge frame": with_header(claiming(2**62), raw_bytes=2048, codec=Codec.ZSTD),
    "a huge frame in a huge piece": with_header(claiming(2**32 - 1), raw_bytes=2**32 - 1, codec=Codec.ZSTD),
    "a frame of nothing": with_header(frame(b""), raw_bytes=0, codec=Codec.ZSTD),
    "planes of nothing": with_header(b"", raw_bytes=0, codec=Codec.PLANES),
    "planes without a code": with_header(bytes(2048), raw_bytes=2048, codec=Codec.PLANES),
    "codes of five bits": with_header(bytes(2048), raw_bytes=2048, bits=5, codec=Codec.PLANES),
    "huge codes": with_header(bytes(2048), raw_bytes=2048, bits=2**32 - 1, codec=Codec.PLANES),
    "too little for planes": with_header(planes_of_zeros()[:-1], raw_bytes=2048, bits=1, codec=Codec.PLANES),
    "too much for planes": with_header(planes_of_zeros() + b"\0", raw_bytes=2048, bits=1, codec=Codec.PLANES),
    "an exception that is not listed": with_header(
        planes_of_zeros(codes=b"\1" + bytes(127)), raw_bytes=2048, bits=1, codec=Codec.PLANES
    ),
    "an exception in another row": with_header(
        planes_of_zeros(codes=b"\1" + bytes(127), counts=b"\0\0\1\0" + bytes(4)) + b"\0",
        raw_bytes=2048,
        bits=1,
        codec=Codec.PLANES,
    ),
    "more exceptions than there are values": with_header(
        planes_of_zeros(counts=b"\xff\xff" + bytes(6)) + bytes(65535), raw_bytes=2048, bits=1, codec=Codec.PLANES
    ),
    "half a value": with_header(bytes(2047), raw_bytes=2047, bits=1, codec=Codec.PLANES),
    "planes of bytes": with_header(bytes(2048), raw_bytes=2048, bits=1, codec=Codec.PLANES, element=Element.BYTES),
    "planes of fp8": with_header(bytes(2048), raw_bytes=2048, bits=1, codec=Codec.PLANES, element=Element.FP8_E5M2),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_with_a_right_checksum_is_found_and_costs_no_memory(lie: str) -> None:
    out = np.zeros((PIECE.num_rows, PIECE.row_bytes), np.uint8)
    elements = [Element(LIES[lie][17])] if LIES[lie][17] in list(Element) else [Element.BF16]
    library.planes()  # reads its file the first time
    tracemalloc.start()
    try:
        with pytest.raises(StoreCorrupt):
            decode_piece(LIES[lie], Piece(PIECE.num_rows, PIECE.row_bytes, elements[0]), SEED, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", Codec)
def test_a_piece_of_another_form_is_refused(codec: Codec) -> None:
    raw = normal_values(Element.BF16, 4, 256)
    stored = encoded(raw, PIECE, codec)
    for other in (Piece(4, 510, Element.BF16), Piece(5, 512, Element.BF16), Piece(4, 512, Element.FP16)):
        with pytest.raises(StoreCorrupt, match="belong"):
            decoded(stored, other)


def test_planes_are_not_written_to_rows_that_end_within_a_value() -> None:
    stored = encoded(normal_values(Element.BF16, 2, 1001), Piece(2, 2002, Element.BF16), Codec.PLANES)
    with pytest.raises(StoreCorrupt, match="rows of 1001 bytes"):
        decoded(stored, Piece(4, 1001, Element.BF16))


@given(st.data(), st.sampled_from([Codec.ZSTD, Codec.PLANES]), st.sampled_from(sorted(FLOATS)))
def test_damage_under_a_right_checksum_never_raises_anything_else(
    data: st.DataObject, codec: Codec, element: Element
) -> None:
    raw = normal_values(element, 4, 1000)
    piece = form_of(raw, element)
    stored = bytearray(encoded(raw, piece, codec))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(12, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(HEADER_BYTES, len(stored)))
    stored[:8] = struct.pack("<Q", checksum(bytes(stored[8:cut]), SEED))
    with suppress(StoreCorrupt):
        decoded(memoryview(stored)[:cut], piece)


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
def test_populating_leaves_memory_as_it_is(size: int) -> None:
    view = memoryview(bytes(range(256)) * 400)[:size]
    populate(view)
    assert bytes(view) == (bytes(range(256)) * 400)[:size]


def can_populate() -> bool:
    """Linux 5.14."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(22)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_populate(), reason="the kernel cannot populate pages")
def test_populating_pages_that_the_file_has_lost_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("rb") as file:
        pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    os.truncate(path, mmap.PAGESIZE)
    populate(pages[: mmap.PAGESIZE])
    with pytest.raises(StoreCorrupt, match="cannot be read"):
        populate(pages[100:])


def test_a_view_of_which_only_the_ends_are_in_memory_is_populated(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "data", 8 << 20
    path.write_bytes(bytes(num_bytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    assert pages[0] == pages[-1] == 0
    populate(pages)
    assert _is_in_memory(address(pages), num_bytes)


@pytest.mark.parametrize("stored", [b"", b"not a frame", frame(bytes(404)), frame(bytes(400))[:-3]])
def test_a_record_that_is_no_frame_or_claims_too_much_is_refused(stored: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        decompress(stored, max_bytes=400)


def of_element(element: Element, values: npt.NDArray[np.float32]) -> memoryview:
    """The values as bytes."""
    if element == Element.BF16:
        return view_of(upper_half(values))
    return view_of(values.astype(np.float16) if element == Element.FP16 else values)


@pytest.mark.parametrize("element", [Element.BF16, Element.FP16, Element.FP32])
@pytest.mark.parametrize("wrong", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 500, -1])
def test_a_value_that_is_not_finite_is_found_in_any_place(element: Element, wrong: float, place: int) -> None:
    values = np.random.default_rng(7).standard_normal(1001).astype(np.float32)
    largest = 65504.0 if element == Element.FP16 else float(np.finfo(np.float32).max)
    values[1:3] = largest, -largest
    assert is_finite(of_element(element, values), element)
    values[place] = wrong
    assert not is_finite(of_element(element, values), element)


def test_codes_whose_scale_is_not_finite_are_found() -> None:
    items = np.full((5, 34), 255, np.uint8)
    items[:, :2] = np.frombuffer(b"\x01\x3c", np.uint8)
    assert is_finite(view_of(items), Element.Q8)
    items[3, :2] = np.frombuffer(b"\x80\x7f", np.uint8)
    assert not is_finite(view_of(items), Element.Q8)


@pytest.mark.parametrize("element", [Element.BYTES, Element.FP8_E4M3, Element.FP8_E5M2])
def test_values_of_other_types_count_as_finite_and_so_does_nothing(element: Element) -> None:
    assert is_finite(memoryview(b"\xff" * 8), element)
    assert is_finite(memoryview(b""), Element.BF16)
