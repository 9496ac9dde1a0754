"""The speculation benchmark: decoding with guesses against decoding without, and whether a token differs.

Guesses come from the tokens before, or from a draft model.

Two kinds of text. Edits: a file of this project, and what is to be changed in it; the reply repeats most of the file.
Chat: ordinary questions, whose replies repeat little. Two servers take turns, request by request, so that the noise of
the machine meets both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tools.measuring.live_server import Answer, LiveServer, step
from tools.measuring.options import FOLDER, JSON, MODEL
from tools.measuring.report import machine, median, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring, model_folder

MOST_LINES = 60
"""Of the part of a file that is edited."""
EDITS = (
    "Rename the variable {name} to {name}_value everywhere.",
    "Add a comment above each function that says what it does. Change nothing else.",
    "Replace every occurrence of `self._` by `self.`. Change nothing else.",
    "Add the parameter `verbose: bool = False` to the first function. Change nothing else.",
    "Remove all docstrings. Change nothing else.",
)
EDIT = "{task} Answer with the whole file and nothing else.\n\n```python\n{source}\n```"
QUESTIONS = (
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a lighthouse keeper.",
    "How do I keep tomatoes from getting blight?",
    "Explain how a bicycle stays upright.",
    "Which sights should I see in Lisbon in two days?",
    "Write a poem about the first snow.",
    "Why is the sky blue, and why are sunsets red?",
    "What should I consider before I adopt a dog?",
    "Summarise the causes of the French Revolution.",
    "How does a refrigerator work?",
    "Give me a recipe for a simple vegetable soup.",
    "What makes a good code review?",
)
SYSTEM = "You are a helpful assistant."


def edits(count: int) -> list[str]:
    """Returns prompts over as many parts of this project's files."""
    root = Path(__file__).parents[2] / "diskprefix"
    files = sorted(path for path in root.rglob("*.py") if len(path.read_text("utf-8").splitlines()) >= MOST_LINES)
    chosen = [files[number * len(files) // count] for number in range(count)]
    return [_edit(number, path) for number, path in enumerate(chosen)]


def _edit(number: int, path: Path) -> str:
    source = "\n".join(path.read_text("utf-8").splitlines()[:MOST_LINES])
    names = [word for word in source.replace("(", " ").split() if word.isidentifier() and len(word) > 5]
    return EDIT.format(task=EDITS[number % len(EDITS)].format(name=max(names, key=names.count)), source=source)


def ask_both(
    servers: tuple[LiveServer, LiveServer], kind: str, prompts: Sequence[str], reply_tokens: int, console: Console
) -> list[dict[str, Any]]:
    """Asks a server that does not guess and one that does, in turns."""
    samples = []
    for number, prompt in enumerate(prompts, start=1):
        with step(console, f"{kind} {number} of {len(prompts)}"):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
            # Who is first takes turns too.
            order = servers if number % 2 else servers[::-1]
            answers = {id(one): one.chat(messages, max_tokens=reply_tokens, scope="off") for one in order}
        plain, guessing = (answers[id(one)] for one in servers)
        samples.append({"kind": kind} | _compared(plain, guessing))
    return samples


def _compared(plain: Answer, guessing: Answer) -> dict[str, Any]:
    ms, faster_ms = (answer.timings["decode_ms"] for answer in (plain, guessing))
    return {
        "prompt_tokens": plain.prompt_tokens,
        "tokens": plain.completion_tokens,
        "decode_ms": ms,
        "guessing_decode_ms": faster_ms,
        "decode_tokens_per_s": plain.timings["decode_tokens_per_s"],
        "drafted_tokens": guessing.timings.get("drafted_tokens", 0),
        "accepted_tokens": guessing.timings.get("accepted_tokens", 0),
        "texts_equal": (plain.text, plain.completion_tokens) == (guessing.text, guessing.completion_tokens),
    }


@contextmanager
def _server(workspace: Path, model: Path, guesses: Sequence[str], console: Console) -> Iterator[LiveServer]:
    flags, name = ("--model", str(model), *guesses), "guessing" if guesses else "plain"
    log_path = workspace / "server.log"
    with LiveServer(kv_cache_dir=workspace / name, log_path=log_path, flags=flags) as server:
        with step(console, f"server starting, {' '.join(guesses) or 'without guesses'}") as note:
            server.start(note)
        yield server


def measure(
    workspace: Path,
    model: str,
    folder: Path,
    draft: Path | None,
    sizes: tuple[int, int, int],
    console: Console,
) -> dict[str, Any]:
    """Returns the report as JSON values. `draft` is the draft model; None: guesses come from the tokens before.
    `sizes`: the number of edits, of questions, and the tokens of a reply at most. Raises `LiveServerError`."""
    num_edits, num_questions, reply_tokens = sizes
    guesses = ("--speculative", "ngram") if draft is None else ("--draft-model", str(draft))
    with _server(workspace, folder, (), console) as plain, _server(workspace, folder, guesses, console) as guessing:
        samples = ask_both((plain, guessing), "edits", edits(num_edits), reply_tokens, console)
        samples += ask_both((plain, guessing), "chat", QUESTIONS[:num_questions], reply_tokens, console)
    return {
        "benchmark": "speculation",
        "model": model,
        "guesses": "--speculative ngram" if draft is None else "--draft-model",
        "machine": machine(),
        "texts_equal": all(sample["texts_equal"] for sample in samples),
        "samples": samples,
    }


def show(report: dict[str, Any], console: Console) -> None:
    table = new_table(
        f"{report['model']}: decoding with {report['guesses']} against without",
        left=("text",),
        right=("prompts", "tokens/s", "faster, all", "median", "least", "tokens a step", "drafted", "accepted"),
    )
    for kind in dict.fromkeys(sample["kind"] for sample in report["samples"]):
        chosen = [sample for sample in report["samples"] if sample["kind"] == kind and sample["guessing_decode_ms"]]
        ratios = [sample["decode_ms"] / sample["guessing_decode_ms"] for sample in chosen]
        drafted, accepted = (sum(one[name] for one in chosen) for name in ("drafted_tokens", "accepted_tokens"))
        whole = sum(one["decode_ms"] for one in chosen) / sum(one["guessing_decode_ms"] for one in chosen)
        speed = median(one["decode_tokens_per_s"] for one in chosen)
        figures = (f"{whole:.2f}", f"{median(ratios):.2f}", f"{min(ratios):.2f}")
        tokens = sum(one["tokens"] for one in chosen)
        per_step = f"{tokens / (tokens - accepted):.2f}"
        share = f"{accepted / drafted:.0%}" if drafted else "-"
        table.add_row(kind, str(len(chosen)), f"{speed:.1f}", *figures, per_step, str(drafted), share)
    console.print(table)
    say(console, f"Texts: {'equal' if report['texts_equal'] else 'DIFFERENT'}.")
    show_machine(report["machine"], console)


@click.command()
@MODEL
@click.option("--edits", "num_edits", type=click.IntRange(0, 100), default=50, show_default=True, help="Code edits.")
@click.option(
    "--questions",
    type=click.IntRange(0, len(QUESTIONS)),
    default=len(QUESTIONS),
    show_default=True,
    help="Questions of ordinary chat.",
)
@click.option(
    "--reply-tokens", type=click.IntRange(min=2), default=100, show_default=True, help="Tokens of a reply at most."
)
@click.option(
    "--draft-model",
    type=click.Path(exists=True, path_type=Path),
    help="Have this model guess, a folder or a .gguf file. Without it, guesses come from the tokens before.",
)
@FOLDER
@JSON
def main(
    model: str,
    num_edits: int,
    questions: int,
    reply_tokens: int,
    draft_model: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure how much faster replies are with guessed tokens: edits of code, and ordinary chat.

    Exits with 1 if a text differs.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        sizes = num_edits, questions, reply_tokens
        report = measure(workspace, model, source, draft_model, sizes, progress)
    print_report(report, as_json, show)
    sys.exit(0 if report["texts_equal"] else 1)
