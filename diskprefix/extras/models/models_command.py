"""`diskprefix models`: list the architectures, what their layers keep, and what was verified of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diskprefix.cli.options import nonempty
from diskprefix.cli.tooling import json_option, plain, print_json, print_table, status, terminal_width
from diskprefix.errors import ModelError, SettingsError
from diskprefix.settings import expanded
from diskprefix.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TABLE = Path(__file__).with_name("verified_models.json")
"""The table that `tools/bench exactness --write-table` writes."""

_RESTORED = {"cut": "anywhere", "checkpoint": "at checkpoints", "one pass": "at the end only", "unsupported": "not"}
_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One architecture. `verified` has the dtypes in which a restored run was equal to the cold run, bit for bit;
    `exact_at_tokens` those in which that holds however the prompt is cut into steps."""

    architecture: str
    layers: str
    restored: str
    verified: tuple[str, ...] = ()
    exact_at_tokens: tuple[str, ...] = ()
    note: str = ""


@click.command(short_help="List the supported architectures and how each is restored.")
@click.argument("names", nargs=-1, metavar="[NAME]...", callback=nonempty)
@json_option
def models(names: tuple[str, ...], as_json: bool) -> None:
    """List the decoder architectures of the installed transformers: the state of their layers, how a prefix is
    restored, and whether this was verified.

    NAME is an architecture (the model_type in a model's config.json) or the folder of a model. For a folder, the layers
    of its configuration are shown. Nothing is downloaded, and no weights are read. `diskprefix show` lists the tensors
    of a model.

    \b
    layers     full, sliding(window), indexed: state for each token, which can be cut at every block
               linear (linear attention, Mamba, short convolutions): state at one position, saved as checkpoints
               shared, stateless: no state of its own
    restored   anywhere: at every block; at checkpoints: at saved checkpoints; at the end only: an exact repeat
               not: never, requests run on transformers' own cache
    exact at   token: on the CPU, a token's state has the same bits however the prompt is cut into steps
               grid: it has the same bits only with steps of --block-size tokens
    verified   dtypes in which restored and cold runs gave the same bits (tools/bench exactness)

    When a model is loaded for the first time, the daemon tests a restore. A model that fails is served without the
    cache.

    \b
    diskprefix models
    diskprefix models gemma3 qwen3_next
    diskprefix models ~/models/qwen --json

    \b
    Exit codes: 0 done; 2 wrong usage, or no such NAME; 3 what is in a folder cannot be read or served.
    """
    table = _read_table()
    # Importing transformers and reading two hundred configurations takes seconds.
    with status("asking transformers …"):
        from diskprefix.model.load.gguf import quiet_transformers

        # The default configurations of some architectures make transformers complain.
        quiet_transformers()
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        known = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *table["architectures"]})
        rows = [_row_of(name, table) for name in names] or [_row_of_type(name, table) for name in known]
    verified_with = {name: table[name] for name in installed_versions()}
    if as_json:
        print_json(
            {"installed": installed_versions(), "verified_with": verified_with, "models": [asdict(row) for row in rows]}
        )
    else:
        _show(rows, verified_with)


def installed_versions() -> dict[str, str]:
    """Returns the versions of torch and transformers, without the label of a build such as `+cpu`."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers")}


def _read_table() -> dict[str, Any]:
    """Returns the table of verified architectures, also keyed by the model type of their text decoder."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    found = table["architectures"]
    table["architectures"] = {entry["model_type"]: entry for entry in found.values()} | found
    return table


def _row_of(name: str, table: dict[str, Any]) -> ModelRow:
    """Raises `SettingsError` for a name that is no architecture and no folder, `ModelError` for an unfit folder."""
    from transformers import CONFIG_MAPPING

    path = expanded(name)
    if path.is_dir() and (name not in CONFIG_MAPPING or os.sep in name):
        return _row_of_folder(path, table)
    if name in CONFIG_MAPPING:
        return _row_of_type(name, table)
    raise SettingsError(
        f"{name!r} is neither an architecture of transformers {version('transformers')} nor a folder; "
        "`diskprefix models` lists the architectures"
    )


def _row_of_folder(folder: Path, table: dict[str, Any]) -> ModelRow:
    from transformers import AutoConfig

    from diskprefix.model.load.kinds import require_served_kind
    from diskprefix.printable import first_line

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot read the configuration of {folder}: {first_line(error)}") from error
    require_served_kind(folder, config)
    return _row(config.model_type, config, table)


def _row_of_type(name: str, table: dict[str, Any]) -> ModelRow:
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[name]()
    except Exception:  # noqa: BLE001 - some have no valid default configuration
        return ModelRow(architecture=name, layers="", restored="unknown", note="it has no default configuration")
    return _row(name, config, table)


def _row(name: str, config: PreTrainedConfig, table: dict[str, Any]) -> ModelRow:
    """The row that the configuration gives, with what was verified of the architecture."""
    from diskprefix.extras.models.survey import describe_layers, moving_ropes_of, survey

    row = ModelRow(architecture=name, layers="", restored="not")
    if config.is_encoder_decoder:
        return replace(row, note="not served: an encoder–decoder model")
    text = config.get_text_config(decoder=True)
    entry = table["architectures"].get(name) or table["architectures"].get(text.model_type)
    try:
        layers, unknown = survey(config)
    except Exception:  # noqa: BLE001 - a configuration of any age and author may raise anything
        row = replace(row, restored="unknown", note="transformers makes no cache from its configuration alone")
    else:
        row = replace(row, layers=describe_layers(layers, config))
        if reasons := (*unknown, *moving_ropes_of(config)):
            return replace(row, note=f"unsupported: {', '.join(reasons)}")
        has_states = any(layer.kind.startswith("linear") for layer in layers)
        row = replace(row, restored="at checkpoints" if has_states else "anywhere", note="not verified")
    if entry is None:
        return row
    note = entry["reason"] or ("text alone: prompts with media are not cached" if text is not config else "")
    return replace(
        row,
        restored=_RESTORED[entry["kind"]],
        verified=tuple(entry["dtypes"]),
        exact_at_tokens=tuple(entry["exact_at_tokens"]),
        note=note,
    )


def _exact_at(row: ModelRow) -> str:
    """Returns `token`, `token (bf16)` if it is not so in all verified dtypes, `grid`, or "" if nothing is verified."""
    if not row.exact_at_tokens:
        return "grid" if row.verified else ""
    return "token" if row.exact_at_tokens == row.verified else f"token ({_named(row.exact_at_tokens)})"


def _named(dtypes: Sequence[str]) -> str:
    return ", ".join(_SHORT_DTYPES.get(dtype, dtype) for dtype in dtypes)


def _show(rows: Sequence[ModelRow], verified_with: dict[str, str]) -> None:
    from rich.table import Column

    titles = ("architecture", "layers", "restored", "exact at", "verified", "note")
    columns = [Column(title, no_wrap=title not in ("layers", "note")) for title in titles]
    cells = []
    for row in rows:
        verified = _named(row.verified) or "no"
        cells.append((plain(row.architecture), row.layers, row.restored, _exact_at(row), verified, plain(row.note)))
    print_table(columns, cells, width=terminal_width(otherwise=200))
    number = sum(bool(row.verified) for row in rows)
    verified_names, installed_names = (
        " and ".join(f"{name} {number}" for name, number in versions.items())
        for versions in (verified_with, installed_versions())
    )
    click.echo(f"{counted(len(rows), 'architecture')}, {number} verified with {verified_names}")
    if installed_names != verified_names:
        click.echo(f"installed are {installed_names}: run tools/bench exactness to verify them")
