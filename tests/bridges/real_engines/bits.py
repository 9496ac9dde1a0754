"""Log-probabilities before and after `kill -9`: of a computed prompt, of one in vLLM's own cache, and of one that a
connector restored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tools.benchmarks.engines import OURS, HttpEngine, Model, vllm_engine
from tools.measuring.options import FOLDER
from tools.measuring.prompts import prompt_text
from tools.measuring.workspace import measuring, model_folder

_REPLY_TOKENS, _TOP = 8, 20
_CONNECTORS = {"ours": OURS, "example": "ExampleConnector"}

LogProbs = Sequence[dict[str, float]]
"""The most likely tokens with their log-probabilities, for each token of a reply."""


@click.command()
@click.option("--size", default=4000, show_default=True, help="Words of the prompt, about as many tokens.")
@click.option("--dtype", default="float32", show_default=True, help="vLLM's dtype.")
@FOLDER
def bits(size: int, dtype: str, folder: Path | None) -> None:
    """Compare the log-probabilities of a reply: computed, from vLLM's cache in memory, and after kill -9 from our
    connector and from vLLM's example. Prints the largest differences; ends with 1 if a token differs, or if ours
    differs from vLLM's cache."""
    progress = Console(stderr=True)
    replies: dict[str, LogProbs] = {}
    with measuring(folder, progress) as workspace:
        model_path = model_folder("smollm2", progress)
        model = Model("smollm2", model_path, model_path, size + 1024)
        for name, connector in _CONNECTORS.items():
            own = workspace / name
            own.mkdir()
            more = ["--dtype", dtype, "--enforce-eager"]
            engine = vllm_engine(model, own, progress.print, more, connector=connector)
            try:
                replies |= _asked(engine, name, prompt_text(size, "bits"))
            finally:
                engine.process.kill()
    report = {name: _difference(replies["ours computed"], other) for name, other in replies.items()}
    report["ours restored, to ours in memory"] = _difference(replies["ours in memory"], replies["ours restored"])
    print(json.dumps(report, indent=2))
    texts = {tuple(max(top, key=lambda token: top[token]) for top in other) for other in replies.values()}
    if len(texts) > 1 or report["ours restored, to ours in memory"]:
        raise click.exceptions.Exit(1)


def _asked(engine: HttpEngine, name: str, prompt: str) -> dict[str, LogProbs]:
    engine.start()
    replies = {f"{name} {state}": _log_probs(engine, prompt) for state in ("computed", "in memory")}
    engine.kill()
    engine.start()
    return replies | {f"{name} restored": _log_probs(engine, prompt)}


def _log_probs(engine: HttpEngine, prompt: str) -> LogProbs:
    body: Any = engine.complete(prompt, _REPLY_TOKENS, logprobs=_TOP, kv_transfer_params={"scope": "full"})
    return [dict(top) for top in body["choices"][0]["logprobs"]["top_logprobs"]]


def _difference(first: LogProbs, second: LogProbs) -> float:
    """Returns the largest difference between log-probabilities that both have."""
    pairs = zip(first, second, strict=True)
    return max(abs(top[token] - others[token]) for top, others in pairs for token in top.keys() & others.keys())
