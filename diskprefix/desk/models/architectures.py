"""The table of verified architectures: `diskprefix list --architectures`, and a line of `diskprefix show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from diskprefix.daemon.catalogue.verified import TABLE, installed_versions
from diskprefix.desk.shared.tooling import plain, print_json, print_table
from diskprefix.runtime.files.gguf.gguf_header import read_header
from diskprefix.runtime.files.gguf.known_families import MODEL_TYPES
from diskprefix.runtime.plan.families.type_table import class_of, has_trait
from diskprefix.runtime.plan.families.types.known_types import TYPES
from diskprefix.units import counted

_WITHOUT_CLASS = "transformers has no class of it"
_RESTORED = {"cut": "anywhere", "checkpoint": "at checkpoints", "unsupported": "not"}
_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def show_architectures(as_json: bool) -> None:
    """Prints the table: the names of each architecture in folders and `.gguf` files, how its state is restored, and the
    dtypes in which a restored run was equal to the cold run, bit for bit."""
    table, installed = _table(), installed_versions()
    rows = [_row(name, entry) for name, entry in table["architectures"].items()]
    versions = {name: table[name] for name in installed}
    if as_json:
        print_json({"installed": installed, "verified_with": versions, "architectures": rows})
        return
    titles = ("from folders", "from files", "restored", "exact at", "verified", "note")
    cells = [
        (
            row["architecture"],
            ", ".join(row["files"]),
            row["restored"],
            _exact_at(row),
            _named(row["verified"]) or "no",
            plain(row["note"]),
        )
        for row in rows
    ]
    print_table(titles, cells, wrapped=("from files", "note"))
    with_these = " and ".join(f"{name} {number}" for name, number in versions.items())
    number = sum(bool(row["verified"]) for row in rows)
    files = {name for row in rows for name in row["files"]}
    click.echo(f"{counted(len(rows), 'architecture')}, {number} verified with {with_these}; {len(files)} from files")
    if versions != installed:
        click.echo("other versions are installed: tools/bench exactness verifies them")


def _table() -> dict[str, Any]:
    """Returns the table, with the types of which transformers has no class. Without a class that their folders name,
    their files alone are served."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    further = {
        name: {
            "model_type": name,
            "kind": "cut",
            "dtypes": [],
            "exact_at_tokens": [],
            "reason": _WITHOUT_CLASS if class_of(name) else f"files alone: {_WITHOUT_CLASS}",
        }
        for name in TYPES
        if has_trait(name, "without_class")
    }
    return table | {"architectures": dict(sorted((table["architectures"] | further).items()))}


def verified_of(path: Path) -> str:
    """Returns the verified properties of the architecture of a model's file or folder, for people."""
    table = _table()["architectures"]
    name, types = _architecture_of(path)
    by_type = {entry["model_type"]: entry for entry in table.values()} | table
    entry = next((by_type[model_type] for model_type in types if model_type in by_type), None)
    if entry is None:
        return f"{name}: none of `diskprefix list --architectures`, so it may not be served"
    return f"{name}: {_said_of(_row(name, entry))}"


def _said_of(row: dict[str, Any]) -> str:
    """Returns a sentence without words of the table."""
    exact, verified = row["exact_at_tokens"], row["verified"]
    if row["restored"] == _RESTORED["unsupported"]:
        return "prompts are not saved"
    if not verified:
        return "prompts are saved, which is not verified"
    where = f"at any token ({_named(exact)})" if exact else "every 256 tokens"
    if row["restored"] == _RESTORED["checkpoint"]:
        where = "at the ends of turns"
    elif exact == verified:
        where = "at any token"
    return f"prompts are restored {where} with the same bits, verified in {_named(verified)}"


def _architecture_of(path: Path) -> tuple[str, Sequence[str]]:
    """Returns the name of a model's architecture, and the names that transformers may have for it or its text part."""
    if path.is_file():
        name = read_header(path).shown("general.architecture")
        return name, MODEL_TYPES.get(name, ())
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    types = [str(name) for name in names if name]
    return next(iter(types), "not known"), types


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architecture": name,
        "model_type": entry["model_type"],
        "files": sorted(file for file, types in MODEL_TYPES.items() if entry["model_type"] in types),
        "restored": _RESTORED[entry["kind"]],
        "verified": entry["dtypes"],
        "exact_at_tokens": entry["exact_at_tokens"],
        "note": entry["reason"] or "",
    }


def _exact_at(row: dict[str, Any]) -> str:
    """Returns `token`, `token (bf16)` for some of the verified dtypes, `grid`, or "" if nothing is verified."""
    exact = row["exact_at_tokens"]
    if not exact:
        return "grid" if row["verified"] else ""
    return "token" if exact == row["verified"] else f"token ({_named(exact)})"


def _named(dtypes: Sequence[str]) -> str:
    return ", ".join(_SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes)
