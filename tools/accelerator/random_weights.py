"""`python -m tools.accelerator.random_weights serve …`: `diskprefix serve`, with random weights made on the device.

They have a seed, so each process of one machine has the same. Everything else is the daemon as it is. With `save PLAN`
or `restore PLAN` it does that half of the first job of the exactness suite, and ends by SIGKILL.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SEED = 7


def make_weights(source: Any) -> Any:
    """Returns a model of the source's configuration. In place of `diskprefix.model.load.loader._unread_model`."""
    import torch

    from diskprefix.model.load.placing import UnreadWeights

    torch.manual_seed(SEED)
    with source.device:
        return source.kind.loader.from_config(source.config, dtype=source.dtype), UnreadWeights()


def run(command: str, *arguments: str) -> None:
    from diskprefix.model.load.imports import import_transformers

    # Before anything else imports transformers.
    import_transformers()
    from diskprefix.model.load import loader

    loader._unread_model = make_weights
    if command == "serve":
        from diskprefix.cli import main

        main()
    else:
        from tests.exactness import jobs, worker

        # Not in a fork, where CUDA may not work.
        worker.do(command, jobs.read_jobs(Path(arguments[0]))[0])


if __name__ == "__main__":
    run(*sys.argv[1:])
