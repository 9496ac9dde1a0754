"""Programs that serve a model. Each is started, with the settings that its makers recommend for a CPU, asked, killed
and started again."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from diskprefix.progress import Report
from tools.measuring.answers import Answer, LiveServerError, streamed
from tools.measuring.environments import llama_cpp_libraries, python_of
from tools.measuring.live_server import POLL_S, ROOT, Process, started
from tools.measuring.processes import disk_bytes, free_port

START_DEADLINE_S = 1800.0
ANSWER_DEADLINE_S = 1800.0
_SAVE_DEADLINE_S = 120.0
_POLL_S = 0.02
_OURS = "DiskPrefixConnector"


@dataclass(frozen=True)
class Model:
    """`file` is the `.gguf`, or the folder if there is none; `folder` has the weights in bf16, if they are anywhere.
    `context` is the longest prompt with its reply, in tokens."""

    name: str
    file: Path
    folder: Path | None
    context: int


class Engine(Protocol):
    """One program, with one model."""

    process: Process

    def start(self) -> float:
        """Returns the seconds from the process's start until it can answer. Raises `LiveServerError`."""

    def kill(self) -> None:
        """Waits until everything is written, then sends SIGKILL."""

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        """Sends all prompts at once; returns their replies. Raises `LiveServerError`."""


class HttpEngine:
    """A server of OpenAI's API that says at `/health` when it is ready. `fields` are sent with each request,
    `without_cache` also with requests that must restore nothing; None if the server has no such fields. `settle` waits
    until everything is on disk. `tokens` is the folder in which the daemon keeps the token for its owner."""

    def __init__(
        self,
        process: Process,
        port: int,
        fields: dict[str, Any],
        *,
        without_cache: dict[str, Any] | None = None,
        settle: Callable[[HttpEngine], None],
        tokens: Path | None = None,
    ) -> None:
        self.process, self.without_cache = process, without_cache
        self._fields, self._settle, self._tokens = fields, settle, tokens
        timeout = httpx.Timeout(ANSWER_DEADLINE_S, connect=5.0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout)

    def start(self) -> float:
        return started(self.process, self._client, START_DEADLINE_S)

    def first_token_s(self, prompt: str) -> float | None:
        """Kills the daemon, starts it, and sends a prompt as soon as its port is open. Returns the seconds from the
        start to the first token, or None for other servers, which refuse prompts until they are ready."""
        if self._tokens is None:
            return None
        self.kill()
        began = time.perf_counter()
        self.process.start()
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(self._client.base_url.port or 0))).close()
                break
            except OSError:
                self.process.check()
                time.sleep(POLL_S)
        opened_s = time.perf_counter() - began
        return opened_s + self.reply(prompt, 1).ttft_s

    def kill(self) -> None:
        if self.process.popen is not None:
            self.settle()
        self.process.kill()

    def settle(self) -> None:
        """Waits until all is on disk."""
        self._settle(self)

    def cache_stats(self) -> dict[str, Any]:
        """Returns the daemon's counts of its cache, as its owner sees them."""
        assert self._tokens is not None, "it is the daemon"
        file = next(self._tokens.glob(f"*_{self._client.base_url.port}"))
        token = file.read_text(encoding="ascii").split()[-1]
        answer = self._client.get("/props", headers={"Authorization": f"Bearer {token}"}).raise_for_status()
        return dict(answer.json()["full_cache"]["state"])

    def metric(self, name: str) -> float:
        """Returns a count or gauge of the daemon."""
        lines = self._client.get("/metrics").raise_for_status().text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"diskprefix_{name} "))

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.reply(prompt, max_tokens), prompts))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, *, cached: bool = True, **fields: Any
    ) -> Answer:
        """Asks in a chat. Raises `LiveServerError`."""
        return self._reply("/v1/chat/completions", {"messages": messages, **fields}, max_tokens, cached=cached)

    def reply(self, prompt: str, max_tokens: int, *, cached: bool = True) -> Answer:
        return self._reply("/v1/completions", {"prompt": prompt}, max_tokens, cached=cached)

    def _reply(self, path: str, body: dict[str, Any], max_tokens: int, *, cached: bool) -> Answer:
        off = {} if cached else self.without_cache or {}
        try:
            return streamed(self._client, path, body | off | self._fields, max_tokens)
        except LiveServerError:
            self.process.check()
            raise


