"""What tests of the library run in a process of its own, which then ends in one way or another."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import torch

from diskprefix import PrefixCacheSession
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, random_prompt, tiny_settings

SEED, LENGTH = 5, 6 * BLOCK + 3


def main(name: str, folder: Path, ending: str) -> None:
    """Writes the store and `expected.pt` to `folder`.

    `ending`: `close` closes the session, `save` saves and dies of SIGKILL, `exit` just returns.
    """
    model = tiny_model(name, torch.bfloat16)
    prompt = random_prompt(SEED, LENGTH)
    session = PrefixCacheSession(model, scope="full", settings=tiny_settings(folder / "kv"))
    output = session.generate(
        prompt, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    cache, _ = session.prefill(prompt)
    with torch.no_grad():
        ids = torch.from_numpy(prompt[6 * BLOCK :]).long()[None]
        logits = model(input_ids=ids, **{session.cache_argument: cache}).logits
    torch.save({"generated": torch.cat(output.logits), "next": logits[0, -1]}, folder / "expected.pt")
    if ending == "close":
        session.close()
    elif ending == "save":
        session.save()
        os.kill(os.getpid(), signal.SIGKILL)


def run_program(code: str, folder: Path, environment: Mapping[str, str], out: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with out.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        exec(compile(code, "the example", "exec"), {"__name__": "__main__"})
