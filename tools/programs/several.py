"""Two models that do not fit together behind one port, and the front process alone."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from diskprefix.units import format_size
from tests.server.chat_model import write_chat_model
from tools.measuring.live_server import Answer, LiveServer
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import at_most, machine, none_of, print_report, show_machine, verdict_table
from tools.measuring.swapped_models import SwappedModels, family
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

    def in_turn(self, limit: str) -> dict[str, Any]:
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
        return {
            "alone_s": alone_s,
            "first_tokens_s": [{"model": name, "ttft_s": answer.ttft_s} for name, answer, _ in taken],
            "computed_twice": sum(again for _, _, again in taken),
            "different_replies": different,
        }

    def in_turn_of_a_router(self, program: str) -> dict[str, Any]:
        """Alternates as `in_turn` does, with llama.cpp's router, which keeps one model."""
        with LlamaRouter(program, self._models, self._workspace) as server:
            server.start()
            alone_s = {name: server.load_s(name) for name in self._models}
            talks = {name: _conversation(server, name, self._turns) for name in self._models}
            taken = [(name, *next(talks[name])) for _ in range(self._turns) for name in self._models]
        return {
            "alone_s": alone_s,
            "first_tokens_s": [{"model": name, "ttft_s": answer.ttft_s} for name, answer, _ in taken],
            "computed_twice": sum(again for _, _, again in taken),
        }

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

    def front(self) -> dict[str, Any]:
        """Measures the front alone: its start, its memory, and its share of the first token of a loaded model."""
        name = next(iter(self._models))
        with self._front("front") as server:
            started = time.perf_counter()
            server.launch()
            _wait(server.listens)
            start_s = time.perf_counter() - started
            url = f"http://127.0.0.1:{server.port}"
            body = {"model": name, "messages": [_said(0)], "max_tokens": 1, "temperature": 0, "stream": True}
            (httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_DEADLINE_S)).raise_for_status()
            (path,) = self._workspace.glob("diskprefix-*/*")
            through, direct = httpx.Client(base_url=url), httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))
            pairs = [(_first_s(through, "", body), _first_s(direct, "http://localhost", body)) for _ in range(_PASSES)]
            rss_bytes = _proc_bytes(server.process_id, "status", "VmRSS")
        added_ms = (statistics.median(one for one, _ in pairs) - statistics.median(one for _, one in pairs)) * 1e3
        return {"start_s": start_s, "rss_bytes": rss_bytes, "added_ms": added_ms}

    def standby(self) -> dict[str, Any]:
        """Measures requests for unloaded models with a spare worker, and the memory when all models are unloaded."""
        first_s = {}
        with self._front("standby", "--standby") as server:
            server.start()
            url = f"http://127.0.0.1:{server.port}"
            _wait(lambda: "a spare is ready" in server.log_path.read_text(errors="replace"))
            for name in self._models:
                self._load_s(server, name)
                httpx.post(f"{url}/models/{name}/unload", headers=server.token).raise_for_status()
                _wait(lambda: not _states(url))
                first_s[name] = server.chat([_said(0)], max_tokens=1, model=name).ttft_s
                httpx.post(f"{url}/models/{name}/unload", headers=server.token).raise_for_status()
                _wait(lambda: not _states(url))
            idle_bytes = sum(_proc_bytes(pid, "smaps_rollup", "Pss") for pid in family(server.process_id))
        return {"first_token_s": first_s, "idle_bytes": idle_bytes}

    def agents(self, limit: str, agents: int, minutes: float, *, kills: bool) -> dict[str, Any]:
        """Has agents ask all models in turn, and compares their replies with those of each model alone."""
        with self._front("agents", "--memory-limit", limit) as server:
            server.start()
            asked = SwappedModels(server, list(self._models))
            figures = asked.run(agents, minutes * 60, kills=kills)
            server.stop(_DEADLINE_S)
        figures["wrong"] = 0
        for name, path in self._models.items():
            with self._server(f"agents-{name}", "--model", str(path)) as alone:
                alone.start()
                figures["wrong"] += asked.wrong(alone, name)
        return figures


