"""`tools/bench`: one subcommand for each benchmark; `restart` is what runs when none is named."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click
import restart_bench
from live_server import LiveServerError, log_tail, step
from rich.console import Console

from diskprefix.errors import DiskPrefixError


class DefaultGroup(click.Group):
    """A group that takes `restart` for granted when the first argument is not a subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["restart", *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultGroup)
def main() -> None:
    """Benchmarks of diskprefix. Without a subcommand: restart."""


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
@click.option(
    "--codec",
    type=click.Choice(["raw", "zstd", "planes"]),
    default="raw",
    show_default=True,
    help="How the state is stored.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the cache folder is made, to measure another disk. About 0.4 GB for each run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample to stdout instead of tables.")
def restart(runs: int, tokens: tuple[int, ...], codec: str, folder: Path | None, as_json: bool) -> None:
    """What a restart costs: cold, exact repeat, nearest prefix.

    Every restored figure is the first request of a server that was killed with SIGKILL and started again. The operating
    system's page cache survives that, so this is a restarted process and not a rebooted machine.
    """
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace:
        log_path = Path(workspace) / "server.log"
        try:
            report = restart_bench.measure(Path(workspace) / "kv", log_path, sorted(set(tokens)), runs, codec, progress)
        except LiveServerError as error:
            progress.print(f"[red]{error}[/red]; the end of the server's log:", highlight=False)
            progress.print(log_tail(log_path), highlight=False, markup=False)
            sys.exit(1)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        restart_bench.show(report, Console())


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
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the stores are made, to measure another disk.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout instead of tables.")
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
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        store_bench.show(report, Console())


if __name__ == "__main__":
    main()
