"""The suite over HTTP, in both forms: daemons of one model, and one of several models of which one fits at a time.

The replies of a daemon of one model, their log probabilities, and the state that it saves are what the other form must
give: computed, restored, after a swap, after an unload, and after SIGKILL of a worker and of the router.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from diskprefix.prefixstore.store.store import Store
from diskprefix.tokens import as_token_ids
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import DaemonProcess, clean_environment, serve_flags, wait_until
from tests.exactness.architectures import VOCAB, tiny_model
from tests.exactness.jobs import Case, Lengths, cases_of
from tests.exactness.rows import UNSUPPORTED
from tests.runtime.plan import tiny
from tests.runtimes import RUNTIME

ONE_AT_A_TIME = "1GiB"
"""Room to compute is most of what a tiny model needs."""
KILLED = -signal.SIGKILL


def daemon_of(models: Mapping[str, Path], cache: Path, lengths: Lengths) -> DaemonProcess:
    """A daemon of one model; or of several, which are all those of a folder. It restores nothing from memory."""
    one, *others = models.values()
    flags = serve_flags(one, cache, block_size=lengths.block)
    if others:
        several = serve_flags(one.parent, cache, block_size=lengths.block, memory_limit=ONE_AT_A_TIME)
        flags = ["--models-dir", *several[1:]]
    environment = clean_environment(CHECKPOINT_INTERVAL=str(lengths.interval))
    return DaemonProcess(*flags, module="tests.exactness.forgetful_daemon", environment=environment)


def write_architecture(name: str, dtype: str, folder: Path) -> Path:
    """A tiny model as a folder, with a tokenizer that no test needs: prompts are token ids. For llama.cpp's library it
    is another Llama for each name: `tools/llama matrix` has the architectures."""
    if RUNTIME == "llama":
        return write_chat_model(folder, seed=sum(name.encode()))
    tiny_model(name, getattr(torch, dtype)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Answered:
    """`choices`: texts, and the log probabilities of each token."""

    choices: Any
    restored: int
    source: str | None


@dataclass(frozen=True)
class Alone:
    """The answers of a daemon that has one model, by the names of the cases: `cold` without the cache, `restored` from
    the disk. `saved`: the records of all payloads by their keys."""

    cold: Mapping[str, Answered]
    restored: Mapping[str, Answered]
    saved: Mapping[bytes, bytes]


@dataclass(frozen=True)
class SeveralRow:
    """One model among several. `different`: what was not as in the daemon of one model. `restored`: tokens by case."""

    architecture: str
    dtype: str
    comparisons: int
    different: list[str]
    restored: dict[str, int]


class Prompts:
    """The prompts of the suite, as they are asked of a model over HTTP."""

    def __init__(self, lengths: Lengths, reply: int) -> None:
        self._reply, self.lengths = reply, lengths
        self.cases = cases_of(lengths, self._tokens)

    @staticmethod
    def _tokens(seed: int, count: int) -> Any:
        return as_token_ids(np.random.default_rng(seed).integers(3, VOCAB - 1, count).tolist())

    def ask(self, client: httpx.Client, model: str, case: Case, **cache: Any) -> Answered:
        """Raises `httpx.HTTPStatusError`."""
        body = {"model": model, "prompt": case.token_ids.tolist(), "max_tokens": self._reply, "temperature": 0}
        # No end before the last token.
        body |= {"logprobs": 5, "logit_bias": {"2": -100}, "prefix_cache": cache}
        reply = client.post("/v1/completions", json=body).raise_for_status().json()
        report = reply["prefix_cache"]
        return Answered(reply["choices"], report["restored"], report.get("source"))

    def cold(self, client: httpx.Client, model: str) -> dict[str, Answered]:
        return {case.name: self.ask(client, model, case, scope="off") for case in self.cases}

    def save(self, client: httpx.Client, model: str) -> Answered:
        return self.ask(client, model, self.cases[0], scope="full")

    def restored(self, client: httpx.Client, model: str) -> dict[str, Answered]:
        return {case.name: self.ask(client, model, case, save=False) for case in self.cases}


def saved_state(cache: Path) -> dict[bytes, bytes]:
    """The records of all payloads. Their keys and their bytes are the same in copies of one store."""
    with closing(Store(cache)) as store, store.snapshot() as snapshot:
        return {key: bytes(value) for key, value in snapshot.records("payloads")}


def answers_alone(model: Path, cache: Path, prompts: Prompts) -> Alone:
    """The answers of a daemon of one model. `cache` is a store without prompts, or none."""
    with daemon_of({model.name: model}, cache, prompts.lengths) as daemon, daemon.wait_ready().client() as client:
        cold = prompts.cold(client, model.name)
        prompts.save(client, model.name)
        daemon.wait_saved()
        restored = prompts.restored(client, model.name)
        daemon.stop()
    return Alone(cold, restored, saved_state(cache))


@dataclass
class Comparison:
    """What a model among several answers, beside what it answers alone."""

    model: str
    alone: Alone
    comparisons: int = 0
    different: list[str] = field(default_factory=list)
    restored: dict[str, int] = field(default_factory=dict)

    def compare_cold(self, event: str, found: Mapping[str, Answered]) -> None:
        self._compare(event, self.alone.cold, found)

    def compare_restored(self, event: str, found: Mapping[str, Answered]) -> None:
        self._compare(event, self.alone.restored, found)
        self.restored = {case: answered.restored for case, answered in found.items()}

    def _compare(self, event: str, expected: Mapping[str, Answered], found: Mapping[str, Answered]) -> None:
        for case, answered in found.items():
            for what in ("choices", "restored", "source"):
                self._require(f"{event}: {what} of {case}", getattr(expected[case], what), getattr(answered, what))
            self._require(f"{event}: {case}, cold", self.alone.cold[case].choices, answered.choices)

    def compare_saved(self, found: Mapping[bytes, bytes]) -> None:
        for key, record in self.alone.saved.items():
            self._require(f"saved state {key.hex()}", record, found.get(key))

    def require_restored(self, prompt_tokens: int) -> None:
        """All of the prompt that was saved must have been restored."""
        if self.model not in UNSUPPORTED:
            self._require("tokens that are restored of the prompt", prompt_tokens, self.restored.get("repeat"))

    def fail(self, event: str, error: Exception) -> None:
        answer = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
        self.different.append(f"{event}: {answer[:300]}")

    def _require(self, what: str, expected: Any, found: Any) -> None:
        self.comparisons += 1
        if expected != found:
            self.different.append(what)


class SeveralModels:
    """A router with several models, whose processes come, go and are killed. `cache` is a store without prompts."""

    def __init__(self, models: Mapping[str, Path], cache: Path, prompts: Prompts) -> None:
        self._models, self._cache, self._prompts = models, cache, prompts

    def compare(self, alone: Mapping[str, Alone]) -> Iterator[Comparison]:
        """Yields one for each of the models that `alone` has."""
        compared = {name: Comparison(name, answers) for name, answers in alone.items()}
        with self._daemon() as daemon, daemon.client() as client:
            self._each("cold", compared, lambda one: self._begin(client, one))
            # Another model took its place meanwhile.
            self._each("after a swap", compared, lambda one: self._again("after a swap", daemon, client, one))
            self._wait_unloaded(client, *compared)
            assert daemon.stop(signal.SIGKILL) == KILLED
        with self._daemon() as daemon, daemon.client() as client:
            event = "after SIGKILL of the router"
            self._each(event, compared, lambda one: one.compare_restored(event, self._ask_again(client, one)))
            daemon.stop()
        saved = saved_state(self._cache)
        for one in compared.values():
            one.compare_saved(saved)
            one.require_restored(len(self._prompts.cases[0].token_ids))
        yield from compared.values()

    def _daemon(self) -> DaemonProcess:
        return daemon_of(self._models, self._cache, self._prompts.lengths)

    @staticmethod
    def _each(event: str, compared: Mapping[str, Comparison], do: Callable[[Comparison], None]) -> None:
        for one in compared.values():
            try:
                do(one)
            except (httpx.HTTPError, AssertionError) as error:
                one.fail(event, error)

    def _begin(self, client: httpx.Client, one: Comparison) -> None:
        one.compare_cold("cold", self._prompts.cold(client, one.model))
        one.compare_cold("while it is saved", {"repeat": self._prompts.save(client, one.model)})

    def _again(self, event: str, daemon: DaemonProcess, client: httpx.Client, one: Comparison) -> None:
        one.compare_restored(event, self._ask_again(client, one))
        os.kill(_worker_of(daemon, one.model), signal.SIGKILL)
        one.compare_restored("after SIGKILL of its worker", self._ask_after_the_kill(client, one))
        self._wait_unloaded(client, one.model)
        one.compare_restored("after an unload", self._ask_again(client, one))

    def _ask_again(self, client: httpx.Client, one: Comparison) -> dict[str, Answered]:
        return self._prompts.restored(client, one.model)

    def _ask_after_the_kill(self, client: httpx.Client, one: Comparison) -> dict[str, Answered]:
        """Waits until the router has seen that the worker died: requests that it had would fail."""
        wait_until(lambda: one.model not in _states(client), "the router sees the death")
        return self._ask_again(client, one)

    @staticmethod
    def _wait_unloaded(client: httpx.Client, *models: str) -> None:
        for model in models:
            client.post(f"/models/{model}/unload").raise_for_status()
        wait_until(lambda: not {*models} & {*_states(client)}, "they are unloaded")


def _states(client: httpx.Client) -> dict[str, str]:
    found: dict[str, str] = client.get("/health").json()["models"]
    return found


def _worker_of(daemon: DaemonProcess, model: str) -> int:
    """The process that has the model."""
    found = [re.search(rf"\[router\] {re.escape(model)} runs in process (\d+)$", line) for line in daemon.lines]
    return [int(match[1]) for match in found if match][-1]


def several_rows(names: Sequence[str], dtype: str, folder: Path, lengths: Lengths, reply: int) -> list[SeveralRow]:
    """A row for each architecture, all behind one router, in copies of one store."""
    prompts, empty = Prompts(lengths, reply), folder / "empty"
    Store(empty).close()
    models = {name: write_architecture(name, dtype, folder / "models" / name) for name in names}

    def alone(name: str) -> Alone:
        return answers_alone(models[name], Path(shutil.copytree(empty, folder / f"alone-{name}")), prompts)

    cache = Path(shutil.copytree(empty, folder / "several"))
    compared = SeveralModels(models, cache, prompts).compare({name: alone(name) for name in names})
    return [SeveralRow(one.model, dtype, one.comparisons, one.different, one.restored) for one in compared]
