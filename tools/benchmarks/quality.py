"""The loss of quantised weights: perplexity, and agreement with bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings
from tests.model.plans import logits_of
from tools.measuring.live_server import step
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report
from tools.models import real

FORMS = ("native", "auto")
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


@torch.inference_mode()
def measured(model: str, weights: str, texts: Sequence[str], tokens: int) -> tuple[float, list[int]]:
    """Returns the perplexity of a model in one form, and its most likely tokens."""
    loaded = load_model(Settings(model=model, weights=weights), real.print_report)
    assert loaded.weights is not None, "the model has a plan"
    losses: list[torch.Tensor] = []
    likely: list[int] = []
    for text in texts:
        ids = torch.tensor(loaded.tokenizer.encode(text)[:tokens])
        logits = logits_of(loaded.weights, loaded.config, ids.numpy())
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
        likely += logits.argmax(-1).tolist()
    return math.exp(float(torch.cat(losses).double().mean())), likely


def compared(name: str, texts: Sequence[str], tokens: int, console: Console) -> dict[str, dict[str, float]]:
    """Returns the figures of each form of a real model."""
    file = str(real.gguf_file(name, real.print_report))
    found: dict[str, dict[str, float]] = {}
    expected: list[int] = []
    for form in FORMS:
        with step(console, f"{name}, {form}"):
            perplexity, likely = measured(file, form, texts, tokens)
        expected = expected or likely
        agreement = sum(a == b for a, b in zip(likely, expected, strict=True)) / len(expected)
        found[form] = {"perplexity": perplexity, "agreement": agreement}
    return found


def show(report: dict[str, Any], console: Console) -> None:
    for name, forms in report["models"].items():
        table = new_table(name, left=("weights",), right=("perplexity", "agreement"))
        for form, found in forms.items():
            table.add_row(form, f"{found['perplexity']:.3f}", f"{found['agreement']:.1%}")
        console.print(table)


@click.command()
@click.option("--model", "names", multiple=True, type=click.Choice(real.NAMES), default=real.NAMES, help="Repeatable.")
@click.option("--text", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Texts.")
@click.option("--windows", default=12, show_default=True, help="The number of texts.")
@click.option("--tokens", default=512, show_default=True, help="Tokens of each.")
@JSON
def main(names: tuple[str, ...], text: Path, windows: int, tokens: int, *, as_json: bool) -> None:
    """Compare the forms of the weights of real models: perplexity, and agreement with bfloat16.

    Perplexity is over windows of the texts. The agreement is the share of their positions at which the most likely
    token is that of `native`.
    """
    texts = texts_of(text, windows, 6 * tokens)
    if not texts:
        raise click.ClickException(f"there are no texts in {text}")
    console = Console(stderr=True)
    models = {name: compared(name, texts, tokens, console) for name in names}
    print_report({"benchmark": "quality", "models": models}, as_json, show)
