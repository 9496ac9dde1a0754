"""`diskprefix restore`: put a backup in the place of the store."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from diskprefix.cli.options import PathType
from diskprefix.cli.tooling import advised, print_json, progress, require_store, store_options
from diskprefix.errors import SettingsError
from diskprefix.store.compact import compacted_bytes, replace_store
from diskprefix.store.folder import DATA, become_owner
from diskprefix.store.store import Store
from diskprefix.units import format_size


@click.command(short_help="Put a backup in the place of the store.")
@click.argument("source", metavar="FOLDER", type=PathType(file_okay=False))
@click.option("--yes", is_flag=True, help="Do not ask before a store is replaced.")
@store_options
def restore(source: Path, yes: bool, kv_cache_dir: Path, as_json: bool) -> int:
    """Put the store that `diskprefix backup` wrote to FOLDER in the place of the one in the cache folder.

    The daemon must not run. The store that is there is lost; the backup stays. The command may be interrupted at any
    moment: the old file stays until the new one is complete, checked and on disk.

    \b
    diskprefix restore /mnt/backup/kv-monday
    diskprefix restore --yes /mnt/backup/kv-monday

    \b
    Exit codes: 0 done; 1 declined; 2 wrong usage; 4 the backup is damaged, the store is in use, or the disk is too
    full.
    """
    source = source.absolute()
    folder = become_owner(kv_cache_dir)
    with advised():
        # Its format is checked, and its identity read, before anything is replaced.
        Store(require_store(source), read_only=True).close()
    if (folder / DATA).exists() and not yes and not _confirmed(kv_cache_dir):
        return 1
    with advised(), progress("restoring", compacted_bytes(source)) as advance:
        result = replace_store(source, folder, advance)
    if as_json:
        print_json({"file": str(kv_cache_dir / DATA)} | asdict(result))
    else:
        click.echo(f"restored {kv_cache_dir / DATA}: {format_size(result.after_bytes)}")
    return 0


def _confirmed(folder: Path) -> bool:
    if not sys.stdin.isatty():
        raise SettingsError(f"{folder} holds a store, and standard input is no terminal to ask at; add --yes")
    return click.confirm(f"Replace the store in {folder}?", default=False, err=True)
