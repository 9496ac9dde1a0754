"""Makes a model many times over, killed each time at another point, in a process of its own.

Every trial starts from an empty cache folder, kills the process that makes the model with SIGKILL at a random one of
its file operations, looks for a model that would be accepted though it is not whole, and then lets another process do
it. The libraries are imported once and every trial is a fork, or the imports alone would take minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from diskprefix.model.load.gguf import converted_folder, is_finished
from tests import forked

IMPORTED: tuple[Any, ...] = (gguf, torch, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM)


def in_fork(action: Callable[[], object]) -> int:
    """Run `action` in a child with a process group of its own; returns the wait status. Its children die with it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        try:
            action()
        except BaseException:  # noqa: BLE001 (nothing may return into the parent's code)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return status
    return status


def on_file_operations(cache: Path, action: Callable[[int], None]) -> None:
    """Call `action(n)` before the n-th operation of this process that names something under `cache`."""
    count = 0

    def hook(_: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if any(str(cache) in str(argument) for argument in arguments if isinstance(argument, str | Path | list)):
            action(count)
            count += 1

    sys.addaudithook(hook)


class Trials:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"

    def make(self) -> Path:
        return converted_folder(self.folder / "tiny.gguf", lambda _: None)

    def fresh_cache(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()

    def made(self) -> dict[str, bytes]:
        """The weight files of the models that would be accepted, by path."""
        models = self.cache / "diskprefix" / "models"
        folders = [path for path in models.glob("*") if is_finished(path)]
        return {str(file): file.read_bytes() for path in folders for file in path.glob("*.safetensors")}

    def count_operations(self) -> int:
        self.fresh_cache()
        log = self.folder / "operations"

        def counted() -> None:
            total = 0

            def count(n: int) -> None:
                nonlocal total
                total = n + 1

            on_file_operations(self.cache, count)
            self.make()
            log.write_text(str(total))

        assert in_fork(counted) == 0
        return int(log.read_text())

    def killed_at(self, point: int) -> None:
        def act(n: int) -> None:
            if n == point:
                os.kill(os.getpid(), signal.SIGKILL)

        def killed() -> None:
            on_file_operations(self.cache, act)
            self.make()

        self.fresh_cache()
        status = in_fork(killed)
        # A run that has fewer operations ends well.
        assert status in (0, signal.SIGKILL), status


def found(folder: Path, trials: int, seed: int) -> dict[str, Any]:
    """Returns the number of file operations, and the points after which something was wrong with `tiny.gguf`."""
    out = folder / "found.json"
    code = forked.run(_main, folder, trials, seed, dict(os.environ), out)
    assert code == 0
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def _main(folder: Path, trials: int, seed: int, environment: Mapping[str, str], out: Path) -> None:
    warnings.simplefilter("error")
    os.environ.update(environment)
    os.environ.update(XDG_CACHE_HOME=str(folder / "cache"), TOKENIZERS_PARALLELISM="false")
    out.write_text(json.dumps(_found(folder, trials, seed)), encoding="utf-8")


def _found(folder: Path, trials: int, seed: int) -> dict[str, Any]:
    runs = Trials(folder)
    total = runs.count_operations()
    good = runs.made()
    assert len(good) == 1
    found: dict[str, Any] = {"operations": total, "accepted_but_bad": [], "not_repaired": [], "left_over": []}
    points = random.Random(seed).sample(range(total), min(trials, total))
    for point in points:
        runs.killed_at(point)
        if runs.made() not in ({}, good):
            found["accepted_but_bad"].append(point)
        if in_fork(runs.make) != 0 or runs.made() != good:
            found["not_repaired"].append(point)
        models = runs.cache / "diskprefix" / "models"
        names = sorted(path.name for path in models.iterdir())
        if names != sorted(f"{lock}{Path(file).parent.name}" for file in good for lock in ("", ".lock-")):
            found["left_over"].append([point, names])
    return found
