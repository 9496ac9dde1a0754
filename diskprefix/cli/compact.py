"""`diskprefix compact`: return the unused room of the store's file to the disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from diskprefix.cli.options import PathType
from diskprefix.cli.tooling import advised, print_json, progress, require_store, store_options
from diskprefix.settings import format_size
from diskprefix.store.compact import compact_folder, compacted_bytes, copy_store
from diskprefix.store.folder import DATA


@click.command(short_help="Return unused room of the store's file to the disk.")
@click.option(
    "--to",
    "target",
    metavar="FOLDER",
    type=PathType(file_okay=False),
    help="Leave the store unchanged and write the compacted copy to this folder. This works beside a running daemon.",
)
@store_options
def compact(target: Path | None, kv_cache_dir: Path, as_json: bool) -> None:
    """Write the store's file anew without the room that removed blocks left in it.

    The file never shrinks by itself: new blocks use the room of blocks that were evicted or purged. Until then the room
    still holds the old bytes. Compact the store to return that room to the disk, and to erase what was purged.

    The daemon must not run, because its file is replaced. The command needs as much free disk as the new file takes.
    It may be interrupted at any moment: the old file stays until the new one is complete, checked and on disk.

    \b
    diskprefix compact
    diskprefix compact --to /mnt/backup/kv     a copy, while the daemon runs
    diskprefix purge --salt alice --yes && diskprefix compact

    \b
    Exit codes: 0 done, 2 wrong usage, 4 the store is in use or damaged, or the disk is too full.
    """
    target = target and target.absolute()
    folder = require_store(kv_cache_dir)
    with advised(), progress("compacting", compacted_bytes(folder)) as advance:
        result = copy_store(folder, target, advance) if target else compact_folder(folder, advance)
    if as_json:
        print_json({"file": str((target or kv_cache_dir) / DATA)} | asdict(result))
    else:
        done = f"wrote {target / DATA}" if target else f"compacted {kv_cache_dir / DATA}"
        click.echo(f"{done}: {format_size(result.before_bytes)} → {format_size(result.after_bytes)}")
