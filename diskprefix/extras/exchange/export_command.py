"""`diskprefix export`: write one saved prompt to a `.safetensors` file."""

from __future__ import annotations

from pathlib import Path

import click

from diskprefix.cli.options import PathType
from diskprefix.cli.tooling import find_entry, opened_store, print_json, progress, short_id, store_options
from diskprefix.errors import SettingsError
from diskprefix.extras.exchange.exchange import export_entry
from diskprefix.printable import printable_only
from diskprefix.store.tree import list_entries
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import format_size


@click.command(short_help="Write a saved prompt to a .safetensors file.")
@click.argument("entry")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=PathType(),
    show_default="the beginning of the id, in the current folder",
    help="The file to write, or the folder to write it into.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@store_options
def export(
    entry: str,
    output: Path | None,
    force: bool,
    kv_cache_dir: Path,
    as_json: bool,
) -> None:
    """Write the saved prompt ENTRY with all its blocks to one .safetensors file.

    ENTRY is an id from inspect, or the beginning of one. If the prompt was extended later, the extended prompt is
    written, and a line on stderr shows its new id. `diskprefix import` adds the file to another store, on this machine
    or on one with the same model and libraries.

    Other programs can read the file too: layers.0.keys, layers.0.values and so on have the shape [1, heads, tokens,
    head_dim] and the model's dtype. token_ids has the prompt, logits the scores of the next token. For layers whose
    state exists at one position only, the file has all checkpoints: layers.0.conv0 and so on, with a row for each.

    The prompt keeps its tenant: in the other store, only requests with the same key and salt can use it.

    This is safe beside a running daemon. Every block is verified. If one is damaged, no file is written. The file
    contains the prompt, so only its owner may read it.

    \b
    diskprefix inspect                            lists the ids
    diskprefix export 3fa9 -o manual.safetensors
    diskprefix export 3fa9 --json | jq -r .file

    \b
    Exit codes: 0 done; 2 wrong usage, no such ENTRY, one that cannot be exported, or the file
    exists; 4 the store cannot be opened or is damaged, or the file cannot be written.
    """
    where = Path.cwd()
    with opened_store(kv_cache_dir) as store:
        with store.snapshot() as snapshot:
            info = find_entry(store, snapshot, list_entries(snapshot), entry)
        path = output or Path()
        # Opening the store may change the working directory: see `become_owner`.
        path = path if Path.cwd() == where else where / path
        if path.is_dir():
            path = path / f"{short_id(info.id)}.safetensors"
        if not path.parent.is_dir():
            raise SettingsError(f"--output: there is no folder {path.parent}; create it first")
        with progress("exporting", info.raw_bytes) as advance:
            file_bytes = export_entry(store, bytes.fromhex(info.id), path, force=force, advance=advance)
    if as_json:
        known = {name: getattr(info, name) for name in ("id", "model", "tenant", "num_tokens")}
        print_json({"file": str(path), "file_bytes": file_bytes} | known)
    else:
        tenant = f", tenant {short_tenant(info.tenant)}" if info.tenant else ""
        click.echo(
            f"{path}: {info.num_tokens:,} tokens of {printable_only(info.model)}, {format_size(file_bytes)}, "
            f"entry {short_id(info.id)}{tenant}"
        )