class WorkerEngine:
    """A program of this folder that runs in an engine's environment and imports nothing of this project.

    It prints the line `{}` when it is ready. Then it reads questions, each one line of JSON, `{"prompts": [text, ...],
    "max_tokens": N}`, and answers each with one line, a list of `{"prompt_tokens": N, "at_s": [...]}`.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    def start(self) -> float:
        began = time.perf_counter()
        self.process.start(piped=True)
        self._line()
        return time.perf_counter() - began

    def _line(self) -> Any:
        popen = self.process.popen
        assert popen is not None
        assert popen.stdout is not None
        line = popen.stdout.readline()
        if not line:
            popen.wait()
            self.process.check()
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        popen = self.process.popen
        assert popen is not None
        assert popen.stdin is not None
        popen.stdin.write(json.dumps({"prompts": list(prompts), "max_tokens": max_tokens}) + "\n")
        popen.stdin.flush()
        return [
            Answer(
                prompt_tokens=reply["prompt_tokens"], completion_tokens=len(reply["at_s"]), at_s=tuple(reply["at_s"])
            )
            for reply in self._line()
        ]


def _diskprefix(model: Model, workspace: Path, report: Report, more: Sequence[str]) -> Engine:
    del report
    port = free_port()
    command = [sys.executable, "-P", "-m", "diskprefix", "serve", "--port", str(port), "--model", str(model.file)]
    command += ["--kv-cache-dir", str(workspace / "kv"), "--disk-prefix-cache", "full", *more]
    # A cache folder of its own: files that an earlier run converted would shorten the first start.
    cache_home = workspace / "kept"
    environment = {"XDG_CACHE_HOME": str(cache_home), "PYTHONPATH": ROOT}
    process = Process(command, workspace / "engine.log", environment)
    off, tokens = {"prefix_cache": {"scope": "off"}}, cache_home / "diskprefix" / "daemons"
    return HttpEngine(process, port, {}, without_cache=off, settle=_wait_until_saved, tokens=tokens)


def _wait_until_saved(engine: HttpEngine) -> None:
    deadline = time.monotonic() + _SAVE_DEADLINE_S
    while engine.metric("store_pending_bytes") and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _wait_until_grown(store: Path, _engine: HttpEngine) -> None:
    """Waits until the saved files no longer grow on the disk."""
    deadline, last = time.monotonic() + _SAVE_DEADLINE_S, -1
    while (now := disk_bytes(store)) != last and time.monotonic() < deadline:
        last = now
        time.sleep(0.5)


def _llama_cpp(model: Model, workspace: Path, report: Report, more: Sequence[str]) -> Engine:
    if model.file.suffix != ".gguf":
        raise LiveServerError(f"llama.cpp reads .gguf files, and {model.name} is a folder")
    command = [sys.executable, str(Path(__file__).with_name("llama_cpp_worker.py")), str(llama_cpp_libraries(report))]
    command += [str(model.file), str(model.context), str(workspace), *more]
    return WorkerEngine(Process(command, workspace / "engine.log"))


def _folder(model: Model) -> str:
    if model.folder is None:
        raise LiveServerError(f"there is no folder of {model.name} with its weights in bfloat16")
    return str(model.folder)


def _vllm(
    model: Model, workspace: Path, report: Report, more: Sequence[str], *, connector: str = "ExampleConnector"
) -> Engine:
    port, store = free_port(), str(workspace / "kv")
    settings: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if connector == _OURS:
        settings |= {"kv_connector_module_path": "diskprefix.extras.vllm.connector"}
        settings |= {"kv_load_failure_policy": "recompute"}
        extra: dict[str, Any] = {"kv_cache_dir": store, "kv_cache_budget": "16GiB", "disk_prefix_cache": "full"}
    else:
        extra = {"shared_storage_path": store}
    command = [str(python_of("vllm", report)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", _folder(model), "--served-model-name", "model", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(model.context)]
    command += ["--kv-transfer-config", json.dumps(settings | {"kv_connector_extra_config": extra})]
    # The connector saves what the first step of a prompt computes, so a step must hold a prompt.
    command += ["--max-num-batched-tokens", str(model.context), *more]
    # By default it leaves a core to its other processes, and another one to a connector.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"PYTHONPATH": ROOT, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    fields = {"model": "model", "ignore_eos": True}
    settle = partial(_wait_until_grown, workspace / "kv")
    return HttpEngine(Process(command, workspace / "engine.log", environment), port, fields, settle=settle)


ENGINES: Mapping[str, Callable[[Model, Path, Report, Sequence[str]], Engine]] = {
    "diskprefix": _diskprefix,
    "llama.cpp": _llama_cpp,
    "vllm": _vllm,
    "vllm-diskprefix": partial(_vllm, connector=_OURS),
}


def made(wanted: str, model: Model, workspace: Path, report: Report) -> Engine:
    """Returns an engine. `wanted` is its name, and then more arguments of its own: `diskprefix --speculative off`.

    Raises `LiveServerError`, `NotInstalled`.
    """
    name, *more = shlex.split(wanted)
    return ENGINES[name](model, workspace, report, more)
