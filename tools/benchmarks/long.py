"""Long prompts: gigabytes of state are saved, restored after a kill, and gone on from, within bounds of memory.

Without `--model`, random models have states of real size and little to compute: 57 344 bytes a token, as a dense 7B,
and 4 096 bytes a token.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from rich.console import Console

from diskprefix.units import format_size
from tests.model import tiny
from tools.measuring import page_cache
from tools.measuring.live_server import Answer, LiveServer, step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import peak_of, status_bytes
from tools.measuring.report import at_most, machine, new_table, none_of, print_report, show_machine, verdict_table
from tools.measuring.workspace import measuring

REPLY_TOKENS, NEW_TOKENS, IDS = 4, 23, range(10, 250)
GIB, SLACK_BYTES, DEADLINE_S = 1 << 30, 256 << 20, 6 * 3600.0
"""Memory that a long request may take beside its state and the write buffer; and how long an answer may take."""
# Without sequences that ended in memory, everything comes from the disk.
FLAGS = ("--disk-prefix-cache=full", "--kv-cache-gate=off", "--kv-cache-budget=64GiB", "--kv-memory-entries=0")
CASES = {32_000: (7, 16), 128_000: (2, 4)}
"""The tokens of a prompt; the layers and the heads, of 128 numbers each, of its random model."""


def watched(pid: int) -> AbstractContextManager[SimpleNamespace]:
    """Watches the memory that a process has, without pages of files, above what it has now."""
    before = status_bytes(pid, "RssAnon")
    return peak_of(lambda: status_bytes(pid, "RssAnon") - before)


def measure(workspace: Path, model: str | None, tokens: int, console: Console, *, compares: bool) -> dict[str, Any]:
    """Measures a prompt of `tokens` tokens. Returns the figures as JSON values. Raises `LiveServerError`."""
    if model is None:
        layers, heads = CASES[min(CASES, key=lambda known: abs(known - tokens))]
        sizes = {"num_hidden_layers": layers, "head_dim": 128, "max_position_embeddings": tokens + 1024}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        model = str(tiny.write_folder(workspace / "model", dtype=torch.bfloat16, **sizes))
    turn = random.Random(tokens).choices(IDS, k=tokens + NEW_TOKENS)
    prompt, store = turn[:tokens], workspace / "kv"
    flags, log = ("--model", model, *FLAGS), workspace / "server.log"
    with LiveServer(kv_cache_dir=store, log_path=log, flags=flags, deadline_s=DEADLINE_S) as server:

        def ask(ids: list[int], title: str, scope: str = "full") -> Answer:
            with step(console, f"{tokens:,} tokens: {title}"):
                return server.complete(ids, max_tokens=REPLY_TOKENS, scope=scope)

        server.start()
        with watched(server.process_id) as saving:
            cold = ask(prompt, "cold")
            save_s = server.wait_until_saved()
        stats, kv_bytes = server.cache_stats(), server.props()["kv_memory"]["used_bytes"]
        times, peak_bytes, num_wrong = {}, 0, 0
        for pages in ("disk", "page cache"):
            server.kill()
            read_s = _read_s(store / "data.mdb", is_warm=pages == "page cache")
            server.start()
            with watched(server.process_id) as restoring:
                again = ask(prompt, f"after kill -9, from the {pages}")
            restore_s, ttft_s = (again.timings[name] / 1e3 for name in ("restore_ms", "ttft_ms"))
            times[pages] = {"restore_s": restore_s, "read_s": read_s, "ttft_s": ttft_s}
            num_wrong += again.text != cold.text or again.restored != tokens
            peak_bytes = max(peak_bytes, restoring.peak_bytes)
        server.restart()
        following = ask(turn, "after kill -9, the next turn")
        num_wrong += following.restored < tokens
        num_wrong += compares and ask(turn, "the next turn, cold", "off").text != following.text
    bounds = [(kv_bytes + more + SLACK_BYTES) / GIB for more in (stats["buffer_bytes"], 0)]
    verdicts = [
        none_of("answers that differ, or were not restored", num_wrong),
        none_of("prompts that were not saved whole", stats["dropped"]),
        at_most("memory while saving, GiB", saving.peak_bytes / GIB, bounds[0]),
        at_most("memory while restoring, GiB", peak_bytes / GIB, bounds[1]),
    ]
    sizes = {"tokens": tokens, "state_bytes": stats["saved_bytes"], "disk_bytes": stats["used_bytes"]}
    # The server's own times: a token of a random model may be no whole character.
    cold_s, turn_s = (answer.timings["ttft_ms"] / 1e3 for answer in (cold, following))
    return sizes | {"cold_s": cold_s, "save_s": save_s, "turn_s": turn_s, "restores": times, "verdicts": verdicts}


def _read_s(file: Path, *, is_warm: bool) -> float:
    """Returns the seconds of reading a file, with its pages in the page cache or not, and leaves them so."""
    leave = page_cache.warm if is_warm else page_cache.drop
    leave(file)
    started = time.perf_counter()
    page_cache.warm(file)
    read_s = time.perf_counter() - started
    leave(file)
    return read_s


def show(report: dict[str, Any], console: Console) -> None:
    for found in report["cases"]:
        sizes = [format_size(found[name]) for name in ("state_bytes", "disk_bytes")]
        title = f"{found['tokens']:,} tokens: {sizes[0]} of state, {sizes[1]} stored"
        table = new_table(title, left=("",), right=("s", "plain reads, s", "ratio", "first token, s"))
        table.add_row("saved, after the reply", f"{found['save_s']:.2f}", "", "", f"{found['cold_s']:.2f}")
        for pages, one in found["restores"].items():
            figures = (one["restore_s"], one["read_s"], one["restore_s"] / one["read_s"], one["ttft_s"])
            table.add_row(f"restored from the {pages}", *(f"{figure:.2f}" for figure in figures))
        table.add_row("next turn", "", "", "", f"{found['turn_s']:.2f}")
        console.print(table, verdict_table("", found["verdicts"]))
    show_machine(report["machine"], console)


@click.command()
@click.option("--model", help="A model's folder or .gguf file, in place of random ones.")
@click.option("--size", "sizes", type=click.IntRange(min=512), multiple=True, help="Tokens of a prompt; repeatable.")
@click.option("--compare/--no-compare", default=True, help="Compute the next turn cold, too, and compare the texts.")
@FOLDER
@JSON
def main(model: str | None, sizes: tuple[int, ...], compare: bool, folder: Path | None, as_json: bool) -> None:
    """Save and restore 32 000 tokens with the state of a 7B, and 128 000 tokens of a small model.

    Exits with 1 if a text differs from the cold one, or memory exceeds its bounds.
    """
    progress = Console(stderr=True)
    found = []
    for tokens in sizes or CASES:
        with measuring(folder, progress) as workspace:
            found.append(measure(workspace, model, tokens, progress, compares=compare))
    print_report({"benchmark": "long", "machine": machine(), "model": model, "cases": found}, as_json, show)
    sys.exit(0 if all(row["holds"] for one in found for row in one["verdicts"]) else 1)