class LlamaRouter(LiveServer):
    """llama.cpp's server without a model, which starts a server for the model that a request names, one at a time."""

    def __init__(self, program: str, models: dict[str, Path], workspace: Path) -> None:
        super().__init__(kv_cache_dir=workspace, log_path=workspace / "router.log")
        folder = workspace / "router"
        folder.mkdir()
        for name, path in models.items():
            (folder / f"{name}.gguf").symlink_to(path)
        self._command = [program, "--port", str(self.port), "--models-dir", str(folder), "--models-max", "1"]
        # It closes a kept connection without a word.
        self._client = httpx.Client(
            base_url=str(self._client.base_url),
            timeout=_DEADLINE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._command += ["--threads", str(os.cpu_count()), "--parallel", "1", "--ctx-size", "8192"]

    def load_s(self, name: str) -> float:
        """Returns the seconds in which a model becomes ready, with nothing else in memory."""
        for other, state in self._states().items():
            if state != "unloaded":
                self._client.post("/models/unload", json={"model": other}).raise_for_status()
        _wait(lambda: set(self._states().values()) == {"unloaded"})
        started = time.perf_counter()
        self._client.post("/models/load", json={"model": name}).raise_for_status()
        _wait(lambda: self._states()[name] == "loaded")
        return time.perf_counter() - started

    def _states(self) -> dict[str, str]:
        return {one["id"]: one["status"]["value"] for one in self._client.get("/models").json()["data"]}


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


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException("the daemon did not come so far in time")
        time.sleep(0.005)


def _proc_bytes(pid: int, file: str, key: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@click.command()
@click.option("--model", "paths", multiple=True, type=click.Path(exists=True, path_type=Path), help="Two of them.")
@click.option("--memory-limit", default="1GiB", show_default=True, help="It fits one model.")
@click.option("--turns", default=20, show_default=True, help="Of each conversation.")
@click.option("--agents", default=0, help="Measure so many agents that ask all models in turn, and nothing else.")
@click.option("--models", default=3, show_default=True, help="The tiny models of --agents.")
@click.option("--minutes", default=2.0, show_default=True, help="The time for --agents.")
@click.option("--kill", "kills", is_flag=True, help="Kill workers and the front at random meanwhile.")
@click.option("--router", metavar="LLAMA_SERVER", help="Take the same turns with this llama-server of llama.cpp.")
@FOLDER
@JSON
def main(
    paths: tuple[Path, ...],
    memory_limit: str,
    turns: int,
    agents: int,
    models: int,
    minutes: float,
    kills: bool,
    router: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure two models in turn behind one port, and the front process alone; or agents that ask several models.

    Without --model, they are tiny models with random numbers. Exits with 1 if a verdict does not hold.
    """
    if len(paths) not in (0, 2) and not agents:
        raise click.UsageError("--model: give two, or none")
    with measuring(folder, Console(stderr=True)) as workspace:
        flags: tuple[str, ...] = ("--kv-cache-min-tokens", "16", "--kv-cache-gate", "off")
        if router and (agents or not paths or any(path.suffix != ".gguf" for path in paths)):
            raise click.UsageError("--router: it takes two --model that are .gguf files")
        if not paths:
            paths = tuple(
                write_chat_model(workspace / f"tiny-{seed}", seed=seed)
                for seed in range(1, 1 + (models if agents else 2))
            )
            flags += ("--block-size", "16")
        named = {f"{path.stem.lower()}-{number}": path.resolve() for number, path in enumerate(paths)}
        several = Several(workspace, named, flags, turns)
        report: dict[str, Any] = {"machine": machine()}
        if agents:
            report["agents"] = several.agents(memory_limit, agents, minutes, kills=kills)
        else:
            report |= {"front": several.front(), "standby": several.standby()}
            report["in_turn"] = several.in_turn(memory_limit)
            report["router"] = several.in_turn_of_a_router(router) if router else None
    report["verdicts"] = _agent_verdicts(report["agents"]) if agents else _verdicts(report)
    print_report(report, as_json, _show)
    sys.exit(not all(row["holds"] for row in report["verdicts"]))


def _verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    turns, front, standby = report["in_turn"], report["front"], report["standby"]
    return [
        none_of("prompt tokens computed twice", turns["computed_twice"]),
        none_of("models with other replies than alone", turns["different_replies"]),
        at_most("first token after a swap, of a load alone (median)", _of_a_load(turns), 1.2),
        at_most("start of the front, s", front["start_s"], 0.5),
        at_most("memory of the front, MiB", front["rss_bytes"] / 2**20, 120),
        at_most("added to a first token, ms", front["added_ms"], 1.5),
        *(at_most(f"--standby: first token of {name}, s", s, 1.0) for name, s in standby["first_token_s"].items()),
        at_most("--standby: memory of all, unloaded, MiB", standby["idle_bytes"] / 2**20, 350),
    ]


def _of_a_load(turns: dict[str, Any]) -> float:
    """Returns the median of the times to a first token after a swap, in loads of that model alone."""
    # The first turn of the second model is the first swap.
    return float(
        statistics.median(one["ttft_s"] / turns["alone_s"][one["model"]] for one in turns["first_tokens_s"][1:])
    )


def _agent_verdicts(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        none_of("replies other than those of the model alone", figures["wrong"]),
        none_of("turns without an answer", figures["lost"]),
    ]


def _show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    console.print(verdict_table("several models", report["verdicts"]))
    if "agents" in report:
        for name, figure in report["agents"].items():
            console.print(f"{name.replace('_', ' ')}: {figure}", highlight=False)
        return
    console.print(f"the front takes {format_size(report['front']['rss_bytes'])}", highlight=False)
    if report["router"]:
        for who, turns in (("diskprefix", report["in_turn"]), ("llama.cpp's router", report["router"])):
            first_s = [one["ttft_s"] for one in turns["first_tokens_s"]]
            console.print(
                f"{who}: {turns['computed_twice']:,} prompt tokens computed twice; first token after a swap "
                f"{statistics.median(first_s[1:]):.2f} s, of a load alone {_of_a_load(turns):.2f}, "
                f"last turns {statistics.median(first_s[-4:]):.2f} s",
                highlight=False,
            )


if __name__ == "__main__":
    main()
