"""The hit path benchmark: the time of each stage of an exact repeat, and its growth with the prompt.

The prompt is a conversation about this project's files, in the tokenizer and the template of Qwen2.5-Coder-0.5B. Its
state is made up, in the form and size of that model's. So no model runs: all stages but the sampling of one token from
stored logits, which does not depend on the length.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from diskprefix.api.openai_chat import ChatRequest
from diskprefix.chat.encoder import Encoder
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.model.load.loader import load_tokenizer
from diskprefix.server.body import parse_json
from diskprefix.server.remembering import Stored
from diskprefix.store.codec.codec import Codec
from diskprefix.store.note_record import NoteKind
from diskprefix.store.notes import Notes, TenantNotes
from diskprefix.tokens import floor_to_grid
from tests.synthetic_model import dense_layout, open_restorer
from tools.measuring import kv_sample
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, runs_option
from tools.measuring.report import machine, new_table, print_report, say, short, show_machine
from tools.measuring.workspace import model_folder
from tools.programs.store import THREADS, Plan, Restore

MODEL = "qwen2.5-coder-0.5b"
LAYOUT = dense_layout(layers=24, heads=2, head_dim=64, dtype=torch.bfloat16, vocab_size=151_936)
TOKENS = (8_000, 16_000, 32_000)
POSITIONS = 1 << 20
_TTL_S = 3600.0
MESSAGE_CHARS = 4_000
STAGES = ("body", "template", "tokens", "boundaries", "names", "match", "restore")
"""The stages in their order. `tokens` are found in the store; `boundaries` is all of rendering beside the
template and the tokens; `match` is the lookup without the names of the blocks."""
_ROLES = ("user", "assistant")
_SOURCES = Path(__file__).parents[2] / "diskprefix"


def conversation(num_chars: int) -> bytes:
    """Returns the body of a chat request: `num_chars` characters of this project's files, as alternating messages."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_SOURCES.rglob("*.py")))
    text = (text * -(-num_chars // len(text)))[:num_chars]
    parts = [text[start : start + MESSAGE_CHARS] for start in range(0, num_chars, MESSAGE_CHARS)]
    messages = [{"role": _ROLES[index % 2], "content": part} for index, part in enumerate(parts)]
    if len(messages) % 2 == 0:
        messages.append({"role": "user", "content": "And?"})
    return json.dumps({"messages": messages}).encode()


@dataclass(frozen=True)
class HitPath:
    """One prompt, stored in a folder."""

    renderer: PromptRenderer
    encoder: Encoder
    body: bytes
    restore: Restore

    @classmethod
    def of(cls, renderer: PromptRenderer, encoder: Encoder, num_tokens: int, folder: Path) -> HitPath:
        """Returns a stored prompt of about `num_tokens` tokens."""
        chars = 4 * num_tokens
        for _ in range(3):
            prompt = renderer.replay(parse_json(conversation(chars), ChatRequest).conversation, None).prompt
            chars = chars * num_tokens // len(prompt.token_ids)
        body = conversation(chars)
        prompt = renderer.replay(parse_json(body, ChatRequest).conversation, None).prompt
        restore = Restore(
            Plan(sample=kv_sample.synthetic_sample(8, LAYOUT), tokens=num_tokens, blocks=0, runs=1, folder=folder)
        )
        # Whole blocks: of the rest there is no made-up state.
        restore.prompt = prompt.token_ids[: floor_to_grid(len(prompt.token_ids), kv_sample.BLOCK_SIZE)]
        restore.save(Codec.RAW)
        return cls(renderer, encoder, body, restore)

    def times_ms(self, runs: int) -> Iterator[dict[str, float]]:
        """Yields the milliseconds of each stage, run by run. The first run fills caches and is left out."""
        renderer, restore = self.renderer, self.restore
        with restore.opened(Codec.RAW) as model, open_restorer(model, capacity=len(restore.prompt)) as restorer:
            notes = Notes(model.store, lambda: None)
            encodings = Stored(NoteKind.ENCODING, TenantNotes(notes, model.root, model.record, _TTL_S))
            for number in range(runs + 1):
                parse_ms, request = _timed(partial(parse_json, self.body, ChatRequest))
                template_ms, text = _timed(partial(renderer.text_of, request.conversation))
                tokens_ms, _ = _timed(partial(self.encoder.encode, text, param="messages", store=encodings))
                prompt_ms, _ = _timed(partial(renderer.replay, request.conversation, None, encodings))
                notes.write()
                names_ms, _ = _timed(partial(model.path, restore.prompt))
                restored = restorer.restore(restore.prompt)
                assert restored.num_tokens == len(restore.prompt), "all of the prompt is stored"
                others = prompt_ms - template_ms - tokens_ms, names_ms, restored.lookup_ms - names_ms
                if number:
                    taken = parse_ms, template_ms, tokens_ms, *others, restored.restore_ms
                    yield dict(zip(STAGES, taken, strict=True))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return (time.perf_counter() - began) * 1e3, found


def growth(first: tuple[int, float], last: tuple[int, float]) -> float:
    """Returns the power of the length that a time grows with, from (tokens, ms) to (tokens, ms)."""
    return math.log(max(last[1], 1e-3) / max(first[1], 1e-3)) / math.log(last[0] / first[0])


def show(report: dict[str, Any], console: Console) -> None:
    cases = report["cases"]
    lengths = [f"{case['tokens']:,}\nms" for case in cases]
    table = new_table("An exact repeat, by stage", left=("stage",), right=(*lengths, "grows with\nlength to the"))
    for stage in (*STAGES, "all"):
        ends = [(case["tokens"], case["ms"][stage]) for case in (cases[0], cases[-1])]
        table.add_row(stage, *(short(case["ms"][stage]) for case in cases), f"{growth(*ends):.2f}")
    console.print(table)
    say(console, f"{report['runs']} runs of each length, medians; state of {MODEL}'s form, from warm pages")
    show_machine(report["machine"], console)


@click.command()
@runs_option(9)
@FOLDER
@JSON
def main(runs: int, folder: Path | None, as_json: bool) -> None:
    """Take an exact repeat of 8 000, 16 000 and 32 000 tokens apart."""
    progress = Console(stderr=True)
    torch.set_num_threads(THREADS)
    tokenizer = load_tokenizer(str(model_folder(MODEL, progress)), None, lambda _: None)
    renderer = PromptRenderer(tokenizer, vocab_size=LAYOUT.vocab_size, max_positions=POSITIONS)
    renderer.warm_up()
    encoder = Encoder(tokenizer, vocab_size=LAYOUT.vocab_size, max_positions=POSITIONS)
    encoder.warm_up()
    cases = []
    for tokens in TOKENS:
        with (
            step(progress, f"{tokens} tokens"),
            tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace,
        ):
            path = HitPath.of(renderer, encoder, tokens, Path(workspace))
            samples = list(path.times_ms(runs))
        medians = {stage: statistics.median(sample[stage] for sample in samples) for stage in STAGES}
        medians["all"] = statistics.median(sum(sample.values()) for sample in samples)
        cases.append({"tokens": len(path.restore.prompt), "ms": medians, "samples": samples})
    report = {"benchmark": "hitpath", "machine": machine(), "runs": runs, "cases": cases}
    print_report(report, as_json, show)
