"""Measures whole steps of a model in a process of its own, and prints tokens a second as JSON (`whole_steps`)."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import click
import numpy as np

from diskprefix.daemon.cli.options import build_settings, setting_options
from diskprefix.daemon.settings import SETTINGS, Settings
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.prefill import prefill
from tools.models.real import print_report


def measured(settings: Settings, num_prefill: int, num_decode: int, rounds: int) -> dict[str, list[float]]:
    """Returns the tokens a second of `num_prefill` tokens in an empty sequence, and of `num_decode` tokens in another,
    one by one and with no guesses, round by round. Raises `ModelError`, and `ClickException` for a model without a
    plan."""
    loaded = load_model(settings, print_report)
    if (runtime := loaded.runtime) is None:
        raise click.ClickException(f"{settings.model} has no plan: {loaded.reason}")
    loaded.finish()
    runtime.prepare()
    size = settings.block_size
    pool, random = PagePool(runtime.layout, block_size=size), np.random.default_rng(0)
    samples: dict[str, list[float]] = defaultdict(list)
    # The first round warms up.
    for number in range(rounds + 1):
        for part, count in (("prefill", num_prefill), ("decode", num_decode)):
            sequence, token_ids = KVSequence(pool), random.integers(0, runtime.layout.vocab_size, count, np.int32)
            begun = time.perf_counter()
            if part == "prefill":
                prefill(runtime, sequence, token_ids, start=0, block_size=size, after_step=lambda _sequence: None)
            else:
                for at in range(count):
                    runtime.run([Rows(sequence, token_ids[at : at + 1].astype(np.int64))])
            if number:
                samples[part].append(count / (time.perf_counter() - begun))
            sequence.close()
    return samples


@click.command()
@click.argument("num_prefill", type=int)
@click.argument("num_decode", type=int)
@click.argument("rounds", type=int)
@setting_options(SETTINGS)
def main(num_prefill: int, num_decode: int, rounds: int, **flags: Any) -> None:
    """Measure steps with the settings of `diskprefix serve`."""
    print(json.dumps(measured(build_settings(flags), num_prefill, num_decode, rounds)))


if __name__ == "__main__":
    main()
