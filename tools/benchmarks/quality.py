"""The loss of quantised weights, of rounded rows, and of keys and values in 8 bits: forms of a model beside the first.

Every form computes a window before the next one, so that only one window's probabilities are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.load.loader import LoadedModel, load_model
from tools.benchmarks import rounded_rows
from tools.benchmarks.llama_cpp_worker import BATCH, Q8_0, Worker, loaded
from tools.measuring.environments import llama_cpp_libraries
from tools.measuring.live_server import step
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report
from tools.models import real

FORMS: dict[str, dict[str, str]] = {
    "native": {"weights": "native"},
    "auto": {},
    "q8": {"kv_type": "q8"},
    "rows 15": {"rows": "15"},
    "rows 8": {"rows": "8"},
    "rows bf16": {"rows": "bf16"},
}
"""Settings by form. `NAME=VALUE,…` is a form too."""
LLAMA_CPP = {"llama.cpp": None, "llama.cpp q8_0": Q8_0}
"""The type of llama.cpp's keys and values, by form; None is its default."""
Logits = Callable[[list[int]], Iterator[np.ndarray]]
"""Yields the logits of tokens, part by part."""
_SUFFIXES = {".txt", ".md", ".jsonl", ".json", ".py"}
_ROWS = 64
"""The tokens whose probabilities are compared at once."""


@dataclass
class Samples:
    """The means of each window in one form."""

    losses: list[float] = field(default_factory=list)
    """Of the next token, in nats."""
    divergences: list[float] = field(default_factory=list)
    """KL(first form ‖ this form), in nats per token."""
    agreements: list[float] = field(default_factory=list)
    """The share of the positions with the same most likely token."""


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


def settings_of(form: str) -> dict[str, str]:
    """Returns the settings of a form. Raises `ValueError` if it has others than `Settings`."""
    chosen = FORMS.get(form) or dict(pair.partition("=")[::2] for pair in form.split(",") if form != "auto")
    if unknown := chosen.keys() - {setting.name for setting in fields(Settings)}:
        raise ValueError(f"{form}: no such form, and no such setting: {', '.join(sorted(unknown))}")
    return chosen


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
    # Both configure AMX in the thread that calls them. llama.cpp does it once and expects it to stay.
    thread = ThreadPoolExecutor(1)

    def decoded(ids: list[int], at: int) -> np.ndarray:
        worker.decode([(token, at + i, 0, True) for i, token in enumerate(ids)])
        logits: np.ndarray = np.stack([worker.logits(row) for row in range(len(ids))])
        return logits

    def computed(ids: list[int]) -> Iterator[np.ndarray]:
        thread.submit(worker.llama.llama_memory_clear, worker.memory, True).result()
        for at in range(0, len(ids), BATCH):
            yield thread.submit(decoded, ids[at : at + BATCH], at).result()

    return computed


def opened(file: str, forms: Sequence[str], tokens: int, console: Console) -> dict[str, Logits]:
    """Loads a file in each form."""
    by_form: dict[str, Logits] = {}
    modules = None
    for form in forms:
        with step(console, f"{Path(file).name}, {form}"):
            if form in LLAMA_CPP:
                by_form[form] = logits_of_llama_cpp(file, LLAMA_CPP[form], tokens)
            elif form in rounded_rows.ROUNDINGS:
                modules = modules or rounded_rows.modules_of(file)
                by_form[form] = rounded_rows.logits_of(modules, rounded_rows.ROUNDINGS[form])
            else:
                chosen: dict[str, Any] = {"model": file, **settings_of(form)}
                by_form[form] = logits_of(load_model(Settings(**chosen), real.print_report))
    return by_form


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the probabilities, [tokens, vocab], in float32."""
    shifted: np.ndarray = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, dtype=np.float64, keepdims=True)).astype(np.float32)
    return shifted


def in_pieces(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the logarithms of the probabilities of a few tokens at a time."""
    for part in parts:
        for at in range(0, len(part), _ROWS):
            yield log_probabilities(part[at : at + _ROWS])


def add_window(
    samples: Samples, parts: Iterable[np.ndarray], ids: list[int], expected: list[np.ndarray] | None
) -> list[np.ndarray]:
    """Adds the means of a window whose logits are `parts`. Returns its probabilities, which are the `expected` of the
    other forms."""
    following, kept = np.array(ids[1:]), list[np.ndarray]()
    losses, divergences, agreements = list[float](), list[float](), list[bool]()
    first = iter(expected or ())
    for piece in in_pieces(parts):
        wanted = next(first, piece)
        next_ids = following[len(agreements) : len(agreements) + len(piece)]
        losses += (-piece[np.arange(len(next_ids)), next_ids]).tolist()
        divergences += (np.exp(wanted) * (wanted - piece)).sum(-1, dtype=np.float64).tolist()
        agreements += (piece.argmax(-1) == wanted.argmax(-1)).tolist()
        if expected is None:
            kept.append(piece)
    samples.losses.append(float(np.mean(losses)))
    samples.divergences.append(float(np.mean(divergences)))
    samples.agreements.append(float(np.mean(agreements)))
    return kept if expected is None else expected


