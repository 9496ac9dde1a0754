"""`tools/bench`: one subcommand for each benchmark; `restart` is what runs when none is named."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import conversation_bench
import prefix_bench
import real_models
import restart_bench
from live_server import LiveServerError, log_tail, step
from rich.console import Console

from diskprefix.errors import DiskPrefixError, ModelError
from diskprefix.settings import CODECS


class DefaultGroup(click.Group):
    """A group that takes `restart` for granted when the first argument is not a subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["restart", *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultGroup)
def main() -> None:
    """Benchmarks of diskprefix. Without a subcommand: restart."""
    # Otherwise the server would outlive a benchmark that is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


Command = TypeVar("Command", bound=Callable[..., Any])
FOLDER = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the cache folder is made, to measure another disk.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample to stdout instead of tables.")


def codec_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--codec", type=click.Choice(CODECS), default=default, show_default=True, help="How the state is stored."
    )


@contextmanager
def measuring(folder: Path | None, progress: Console) -> Iterator[Path]:
    """A folder to work in; a server that did not do what was asked is explained, with the end of `server.log` in it."""
    with tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace:
        try:
            yield Path(workspace)
        except LiveServerError as error:
            progress.print(f"[red]error:[/red] {error}; the end of the server's log:", highlight=False)
            progress.print(log_tail(Path(workspace) / "server.log"), highlight=False, markup=False)
            sys.exit(1)


def model_folder(model: str, progress: Console) -> Path:
    """Of a name that `real_models` knows, fetched if need be, or of a folder."""
    if model not in real_models.NAMES and os.path.isdir(model):
        return Path(model)
    try:
        if model not in real_models.NAMES:
            raise ModelError(f"--model: {model!r} is neither a folder nor one of {', '.join(real_models.NAMES)}")
        with step(progress, f"model {model}") as note:
            return real_models.fetched(model, note)
    except ModelError as error:
        progress.print(f"[red]error:[/red] {error.message}", highlight=False)
        sys.exit(1)


def print_report(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())


@main.command()
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Runs to take the median of; best an even number.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=512, max=8100),
    multiple=True,
    default=restart_bench.PROMPT_TOKENS,
    show_default=True,
    help="Length of a prompt; may be given several times.",
)
@codec_option("raw")
@FOLDER
@JSON
def restart(runs: int, tokens: tuple[int, ...], codec: str, folder: Path | None, as_json: bool) -> None:
    """What a restart costs: cold, exact repeat, nearest prefix.

    Every restored figure is the first request of a server that was killed with SIGKILL and started again. The operating
    system's page cache survives that, so this is a restarted process and not a rebooted machine. The cache folder grows
    by about 0.4 GB with each run.
    """
    progress = Console(stderr=True)
    with measuring(folder, progress) as workspace:
        log_path = workspace / "server.log"
        report = restart_bench.measure(workspace / "kv", log_path, sorted(set(tokens)), runs, codec, progress)
    print_report(report, as_json, restart_bench.show)


@main.command()
@click.option(
    "--model",
    default=real_models.DEFAULT,
    show_default=True,
    help=f"One that has a chat template: {real_models.DEFAULT}, {real_models.QWEN2_CODER.name} or a model's folder.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Conversations to take the median of. Three are different, of prompts that end elsewhere on the grid.",
)
@click.option("--restart/--no-restart", default=True, show_default=True, help="Kill the server between the turns.")
@codec_option("auto")
@FOLDER
@JSON
def conversation(model: str, rounds: int, restart: bool, codec: str, folder: Path | None, as_json: bool) -> None:
    """What the three turns of an agent cost: cold, and with the earlier turns on disk.

    About 5 000 tokens in the third turn. Exits with 1 if a reply differs from that of a run without the cache.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = conversation_bench.measure(workspace, model, source, rounds, restart, codec, progress)
    print_report(report, as_json, conversation_bench.show)
    if not report["texts_equal"]:
        sys.exit(1)


@main.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=tuple(prefix_bench.SIZES),
    show_default=True,
    help=f"{', '.join(real_models.NAMES)} or a model's folder; may be given several times.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=512),
    multiple=True,
    help="Length of a prompt; may be given several times. [default: 2000 and 20000; 7900 for smollm2]",
)
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Runs to take the median of.")
@codec_option("auto")
@FOLDER
@JSON
def prefix(
    models: tuple[str, ...], tokens: tuple[int, ...], runs: int, codec: str, folder: Path | None, as_json: bool
) -> None:
    """What a long prompt costs: cold, exact repeat, another end; beside the published figures of another system.

    Every restored figure is the first request of a server that was killed and started again. Exits with 1 if a text
    differs from that of a run that restored nothing.
    """
    progress = Console(stderr=True)
    folders = {model: model_folder(model, progress) for model in models}
    sizes = {model: sorted(set(tokens)) or prefix_bench.SIZES.get(model, (2_000, 20_000)) for model in models}
    with measuring(folder, progress) as workspace:
        report = prefix_bench.measure(workspace, folders, sizes, runs, codec, progress)
    print_report(report, as_json, prefix_bench.show)
    if not report["texts_equal"]:
        sys.exit(1)


@main.command()
@click.option(
    "--tokens",
    type=click.IntRange(min=1024),
    default=8192,
    show_default=True,
    help="How much is saved and restored; of the embedded model's shape, 1 GiB is about 46 000 tokens.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="How many the store holds in which prompts of 100 000 tokens are looked up.",
)
@click.option("--runs", type=click.IntRange(min=1), default=7, show_default=True, help="Runs to take the median of.")
@click.option(
    "--kv",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Real KV to measure with, a .npy: uint16 (bf16), float16 or float32 [blocks, tensors, heads, 256, head_dim].",
)
@click.option("--model", is_flag=True, help="Compute real KV, and count tokens, with the embedded model.")
@click.option(
    "--workload",
    "workloads",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    metavar="PATH",
    help="Recorded conversations, to see what sharing saves: a file or folder of *.json with traj, *.traj or "
    "prompt_*.log. May be given several times.",
)
@FOLDER
@JSON
def store(
    tokens: int,
    blocks: int,
    runs: int,
    kv: Path | None,
    model: bool,
    workloads: tuple[Path, ...],
    folder: Path | None,
    as_json: bool,
) -> None:
    """What the store can do: restores against a memory copy and a direct read, lookup, codecs, sharing.

    Without --kv and --model the KV is made up, so that it compresses as that of the embedded model does.
    """
    import agent_workload
    import kv_sample
    import store_bench

    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace:
        try:
            with step(progress, "KV to measure with") as note:
                if kv is not None:
                    sample = kv_sample.sample_from_file(kv)
                elif model:
                    sample = kv_sample.sample_from_model(note)
                else:
                    sample = kv_sample.synthetic_sample(8)
                tokenizer = agent_workload.embedded_tokenizer(note) if model else agent_workload.word_tokenizer()
            plan = store_bench.Plan(
                sample=sample,
                tokens=tokens,
                blocks=blocks,
                runs=runs,
                workloads=workloads,
                tokenizer=tokenizer,
                folder=Path(workspace),
            )
            report = store_bench.measure(plan, progress)
        except (DiskPrefixError, ValueError) as error:
            progress.print(f"[red]error:[/red] {error}", highlight=False)
            sys.exit(1)
    print_report(report, as_json, store_bench.show)


if __name__ == "__main__":
    main()
