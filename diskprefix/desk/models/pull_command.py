"""`diskprefix pull` and `diskprefix rm`: fetch a model from the Hugging Face hub, and remove fetched models."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

import click

from diskprefix.daemon.catalogue.catalogue import KnownModel
from diskprefix.daemon.cli.options import nonempty
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.fetch_model import fetch
from diskprefix.desk.shared.model_row import row_of
from diskprefix.desk.shared.tooling import confirmed, json_option, packed_weights_option, print_json, say
from diskprefix.errors import ModelError, SettingsError
from diskprefix.nearest import nearest
from diskprefix.printable import printable_only
from diskprefix.runtime.fetch.embedded import EMBEDDED, embedded_file
from diskprefix.runtime.fetch.found_models import found_model
from diskprefix.runtime.fetch.hub import cached_models, files_to_remove
from diskprefix.runtime.fetch.named_model import is_embedded, path_of
from diskprefix.runtime.fetch.proposals import meant_name, require_repository
from diskprefix.runtime.files.gguf.gguf_file import offer_packs
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.units import counted, format_size
from diskprefix.values import require_model_name


@click.command(short_help="Fetch a model from the Hugging Face hub.")
@click.argument("name", metavar="NAME|ORG/NAME[:QUANT]", callback=nonempty)
@click.option("--packs", is_flag=True, help="Fetch prompts for this .gguf file, too, if the repository has any.")
@json_option
def pull(name: str, packs: bool, as_json: bool) -> None:
    """Fetch a model, so that `serve` finds it on this machine. Only the files that are needed are fetched.

    NAME is a short name, such as qwen3.5:4b; `diskprefix list --available` lists them.

    QUANT is a quantization in a repository of .gguf files, such as Q4_K_M. Without it, the one with the most bits that
    fits into the free memory is fetched, with at most 8 bits per weight if there is a choice. In a repository of
    safetensors, these are fetched. A folder MODEL.prefixes beside MODEL.gguf may have packs: prompts that somebody has
    computed. With --packs they are fetched, for `diskprefix import`.

    A broken connection resumes where it stopped; an interrupted pull starts its file again. The SHA-256 of large
    files is checked, and the disk must have enough space. The files are in the cache folder of huggingface_hub, whose
    variables apply: HF_HOME, HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_OFFLINE, and the proxy variables.

    \b
    diskprefix pull qwen3.5:4b
    diskprefix pull unsloth/Qwen3.5-4B-GGUF:Q8_0 && diskprefix serve --model unsloth/Qwen3.5-4B-GGUF:Q8_0
    diskprefix pull HuggingFaceTB/SmolLM2-360M-Instruct

    \b
    Exit codes: 0 done; 2 wrong usage; 3 the model cannot be fetched, or no quant of it fits.
    """
    if "/" not in name and (model := found_model(name)) is not None and not model.problem:
        raise SettingsError(f"{model.owner} has {name} on this machine: diskprefix serve --model {shlex.quote(name)}")
    name = require_repository(name)
    fetched: str | None
    if is_embedded(name):
        path, fetched = embedded_file(say), EMBEDDED.name
    else:
        path = fetch(name, "pull", with_packs=packs)
        fetched = next((known for known, place in cached_models() if place.samefile(path)), None)
    if fetched is None:
        raise ModelError(f"{name} holds no model: neither weights with a config.json nor .gguf files")
    if ":" in name and name.lower() != fetched.lower():
        # The user named a file, whose quant other files of the repository may share.
        fetched = name
    row = row_of(KnownModel(name=fetched, settings=Settings(model=str(path)), source=name, path=path, origin="pulled"))
    if row["problem"]:
        raise ModelError(f"{fetched} is here, but cannot be served: {row['problem']}")
    if as_json:
        print_json(row)
        return
    click.echo(printable_only(f"{fetched} is in {path}"))
    if row["needed_bytes"]:
        fits = f"a context of {row['context']:,} tokens" if row["fits"] else "which is more than is free"
        click.echo(f"needs     {format_size(row['needed_bytes'])} of memory, {fits}")
    click.echo(f"serve it  diskprefix serve --model {shlex.quote(fetched)}")
    if path.is_file():
        offer_packs(path, click.echo)


@click.command(short_help="Remove models that were fetched.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, callback=nonempty)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@packed_weights_option
@json_option
def rm(names: tuple[str, ...], yes: bool, packed_weights: str, as_json: bool) -> int:
    """Remove models from the cache folder of huggingface_hub, and the packed weights that `serve` made of them.

    NAME is a name in `diskprefix list`. Only models fetched from the hub, by any program, and the embedded model are
    removed; other files of their repositories and your own files stay. The prompts that the prefix cache has saved stay
    too: see `diskprefix purge --model`.

    \b
    diskprefix rm unsloth/Qwen3.5-4B-GGUF:Q8_0
    diskprefix rm HuggingFaceTB/SmolLM2-360M-Instruct --yes
    diskprefix rm smollm2:135m

    \b
    Exit codes: 0 done; 1 declined; 2 wrong usage, or no such model.
    """
    here, names = dict(cached_models()), tuple(map(meant_name, names))
    embedded = [] if (file := path_of(None)) is None else [(EMBEDDED.name, file)]
    for name in names:
        if name not in here | dict(embedded):
            raise SettingsError(_not_pulled(name, list(here)))
    files, folders = files_to_remove(names)
    for name, file in embedded:
        if name in names and is_embedded(name):
            files.add(file)
            folders.append(file.parent)
    num_bytes = sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
    packed_files = PackedFiles.here(packed_weights)
    packed = [] if packed_files is None else packed_files.made_from(files)
    packed_bytes = sum(size for _, size in packed)
    amounts = format_size(num_bytes) + (f" and {format_size(packed_bytes)} of packed weights" if packed else "")
    question = f"Remove {', '.join(dict.fromkeys(names))}, {amounts}?"
    if not yes and not confirmed(question):
        click.echo("nothing was removed", err=True)
        return 1
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for path, _ in packed:
        path.unlink(missing_ok=True)
    if as_json:
        print_json({"removed": sorted(set(names)), "bytes": num_bytes, "packed_bytes": packed_bytes})
    else:
        click.echo(f"removed {counted(len(set(names)), 'model')}, {amounts}")
    return 0


def _not_pulled(name: str, here: Sequence[str]) -> str:
    """Returns why there is nothing to remove. `here` has the names of the fetched models."""
    if os.path.exists(os.path.expanduser(name)):
        return f"{name} is a file or folder of yours; rm removes only what was fetched from the hub"
    require_model_name(name)
    if is_embedded(name):
        return f"{name}, the embedded model, is not on this machine"
    if (model := found_model(name)) is not None:
        return f"{name} belongs to {model.owner}, and must be removed there"
    near = nearest(name, here)
    hint = f"the nearest name is {near!r}" if near else "`diskprefix list` shows the names"
    return f"no model that was fetched from the hub is called {name!r}; {hint}"