def figures_of(samples: Samples, first: Samples) -> dict[str, Any]:
    """Returns the figures of a form, and the standard errors that come from the choice of the windows."""
    ratio = math.exp(float(np.mean(samples.losses) - np.mean(first.losses)))
    differences = np.array(samples.losses) - np.array(first.losses)
    return {
        "perplexity": math.exp(float(np.mean(samples.losses))),
        "change_percent": 100 * (ratio - 1),
        "change_error": 100 * ratio * standard_error(differences),
        "divergence": float(np.mean(samples.divergences)),
        "divergence_error": standard_error(samples.divergences),
        "agreement": float(np.mean(samples.agreements)),
        "losses": samples.losses,
        "divergences": samples.divergences,
    }


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def compared(
    file: str, forms: Sequence[str], texts: Sequence[str], tokens: int, console: Console
) -> dict[str, dict[str, Any]]:
    """Returns the figures of each form of a model."""
    by_form = {form: Samples() for form in forms}
    logits = opened(file, forms, tokens, console)
    tokenizer = load_model(Settings(model=file), real.print_report).tokenizer
    for number, text in enumerate(texts, start=1):
        ids, expected = tokenizer.encode(text)[:tokens], None
        with step(console, f"window {number} of {len(texts)}"):
            for form, samples in by_form.items():
                expected = add_window(samples, logits[form](ids), ids, expected)
    return {form: figures_of(samples, by_form[forms[0]]) for form, samples in by_form.items()}


def show(report: dict[str, Any], console: Console) -> None:
    for name, forms in report["models"].items():
        table = new_table(name, left=("form",), right=("perplexity", "change", "±", "KL in nats", "±", "agreement"))
        for form, figures in forms.items():
            change = f"{figures['change_percent']:+.3f} %", f"{figures['change_error']:.3f} %"
            divergence = f"{figures['divergence']:.6f}", f"{figures['divergence_error']:.6f}"
            table.add_row(form, f"{figures['perplexity']:.4f}", *change, *divergence, f"{figures['agreement']:.2%}")
        console.print(table)
    for name, matrices in report["outliers"].items():
        table = new_table(f"{name}: rows with outliers", left=("matrix",), right=("max / rms", "kurtosis", "8 bits"))
        for matrix, of in sorted(matrices.items(), key=lambda item: -item[1]["ratio"])[:8]:
            table.add_row(matrix, f"{of['ratio']:.1f}", f"{of['kurtosis']:.1f}", f"{of['lost']:.2%}")
        console.print(table)


def outliers(file: str, texts: Sequence[str], tokens: int) -> dict[str, dict[str, float]]:
    ids = load_model(Settings(model=file), real.print_report).tokenizer.encode(texts[0])[:tokens]
    return rounded_rows.outliers_of(rounded_rows.modules_of(file), ids)


def _file(name: str) -> str:
    """Returns the file or folder of a model. Raises `click.BadParameter`."""
    if name in real.NAMES:
        return str(real.gguf_file(name, real.print_report))
    if not Path(name).exists():
        raise click.BadParameter(f"{name} is neither a file, nor a folder, nor one of {', '.join(real.NAMES)}")
    return name


def _require_known(_context: click.Context, _option: click.Parameter, forms: tuple[str, ...]) -> tuple[str, ...]:
    for form in forms:
        if form not in LLAMA_CPP and form not in rounded_rows.ROUNDINGS:
            try:
                settings_of(form)
            except ValueError as error:
                raise click.BadParameter(str(error)) from error
    return tuple(dict.fromkeys(forms))


_TEXT = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command()
@click.option("--model", "names", multiple=True, default=real.NAMES, help="A real model, a file or folder; repeatable.")
@click.option(
    "--form",
    "forms",
    multiple=True,
    callback=_require_known,
    default=("native", "auto"),
    show_default=True,
    help=f"The form to compare; repeatable. {', '.join((*FORMS, *LLAMA_CPP, *rounded_rows.ROUNDINGS))}, or settings as "
    "NAME=VALUE,…",
)
@click.option("--text", type=_TEXT, required=True, help="A folder with the texts.")
@click.option("--windows", default=12, show_default=True, help="The number of texts.")
@click.option("--tokens", default=512, show_default=True, help="The tokens of each text.")
@click.option("--outliers", "with_outliers", is_flag=True, help="Also show the matrices with outliers in their rows.")
@JSON
def main(
    names: tuple[str, ...],
    forms: tuple[str, ...],
    text: Path,
    windows: int,
    tokens: int,
    *,
    with_outliers: bool,
    as_json: bool,
) -> None:
    """Compare forms of models with the first form: perplexity, KL divergence, agreement of the most likely tokens.

    native is bfloat16, auto the file's own quants, q8 keys and values in 8 bits beside these; rows 15, 8 and bf16 are
    the bits of activations in products with quants. torch computes in float32 with transformers, and torch 15, torch 8
    and so on round its rows. Each text is a window; the errors (±) are standard errors over the windows, of differences
    from the first form.
    """
    texts = texts_of(text, windows, 6 * tokens)
    if not texts:
        raise click.ClickException(f"there are no texts in {text}")
    console = Console(stderr=True)
    files = {name: _file(name) for name in names}
    models = {name: compared(file, forms, texts, tokens, console) for name, file in files.items()}
    of_rows = {name: outliers(file, texts, tokens) for name, file in files.items() if with_outliers}
    print_report({"benchmark": "quality", "models": models, "outliers": of_rows}, as_json, show)
