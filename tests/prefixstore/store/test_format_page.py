"""The page of the format gives each record of the store's file with its keys, types and defaults, and a reader that is
written from the page alone reads a released store."""

from __future__ import annotations

import gzip
import json
import re
from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec.structs import fields

from diskprefix.prefixstore.cache.imported_prompt import ImportedNode, ImportedPrompt
from diskprefix.prefixstore.remote.bundle import BundledNode, Header
from diskprefix.prefixstore.store.folder import FileMark
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.pieces import LayoutGroup, LayoutState, LayoutText
from diskprefix.prefixstore.store.schema import (
    DATABASES,
    EntryRecord,
    ModelRecord,
    NamesRecord,
    NodeKind,
    OptionValue,
    PromptRecord,
    RootRecord,
)
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens
from diskprefix.prefixstore.store.statistics.savings import Savings, Tally
from diskprefix.prefixstore.store.write_counter import WrittenBytes
from diskprefix.tokens import PromptDigest
from tests.prefixstore.store.second_reader import SecondReader
from tests.source_files import PACKAGE, modules_in

PAGE = (PACKAGE / "prefixstore/store/FORMAT.md").read_text(encoding="utf-8")
FORMATS = Path(__file__).parent / "formats"
RECORDS: tuple[type[Any], ...] = (
    *(NamesRecord, WrittenBytes, ModelRecord, OptionValue, RootRecord, LayoutText, LayoutGroup, LayoutState),
    *(EntryRecord, PromptDigest, PromptRecord, Savings, Tally, LostTokens),
    *(ImportedPrompt, ImportedNode, Header, BundledNode, FileMark),
)
"""The records, in the order of the page."""
TABLE = re.compile(r"^\*\*`(\w+)`\*\*.*\n(?:.+\n)*\n\| (?:key|place) .*\n\| --- .*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)
"""A key, its type, its value if it is missing, and its meaning."""
PLAIN = {str: "text", bytes: "bytes", int: "int", float: "float", bool: "bool", NoneType: "nil"}

Row = tuple[str, str, str]


def type_text(kind: Any) -> str:
    """Returns a type in words of msgpack and JSON. Records are named."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Literal:
        return "text"
    if origin is UnionType:
        return " or ".join(map(type_text, arguments))
    if origin is dict:
        return f"map of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if origin in (list, tuple):
        is_alike = origin is list or arguments[-1] is Ellipsis
        return f"array of {type_text(arguments[0])}" if is_alike else f"[{', '.join(map(type_text, arguments))}]"
    return "int" if issubclass(kind, IntEnum) else f"`{kind.__name__}`"


def default_text(default: Any) -> str:
    match default:
        case msgspec.NODEFAULT | None:
            return "required" if default is not None else "nil"
        case PromptDigest():
            return "zeros"
        case "" | b"" | () | {} | []:
            return "empty"
        case tuple():
            return ", ".join(map(str, default))
    return f"`{default}`" if isinstance(default, str) else str(default).lower()


def rows_of(record: type[Any]) -> list[Row]:
    hints = get_type_hints(record)
    if not issubclass(record, msgspec.Struct):
        return [(name, type_text(kind), "required") for name, kind in hints.items()]
    rows = list[Row]()
    for field in fields(record):
        is_made = field.default_factory is not msgspec.NODEFAULT
        default = "empty" if is_made else default_text(field.default)
        rows.append((field.encode_name, type_text(hints[field.name]), default))
    return rows


def on_page() -> dict[str, list[Row]]:
    return {
        record: [(key, kind.strip(), default.strip()) for key, kind, default, _ in ROW.findall(rows)]
        for record, rows in TABLE.findall(PAGE)
    }


def test_the_page_has_each_key_of_each_record_with_its_type_and_default() -> None:
    assert on_page() == {record.__name__: rows_of(record) for record in RECORDS}


def test_a_record_that_the_page_calls_an_array_is_one() -> None:
    arrays = set(re.findall(r"^\*\*`(\w+)`\*\*[^:]*\barray\b", PAGE, re.MULTILINE))
    is_array = {kind.__name__ for kind in RECORDS if not issubclass(kind, msgspec.Struct)}
    is_array |= {
        kind.__name__
        for kind in RECORDS
        if getattr(kind, "__struct_config__", None) and kind.__struct_config__.array_like
    }
    assert arrays == is_array


def test_every_record_that_the_store_reads_has_its_table() -> None:
    """Read by its class, from msgpack or JSON. A map without a class is in the table of databases."""
    reads = re.compile(r"(?:\bdecode_record\(|\bmsgpack\.decode\(.*type=|\bjson\.decode\(.*type=)([A-Z]\w+)")
    read = {
        name
        for path in modules_in(*(f"prefixstore/{room}" for room in ("store", "cache", "remote")))
        for name in reads.findall(path.read_text(encoding="utf-8"))
    }
    assert len(read) > 8
    assert read - {record.__name__ for record in RECORDS} == set()


def test_the_page_lists_the_databases_and_the_kinds() -> None:
    assert re.findall(r"^\| `(\w+)` \| ", PAGE.partition("| database |")[2].partition("\n\n")[0], re.MULTILINE) == list(
        DATABASES
    )
    notes = PAGE.partition("| `notes` |")[2].partition("\n")[0]
    assert {int(number) for number in re.findall(r"\b(\d) [a-z]", notes.partition(")")[0])} == {*map(int, NoteKind)}
    assert ", ".join(f"{kind.value} {kind.name.lower()}" for kind in NodeKind) in PAGE


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> SecondReader:
    folder = tmp_path_factory.mktemp("store")
    (folder / "data.mdb").write_bytes(gzip.decompress((FORMATS / "16.mdb.gz").read_bytes()))
    return SecondReader(folder)


def test_a_reader_made_from_the_page_finds_the_prompts_of_a_released_store(reader: SecondReader) -> None:
    expected = json.loads((FORMATS / "16.json").read_text(encoding="utf-8"))
    assert reader.format == 16
    assert {name.hex() for name in reader.entries} == {key.split()[1] for key in expected if key.startswith("entry ")}
    for name, entry in reader.entries.items():
        path = reader.path(name)
        token_ids = [token for node in path for token in node.token_ids]
        assert len(token_ids) == entry["num_tokens"]
        assert [node.position for node in path] == sorted(node.position for node in path)
        # Each name is the hash of what it stands for.
        assert [reader.name_of(node) for node in path] == [node.name for node in path]


def test_a_reader_made_from_the_page_decodes_every_payload_of_a_released_store(reader: SecondReader) -> None:
    expected = json.loads((FORMATS / "16.json").read_text(encoding="utf-8"))
    texts = {f"node {node.name.hex()}": reader.text(node) for node in reader.nodes.values() if node.kind != 3}
    assert texts == {key: value for key, value in expected.items() if key.startswith("node ")}
    assert {codec for node in reader.nodes.values() for codec in reader.codecs(node)} == {0, 1, 2}
