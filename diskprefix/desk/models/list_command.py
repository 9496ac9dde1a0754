"""`diskprefix list` and `diskprefix show`: the models known by name, and one of them in detail, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diskprefix.daemon.catalogue.adviser import AGENT_TOKENS, TOLD_CONTEXT, cost_text, needs_of, offers, proposed
from diskprefix.daemon.catalogue.catalogue import (
    Catalogue,
    KnownModel,
    embedded,
    files_of,
    open_catalogue,
    template_of,
)
from diskprefix.daemon.cli.options import build_settings, nonempty, setting_options
from diskprefix.daemon.settings import PER_MODEL, SETTINGS, Settings
from diskprefix.desk.models.architectures import show_architectures, verified_of
from diskprefix.desk.shared.model_row import fit_of, row_of
from diskprefix.desk.shared.tooling import json_option, packed_weights_option, plain, print_json, print_table, status
from diskprefix.errors import DiskPrefixError, ModelError, ModelNotFound
from diskprefix.printable import printable_only, shown
from diskprefix.runtime.fetch.embedded import EMBEDDED
from diskprefix.runtime.fetch.proposals import ShortName, meant_name, short_name
from diskprefix.runtime.fetch.recommended_sampling import sampling_defaults, sampling_line
from diskprefix.runtime.files.fit import Fit, fitted
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.runtime.memory import available_ram_bytes
from diskprefix.units import counted, format_size, rough_duration

if TYPE_CHECKING:
    from diskprefix.daemon.chat.template_cost import TemplateCost

_TEMPLATE_S = 5.0
"""The time limit, in seconds, for the trial renderings of a template."""
_PLACES = ("models_dir", "models_file", "kv_memory")


@click.command("list", short_help="List the models that are known by name.")
@click.option("--architectures", is_flag=True, help="List the architectures of model folders and files.")
@click.option(
    "--available", is_flag=True, help="List the models that have a short name, and what each would need here."
)
@setting_options(_PLACES)
@packed_weights_option
@json_option
def list_models(architectures: bool, available: bool, as_json: bool, **flags: Any) -> None:
    """List the models in models.toml, below --models-dir and in the hub's cache, the models that Ollama, LM Studio,
    llama.cpp and `tools/bench models` have on this machine, and the embedded model if it is the default. The columns
    are the quantization, the size of the files, the memory that the model needs, and the longest context that is
    served. The last line counts the files of packed weights, which `serve` makes; --json has the bytes of each model's.

    The quantization is named by the file's name or header, such as Q4_K_M, or else is that of most weights. Only
    headers are read. A model that does not fit into the free memory has "no" in the column fits. Models of other
    programs are served in place, under the names that those programs give them.

    With --available, the models that `pull` knows by a short name: the size of the file, the memory with 32,000 tokens,
    the time of an agent's first prompt on this machine, a guess unless a daemon has measured it, and what the model is
    good for. The one that `doctor` advises for agents is the first.

    With --architectures, one column has the names used in folders, another those in .gguf files. A prefix is restored
    anywhere (at every token or block) or at checkpoints. Exact at token: the state of a token has the same bits however
    the prompt is cut into steps; grid: only in steps of --block-size tokens. Verified lists the types in which restored
    and cold runs gave the same bits. The daemon tests a restore when it loads a model for the first time; a model that
    fails is served without the cache.

    \b
    diskprefix list
    diskprefix list --models-dir ~/models --json
    diskprefix list --available
    diskprefix list --architectures

    \b
    Exit codes: 0 done; 2 wrong usage.
    """
    if architectures and available:
        raise click.UsageError("--available and --architectures are two lists: give one of them")
    if available:
        _show_available(as_json)
        return
    if architectures:
        show_architectures(as_json)
        return
    with status("reading headers …"):
        settings = build_settings(flags)
        packed = PackedFiles.here(settings.packed_weights)
        known_models = (*Catalogue(settings).models(), *_served_otherwise(settings))
        rows = [row_of(known) | {"packed_bytes": _packed_bytes(packed, known)} for known in known_models]
    if as_json:
        amounts = None if packed is None else packed.amounts
        print_json({"free_bytes": available_ram_bytes(), "packed_weights": amounts, "models": rows})
        return
    _print_models(rows)
    click.echo(f"{counted(len(rows), 'model')}, {format_size(available_ram_bytes())} of memory free")
    if packed is not None and packed.amounts["files"]:
        click.echo(printable_only(f"packed weights: {packed.line}"))


def _print_models(rows: list[dict[str, Any]]) -> None:
    titles = ("name", "weights", "files", "memory", "context", "fits", "where")
    cells = [
        (
            plain(", ".join((row["name"], *row["aliases"]))),
            plain(row["kind"] or ""),
            format_size(row["file_bytes"]) if row["file_bytes"] else "",
            format_size(row["needed_bytes"]) if row["needed_bytes"] else "",
            f"{row['context']:,}" if row["context"] else "",
            {True: "yes", False: "no", None: ""}[row["fits"]],
            plain(row["problem"] or f"{row['origin']}: {row['path'] or 'not fetched yet'}"),
        )
        for row in rows
    ]
    print_table(titles, cells, wrapped=("where",))


def _packed_bytes(packed: PackedFiles | None, known: KnownModel) -> int:
    """Returns the bytes of a model's packed weights. 0 if there are none."""
    with suppress(ModelError, OSError):
        if packed is not None and known.path is not None:
            files = {file.resolve() for file in files_of(known.path)}
            return sum(size for _, size in packed.made_from(files))
    return 0


