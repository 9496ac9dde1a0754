"""`diskprefix compact`: return the unused room of the store's file to the disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from diskprefix.cli.tooling import advised, print_json, progress, require_store, store_options
from diskprefix.store.compact import compact_folder, compacted_bytes
from diskprefix.store.folder import DATA
from diskprefix.units import format_size


@click.command(short_help="Return unused room of the store's file to the disk.")
@store_options
def compact(kv_cache_dir: Path, as_json: bool) -> None:
    """Write the store's file anew without the room that removed blocks left in it.

    The file never shrinks by itself: new blocks use the room of blocks that were evicted or purged. Until then the room
    still holds the old bytes. Compact the store to return that room to the disk, and to erase what was purged.

    The daemon must not run, because its file is replaced. The command needs as much free disk as the new file takes.
    It may be interrupted at any moment: the old file stays until the new one is complete, checked and on disk.

    \b
    diskprefix compact
    diskprefix compact --json
    diskprefix purge --salt alice --yes && diskprefix compact

    \b
    Exit codes: 0 done, 2 wrong usage, 4 the store is in use or damaged, or the disk is too full.
    """
    folder = require_store(kv_cache_dir)
    with advised(), progress("compacting", compacted_bytes(folder)) as advance:
        result = compact_folder(folder, advance)
    if as_json:
        print_json({"file": str(kv_cache_dir / DATA)} | asdict(result))
    else:
        sizes = f"{format_size(result.before_bytes)} → {format_size(result.after_bytes)}"
        click.echo(f"compacted {kv_cache_dir / DATA}: {sizes}")
