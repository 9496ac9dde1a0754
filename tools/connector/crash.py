"""SIGKILL of a small engine with the connector at random moments: far more than real vLLMs start in the same time."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import click
from rich.console import Console

from diskprefix.store.maintenance.verify import verify_index
from tests.extras.vllm.engine import BLOCK, Engine, Request, prompt
from tools.connector.faults import damage
from tools.measuring.options import FOLDER
from tools.measuring.workspace import measuring

_LIFE_S = (0.01, 0.4)
_PROMPTS = 6
_RANKS = 2


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@FOLDER
def crash(kills: int, seed: int, folder: Path | None) -> None:
    """The same with the scheduler's side and two workers over pages of a made-up model, without vLLM.

    After each kill, another process restores every prompt and compares its pages. Ends with 1 if one is wrong.
    """
    choose, wrong, restored = random.Random(seed), 0, 0
    with measuring(folder, Console(stderr=True)) as workspace:
        store = workspace / "kv"
        for number in range(kills):
            child = os.fork()
            if not child:
                _serve(store, number)
            time.sleep(choose.uniform(*_LIFE_S))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            checker = os.fork()
            if not checker:
                _check(store, workspace / "restored")
            wrong += os.waitstatus_to_exitcode(os.waitpid(checker, 0)[1]) != 0
            restored += int((workspace / "restored").read_text(encoding="ascii"))
        problem = damage(store)
    print(
        f"{kills} kills, {wrong} with a wrong page or record, {restored} blocks restored in all; {problem or 'clean'}"
    )
    sys.exit(bool(wrong or problem))


def _prompt(number: int) -> Request:
    """Prompts of six conversations, each with a turn more the next time."""
    conversation, turn = number % _PROMPTS, number // _PROMPTS % 4
    return Request(f"request {number}", prompt(conversation, 2 * BLOCK + turn * BLOCK // 2 + 3))


def _serve(store: Path, first: int) -> None:
    """Serves until it is killed."""
    engine = Engine(store, num_ranks=_RANKS, budget="16MiB")
    number = first
    while True:
        engine.run(_prompt(number))
        number += 1


def _check(store: Path, told: Path) -> None:
    """Ends with 0 if all that is restored is right."""
    code = 1
    try:
        engine = Engine(store, num_ranks=_RANKS, budget="16MiB")
        blocks, is_right = 0, not verify_index(engine.shared.store).problems
        for number in range(_PROMPTS * 4):
            request = _prompt(number)
            num_tokens = engine.begin(request)
            is_right &= all(found[1:] == (False, set()) for found in engine.results(request))
            is_right &= engine.is_right(request, num_tokens)
            engine.scheduler.finish(request.request_id)
            blocks += num_tokens // BLOCK
        told.write_text(str(blocks), encoding="ascii")
        engine.close()
        code = int(not is_right)
    finally:
        os._exit(code)
