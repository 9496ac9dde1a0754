"""Two models that do not fit together behind one port, and the front process alone."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from tests.server.chat_model import write_chat_model
from tools.measuring.live_server import Answer, LiveServer
from tools.measuring.options import FOLDER, JSON
from tools.measuring.processes import status_bytes
from tools.measuring.report import at_most, machine, none_of, print_report, show_machine, verdict_table
from tools.measuring.workspace import measuring

_SAID = "Tell me more about river number {number}: where it begins, and what lies between."
_MAX_TOKENS = 8
_PASSES = 100
_DEADLINE_S = 900.0


class Several:
    """Measures with one workspace. `models`: a path of each by its name; `flags` are for every daemon."""

    def __init__(self, workspace: Path, models: dict[str, Path], flags: tuple[str, ...], turns: int) -> None:
        self._workspace, self._models, self._flags, self._turns = workspace, models, flags, turns
        self._catalogue = workspace / "models.toml"
        self._catalogue.write_text("".join(f'[{name}]\nmodel = "{path}"\n' for name, path in models.items()))

    def _server(self, store: str, *flags: str) -> LiveServer:
        return LiveServer(
            kv_cache_dir=self._workspace / store,
            log_path=self._workspace / "server.log",
            flags=("--disk-prefix-cache", "auto:30", *self._flags, *flags),
            environment={"TMPDIR": str(self._workspace)},
        )

    def _front(self, store: str, *flags: str) -> LiveServer:
        return self._server(store, "--models-file", str(self._catalogue), *flags)

    def in_turn(self, limit: str) -> list[dict[str, Any]]:
        """Alternates between the models, one conversation each, and compares with each of them alone."""
        with self._front("several", "--memory-limit", limit) as server:
            server.start()
            alone_s = {name: self._load_s(server, name) for name in self._models}
            talks = {name: _conversation(server, name, self._turns) for name in self._models}
            taken = [(name, *next(talks[name])) for _ in range(self._turns) for name in self._models]
            server.stop(_DEADLINE_S)
        different = 0
        for name, path in self._models.items():
            with self._server(f"alone-{name}", "--model", str(path)) as server:
                server.start()
                texts = [answer.text for answer, _ in _conversation(server, None, self._turns)]
            different += texts != [answer.text for one, answer, _ in taken if one == name]
        # The first turn of the second model is the first swap.
        of_a_load = statistics.median(answer.ttft_s / alone_s[name] for name, answer, _ in taken[1:])
        return [
            none_of("prompt tokens computed twice", sum(again for _, _, again in taken)),
            none_of("models with other replies than alone", different),
            at_most("first token after a swap, of a load alone (median)", of_a_load, 1.2),
        ]

    def _load_s(self, server: LiveServer, name: str) -> float:
        """Returns the seconds in which the worker of a model becomes ready, with nothing else in memory."""
        url = f"http://127.0.0.1:{server.port}"
        for other in self._models:
            httpx.post(f"{url}/models/{other}/unload", headers=server.token, timeout=_DEADLINE_S).raise_for_status()
        _wait(lambda: not _states(url))
        started = time.perf_counter()
        httpx.post(f"{url}/models/{name}/load", headers=server.token, timeout=_DEADLINE_S).raise_for_status()
        _wait(lambda: _states(url).get(name) == "ready")
        return time.perf_counter() - started

    def front(self) -> list[dict[str, Any]]:
        """Measures the front alone: its start, its memory, and its share of the first token of a loaded model."""
        name = next(iter(self._models))
        with self._front("front") as server:
            started = time.perf_counter()
            server.launch()
            _wait(server.listens)
            start_s = time.perf_counter() - started
            url = f"http://127.0.0.1:{server.port}"
            body = {"model": name, "messages": [_said(0)], "max_tokens": 1, "temperature": 0, "stream": True}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_DEADLINE_S).raise_for_status()
            (path,) = self._workspace.glob("diskprefix-*/*")
            through, direct = httpx.Client(base_url=url), httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))
            pairs = [(_first_s(through, "", body), _first_s(direct, "http://localhost", body)) for _ in range(_PASSES)]
            rss_bytes = status_bytes(server.process_id, "VmRSS")
        added_ms = (statistics.median(one for one, _ in pairs) - statistics.median(one for _, one in pairs)) * 1e3
        return [
            at_most("start of the front, s", start_s, 0.5),
            at_most("memory of the front, MiB", rss_bytes / 2**20, 120),
            at_most("added to a first token, ms", added_ms, 1.5),
        ]


def _said(number: int) -> dict[str, str]:
    return {"role": "user", "content": _SAID.format(number=number)}


def _conversation(server: LiveServer, model: str | None, turns: int) -> Iterator[tuple[Answer, int]]:
    """Yields the answer of each turn, and how many of the tokens before it were computed again."""
    messages: list[dict[str, str]] = []
    known = 0
    for number in range(turns):
        messages.append(_said(number))
        answer = server.chat(messages, max_tokens=_MAX_TOKENS, model=model)
        yield answer, max(0, known - answer.restored)
        messages.append({"role": "assistant", "content": answer.text})
        # The last token of a reply was sampled, not computed.
        known = answer.prompt_tokens + answer.completion_tokens - 1


def _first_s(client: httpx.Client, base: str, body: dict[str, Any]) -> float:
    """Returns the seconds from sending a request to the first text of its reply."""
    started = time.perf_counter()
    with client.stream("POST", f"{base}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if '"finish_reason":"' in line or '"content":"' in line:
                return time.perf_counter() - started
    raise AssertionError("a reply without a token")


def _states(url: str) -> dict[str, str]:
    found: dict[str, str] = httpx.get(f"{url}/health").json()["models"]
    return found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException("the daemon did not come so far in time")
        time.sleep(0.005)


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(verdict_table("several models", report["verdicts"]))
    show_machine(report["machine"], console)


@click.command()
@click.option("--model", "paths", multiple=True, type=click.Path(exists=True, path_type=Path), help="Two of them.")
@click.option("--memory-limit", default="1GiB", show_default=True, help="It fits one model.")
@click.option("--turns", default=20, show_default=True, help="Of each conversation.")
@FOLDER
@JSON
def main(paths: tuple[Path, ...], memory_limit: str, turns: int, folder: Path | None, *, as_json: bool) -> None:
    """Measure two models in turn behind one port, and the front process alone.

    Without --model, they are tiny models with random numbers. Exits with 1 if a verdict does not hold.
    """
    if len(paths) not in (0, 2):
        raise click.UsageError("--model: give two, or none")
    with measuring(folder, Console(stderr=True)) as workspace:
        flags: tuple[str, ...] = ("--kv-cache-min-tokens", "16", "--kv-cache-gate", "off")
        if not paths:
            paths = tuple(write_chat_model(workspace / f"tiny-{seed}", seed=seed) for seed in (1, 2))
            flags += ("--block-size", "16")
        named = {f"{path.stem.lower()}-{number}": path.resolve() for number, path in enumerate(paths)}
        several = Several(workspace, named, flags, turns)
        verdicts = [*several.front(), *several.in_turn(memory_limit)]
    print_report({"benchmark": "several", "machine": machine(), "verdicts": verdicts}, as_json, _show)
    sys.exit(not all(row["holds"] for row in verdicts))
