"""The header of a GGUF file: what is read of a whole one, and that a damaged one is refused in one line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_file import read_tensors
from diskprefix.model.load.gguf_header import read_header


def write_sample(path: Path) -> Path:
    """Writes a small file that has metadata of every type, and tensors of some. Returns its path."""
    writer = GGUFWriter(path, "llama")
    for value_type in GGUFValueType:
        if value_type == GGUFValueType.STRING:
            writer.add_key_value("of.STRING", "text", value_type)
            writer.add_key_value("list.STRING", ["a", "bc", ""] * 5, GGUFValueType.ARRAY, value_type)
        elif value_type != GGUFValueType.ARRAY:
            writer.add_key_value(f"of.{value_type.name}", 1, value_type)
            writer.add_key_value(f"list.{value_type.name}", [1, 0, 1], GGUFValueType.ARRAY, value_type)
    writer.add_custom_alignment(64)
    rows = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    writer.add_tensor("plain", rows)
    writer.add_tensor("stacked", rows.reshape(2, 2, 128).astype(np.float16))
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "sample.gguf")


def test_a_header_is_read_as_the_library_reads_it(file: Path) -> None:
    reader, (header, tensors) = GGUFReader(file), read_tensors([file])
    scalars = {
        name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1 and "GGUF." not in name
    }
    assert header.values == scalars
    assert header.alignment == 64
    assert [tensor.name for tensor in tensors] == [tensor.name for tensor in reader.tensors]
    for ours, theirs in zip(tensors, reader.tensors, strict=True):
        assert ours.type == theirs.tensor_type
        assert (ours.offset, ours.dtype, ours.stored_shape) == (
            theirs.data_offset,
            theirs.data.dtype,
            theirs.data.shape,
        )
        assert np.array_equal(ours.content(), theirs.data)


def changed(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


F32, Q4_0 = 0, 2
ALIGNMENT = text("general.alignment") + struct.pack("<I", 4)
BLOCKS = text("Q4_0") + struct.pack("<I2Q", 2, 256, 2)
PLAIN = text("plain") + struct.pack("<I2Q", 2, 256, 2)

DAMAGES: dict[str, tuple[bytes, bytes, str]] = {
    "magic": (b"GGUF\x03", b"GGML\x03", "does not begin with GGUF"),
    "version": (b"GGUF\x03\0", b"GGUF\x09\0", "version 9"),
    "byte order": (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "byte order"),
    "tensors": (struct.pack("<2Q", 5, 26), struct.pack("<2Q", 2**63, 26), "counts 9223372036854775808 tensors"),
    "length of a string": (text("text"), struct.pack("<Q", 2**27) + b"text", "cut short"),
    "length of a name": (text("of.INT8"), struct.pack("<Q", 70_000) + b"of.INT8", "a name in it has 70000 bytes"),
    "UTF-8": (b"of.INT8", b"of.INT\xff", "not UTF-8"),
    "type of a value": (text("of.INT8") + b"\x01", text("of.INT8") + b"\x0d", "a value of the type 13"),
    "type in an array": (text("list.INT8") + b"\x09\0\0\0\x01", text("list.INT8") + b"\x09\0\0\0\x09", "of the type 9"),
    "key twice": (b"of.INT16", b"of.INT32", "twice"),
    "dimensions": (PLAIN, text("plain") + struct.pack("<I2Q", 5, 256, 2), "5 dimensions"),
    "no elements": (PLAIN, text("plain") + struct.pack("<I2Q", 2, 256, 0), "the sizes"),
    "size overflows": (PLAIN, text("plain") + struct.pack("<I2Q", 2, 2**63, 2**63), "cut short"),
    "type of a tensor": (PLAIN + struct.pack("<I", F32), PLAIN + struct.pack("<I", 77), "the type 77"),
    "not in blocks": (BLOCKS, text("Q4_0") + struct.pack("<I2Q", 2, 25, 2), "Q4_0"),
    "offset behind the end": (PLAIN + struct.pack("<IQ", F32, 0), PLAIN + struct.pack("<IQ", F32, 2**40), "cut short"),
    "offset not aligned": (PLAIN + struct.pack("<IQ", F32, 0), PLAIN + struct.pack("<IQ", F32, 1), "not aligned"),
    "tensor twice": (text("Q8_0"), text("Q4_0"), "twice"),
    "alignment": (ALIGNMENT + struct.pack("<I", 64), ALIGNMENT + struct.pack("<I", 0), "alignment is 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_refused_in_one_line(damage: str, file: Path) -> None:
    old, new, said = DAMAGES[damage]
    changed(file, old, new)
    with pytest.raises(ModelError, match=said) as caught:
        read_header(file)
    assert caught.value.message.startswith(f"cannot read {file}: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_refused(share: float, file: Path) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ModelError, match="cut short"):
        read_header(file)


def test_tensors_that_share_bytes_are_refused(file: Path) -> None:
    content = file.read_bytes()
    first = read_header(file).tensors[0]
    # All tensors lie in the file, but it has not as many bytes as they have together.
    for tensor in read_header(file).tensors[1:]:
        number, offset = GGMLQuantizationType[tensor.kind], tensor.offset - first.offset
        content = content.replace(struct.pack("<IQ", number, offset), struct.pack("<IQ", number, 0))
    file.write_bytes(content[: first.offset + first.num_bytes])
    with pytest.raises(ModelError, match="overlap"):
        read_header(file)


def test_the_parts_of_a_header_that_no_model_has_are_not_read(file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("diskprefix.model.load.gguf_header._MOST_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match="longer than that of any model"):
        read_header(file)