def _show_available(as_json: bool) -> None:
    free_bytes = available_ram_bytes()
    rows, advice = offers(free_bytes), proposed(free_bytes)
    if as_json:
        print_json({"free_bytes": free_bytes, "context": TOLD_CONTEXT, "models": rows, "advice": advice})
        return
    cells = [
        (
            row["name"],
            format_size(row["download_bytes"]),
            format_size(row["memory_bytes"]),
            "yes" if row["fits"] else "no",
            _first_prompt(row),
            "agents: the best here" if row["is_advised"] else "agents" if row["suits_agents"] else "chat",
        )
        for row in rows
    ]
    print_table(("name", "file", "memory", "fits", "first prompt", "good for"), cells, wrapped=())
    click.echo(
        f"{format_size(free_bytes)} of memory free\nmemory is for {TOLD_CONTEXT:,} tokens, or as many as it takes; "
        f"the first prompt is an agent's, of {AGENT_TOKENS:,} tokens, on this machine\nfor agents here: {advice}"
    )


def _first_prompt(row: dict[str, Any]) -> str:
    if row["first_prompt_s"] is None:
        return "too long for it"
    return rough_duration(row["first_prompt_s"]) + ("" if row["is_measured"] else " (a guess)")


@click.command("show", short_help="Show the memory, context and settings of a model.")
@click.argument("name", metavar="NAME|FILE|FOLDER", callback=nonempty)
@click.option("--plan", is_flag=True, help="Also show what a step computes: one layer of each kind.")
@setting_options((*_PLACES, "weights", "kv_type"))
@json_option
def show_model(name: str, plan: bool, as_json: bool, **flags: Any) -> None:
    """Show a model from `diskprefix list`, a .gguf file or a model folder: the memory that it needs by quantization,
    its context, its template, its settings, and how requests that do not say it are sampled, with the source of each
    value. Of a short name that is not fetched, show what it would need.

    With --plan, also show what a step computes, without reading weights: the operators in order, one layer of each
    kind. Each line has the buffers that are read and written, the weights with their shapes and quantizations, and the
    operator's parameters.

    \b
    diskprefix show unsloth/Qwen3.5-4B-GGUF:Q8_0
    diskprefix show ~/models/qwen-q4.gguf --weights native
    diskprefix show claude-haiku-4-5 --json
    diskprefix show qwen3:8b
    diskprefix show gpt-oss:20b --plan

    \b
    Exit codes: 0 done; 2 wrong usage, or no such model; 3 its files cannot be read.
    """
    settings = build_settings(flags)
    try:
        known = _named(name, settings)
    except ModelNotFound:
        if plan or (row_of_table := short_name(name)) is None:
            raise
        _show_unfetched(row_of_table, settings, as_json)
        return
    with status("reading headers …"):
        fit = fit_of(known.settings)
    if known.path is None or fit is None:
        fetches = "serve` fetches it" if known.origin == "embedded" else "pull` fetches models of the hub"
        raise ModelError(f"{known.source} is not on this machine; `diskprefix {fetches}")
    row = _detailed(known, fit)
    with status("rendering …"):
        cost = _template_cost(known)
    row["template_cost"] = None if cost is None else cost.record
    if plan:
        from diskprefix.desk.models.plan_table import show_step, step_of  # Here, as it imports torch.

        with status("making the plan …"):
            row["plan"] = step_of(known.settings)
    if as_json:
        print_json(row)
        return
    _show_fetched(known, row, fit, cost)
    if plan:
        show_step(row["plan"])


def _detailed(known: KnownModel, fit: Fit) -> dict[str, Any]:
    """Returns the row of a model in `show`, for JSON, without its template's cost and its plan."""
    assert known.path is not None
    return row_of(known) | {
        "positions": fit.needs.state.positions,
        "template": bool(template_of(known.path)),
        "architecture": verified_of(known.path),
        "settings": _own(known),
        "sampling": sampling_defaults(known.settings, known.path).record,
        "memory": dict(fit.rows()),
    }


