"""GGUF files: what is read of a header, and that what is damaged or that no model computes is refused in one line."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.runtime.load.loader import load_model
from tests.runtime.plan import tiny


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
    assert [tensor.name for tensor in tensors] == [tensor.name for tensor in reader.tensors]
    for ours, theirs in zip(tensors, reader.tensors, strict=True):
        assert ours.kind == theirs.tensor_type.name
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
    "line end in a name": (b"of.INT8", b"of.IN\n8", r"a name in it is 'of.IN\\n8'"),
    "UTF-8": (b"of.INT8", b"of.INT\xff", r"a name in it is not UTF-8: b'of.INT\\xff'"),
    "type of a value": (text("of.INT8") + b"\x01", text("of.INT8") + b"\x0d", "a value of the type 13"),
    "type in an array": (text("list.INT8") + b"\x09\0\0\0\x01", text("list.INT8") + b"\x09\0\0\0\x0d", "the type 13"),
    "key twice": (b"of.INT16", b"of.INT32", "twice"),
    "dimensions": (PLAIN, text("plain") + struct.pack("<I2Q", 5, 256, 2), "5 dimensions"),
    "no elements": (PLAIN, text("plain") + struct.pack("<I2Q", 2, 256, 0), "the sizes"),
    "size overflows": (PLAIN, text("plain") + struct.pack("<I2Q", 2, 2**63, 2**63), "cut short"),
    "type of a tensor": (PLAIN + struct.pack("<I", F32), PLAIN + struct.pack("<I", 77), "the type 77"),
    "not in blocks": (BLOCKS, text("Q4_0") + struct.pack("<I2Q", 2, 25, 2), "Q4_0"),
    "tensor twice": (text("Q8_0"), text("Q4_0"), "the tensor 'Q4_0' is in it twice"),
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


PLACES: dict[str, Callable[[int, int], int]] = {
    "that of the first tensor": lambda _own, _other: 0,
    "that of another tensor": lambda _own, other: other,
    "within the one before": lambda own, _other: own - 64,
    "behind a hole": lambda own, _other: own + 64,
    "not aligned": lambda own, _other: own + 1,
    "behind the end": lambda _own, _other: 2**40,
    "the last number": lambda _own, _other: 2**64 - 64,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_does_not_follow_the_one_before_is_refused_by_name(place: str, file: Path) -> None:
    tensors, content = read_header(file).tensors, file.read_bytes()
    for number, it in enumerate(tensors):
        own, other = (tensor.offset - tensors[0].offset for tensor in (it, tensors[number - 2]))
        offset = PLACES[place](own, other) % 2**64
        if offset == own:
            continue
        kind, dimensions = GGMLQuantizationType[it.kind], struct.pack("<I", len(it.shape))
        described = text(it.name) + dimensions + struct.pack(f"<{len(it.shape)}QI", *it.shape[::-1], kind)
        # Wherever it lies now, the file has all its bytes.
        file.write_bytes(content + bytes(1024))
        changed(file, described + struct.pack("<Q", own), described + struct.pack("<Q", offset))
        said = (
            f"the tensor '{it.name}' begins at byte {offset} of its tensors, and those before it take the first {own}"
        )
        with pytest.raises(ModelError, match=said):
            read_header(file)


def test_the_parts_of_a_header_that_no_model_has_are_not_read(file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("diskprefix.runtime.files.gguf.gguf_header._MOST_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match="longer than that of any model"):
        read_header(file)


# Whole files, and what of them no model computes.


def keys(**values: Any) -> Callable[[Any], None]:
    """Adds keys below the architecture, whose dots are written as two underscores."""

    def more(writer: Any) -> None:
        for name, value in values.items():
            tiny.add_value(writer, f"{writer.arch}.{name.replace('__', '.')}", value)

    return more


def tensor(name: str, dtype: Any = np.float32) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.full(tiny.HIDDEN // tiny.HEADS // 2, 2, dtype))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"without": "blk.1.ffn_up.weight"}, r"the file lacks the tensor blk\.1\.ffn_up\.weight"),
    ({"architecture": "arch-of-tomorrow"}, "arch-of-tomorrow"),
    ({"architecture": "arch-of\ntomorrow"}, r"arch-of\\ntomorrow"),
    # As GTE-Qwen2 is published.
    (
        {"more": lambda writer: writer.add_causal_attention(False)},
        r"tiny\.gguf holds a model whose tokens see later ones: llama; ",
    ),
    (
        {
            "architecture": "gemma4",
            "more": keys(attention__shared_kv_layers=18, attention__key_length=512, attention__value_length=512),
        },
        r"the file lacks gemma4\.attention\.sliding_window_pattern",
    ),
]
UNREAD: list[tuple[Callable[[Any], object], str]] = [
    (tensor("blk.1.attn_sub_norm.weight"), "blk.1.attn_sub_norm.weight"),
    (tensor("blk.0.attn_q.scale"), "blk.0.attn_q.scale"),
    (tensor("rope_freqs.weight", np.float16), "rope_freqs.weight"),
    (tensor("rope_factors_long.weight"), "rope_factors_long.weight"),
    (tensor("blk.2.nextn.eh_proj.weight"), "blk.2.nextn.eh_proj.weight"),
    (keys(of_tomorrow=3), "llama.of_tomorrow is 3"),
    (keys(of_layers=[0.5] * 2000), "llama.of_layers is an array"),
    (keys(logit_scale=0.5), "llama.logit_scale is 0.5"),
    (keys(attention__scale=0.5), "llama.attention.scale is 0.5, and the model would have 0.353553"),
    (keys(attention__sliding_window=16), "llama.attention.sliding_window is 16"),
    (keys(attention__sliding_window_pattern=[True, False]), "llama.attention.sliding_window_pattern"),
    (keys(attention__value_length=4), "llama.attention.value_length is 4, and the model would have 8"),
    (keys(attention__layer_norm_epsilon=1e-3), "llama.attention.layer_norm_epsilon is 0.001"),
    (keys(rope__scaling__type="dynamic"), "llama.rope.scaling.type is .dynamic"),
    (keys(rope__scaling__type="longrope"), "llama.rope.scaling.type is .longrope"),
    (keys(rope__scaling__attn_factor=1.5), "llama.rope.scaling.attn_factor is 1.5"),
    (keys(rope__scaling__of_tomorrow=1), "llama.rope.scaling.of_tomorrow is 1"),
    (
        lambda writer: [keys(rope__scaling__factor=4.0)(writer), tensor("rope_freqs.weight")(writer)],
        "scales positions twice: by rope_freqs.weight",
    ),
]
REFUSED += [({"more": more}, rf"file.*{named}|{named}.*file") for more, named in UNREAD]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_a_whole_file_of_no_model_that_is_served_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    require_refused(tiny.write_gguf(tmp_path / "tiny.gguf", **options), words)


def require_refused(file: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as raised:
        tiny.read_file(file)
    assert "\n" not in raised.value.message


def name_one_twice(parts: list[Path]) -> None:
    """Gives a tensor of the last part the name of one of the first, and the parts the number of names that remain."""
    first, last = ([tensor.name for tensor in read_header(part).tensors] for part in (parts[0], parts[-1]))
    old, new = next((old, new) for old in last for new in first if len(old) == len(new))
    changed(parts[-1], text(old), text(new))
    count = text("split.tensors.count") + struct.pack("<I", 5)
    total = read_header(parts[0]).values["split.tensors.count"]
    for part in parts:
        changed(part, count + struct.pack("<i", total), count + struct.pack("<i", total - 1))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            name_one_twice,
            r"tiny-00003-of-00003\.gguf and .*tiny-00001-of-00003\.gguf both hold the tensor [a-z0-9._]+:",
        ),
        (lambda parts: parts[1].unlink(), r"tiny-00002-of-00003\.gguf is missing"),
        (lambda parts: shutil.copyfile(parts[1], parts[2]), "is not part 3 of 3 of the same model"),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-100]), "cannot read"),
        *(
            (lambda parts, name=name: parts[0].rename(parts[0].with_name(f"tiny-{name}.gguf")), "there is no part")
            for name in ("00004-of-00003", "00001-of-00000", "00000-of-00003")
        ),
    ],
)
def test_parts_that_are_no_whole_model_are_refused(
    spoil: Callable[[list[Path]], object], words: str, tmp_path: Path
) -> None:
    parts = tiny.write_parts(tmp_path)
    renamed = spoil(parts)
    require_refused(renamed if isinstance(renamed, Path) and renamed not in parts else parts[0], words)


@pytest.mark.usefixtures("cache")
def test_keys_and_tensors_without_effect_are_accepted(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        keys(
            tensor_data_layout="Meta AI original pth",
            attention__key_length=8,
            attention__value_length=8,
            attention__sliding_window=0,
            attention__scale=0.0,
            attention__clamp_kqv=0.0,
            expert_count=0,
            expert_used_count=0,
            expert_gating_func=2,
            logit_scale=1.0,
            embedding_scale=1.0,
            rope__scaling__type="none",
            rope__scaling__factor=8.0,
            rope__scaling__finetuned=True,
            # Of encoders, which are other files.
            mm__tokens_per_image=256,
            vision__block_count=27,
            audio__block_count=12,
        )(writer)
        for key, value in {
            "general.name": "Tiny",
            "general.size_label": "1K",
            "general.tags": ["text-generation"],
            "general.sampling.temp": 0.7,
            "quantize.imatrix.file": "imatrix.dat",
            "quantize.imatrix.entries_count": 14,
            "split.count": 0,
            "mradermacher.quantized_by": "somebody",
            "tokenizer.ggml.add_space_prefix": False,
        }.items():
            tiny.add_value(writer, key, value)

    tiny.read_file(tiny.write_gguf(tmp_path / "tiny.gguf", more=more))


@pytest.mark.usefixtures("cache")
def test_tensors_of_encoders_in_a_file_of_text_are_left_out(tmp_path: Path) -> None:
    """As Ollama's files have them. Each beginning of a name of an encoder's tensor that the library knows is tried."""
    names = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]]
    beginnings = {name.partition(".")[0] for name in names} | {"a", "mm", "resampler", "v"}

    def more(writer: Any) -> None:
        for beginning in sorted(beginnings):
            writer.add_tensor(f"{beginning}.conv1d.weight", np.ones((4, 4), np.float32))

    plain = tiny.read_file(tiny.write_gguf(tmp_path / "plain.gguf"))
    whole = tiny.read_file(tiny.write_gguf(tmp_path / "whole.gguf", more=more))
    assert plain.weights is not None
    assert whole.weights is not None
    assert [name for name, _ in whole.weights.named()] == [name for name, _ in plain.weights.named()]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 4096\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tiny.gguf"])
def test_a_pointer_of_git_lfs_is_named_as_one(name: str, chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    (folder / name).write_text(POINTER, encoding="utf-8")
    with pytest.raises(ModelError, match="a pointer of Git LFS, without the content: run `git lfs pull`") as raised:
        load_model(Settings(model=str(folder / name if name.endswith(".gguf") else folder)), print)
    assert "\n" not in str(raised.value)
