"""`diskprefix pull`: fetches a model from the Hugging Face hub."""

from __future__ import annotations

import shlex

import click

from diskprefix.cli.options import nonempty
from diskprefix.cli.tooling import json_option, print_json
from diskprefix.errors import ModelError
from diskprefix.extras.catalogue.catalogue import KnownModel
from diskprefix.extras.catalogue.list_command import row_of
from diskprefix.model.load.fit import fitted
from diskprefix.model.load.hub import HubListing, cached_models, fetched_model
from diskprefix.model.load.memory import available_ram_bytes
from diskprefix.printable import printable_only
from diskprefix.settings import Settings
from diskprefix.units import format_size


@click.command(short_help="Fetch a model from the Hugging Face hub.")
@click.argument("name", metavar="ORG/NAME[:QUANT]", callback=nonempty)
@json_option
def pull(name: str, as_json: bool) -> None:
    """Fetch a model, so that `serve` finds it on this machine. Only the files that are needed are fetched.

    QUANT is a quant of a repository with .gguf files, such as Q4_K_M. Without it, such a repository gives the one with
    the most bits that fits into the free memory, at most 8 of a weight if there is a choice. Of a repository with
    safetensors, these are fetched.

    A connection that breaks goes on where it was; a pull that ends before begins a file again. The SHA-256 of large
    files is checked, and there must be enough space on the disk. The files lie in the cache folder of huggingface_hub,
    whose variables apply: HF_HOME, HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_OFFLINE, and those of proxies. Its command
    `hf cache rm` removes them.

    \b
    diskprefix pull Qwen/Qwen3-4B-GGUF
    diskprefix pull Qwen/Qwen3-4B-GGUF:Q8_0 && diskprefix serve --model Qwen/Qwen3-4B-GGUF:Q8_0
    diskprefix pull HuggingFaceTB/SmolLM2-360M-Instruct

    \b
    Exit codes: 0 done; 2 wrong usage; 3 the model cannot be fetched, or no quant of it fits.
    """
    path = fetched_model(name, _say, "pull", _warn, with_weights=True)
    fetched = next((known for known, place in cached_models() if place.samefile(path)), None)
    if fetched is None:
        raise ModelError(f"{name} holds no model: neither weights with a config.json nor .gguf files")
    if ":" in name and name.lower() != fetched.lower():
        # By the name of the file: its quant may be that of others upstream.
        fetched = name
    row = row_of(KnownModel(name=fetched, settings=Settings(model=str(path)), source=name, path=path, origin="pulled"))
    if row["problem"]:
        raise ModelError(f"{fetched} is here, and cannot be served: {row['problem']}")
    if as_json:
        print_json(row)
        return
    click.echo(printable_only(f"{fetched} is in {path}"))
    if row["needed_bytes"]:
        fits = f"a context of {row['context']:,} tokens" if row["fits"] else "which is more than is free"
        click.echo(f"needs     {format_size(row['needed_bytes'])} of memory, {fits}")
    click.echo(f"serve it  diskprefix serve --model {shlex.quote(fetched)}")


def _say(line: str) -> None:
    click.echo(printable_only(line), err=True)


def _warn(listing: HubListing) -> None:
    """Says before the download if the model does not fit. It may be meant for another time, or machine."""
    fit = fitted(listing.needs("auto", "auto"), available_ram_bytes())
    if not fit.is_enough:
        _say(f"note: {fit.refusal(listing.other_forms('auto'))}")
