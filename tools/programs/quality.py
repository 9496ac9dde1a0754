"""The cost and the gain of quantised weights: perplexity, agreement with bfloat16, speed and memory.

    tools/bench quality                        # the three real models
    tools/bench quality smollm2 --text DIR     # texts of your own

Perplexity is over windows of the texts. The agreement is the share of their positions at which the most likely token is
that of `native`. Each form is loaded in a process of its own, so the memory is that of one form.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from tools.models.real import DEFAULT, NAMES, fetched, print_report

FORMS = ("native", "int8", "int4", "auto")
_SUFFIXES = {".txt", ".md", ".jsonl", ".json", ".py"}


def texts_of(folder: Path, count: int, characters: int) -> list[str]:
    """Returns pieces from the middle of text files, spread over the folder. Nothing of them is copied or kept."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.stat().st_size > 2 * characters
    )
    chosen = [files[i * len(files) // count] for i in range(min(count, len(files)))]
    found = []
    for path in chosen:
        with path.open("rb") as file:
            file.seek(path.stat().st_size // 2)
            found.append(file.read(characters).decode(errors="ignore"))
    return found


def perplexity(logits: Any, token_ids: Any) -> tuple[float, int]:
    """Returns the sum of the negative logarithms of the tokens' probabilities, and how many there are.

    `logits` are float32 [tokens, vocab], those of each token for the next one."""
    import torch

    losses = torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:], reduction="sum")
    return float(losses), len(token_ids) - 1


def _measure(model: str | None, weights: str, texts: list[str], tokens: int, out: Any) -> None:
    """Loads the model in one form, and sends its results: text losses, most likely tokens, times, memory."""
    import torch

    from diskprefix.engine.forward import prefill
    from diskprefix.kv.arena import KVArena
    from diskprefix.model.exact.invariance import make_exact
    from diskprefix.model.exact.invariant import as_it_was
    from diskprefix.model.exact.rehearsal import rehearse
    from diskprefix.model.load.fingerprint import Fingerprint
    from diskprefix.model.load.loader import load_model
    from diskprefix.settings import Settings

    settings = Settings(model=model, weights=weights)
    load_model(settings, print_report)
    started = time.perf_counter()
    loaded = load_model(settings, print_report)
    load_s = time.perf_counter() - started
    net = loaded.model
    identity = str(Fingerprint.of(net, loaded.weights_digest))
    layout, reason = make_exact(net, rehearse(net, identity), identity)
    memory = _resident_mb()
    losses, count, likely = 0.0, 0, []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor(loaded.tokenizer(text)["input_ids"][:tokens])
            with as_it_was(net):
                logits = net(input_ids=ids[None], use_cache=False).logits[0].float()
            loss, number = perplexity(logits, ids)
            losses, count = losses + loss, count + number
            likely += logits.argmax(-1).tolist()
        speed: dict[str, float] = {}
        prompt = np.random.default_rng(0).integers(0, 1000, 4040).astype(np.int32)
        arena = KVArena(layout, net.device)
        arena.reserve(len(prompt))
        for at in (64, 2000, 4000):
            started = time.perf_counter()
            before = arena.num_tokens
            prefill(net, arena, prompt[:at], start=before, block_size=256, after_step=lambda _: None)
            if at == 2000:
                speed["prefill_2000"] = (at - before) / (time.perf_counter() - started)
            else:
                speed[f"decode_{at}"] = _decode_rate(net, arena, 24)
                arena.truncate(at)
    out.send(
        {
            "perplexity": math.exp(losses / count),
            "likely": likely,
            "exact_at": layout.exact_at,
            "reason": reason,
            "memory_mb": memory,
            "load_s": load_s,
            **speed,
        }
    )


def _decode_rate(net: Any, arena: Any, count: int) -> float:
    """Returns tokens in a second, by the median step."""
    import torch

    times = []
    for _ in range(count):
        started = time.perf_counter()
        arena.reserve(arena.num_tokens + 1)
        arena.forward(net, torch.tensor([[7]]))
        times.append(time.perf_counter() - started)
    return 1 / sorted(times)[len(times) // 2]


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return math.nan


def measured(model: str | None, weights: str, texts: list[str], tokens: int) -> dict[str, Any]:
    """Raises `RuntimeError` if the process of a form ends without a result."""
    context = multiprocessing.get_context("spawn")
    inside, outside = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(model, weights, texts, tokens, outside))
    process.start()
    outside.close()
    try:
        found: dict[str, Any] = inside.recv()
    except EOFError:
        raise RuntimeError(f"{weights}: the process that measured ended") from None
    finally:
        process.join()
    return found


def model_of(name: str) -> str | None:
    """Returns the `--model` of a real model: its .gguf file, None for the embedded default."""
    folder = fetched(name, print_report)
    return None if name == DEFAULT else str(next(folder.glob("*.gguf")))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--text", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Texts.")
@click.option("--windows", default=12, show_default=True, help="The number of texts.")
@click.option("--tokens", default=512, show_default=True, help="Tokens of each.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def main(names: tuple[str, ...], text: Path, windows: int, tokens: int, as_json: bool) -> None:
    """Compare the forms of the weights of real models: perplexity, agreement, speed, memory."""
    texts = texts_of(text, windows, 6 * tokens)
    if not texts:
        print(f"there are no texts in {text}", file=sys.stderr)
        sys.exit(1)
    results: dict[str, dict[str, Any]] = {}
    for name in names or NAMES:
        results[name] = {form: measured(model_of(name), form, texts, tokens) for form in FORMS}
        expected = results[name]["native"]["likely"]
        for found in results[name].values():
            likely = found.pop("likely") if found is not results[name]["native"] else expected
            found["agreement"] = sum(a == b for a, b in zip(likely, expected, strict=True)) / len(expected)
        results[name]["native"].pop("likely")
        if not as_json:
            _show(name, results[name])
    if as_json:
        print(json.dumps(results, indent=2))


def _show(name: str, forms: dict[str, Any]) -> None:
    columns = (
        "weights | perplexity | agreement | decode at 64, 4 000 | prefill at 2 000 | memory | loaded in | exact at"
    )
    click.echo(f"{name}\n| {columns} |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for form, found in forms.items():
        click.echo(
            f"| {form} | {found['perplexity']:.3f} | {found['agreement']:.1%} "
            f"| {found['decode_64']:.1f}, {found['decode_4000']:.1f} tok/s | {found['prefill_2000']:.0f} tok/s "
            f"| {found['memory_mb']:.0f} MB | {found['load_s']:.1f} s | {found['exact_at']} |"
        )
