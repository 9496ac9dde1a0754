"""`diskprefix import`: add exported prompts to the store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from diskprefix import app
from diskprefix.cli.logs import configure_logging
from diskprefix.cli.options import GroupedCommand, PathType, build_settings, nonempty, setting_option, setting_options
from diskprefix.cli.tooling import (
    advised,
    opened_store,
    print_json,
    progress,
    refuse_given,
    short_id,
    status,
    store_options,
)
from diskprefix.errors import StoreUnavailable
from diskprefix.extras.exchange.entry_file import EntryReader
from diskprefix.extras.exchange.exchange import (
    Imported,
    import_entry,
    known_models,
    open_target,
    plan_import,
    require_known_model,
    require_room,
    verify_payloads,
)
from diskprefix.namespace_key import NamespaceKey
from diskprefix.printable import printable_only
from diskprefix.settings import Settings
from diskprefix.store.codec.codec import Codec
from diskprefix.store.folder import DATA, become_owner
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import counted, format_size

_WITH_MODEL = "With --model: "
_OF_IDENTITY = ("device", "dtype", "kernels", "weights", "block_size", "fingerprint")
"""The settings beside the model that decide which state it can use."""
_OTHERWISE = "serve that model with this store, name it with --model, or add --force"
_NO_STORE = "give its folder with --kv-cache-dir, or have it created for a model that --model names"
_OF_ANOTHER = "give the model and the settings that computed it"


@click.command("import", cls=GroupedCommand, short_help="Add exported prompts to the store.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PathType())
@click.option("--dry-run", is_flag=True, help="Verify the files, show what would be imported, and change nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Import the state of any model, and create the store if there is none. Only a daemon with the same model, "
    "libraries and settings can use this state.",
)
@setting_option(
    "model",
    envvar=None,
    callback=nonempty,
    show_default="those that this store was served with",
    help="The model that will use the files, as for serve. It is loaded and compared with the files. If there is no "
    "store, it is created.",
)
@store_options
@setting_option(
    "kv_cache_budget",
    help="The maximum size of the store's file, if no daemon has opened it yet. Otherwise the budget of the last "
    "daemon applies.",
)
@setting_option("kv_cache_min_free")
@setting_option("kv_cache_codec")
@setting_option("namespace_key_file", help="The namespace key of a store that is created here. Give it to serve too.")
@setting_options(_OF_IDENTITY, _WITH_MODEL)
@click.pass_context
def import_(
    context: click.Context,
    /,
    files: tuple[Path, ...],
    dry_run: bool,
    force: bool,
    kv_cache_dir: Path,
    as_json: bool,
    **flags: Any,
) -> None:
    """Add exported prompts to the store.

    This is safe beside a running daemon, whose next request can restore the prompts. All files are verified before
    anything is written. Blocks that the store already has are not stored again. If the store is full, other blocks are
    evicted. A file larger than the budget is refused.

    A prompt keeps its tenant: only requests with the same key and salt can use it.

    State can only be restored with the same weights, libraries, device and settings. So a file is refused if its model
    was not served with this store. The error says what differs. With --model, that model is loaded and compared with
    the files instead. It takes the options and variables of serve.

    Import only files that you trust: the model answers from this state, and a checksum does not protect against a
    deliberate change.

    \b
    diskprefix import manual.safetensors
    diskprefix import *.safetensors --dry-run
    diskprefix import manual.safetensors --model ~/models/qwen
    diskprefix import manual.safetensors --kv-cache-dir /srv/kv --force

    \b
    Exit codes: 0 done; 2 wrong usage, no such file, a file that export did not write, or of a
    model that is not known here; 3 --model cannot be loaded; 4 the store cannot be opened or is
    full, or a file is damaged.
    """
    settings = build_settings(flags | {"kv_cache_dir": kv_cache_dir})
    if settings.model is None:
        refuse_given(context, _WITH_MODEL, "goes with --model")
    elif force:
        raise click.UsageError("--force takes the state of any model: leave --model out", context)
    with ExitStack() as stack:
        readers = [stack.enter_context(EntryReader.open(path)) for path in files]
        if settings.model is not None:
            # Before `become_owner`, which may change the working directory.
            _require_model(settings, readers)
        key_file = settings.namespace_key_file
        namespace = None if key_file is None else NamespaceKey.read(key_file)
        folder = become_owner(kv_cache_dir)
        if settings.model is None and not force:
            if not (folder / DATA).is_file():
                raise StoreUnavailable(f"{kv_cache_dir} holds no diskprefix store; {_NO_STORE}")
            with opened_store(folder) as store, store.snapshot() as snapshot:
                known = known_models(snapshot)
            for reader in readers:
                require_known_model(known, reader, _OTHERWISE)
        with progress("verifying", _raw_bytes(readers)) as advance:
            for reader in readers:
                verify_payloads(reader, advance)
        if dry_run:
            results = _planned(replace(settings, kv_cache_dir=folder), readers)
        else:
            results = _imported(replace(settings, kv_cache_dir=folder), namespace, readers)
    if as_json:
        entries = [{"file": str(path)} | asdict(result) for path, result in zip(files, results, strict=True)]
        print_json({"dry_run": dry_run, "entries": entries})
    else:
        for path, result in zip(files, results, strict=True):
            click.echo(f"{path}: {_sentence(result, dry_run=dry_run)}")


def _require_model(settings: Settings, readers: Sequence[EntryReader]) -> None:
    """Raises `SettingsError` if a file is not of the model of `settings`, and the errors of `app.identify_model`."""
    configure_logging("warning")
    with status("loading the model") as say:
        model = app.identify_model(settings, say)
    for reader in readers:
        require_known_model([model], reader, _OF_ANOTHER)


def _planned(settings: Settings, readers: Sequence[EntryReader]) -> list[Imported]:
    folder = settings.kv_cache_dir
    if not (folder / DATA).is_file():
        return [plan_import(None, reader) for reader in readers]
    with opened_store(folder) as store:
        return [plan_import(store, reader) for reader in readers]


def _imported(settings: Settings, namespace: NamespaceKey | None, readers: Sequence[EntryReader]) -> list[Imported]:
    with advised():
        store = open_target(
            settings.kv_cache_dir,
            budget_bytes=settings.kv_cache_budget,
            min_free_bytes=settings.kv_cache_min_free,
            namespace=namespace,
        )
    try:
        store.codec = Codec[settings.kv_cache_codec.upper()]
        for reader in readers:
            require_room(store, reader)
        with progress("importing", _raw_bytes(readers)) as advance:
            return [import_entry(store, reader, advance=advance) for reader in readers]
    finally:
        store.close()


def _raw_bytes(readers: Sequence[EntryReader]) -> int:
    return sum(reader.payload_bytes(span) for reader in readers for span in reader.spans)


def _sentence(result: Imported, *, dry_run: bool) -> str:
    tenant = f", tenant {short_tenant(result.tenant)}," if result.tenant else ""
    blocks = counted(result.num_nodes, "block")
    parts = [
        f"{result.num_tokens:,} tokens of {printable_only(result.model)}{tenant} in {blocks}",
        f"{result.new_nodes:,} new ({format_size(result.new_bytes)})" if result.new_nodes else "none new",
        f"evicted {counted(result.evicted, 'block')} for them" if result.evicted else "",
        f"entry {short_id(result.id)}" if result.id else "",
    ]
    return f"{'would import' if dry_run else 'imported'} {', '.join(filter(None, parts))}"
