"""Metadata as other programs write them: each key that the tables read, as a number for each block, as different ones,
as bytes that are not UTF-8, as the largest unsigned number, as arrays within an array. A value counts as the number
that it stands for, or is refused by its key, or is one on which no result depends."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.configuration import make_configuration
from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer
from diskprefix.runtime.files.gguf.gguf import GgufModel, rotated_of
from diskprefix.runtime.files.gguf.gguf_header import FileTensor, GgufHeader, read_header
from diskprefix.runtime.files.gguf.gguf_rope import scale_positions
from diskprefix.runtime.files.gguf.known_families import MODEL_TYPES, architecture_of
from diskprefix.runtime.files.gguf.metadata import Metadata
from tests.runtime.files.gguf.test_gguf_refusals import require_refused
from tests.runtime.plan import tiny
from tools.fuzzing.gguf_tables import OF_SOME, SOUND

UNSIGNED_MAX = 2**32 - 1
BYTES, NESTED = "é".encode("latin-1"), None
"""A nested array is None in `GgufHeader.lists`."""
OF_BLOCKS = {
    *("attention.sliding_window_pattern", "attention.recurrent_layers", "attention.rope_pattern"),
    "rope.dimension_sections",
}
"""Keys whose arrays mean something else than their numbers."""
COUNTS = {"block_count", "nextn_predict_layers"}
"""Keys of which no number of blocks is known."""
_ALSO = {"attention.sliding_window": ("gemma3",)}
_OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"expert_weights_norm": True, "attention.sliding_window": 16},
    "gptneox": {"use_parallel_residual": True},
    "granite_swa": {"attention.rope_pattern": (True, True)},
    "hy_v3": {"expert_weights_norm": True},
    "laguna": {"expert_weights_norm": True},
    "smallthinker": {"expert_gating_func": 2, "attention.sliding_window": 16},
    "mellum": {"attention.sliding_window": 16, "attention.sliding_window_pattern": (True, False)},
}
_FACTOR, _LENGTH = "rope.scaling.factor", "rope.scaling.original_context_length"
SCALED: dict[str, Any] = {"rope.scaling.type": "yarn", _FACTOR: 4.0, _LENGTH: 128}


def outcome(architecture: str, values: Mapping[str, Any], read: set[str] | None = None) -> str:
    """Returns the configuration as text, or the message of its refusal. Adds to `read` the keys that were asked for."""
    shape, file = (64, 64), Path("none.gguf")
    sizes = {"token_embd.weight": shape, "blk.0.attn_gate.weight": (4, 64)}
    tensors = [FileTensor(name, "F32", size, file, 0, np.dtype("f4"), size) for name, size in sizes.items()]
    prefixed = {f"{architecture}.{key}": value for key, value in values.items()}
    plain = {key: value for key, value in prefixed.items() if not isinstance(value, tuple) and value is not NESTED}
    lists = {key: value for key, value in prefixed.items() if key not in plain}
    metadata = Metadata(GgufHeader({"general.architecture": architecture} | plain, lists, {}, ()), tensors)
    try:
        is_causal = metadata.get("attention.causal", True)
        config = make_configuration(architecture_of(metadata), metadata)
        scale_positions(config, metadata, tensors)
        said = f"{is_causal} {rotated_of(config)} {config.to_dict()}"
    except ModelError as error:
        said = f"refused: {error.message}".replace("\n", "of two lines")
    if read is not None:
        read |= metadata._read
    return said


@cache
def keys_of(architecture: str) -> frozenset[str]:
    """Returns the keys that are read of a file with much in it."""
    read = set[str]()
    values = {key: value for key, value in SOUND.items() if is_sound(architecture, key)}
    outcome(architecture, values | _OWN.get(architecture, {}), read)
    return frozenset(read | SCALED.keys())


def is_sound(architecture: str, key: str) -> bool:
    return architecture in (*OF_SOME.get(key, (architecture,)), *_ALSO.get(key, ()))


def sound(architecture: str) -> dict[str, Any]:
    """Returns the values of a small model."""
    own = {key: value for key, value in SOUND.items() if key in keys_of(architecture) and is_sound(architecture, key)}
    return own | _OWN.get(architecture, {})


def number_of(key: str) -> Any:
    return next((value for value in (SOUND.get(key), SCALED.get(key)) if isinstance(value, int | float)), 1)


def is_served(said: str) -> bool:
    return not said.startswith("refused: ")


@pytest.mark.cases(40)
@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_a_number_for_each_block_is_the_number(architecture: str) -> None:
    base, checked = sound(architecture), 0
    for key in {*keys_of(architecture)} - OF_BLOCKS - COUNTS:
        number = number_of(key)
        plain, listed = (outcome(architecture, base | {key: value}) for value in (number, (number,) * 2))
        assert (plain == listed) or (not is_served(plain) and not is_served(listed)), key
        checked += is_served(plain)
    assert checked > 10


def others(key: str) -> Iterator[tuple[str, Any]]:
    number = number_of(key)
    yield "differing", (False, True) if key in OF_BLOCKS else (number, number + 1)
    yield "of more blocks", (number,) * 3
    yield "not UTF-8", BYTES
    yield "largest unsigned", UNSIGNED_MAX
    yield "nested", NESTED
    yield "texts", ("a", "b")


@pytest.mark.cases(8)
@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_an_odd_value_is_refused_if_it_changes_a_result(architecture: str) -> None:
    """What is served with an odd value differs from what is served without it, or no value of the key changes it."""
    base = sound(architecture)
    for key in keys_of(architecture):
        number = number_of(key)
        without = outcome(architecture, {name: value for name, value in base.items() if name != key})
        plain = [outcome(architecture, base | {key: value}) for value in (number, 2 * number)]
        depends = {without, *plain} != {without} or not is_served(without)
        for name, value in others(key):
            said = outcome(architecture, base | {key: value})
            if name == "largest unsigned" and said == outcome(architecture, base | {key: 2**20}):
                # It counts as other large numbers do.
                continue
            assert not is_served(said) or not depends or said not in {without, plain[0]}, (key, name)
            is_named = key.rpartition(".")[2] in said or str(UNSIGNED_MAX) in said
            # Of two keys that exclude each other, one is named.
            is_named |= ", and the model would have " in said
            assert is_served(said) or (is_named and "two lines" not in said), (key, name, said)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ((1.6448536, -math.inf), "'activation_sparsity_pattern': [0.95, 0.0]"),
        ((1.6448536, math.inf), "gemma3n.activation_sparsity_scale is (1.6448536, inf), which is not a number"),
        ((1.6448536, math.nan), "gemma3n.activation_sparsity_scale is (1.6448536, nan), which is not a number"),
    ],
)
def test_only_minus_infinity_says_that_a_layer_of_gemma_3n_has_no_sparsity(
    scales: tuple[float, ...], said: str
) -> None:
    assert said in outcome("gemma3n", sound("gemma3n") | {"activation_sparsity_scale": scales})


@pytest.mark.parametrize("architecture", ["granite", "granitemoe"])
def test_a_granite_without_positions_is_refused(architecture: str) -> None:
    said = outcome(architecture, sound(architecture) | {"rope.scaling.finetuned": False})
    assert f"{architecture}.rope.scaling.finetuned is False, which is not true" in said
    assert is_served(outcome(architecture, sound(architecture) | {"rope.scaling.finetuned": True}))


def file_with(path: Path, more: Mapping[str, Any]) -> Path:
    """Writes a llama of two layers whose metadata are changed: bytes are texts as they are."""

    def add(writer: GGUFWriter) -> None:
        for key, value in more.items():
            writer.kv_data[0].pop(key, None)
            if value is None:
                continue
            if isinstance(value, bytes):
                writer.add_string(key, "?" * len(value))
            else:
                tiny.add_value(writer, key, value)

    tiny.write_gguf(path, more=add)
    content = path.read_bytes()
    for key, value in more.items():
        if isinstance(value, bytes):
            head = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value))
            assert content.count(head) == 1
            content = content.replace(head + b"?" * len(value), head + value)
    path.write_bytes(content)
    return path


LATIN_1 = "C:\\Users\\José\\imatrix.dat".encode("latin-1")
SERVED: list[dict[str, Any]] = [
    {"general.name": LATIN_1, "general.author": LATIN_1, "quantize.imatrix.file": LATIN_1, "general.size_label": BYTES},
    {"llama.attention.head_count_kv": [tiny.KV_HEADS] * tiny.LAYERS},
    {"llama.feed_forward_length": [tiny.INNER] * tiny.LAYERS},
    {"tokenizer.ggml.padding_token_id": UNSIGNED_MAX, "tokenizer.ggml.unknown_token_id": 10_000},
]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("more", SERVED, ids=lambda more: "-".join(more))
def test_values_that_change_no_result_are_ignored(more: dict[str, Any], tmp_path: Path) -> None:
    plain = tiny.read_file(tiny.write_gguf(tmp_path / "plain.gguf"))
    odd = tiny.read_file(file_with(tmp_path / "odd.gguf", more))
    assert odd.config.to_dict() == plain.config.to_dict()
    lines: list[str] = []
    GgufModel.read(tmp_path / "odd.gguf", lines.append)
    warned = {key for key in more for line in lines if line.startswith("warning: odd.gguf: ") and key in line}
    assert warned == {key for key in more if key.startswith("tokenizer.")}
    assert odd.weights is not None
    assert plain.weights is not None
    for (name, found), (_, expected) in zip(odd.weights.named(), plain.weights.named(), strict=True):
        assert np.array_equal(found, expected), name


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": BYTES}, r"general\.architecture is not UTF-8"),
    ({"llama.rope.scaling.type": BYTES}, r"llama\.rope\.scaling\.type is not UTF-8"),
    ({"llama.context_length": BYTES}, r"llama\.context_length is not UTF-8"),
    ({"tokenizer.ggml.model": BYTES}, r"tokenizer\.ggml\.model is not UTF-8"),
    ({"tokenizer.ggml.pre": BYTES}, r"tokenizer\.ggml\.pre is not UTF-8"),
    ({"tokenizer.chat_template": BYTES}, r"tokenizer\.chat_template is not UTF-8"),
    ({"tokenizer.ggml.eos_token_id": UNSIGNED_MAX}, r"tokenizer\.ggml\.eos_token_id is 4294967295"),
    ({"tokenizer.ggml.eos_token_id": BYTES}, r"tokenizer\.ggml\.eos_token_id is not UTF-8"),
    ({"llama.attention.head_count_kv": [1, 2]}, r"llama\.attention\.head_count_kv is \(1, 2\)"),
]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("more", "words"), REFUSED, ids=lambda one: "-".join(one) if isinstance(one, dict) else None)
def test_the_refusal_of_a_bad_value_names_its_key(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    require_refused(file_with(tmp_path / "odd.gguf", more), words)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("key", sorted(keys_of("llama") - {"attention.causal"}))
def test_the_largest_number_of_a_whole_file_is_served_or_refused_in_one_line(key: str, tmp_path: Path) -> None:
    path = file_with(tmp_path / "odd.gguf", {f"llama.{key}": UNSIGNED_MAX})
    try:
        tiny.read_file(path)
    except ModelError as error:
        assert "\n" not in error.message  # noqa: PT017


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_token_or_a_merge_that_is_not_utf_8_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "odd.gguf")
    array = read_header(path).arrays[f"tokenizer.ggml.{key}"]
    content = bytearray(path.read_bytes())
    # The last letter of the last string.
    content[array.end - 1] = 0xFF
    path.write_bytes(content)
    assert read_header(path).arrays[array.key].undecoded == array.count - 1
    # Without a model, as a tokenizer is read, and before its weights, as each command reads a model.
    for read in (lambda: make_tokenizer(read_header(path)), lambda: GgufModel.read(path, print)):
        with pytest.raises(ModelError, match=rf"{array.key} is not UTF-8 in element {array.count - 1}"):
            read()


def nested(depth: int, count: int = 1) -> bytes:
    """Returns an array of arrays, with a number within the last ones."""
    inner = struct.pack("<IQI", 4, 1, 7)
    for _ in range(depth):
        inner = struct.pack("<IQ", 9, count) + inner * count
    return inner


def with_array(path: Path, key: str, value: bytes) -> Path:
    """Writes a file with the array `key`, whose bytes are `value`."""
    file_with(path, {key: [11]})
    head = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 9)
    before, _, after = path.read_bytes().partition(head)
    path.write_bytes(before + head + value + after[len(struct.pack("<IQi", 5, 1, 11)) :])
    return path


@pytest.mark.usefixtures("cache")
def test_arrays_within_arrays_are_read_and_refused_where_a_key_means_something(tmp_path: Path) -> None:
    # The tensors begin at a multiple of 32 bytes, as before.
    padded = struct.pack("<IQ", 9, 2) + struct.pack("<IQ", 4, 3) + bytes(12) + struct.pack("<IQ", 4, 0)
    tiny.read_file(with_array(tmp_path / "served.gguf", "general.of_somebody", padded))
    path = with_array(tmp_path / "refused.gguf", "llama.of_somebody", padded)
    require_refused(path, r"llama\.of_somebody is an array")
    with pytest.raises(ModelError, match=r"llama\.of_somebody has arrays within it"):
        _ = read_header(path).arrays["llama.of_somebody"].content


@pytest.mark.parametrize(("depth", "count"), [(9, 1), (2, 300)])
def test_too_many_arrays_within_arrays_are_refused(depth: int, count: int, tmp_path: Path) -> None:
    path = with_array(tmp_path / "tiny.gguf", "general.of_somebody", nested(depth, count))
    with pytest.raises(ModelError, match="too many arrays within arrays"):
        read_header(path)
