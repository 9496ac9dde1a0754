"""`diskprefix backup` and `restore`: a copy of the store, written beside a running daemon, and its way back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from diskprefix.cli.options import PathType
from diskprefix.cli.tooling import advised, print_json, progress, require_store, store_options
from diskprefix.store.compact import compacted_bytes, copy_store
from diskprefix.store.folder import DATA
from diskprefix.units import format_size


@click.command(short_help="Write a copy of the store, beside a running daemon.")
@click.argument("target", metavar="FOLDER", type=PathType(file_okay=False))
@store_options
def backup(target: Path, kv_cache_dir: Path, as_json: bool) -> None:
    """Write a consistent copy of the store to FOLDER, which is created and must not hold a store.

    A daemon may run, and go on saving: the copy has what was stored when it began. It holds the stored records and
    nothing of what was purged. It is checked before it is complete. `diskprefix restore` puts it back.

    \b
    diskprefix backup /mnt/backup/kv-monday
    diskprefix backup --json /mnt/backup/kv-monday
    diskprefix inspect --kv-cache-dir /mnt/backup/kv-monday

    \b
    Exit codes: 0 done, 2 wrong usage, 4 the store is damaged, FOLDER holds one already, or its disk is too full.
    """
    target = target.absolute()
    folder = require_store(kv_cache_dir)
    with advised(), progress("copying", compacted_bytes(folder)) as advance:
        result = copy_store(folder, target, advance)
    if as_json:
        print_json({"file": str(target / DATA)} | asdict(result))
    else:
        click.echo(f"wrote {target / DATA}: {format_size(result.before_bytes)} → {format_size(result.after_bytes)}")
