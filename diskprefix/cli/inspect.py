"""`diskprefix inspect`: list what the store holds, while the daemon runs or not."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.tooling import (
    counted,
    find_entry,
    opened_store,
    plain,
    print_json,
    print_table,
    short_id,
    shortened,
    store_options,
    terminal_width,
)
from diskprefix.printable import printable_only
from diskprefix.settings import format_size
from diskprefix.store.listing import EntryInfo, NodeCounts, count_nodes, list_entries
from diskprefix.store.tree import PrefixTree
from diskprefix.tenant import short_tenant

_OTHER_COLUMNS = 100
"""About the width of the columns beside the preview, with a long model name."""
_NUMBERS = ("tokens", "checkpoints", "generated", "stored", "shared", "hits")


@click.command(short_help="List the saved prompts, and what they share.")
@click.argument("entry", required=False)
@store_options
def inspect(entry: str | None, kv_cache_dir: Path, as_json: bool) -> None:
    """List the saved prompts in the cache folder, the most recently used first.

    With ENTRY, an id or the beginning of one, show that entry alone, with its blocks. This is safe beside a running
    daemon: the command reads one consistent view and changes nothing.

    \b
    stored       bytes on disk of all blocks of the entry
    shared       the part of them that other entries use too; it is stored once
    hits         requests that restored this prefix
    last column  the beginning and the end of the prompt's text
    These columns are shown only if an entry has a value in them:
    tenant       the id of the tenant, as `purge --salt` takes it
    checkpoints  the number of positions at which the prompt can be restored, for a
                 model with state that exists at one position only
    generated    tokens of replies (see --reuse-generated); restoring them is not exact

    \b
    diskprefix inspect
    diskprefix inspect 3fa9
    diskprefix inspect --json | jq '.entries[] | {id, num_tokens, hits}'

    \b
    Exit codes: 0 done; 2 wrong usage, or no such ENTRY; 4 the store cannot be opened.
    """
    with opened_store(kv_cache_dir) as store, store.snapshot() as snapshot:
        entries = list_entries(snapshot)
        used, counts = snapshot.used_bytes(), count_nodes(snapshot)
        if entry is not None:
            info = find_entry(entries, entry)
            blocks = [
                {
                    "hash": name.hex(),
                    "position": node.position,
                    "num_tokens": node.num_tokens,
                    "kind": node.kind.name.lower(),
                    "generated": node.generated,
                    "stored_bytes": node.stored_bytes,
                }
                for name, node in PrefixTree(snapshot).entry(bytes.fromhex(info.id)).items()
            ]
    if entry is not None:
        _show_entry(info, blocks, as_json)
    elif as_json:
        print_json({"entries": [asdict(info) for info in entries]} | asdict(counts))
    else:
        _show_table(entries, kv_cache_dir, used, counts)


def _show_entry(info: EntryInfo, blocks: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(asdict(info) | {"blocks": blocks})
        return
    for label, value in (
        ("id", info.id),
        ("model", info.model),
        ("tokens", f"{info.num_tokens:,}"),
        ("stored", f"{format_size(info.stored_bytes)} (raw {format_size(info.raw_bytes)})"),
        ("shared", format_size(info.shared_bytes)),
        ("checkpoints", _checkpoints_text(info)),
        ("generated", f"{info.generated_tokens:,} tokens" if info.generated_tokens else "none"),
        ("hits", str(info.hits)),
        ("created", _age(info.created_at)),
        ("last used", _age(info.last_used_at)),
        ("kept for", _ttl_text(info)),
        ("scope", info.scope),
        ("tenant", info.tenant or "none"),
        ("preview", info.preview),
    ):
        click.echo(f"{label:<11} {printable_only(value)}")
    click.echo(f"{'blocks':<11} {sum(block['kind'] != 'checkpoint' for block in blocks)}")
    for block in blocks:
        start, end = block["position"], block["position"] + block["num_tokens"]
        where = f"at token {end}" if block["kind"] == "checkpoint" else f"tokens {start}–{end}"
        generated = "  generated" if block["generated"] else ""
        click.echo(f"  {block['hash']}  {block['kind']:<10}  {where}{generated}")


def _ttl_text(info: EntryInfo) -> str:
    if info.ttl_s is None:
        return "what --kv-cache-ttl says"
    return f"{info.ttl_s:,} s after its last use" + (", or what --kv-cache-ttl says" if info.default_ttl else "")


def _checkpoints_text(info: EntryInfo) -> str:
    if not info.checkpoints:
        return "none"
    return f"{format_size(info.checkpoint_bytes)} at {', '.join(f'{position:,}' for position in info.checkpoints)}"


def _show_table(entries: list[EntryInfo], folder: Path, used_bytes: int, counts: NodeCounts) -> None:
    width = terminal_width(otherwise=160)
    if entries:
        _print_entries(entries, width)
    prompts, blocks = counted(len(entries), "saved prompt"), counted(counts.blocks, "block")
    generated = f" ({counts.generated_blocks:,} generated)" if counts.generated_blocks else ""
    size = format_size(counts.checkpoint_bytes)
    checkpoints = f"{counted(counts.checkpoints, 'checkpoint')} ({size}), " if counts.checkpoints else ""
    click.echo(f"{prompts}, {blocks}{generated}, {checkpoints}{format_size(used_bytes)} in {folder}")


def _print_entries(entries: list[EntryInfo], width: int) -> None:
    from rich.table import Column

    rows = [
        {
            "id": short_id(info.id),
            "model": plain(info.model),
            "scope": info.scope,
            "tenant": short_tenant(info.tenant),
            "tokens": f"{info.num_tokens:,}",
            "checkpoints": str(len(info.checkpoints)),
            "generated": f"{info.generated_tokens:,}",
            "stored": format_size(info.stored_bytes),
            "shared": format_size(info.shared_bytes),
            "hits": str(info.hits),
            "last used": _age(info.last_used_at),
            "preview": plain(shortened(info.preview, max(20, width - _OTHER_COLUMNS))),
        }
        for info in entries
    ]
    # Most stores have none of these, and then no column for them.
    shown = {
        "tenant": any(info.tenant for info in entries),
        "checkpoints": any(info.checkpoints for info in entries),
        "generated": any(info.generated_tokens for info in entries),
    }
    titles = [title for title in rows[0] if shown.get(title, True)]
    columns = [
        Column(title, justify="right" if title in _NUMBERS else "left", no_wrap=True, overflow="ellipsis")
        for title in titles
    ]
    print_table(columns, [[row[title] for title in titles] for row in rows], width=width)


def _age(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
