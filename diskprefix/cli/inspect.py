"""`diskprefix inspect`: what is in the cache folder, while the daemon runs or not."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from diskprefix.errors import SettingsError
from diskprefix.server.printable import printable_only
from diskprefix.settings import default_kv_cache_dir, format_size
from diskprefix.store.listing import EntryInfo, list_entries
from diskprefix.store.store import Store

_PIPE_COLUMNS = 160
"""Width of the table where no terminal says one."""
_OTHER_COLUMNS = 100
"""About what the columns beside the preview take with a long model name: they say more than a longer preview."""


@click.command(short_help="List what is saved, and what it shares.")
@click.argument("entry", required=False)
@click.option(
    "--kv-cache-dir",
    type=click.Path(path_type=Path),
    default=default_kv_cache_dir,
    envvar="DISKPREFIX_KV_CACHE_DIR",
    show_default="the folder that serve uses",
    help="Folder of the store.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts instead of a table.")
def inspect(entry: str | None, kv_cache_dir: Path, as_json: bool) -> None:
    """List the saved prompts in the cache folder, the most recently used first.

    Safe beside a running daemon: it reads one consistent view and changes nothing. With ENTRY, an id or the beginning
    of one, shows that entry alone, with its blocks.

    \b
    stored   bytes on disk along the entry's whole path
    shared   the part of them that other entries use too: it is stored once
    hits     requests that restored this prefix

    \b
    diskprefix inspect
    diskprefix inspect 3fa9
    diskprefix inspect --json | jq '.entries[] | {id, num_tokens, hits}'
    """
    store = Store.open(kv_cache_dir, read_only=True)
    try:
        with store.snapshot() as snapshot:
            entries = list_entries(snapshot)
            used, counts = snapshot.used_bytes(), snapshot.counts()
            if entry is not None:
                info = _find(entries, entry)
                blocks = [
                    {
                        "hash": name.hex(),
                        "position": node.position,
                        "num_tokens": len(node.token_ids),
                        "kind": node.kind.name.lower(),
                        "stored_bytes": node.stored_bytes,
                    }
                    for name, node in snapshot.path(bytes.fromhex(info.id))
                ]
    finally:
        store.close()
    if entry is not None:
        _show_entry(info, blocks, as_json)
    elif as_json:
        click.echo(_json({"entries": [asdict(info) for info in entries]}))
    else:
        _show_table(entries, kv_cache_dir, used, counts["blocks"])


def _find(entries: list[EntryInfo], prefix: str) -> EntryInfo:
    found = [info for info in entries if info.id.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    problem = "no entry starts" if not found else f"{len(found)} entries start"
    raise SettingsError(f"{problem} with {prefix!r}; run `diskprefix inspect` to see the ids", param="ENTRY")


def _show_entry(info: EntryInfo, blocks: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(_json(asdict(info) | {"blocks": blocks}))
        return
    for label, value in (
        ("id", info.id),
        ("model", info.model),
        ("tokens", f"{info.num_tokens:,}"),
        ("stored", f"{format_size(info.stored_bytes)} (raw {format_size(info.raw_bytes)})"),
        ("shared", format_size(info.shared_bytes)),
        ("hits", str(info.hits)),
        ("created", _age(info.created_at)),
        ("last used", _age(info.last_used_at)),
        ("scope", info.scope),
        ("preview", info.preview),
    ):
        click.echo(f"{label:<10} {printable_only(value)}")
    click.echo(f"{'blocks':<10} {len(blocks)}")
    for block in blocks:
        end = block["position"] + block["num_tokens"]
        click.echo(f"  {block['hash']}  {block['kind']:<5}  tokens {block['position']}–{end}")


def _show_table(entries: list[EntryInfo], folder: Path, used_bytes: int, num_blocks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("id", "model", "scope"):
        table.add_column(title, no_wrap=True)
    for title in ("tokens", "stored", "shared", "hits"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("preview", overflow="ellipsis", no_wrap=True)
    preview_chars = max(20, console.width - _OTHER_COLUMNS)
    for info in entries:
        table.add_row(
            info.id[:12],
            _plain(info.model),
            info.scope,
            f"{info.num_tokens:,}",
            format_size(info.stored_bytes),
            format_size(info.shared_bytes),
            str(info.hits),
            _age(info.last_used_at),
            _plain(_shortened(info.preview, preview_chars)),
        )
    if entries:
        console.print(table)
    prompts = "1 saved prompt" if len(entries) == 1 else f"{len(entries)} saved prompts"
    click.echo(f"{prompts}, {num_blocks} blocks, {format_size(used_bytes)} in {folder}")


def _shortened(text: str, width: int) -> str:
    """Beginning and end: conversations of one agent begin alike."""
    head = width // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def _plain(text: str) -> Any:
    """Text of others must neither be read as markup nor steer the terminal."""
    from rich.text import Text

    return Text(printable_only(text))


def _json(value: object) -> str:
    """JSON to read and to parse: letters of all scripts as they are, what a terminal would act on escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _age(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
