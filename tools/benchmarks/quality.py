"""The loss of quantised weights, and of keys and values in 8 bits: perplexity, and agreement with another form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.load.loader import LoadedModel, load_model
from diskprefix.model.runtime import Rows
from diskprefix.settings import Settings
from tools.benchmarks.llama_cpp_worker import BATCH, Q8_0, Worker, loaded
from tools.measuring.environments import llama_cpp_libraries
from tools.measuring.live_server import step
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report
from tools.models import real

FORMS = {"native": ("native", "auto"), "auto": ("auto", "auto"), "q8": ("auto", "q8")}
"""`--weights` and `--kv-type`."""
LLAMA_CPP = {"llama.cpp": None, "llama.cpp q8_0": Q8_0}
"""The type of llama.cpp's keys and values, by form; None is its default."""
Logits = Callable[[list[int]], Iterator[np.ndarray]]
"""Yields the logits of tokens, part by part."""
_SUFFIXES = {".txt", ".md", ".jsonl", ".json", ".py"}


def texts_of(folder: Path, count: int, characters: int) -> list[str]:
    """Returns pieces from the middle of text files, spread over the folder. They are not copied or kept."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.stat().st_size > 2 * characters
    )
    chosen = [files[i * len(files) // count] for i in range(min(count, len(files)))]
    pieces = []
    for path in chosen:
        with path.open("rb") as file:
            file.seek(path.stat().st_size // 2)
            pieces.append(file.read(characters).decode(errors="ignore"))
    return pieces


def logits_of(model: LoadedModel) -> Logits:
    runtime = model.runtime
    assert runtime is not None, "the model has a plan"
    model.finish()

    def computed(ids: list[int]) -> Iterator[np.ndarray]:
        sequence = KVSequence(PagePool(runtime.layout, block_size=256))
        for at in range(0, len(ids), 256):
            part = np.array(ids[at : at + 256], np.int64)
            yield from runtime.run([Rows(sequence, part, len(part))]).logits

    return computed


def logits_of_llama_cpp(file: str, cache_type: int | None, tokens: int) -> Logits:
    folder = llama_cpp_libraries(real.print_report)
    worker = Worker(loaded(folder), file, tokens, "", flash_attention=True, cache_type=cache_type, sequences=1)

    def computed(ids: list[int]) -> Iterator[np.ndarray]:
        worker.llama.llama_memory_clear(worker.memory, True)
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            worker.decode([(token, at + i, 0, True) for i, token in enumerate(part)])
            yield np.stack([worker.logits(row) for row in range(len(part))])

    return computed


def measured(logits_of_tokens: Logits, prompts: Sequence[list[int]]) -> tuple[float, list[int]]:
    """Returns the perplexity of a model in one form, and its most likely tokens."""
    losses, likely = list[float](), list[int]()
    for ids in prompts:
        following = [*ids[1:], ids[0]]
        losses_of_text = list[float]()
        for logits in logits_of_tokens(ids):
            highest = logits.max(-1, keepdims=True)
            sums = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1, dtype=np.float64))
            at = len(losses_of_text)
            losses_of_text += (sums - logits[np.arange(len(logits)), following[at : at + len(logits)]]).tolist()
            likely += logits.argmax(-1).tolist()
        losses += losses_of_text[:-1]
    return math.exp(float(np.mean(losses))), likely


def compared(
    name: str, forms: Sequence[str], texts: Sequence[str], tokens: int, console: Console
) -> dict[str, dict[str, float]]:
    """Returns the figures of each form of a real model."""
    file = str(real.gguf_file(name, real.print_report))
    by_form: dict[str, dict[str, float]] = {}
    expected, prompts = list[int](), list[list[int]]()
    for form in forms:
        with step(console, f"{name}, {form}"):
            if form in FORMS or not prompts:
                weights, kv_type = FORMS.get(form, ("auto", "auto"))
                model = load_model(Settings(model=file, weights=weights, kv_type=kv_type), real.print_report)
                prompts = prompts or [model.tokenizer.encode(text)[:tokens] for text in texts]
            computed = logits_of(model) if form in FORMS else logits_of_llama_cpp(file, LLAMA_CPP[form], tokens)
            perplexity, likely = measured(computed, prompts)
        expected = expected or likely
        agreement = sum(a == b for a, b in zip(likely, expected, strict=True)) / len(expected)
        by_form[form] = {"perplexity": perplexity, "agreement": agreement}
    return by_form


def show(report: dict[str, Any], console: Console) -> None:
    for name, forms in report["models"].items():
        table = new_table(name, left=("form",), right=("perplexity", "agreement"))
        for form, figures in forms.items():
            table.add_row(form, f"{figures['perplexity']:.4f}", f"{figures['agreement']:.1%}")
        console.print(table)


@click.command()
@click.option(
    "--model", "names", multiple=True, type=click.Choice(real.NAMES), default=real.NAMES, help="The model; repeatable."
)
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice([*FORMS, *LLAMA_CPP]),
    default=("native", "auto"),
    show_default=True,
    help="The form to compare; repeatable.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="A folder with the texts.",
)
@click.option("--windows", default=12, show_default=True, help="The number of texts.")
@click.option("--tokens", default=512, show_default=True, help="The tokens of each text.")
@JSON
def main(
    names: tuple[str, ...], forms: tuple[str, ...], text: Path, windows: int, tokens: int, *, as_json: bool
) -> None:
    """Compare forms of real models: perplexity, and agreement with the first form.

    native is bfloat16, auto the file's own quants, q8 keys and values in 8 bits beside these. Perplexity is over
    windows of the texts. The agreement is the share of their positions with the same most likely token.
    """
    texts = texts_of(text, windows, 6 * tokens)
    if not texts:
        raise click.ClickException(f"there are no texts in {text}")
    console = Console(stderr=True)
    models = {name: compared(name, forms, texts, tokens, console) for name in names}
    print_report({"benchmark": "quality", "models": models}, as_json, show)