def _show_fetched(known: KnownModel, row: Mapping[str, Any], fit: Fit, cost: TemplateCost | None) -> None:
    """Prints the row of a model on this machine, line by line, and the memory that it needs."""
    lines = {
        "model": f"{', '.join((known.name, *known.aliases))} ({known.origin})",
        "files": f"{known.path}, {format_size(row['file_bytes'])}",
        "context": fit.context_line,
        "type": row["architecture"],
        "template": "the model's own" if row["template"] else "none: give one with --chat-template",
        **({} if cost is None else {"cache": f"{cost.line}; {cost.advice}" if cost.advice else cost.line}),
        "settings": ", ".join(f"{key} = {value}" for key, value in row["settings"].items()),
        "sampling": sampling_line(row["sampling"]),
    }
    if row["sampling"]["ignored"]:
        lines["not used"] = "; ".join(row["sampling"]["ignored"])
    if "plan" in row and row["plan"]["reason"]:
        lines["plan"] = f"none, transformers' modules compute a step: {row['plan']['reason']}"
    _print_lines(lines, fit)


def _print_lines(lines: Mapping[str, str], fit: Fit) -> None:
    for key, line in lines.items():
        if line:
            click.echo(f"{key:<9} {plain(line).plain}")
    for line in ("", *fit.lines()):
        click.echo(line)


def _template_cost(known: KnownModel) -> TemplateCost | None:
    """Returns what the chat template of a model costs; None without a template, or if its tokenizer cannot be read."""
    from diskprefix.daemon.chat.renderer import PromptRenderer  # Here, as `list` needs none of it.
    from diskprefix.daemon.chat.template_cost import template_cost
    from diskprefix.daemon.chat.template_date import TemplateClock
    from diskprefix.runtime.files.chat_template import read_template
    from diskprefix.runtime.files.read_tokenizer import read_tokenizer
    from diskprefix.runtime.files.template_sandbox import renders_end_after

    try:
        assert known.path is not None
        tokenizer = read_tokenizer(known.path, read_template(known.settings.chat_template))
        variables, clock = known.settings.template_variables, TemplateClock(known.settings.template_day)
        renderer = PromptRenderer(
            tokenizer, vocab_size=len(tokenizer), max_positions=1 << 30, template_variables=variables, clock=clock
        )
        with renders_end_after(_TEMPLATE_S):
            renderer.warm_up()
    except DiskPrefixError:
        return None
    return template_cost(renderer) if renderer.template_source else None


def _show_unfetched(model: ShortName, settings: Settings, as_json: bool) -> None:
    """Shows the needs of a model in the table of models that is not fetched."""
    fit = fitted(needs_of(model), available_ram_bytes(), settings.kv_memory)
    if as_json:
        row = {"name": model.source, "aliases": (model.name,), "path": None, "file_bytes": model.download_bytes}
        row |= {"needed_bytes": fit.needed_bytes, "context": fit.context, "fits": fit.is_enough}
        print_json(row | {"positions": fit.needs.state.positions, "memory": dict(fit.rows())})
        return
    lines = {
        "model": f"{model.name} ({model.source})",
        "files": f"not fetched: `diskprefix pull {model.name}` fetches about {format_size(model.download_bytes)}",
        "context": fit.context_line,
        "agents": "good enough for agents" if model.suits_agents else "too small, or not trained for agents",
        "needs": cost_text(model),
    }
    _print_lines(lines, fit)


def _served_otherwise(settings: Settings) -> tuple[KnownModel, ...]:
    """Returns the embedded model if `serve` with these settings serves it."""
    return (embedded(settings),) if settings.model is None and open_catalogue(settings) is None else ()


def _named(name: str, settings: Settings) -> KnownModel:
    """Returns the model that a name, a file or a folder means. Raises `ModelNotFound` or `SettingsError`."""
    is_here = os.path.exists(os.path.expanduser(name))
    try:
        if not is_here or os.sep not in name:
            return Catalogue(settings).find(name)
    except ModelNotFound:
        if meant_name(name) == EMBEDDED.name:
            return embedded(settings)
        if not is_here and (otherwise := _served_otherwise(settings)):
            problem = f"no model, file or folder is called {shown(name)!r}; there is {otherwise[0].name}"
            raise ModelNotFound(problem, param="model") from None
        if not is_here:
            raise
    (known,) = Catalogue(replace(settings, model=name, models_dir=None, models_file=None)).models()
    return known


def _own(known: KnownModel) -> dict[str, Any]:
    """Returns the settings of a model that are not the defaults, for JSON."""
    own, defaults = {name: getattr(known.settings, name) for name in SETTINGS if name in PER_MODEL}, Settings()
    changed = {name: value for name, value in own.items() if value != getattr(defaults, name)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}
