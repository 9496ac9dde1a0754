"""Measures the cost of pictures: a conversation of screenshots, killed after each turn; other pictures.

    tools/bench pictures
    tools/bench pictures --model vision --rounds 1 --cold 1 --cold 5

Every figure is the client's or, where the client cannot know it, the daemon's.
"""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import click
from PIL import Image, ImageDraw

from tests.daemon.server.picture_models import image_part, text_part, write_qwen3_vl
from tools.benchmarks.engines import Engine, HttpEngine
from tools.benchmarks.results import Figure, Plan, compare, plan_options
from tools.measuring.answers import Answer, LiveServerError
from tools.measuring.prompts import prompt_text

_TINY, _SIZE = "tiny", (1920, 1080)
_FIRST_TOKENS, _ROOM = 4, 32_768
_TEXT = 64
"""The number of words of a question."""
_LINE, _WORDS = 14, 44
"""The height of a line of a screenshot in pixels, and its number of words."""
TITLES = {
    "cold_s": "cold: first token, s; turn",
    "restored_s": "after kill -9: first token, s; turn",
    "encode_s": "of it encoding, s; turn",
    "encoded": "pictures encoded; turn",
    "prompt": "prompt, tokens; turn",
    "twice": "prompt tokens computed twice; turn",
    "known_s": "known picture behind other text: first token, s",
    "known_encoded": "pictures encoded for it",
    "other_s": "another picture of the same size: first token, s",
    "other_encoded": "pictures encoded for it",
}

Message: TypeAlias = dict[str, Any]


def screenshot(name: str) -> Message:
    """Returns a part with a picture that depends on `name` alone: lines of words, as a page or an editor has."""
    choose, page = random.Random(name), Image.new("RGB", _SIZE, (250, 250, 248))
    pen = ImageDraw.Draw(page)
    for number, top in enumerate(range(0, _SIZE[1], _LINE)):
        color = tuple(choose.randrange(160) for _ in range(3))
        pen.text((choose.choice((8, 24, 40)), top), prompt_text(_WORDS, f"{name}-{number}"), fill=color)
    file = io.BytesIO()
    page.save(file, "PNG")
    return image_part(file.getvalue())


def _asked(text: str, *pictures: Message) -> Message:
    return {"role": "user", "content": [*pictures, text_part(text)]}


def _conversation(server: HttpEngine, store: Path, round_: int, turns: int, cold: Sequence[int]) -> Iterator[Figure]:
    """A turn for each picture, each answered by a new process; then some of them by processes with an empty store."""
    messages, asked, end = list[Message](), dict[int | str, tuple[list[Message], Answer]](), 0
    for turn in range(1, turns + 1):
        messages.append(_asked(f"What is new on page {turn}?", screenshot(f"{round_}-{turn}")))
        reply = _restarted(server, messages)
        yield Figure("restored_s", reply.ttft_s, turn)
        yield Figure("encode_s", reply.timings["encode_ms"] / 1e3, turn)
        yield Figure("encoded", reply.timings["images_encoded"], turn)
        yield Figure("prompt", reply.prompt_tokens, turn)
        yield Figure("twice", max(0, end - reply.restored), turn)
        asked[turn], end = ([*messages], reply), reply.prompt_tokens
        # Not the reply: the daemon remembers its tokens, and other tokens may have the same text.
        messages.append({"role": "assistant", "content": "It is a page of words."})
    cases = {
        "known": [_asked(prompt_text(_TEXT, round_)), messages[-1], messages[0]],
        "other": [_asked("What is new on page 1?", screenshot(f"{round_}-other"))],
    }
    for case, sent in cases.items():
        asked[case] = sent, (reply := _restarted(server, sent))
        yield Figure(f"{case}_s", reply.ttft_s)
        yield Figure(f"{case}_encoded", reply.timings["images_encoded"])
    checked: list[int | str] = [*cold, *cases]
    for which in checked:
        sent, warm = asked[which]
        reply = _restarted(server, sent, empty=store)
        if _said(reply) != _said(warm):
            raise LiveServerError(f"{which}: the log probabilities after kill -9 are not those of a cold run")
        if isinstance(which, int):
            yield Figure("cold_s", reply.ttft_s, which)


def _restarted(server: HttpEngine, messages: Sequence[Message], *, empty: Path | None = None) -> Answer:
    server.kill()
    if empty is not None:
        shutil.rmtree(empty)
    server.start()
    return _ask(server, messages)


def _ask(server: HttpEngine, messages: Sequence[Message]) -> Answer:
    return server.chat(messages, _FIRST_TOKENS, logprobs=True, top_logprobs=5)


def _said(reply: Answer) -> tuple[str, Any]:
    return reply.text, reply.logprobs


@click.command()
@click.option("--turns", default=10, show_default=True, help="The number of turns; each adds a picture.")
@click.option(
    "--cold",
    multiple=True,
    default=(1, 2, 5, 10),
    show_default=True,
    help="Turns that are also sent to an empty store.",
)
@plan_options(rounds=1, model=_TINY)
def main(turns: int, cold: tuple[int, ...], **options: Any) -> None:
    """Measure what pictures cost, with `--model vision` or a tiny model, which is there if none is named.

    Each turn of a conversation adds a screenshot, and the daemon is killed before it. Then follow a known picture after
    other text, and an unknown picture. Turns of `--cold` are sent to an empty store, too. Exits with 1 if their log
    probabilities differ.
    """

    def measured(engine: Engine, workspace: Path, round_: int) -> Iterator[Figure]:
        if not isinstance(engine, HttpEngine) or engine.without_cache is None:
            raise LiveServerError("only the daemon takes pictures here")
        shown = [turn for turn in cold if turn <= turns]
        yield from _conversation(engine, workspace / "kv", round_, turns, shown)

    with TemporaryDirectory() as folder:
        plan = Plan(**options)
        if plan.models == (_TINY,):
            plan = replace(plan, models=(str(write_qwen3_vl(Path(folder) / _TINY)),))
        compare("pictures", plan, TITLES, _ROOM, measured)
