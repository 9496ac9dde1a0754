"""The command `diskprefix remote`: maintains the bucket that machines share."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diskprefix.cli.options import Decorated, nonempty, setting_option
from diskprefix.cli.tooling import json_option, print_json, shortened
from diskprefix.errors import SettingsError
from diskprefix.namespace_key import NamespaceKey
from diskprefix.printable import escaped
from diskprefix.settings import expanded
from diskprefix.tenant_ids import matches, short_tenant
from diskprefix.units import ago, counted, format_size

if TYPE_CHECKING:
    from diskprefix.extras.remote.objects import ObjectStore
    from diskprefix.extras.remote.upkeep import RemoteRoot, Removed


def bucket_options(command: Decorated) -> Decorated:
    """Adds `--remote-tier`, `--namespace-key-file` and `--json`."""
    return setting_option("remote_tier")(setting_option("namespace_key_file")(json_option(command)))


def opened_bucket(remote_tier: str | None, namespace_key_file: Path | None) -> tuple[ObjectStore, NamespaceKey]:
    """Returns the bucket and its key. Raises `SettingsError`."""
    from diskprefix.extras.remote.objects import ObjectStore

    if remote_tier is None or namespace_key_file is None:
        raise SettingsError("give the bucket with --remote-tier and its key with --namespace-key-file")
    key = NamespaceKey.read(expanded(namespace_key_file))
    # A mistyped folder is not created.
    return ObjectStore(remote_tier, timeout_s=60.0, makes_folder=False), key


@click.group(short_help="List or purge the bucket that machines share.")
def remote() -> None:
    """Maintain the bucket of --remote-tier. Only objects of the namespace of --namespace-key-file are read or removed.
    Each command takes --json. What is old is removed by a lifecycle rule of the bucket.

    \b
    diskprefix remote ls --remote-tier s3://bucket/prefix --namespace-key-file namespace.key
    diskprefix remote purge --tenant alice

    \b
    Exit codes: 0 done; 2 wrong usage, or no such model or tenant; 4 the bucket
    cannot be used.
    """


@remote.command("ls", short_help="List the content of the bucket by model and tenant.")
@bucket_options
def ls(remote_tier: str | None, namespace_key_file: Path | None, as_json: bool) -> None:
    """List the content of the bucket: one line for each model and tenant."""
    objects, key = opened_bucket(remote_tier, namespace_key_file)
    from diskprefix.extras.remote.upkeep import roots

    found = roots(objects, key)
    if as_json:
        print_json({"namespace": key.digest.hex(), "roots": [_described(root) for root in found]})
    elif not found:
        click.echo("nothing is shared yet by machines with these keys")
    else:
        for root in found:
            click.echo(_line(root))
    _warn(sum(len(root.objects) for root in found if root.is_unknown))


@remote.command("purge", short_help="Remove the objects of a tenant or a model.")
@click.option("--tenant", metavar="VALUE", callback=nonempty, help="An API key, a salt, or a tenant's id from ls.")
@click.option("--model", metavar="NAME", callback=nonempty, help="The name of a model from ls.")
@click.option("--all", "everything", is_flag=True, help="Remove all objects of the namespace.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and change nothing.")
@bucket_options
def purge(
    tenant: str | None,
    model: str | None,
    everything: bool,
    dry_run: bool,
    remote_tier: str | None,
    namespace_key_file: Path | None,
    as_json: bool,
) -> None:
    """Remove the objects that meet all given conditions from the bucket.

    Machines keep what they fetched in their own stores, and may upload it again. So run `diskprefix purge` on each
    machine first.

    \b
    diskprefix remote purge --tenant alice --dry-run
    """
    if everything == (tenant is not None or model is not None):
        raise SettingsError("give --tenant, --model or both, or --all alone; see `diskprefix remote purge --help`")
    objects, key = opened_bucket(remote_tier, namespace_key_file)
    from diskprefix.extras.remote.upkeep import purge as purge_bucket

    def wanted(root: RemoteRoot) -> bool:
        is_tenant = tenant is None or matches(root.tenant, tenant)
        return is_tenant and (model is None or root.model == model)

    chosen, removed = purge_bucket(objects, key, wanted, dry_run=dry_run)
    if not chosen and not everything:
        # The tenant's value may be a secret, so it is not repeated.
        unknown = f"; {_unknown(removed.unknown_objects)}" if removed.unknown_objects else ""
        raise SettingsError(f"nothing is shared of this tenant or model; `diskprefix remote ls` shows what is{unknown}")
    _tell(removed, dry_run=dry_run, as_json=as_json)


def _unknown(num_objects: int) -> str:
    lie = "lies" if num_objects == 1 else "lie"
    return f"{counted(num_objects, 'object')} {lie} in a root without a valid description, so the tenant is unknown"


def _warn(unknown_objects: int) -> None:
    """Warns of objects of unknown tenants: some of them may belong to the purged tenant."""
    if unknown_objects:
        click.echo(f"warning: {_unknown(unknown_objects)}", err=True)


def _tell(removed: Removed, *, dry_run: bool, as_json: bool) -> None:
    _warn(removed.unknown_objects)
    if as_json:
        print_json({"dry_run": dry_run} | asdict(removed))
        return
    verb = "would remove" if dry_run else "removed"
    of_all = f"of {counted(removed.found, 'object')}, {format_size(removed.found_bytes)}"
    click.echo(f"{verb} {counted(removed.objects, 'object')}, {format_size(removed.num_bytes)}, {of_all}")


def _described(root: RemoteRoot) -> dict[str, Any]:
    sizes = {"objects": len(root.objects), "bytes": root.num_bytes, "oldest": root.oldest, "newest": root.newest}
    names = {"root": root.root, "model": root.model, "tenant": root.tenant, "block_size": root.block_size}
    return names | sizes


def _line(root: RemoteRoot) -> str:
    sizes = f"{counted(len(root.objects), 'object')}, {format_size(root.num_bytes)}"
    model = escaped(shortened(root.model, 40)) or "(unknown model)"
    tenant = short_tenant(root.tenant) or "shared"
    return f"{root.root[:12]}  {model}  {tenant}  {sizes}  written {ago(root.oldest)} to {ago(root.newest)}"
