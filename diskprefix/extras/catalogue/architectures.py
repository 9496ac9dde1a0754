"""The table of verified architectures: `diskprefix list --architectures`, and a line of `diskprefix show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.tooling import plain, print_json, print_table
from diskprefix.model.load.gguf_header import read_header
from diskprefix.units import counted

TABLE = Path(__file__).with_name("verified_models.json")
"""The table that `tools/bench exactness --write-table` writes."""

_RESTORED = {"cut": "anywhere", "checkpoint": "at checkpoints", "unsupported": "not"}
_SERVED_AS = {"deepseek2": "deepseek_v3"}
"""What .gguf files call otherwise. DeepSeek V2, which is called so too, is verified like V3."""
_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def installed_versions() -> dict[str, str]:
    """Returns the versions of torch and transformers, without the label of a build such as `+cpu`."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def show_architectures(as_json: bool) -> None:
    """Prints the table: how the state of each architecture is restored, and in which dtypes a restored run was equal to
    the cold run, bit for bit."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = [_row(name, entry) for name, entry in table["architectures"].items()]
    versions = {name: table[name] for name in installed_versions()}
    if as_json:
        print_json({"installed": installed_versions(), "verified_with": versions, "architectures": rows})
        return
    titles = ("architecture", "restored", "exact at", "verified", "note")
    cells = [
        (row["architecture"], row["restored"], _exact_at(row), _named(row["verified"]) or "no", plain(row["note"]))
        for row in rows
    ]
    print_table(titles, cells, wrapped=("note",))
    with_these = " and ".join(f"{name} {number}" for name, number in versions.items())
    number = sum(bool(row["verified"]) for row in rows)
    click.echo(f"{counted(len(rows), 'architecture')}, {number} verified with {with_these}")
    if versions != installed_versions():
        click.echo("other versions are installed: tools/bench exactness verifies them")


def verified_of(path: Path) -> str:
    """Returns what was verified of the architecture of a model's file or folder, for people."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))["architectures"]
    names = _architectures_of(path)
    by_type = {entry["model_type"]: entry for entry in table.values()} | table
    # A .gguf file writes `qwen3moe` for `qwen3_moe`.
    by_letters = {_letters(known): entry for known, entry in by_type.items()}
    found = next((by_letters[_letters(name)] for name in names if _letters(name) in by_letters), None)
    name = next(iter(names), "not known")
    if found is None:
        return f"{name}: none of `diskprefix list --architectures`, so it may not be served"
    row = _row(name, found)
    return f"{name}: restored {row['restored']}, exact at {_exact_at(row) or 'no token'}, verified in " + (
        _named(row["verified"]) or "no dtype"
    )


def _architectures_of(path: Path) -> list[str]:
    """Returns the names of a model's architecture, its own first, and then that of what computes its text."""
    if path.is_file():
        own = read_header(path).values.get("general.architecture")
        names = [own, _SERVED_AS.get(str(own))]
    else:
        file = path / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        names = [config.get("model_type"), (config.get("text_config") or {}).get("model_type")]
    return [str(name) for name in names if name]


def _letters(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architecture": name,
        "restored": _RESTORED[entry["kind"]],
        "verified": entry["dtypes"],
        "exact_at_tokens": entry["exact_at_tokens"],
        "note": entry["reason"] or "",
    }


def _exact_at(row: dict[str, Any]) -> str:
    """Returns `token`, `token (bf16)` if it is not so in all verified dtypes, `grid`, or "" if nothing is verified."""
    exact = row["exact_at_tokens"]
    if not exact:
        return "grid" if row["verified"] else ""
    return "token" if exact == row["verified"] else f"token ({_named(exact)})"


def _named(dtypes: Sequence[str]) -> str:
    return ", ".join(_SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes)
