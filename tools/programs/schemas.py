"""The schemas benchmark: does what is written to random schemas validate, and what do the masks cost?

The replies are sampled from random logits, which write the hardest text, in the tokens of the real model. The cost of a
mask is compared with a decode step of that model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import jsonschema
import numpy as np
import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from diskprefix.app import load_engine
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.constrained_reply import ConstraintCompiler, forbidden_by
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import Constraint, DoneEvent, ErrorEvent, Event, GenerateRequest, SamplingParams
from diskprefix.engine.sampler import Sampler
from diskprefix.nouns import CacheOptions, Prompt
from diskprefix.settings import Settings
from tests.random_schemas import random_schema
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, MODEL
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring, model_folder

MOST_TOKENS = 4000
PROMPT = np.arange(10, 74, dtype=np.int32)
REPLY_TOKENS = 64
COMPANY = 4
RECORDS = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 40}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
"""For replies that do not end before their limit."""


class Writer:
    """Writes replies from random logits."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._eos: int = self._tokenizer.eos_token_id
        vocab_size = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
        self._compiler = ConstraintCompiler(self._tokenizer, {self._eos}, vocab_size)

    def sample(self, seed: int) -> dict[str, Any]:
        """Writes one reply, checks it, and writes it again to time its masks."""
        schema = random_schema(seed)
        constraint = Constraint(kind="json_schema", source=json.dumps(schema))
        tokens, is_ended = self._write(constraint, seed)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        began = time.perf_counter()
        self._compiler.matcher(constraint)
        compile_ms = (time.perf_counter() - began) * 1e3
        return {
            "seed": seed,
            "tokens": len(tokens),
            "ended": is_ended,
            "fault": _fault(text, schema) if is_ended else None,
            "compile_ms": compile_ms,
            "mask_ms": self._mask_ms(constraint, tokens),
        }

    def _write(self, constraint: Constraint, seed: int) -> tuple[list[int], bool]:
        generator = torch.Generator().manual_seed(seed)
        allowed = self._compiler.begin(constraint)
        sampler = Sampler(SamplingParams(seed=seed), PROMPT, torch.device("cpu"), constraint=allowed)
        tokens: list[int] = []
        while len(tokens) < MOST_TOKENS:
            tokens.append(sampler.sample(torch.randn(self._compiler.vocab_size, generator=generator)))
            if sampler.is_complete or tokens[-1] == self._eos:
                return tokens, True
        return tokens, False

    def _mask_ms(self, constraint: Constraint, tokens: Sequence[int]) -> list[float]:
        matcher, costs = self._compiler.matcher(constraint), []
        for token in tokens:
            began = time.perf_counter()
            forbidden_by(matcher, self._compiler.vocab_size)
            costs.append((time.perf_counter() - began) * 1e3)
            matcher.consume_token(token)
        return costs


def _fault(text: str, schema: dict[str, Any]) -> str | None:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {text!r}"
    return None


def decode_step_ms(engine: Engine, constraint: Constraint | None, num_requests: int) -> float:
    """Returns the time of a decode step, while so many requests write `REPLY_TOKENS` each."""
    inbox, events = Inbox(engine.serve, 100), SimpleQueue[Event]()
    for seed in range(num_requests):
        request = GenerateRequest(
            id=str(seed),
            prompt=Prompt(PROMPT),
            # No token ends a reply that is free.
            sampling=SamplingParams(
                max_tokens=REPLY_TOKENS, seed=seed, logit_bias={engine.tokenizer.eos_token_id: -100}
            ),
            cache=CacheOptions(scope=parse_scope("off", param="scope")),
            constraint=constraint,
        )
        inbox.submit(request, events.put)
    inbox.start()
    speeds: list[float] = []
    while len(speeds) < num_requests:
        event = events.get()
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, DoneEvent):
            speeds.append(event.timings.decode_tokens_per_s)
    inbox.stop(0)
    return 1e3 / statistics.fmean(speeds)


def decode_steps(folder: Path, workspace: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Returns the time of a step of free and of constrained replies, in turns."""
    settings = Settings(model=str(folder), kv_cache_dir=workspace / "kv")
    engine = load_engine(settings, lambda _: None)
    constraint = Constraint(kind="json_schema", source=json.dumps(RECORDS))
    samples = []
    for requests in (1, COMPANY):
        decode_step_ms(engine, constraint, requests)
        for _ in range(rounds):
            with step(console, f"decode, {requests} at once"):
                samples.append(
                    {
                        "requests": requests,
                        "free_ms": decode_step_ms(engine, None, requests),
                        "constrained_ms": decode_step_ms(engine, constraint, requests),
                    }
                )
    engine.close()
    return samples


def measure(workspace: Path, model: str, folder: Path, schemas: int, rounds: int, console: Console) -> dict[str, Any]:
    """Returns the report as JSON values."""
    writer = Writer(folder)
    with step(console, f"{schemas} schemas"):
        replies = [writer.sample(seed) for seed in range(schemas)]
    return {
        "benchmark": "schemas",
        "model": model,
        "machine": machine(),
        "invalid": [reply for reply in replies if reply["fault"]],
        "cut": sum(not reply["ended"] for reply in replies),
        "replies": replies,
        "steps": decode_steps(folder, workspace, rounds, console),
    }


def show(report: dict[str, Any], console: Console) -> None:
    replies = report["replies"]
    masks = [cost for reply in replies for cost in reply["mask_ms"]]
    free_ms = _median(one["free_ms"] for one in report["steps"] if one["requests"] == 1)
    table = new_table(f"{report['model']}: {len(replies)} schemas", left=("",), right=("median", "99th", "most"))
    table.add_row("tokens", *_figures([reply["tokens"] for reply in replies], "{:.0f}"))
    table.add_row("compile, ms", *_figures([reply["compile_ms"] for reply in replies], "{:.2f}"))
    table.add_row("mask, ms", *_figures(masks, "{:.3f}"))
    table.add_row("mask, share of a decode step", *_figures([cost / free_ms for cost in masks], "{:.2%}"))
    console.print(table)
    console.print()
    table = new_table("decode step", left=("at once",), right=("free, ms", "constrained, ms", "ratio"))
    for requests in (1, COMPANY):
        chosen = [one for one in report["steps"] if one["requests"] == requests]
        ratio = _median(one["constrained_ms"] / one["free_ms"] for one in chosen)
        times = (_median(one[name] for one in chosen) for name in ("free_ms", "constrained_ms"))
        table.add_row(str(requests), *(f"{ms:.2f}" for ms in times), f"{ratio:.3f}")
    console.print(table)
    for reply in report["invalid"]:
        say(console, f"schema {reply['seed']}: {reply['fault']}")
    say(console, f"{len(report['invalid'])} of {len(replies)} replies are invalid; {report['cut']} did not end.")
    show_machine(report["machine"], console)


def _figures(values: Sequence[float], form: str) -> tuple[str, str, str]:
    ordered = sorted(values)
    return form.format(_median(ordered)), form.format(ordered[len(ordered) * 99 // 100]), form.format(ordered[-1])


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


@click.command()
@MODEL
@click.option("--schemas", type=click.IntRange(min=1), default=500, show_default=True, help="How many random schemas.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Figures are medians of them.")
@FOLDER
@JSON
def main(model: str, schemas: int, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Write replies to random schemas from random logits, validate them, and measure the masks.

    Exits with 1 if a reply is invalid or does not end.
    """
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    with measuring(folder, progress) as workspace:
        report = measure(workspace, model, source, schemas, rounds, progress)
    print_report(report, as_json, show)
    sys.exit(1 if report["invalid"] or report["cut"] else 0)
