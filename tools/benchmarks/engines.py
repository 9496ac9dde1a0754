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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from diskprefix.control_groups import num_cpus
from diskprefix.progress import Report
from tools.benchmarks.llama_cpp_worker import common
from tools.measuring.answers import Answer, LiveServerError, streamed
from tools.measuring.environments import NotInstalled, compiled_programs, llama_cpp_libraries, python_of
from tools.measuring.live_server import POLL_S, ROOT, Process, started
from tools.measuring.processes import disk_bytes, free_port

START_DEADLINE_S = 1800.0
ANSWER_DEADLINE_S = 1800.0
_SAVE_DEADLINE_S = 120.0
_POLL_S = 0.02
_SLOT_DEADLINE_S, _SLOT_ATTEMPTS = 10.0, 6
OURS = "DiskPrefixConnector"


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
        api_key: str | None = None,
    ) -> None:
        self.process, self.without_cache = process, without_cache
        self._fields, self._settle, self._tokens = fields, settle, tokens
        timeout = httpx.Timeout(ANSWER_DEADLINE_S, connect=5.0)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, headers=headers)

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

    def complete(self, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Returns the body of a reply that is not streamed. Raises `LiveServerError`."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | self._fields | fields
        try:
            return dict(self._client.post("/v1/completions", json=body).raise_for_status().json())
        except (httpx.HTTPError, ValueError) as error:
            self.process.check()
            raise LiveServerError(f"no reply: {error}") from error

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, *, cached: bool = True, **fields: Any
    ) -> Answer:
        """Asks in a chat. Raises `LiveServerError`."""
        return self._reply("/v1/chat/completions", {"messages": messages, **fields}, max_tokens, cached=cached)

    def say(self, question: str, max_tokens: int) -> str:
        """Returns the answer to a question in a chat, sampled as the program does it by itself. Raises
        `LiveServerError`."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
        try:
            answer = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
            return str(answer["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self.process.check()
            raise LiveServerError(f"no answer: {error}") from error

    def reply(self, prompt: str, max_tokens: int, *, cached: bool = True) -> Answer:
        return self._reply("/v1/completions", {"prompt": prompt}, max_tokens, cached=cached)

    def _reply(self, path: str, body: dict[str, Any], max_tokens: int, *, cached: bool) -> Answer:
        off = {} if cached else self.without_cache or {}
        try:
            return streamed(self._client, path, body | off | self._fields, max_tokens)
        except LiveServerError:
            self.process.check()
            raise


class SlotServer(HttpEngine):
    """A server of llama.cpp's kind, whose slot is saved and restored by hand: saved after a prompt that shares less
    than half with each saved one, and restored before the first prompt of a process, from the file with the longest
    common prefix. Restoring counts as time to the first token; saving does not, as it may follow the reply."""

    def __init__(self, process: Process, port: int, fields: dict[str, Any]) -> None:
        super().__init__(process, port, fields, settle=lambda _engine: None)
        self._saved: list[str] = []
        self._is_new = True

    def start(self) -> float:
        self._is_new = True
        return super().start()

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        waited_s = 0.0
        if self._is_new and self._saved:
            number = max(range(len(self._saved)), key=lambda i: common(self._saved[i], prompts[0]))
            waited_s = self._slot("restore", number)
        self._is_new = False
        answers = super().ask(prompts, max_tokens)
        if all(2 * common(known, prompts[0]) < len(prompts[0]) for known in self._saved):
            self._slot("save", len(self._saved))
            self._saved.append(prompts[0])
        return [replace(answer, at_s=tuple(at_s + waited_s for at_s in answer.at_s)) for answer in answers]

    def _slot(self, action: str, number: int) -> float:
        """Returns the seconds until the server said that it has saved or restored the slot. Raises `LiveServerError`.

        ik_llama.cpp loses its answer if the slot is done before the server waits for it, so it is asked again.
        """
        reason = ""
        for _ in range(_SLOT_ATTEMPTS):
            asked = time.perf_counter()
            try:
                answer = self._client.post(
                    "/slots/0", params={"action": action}, json={"filename": f"{number}.slot"}, timeout=_SLOT_DEADLINE_S
                )
            except httpx.TransportError as error:
                self.process.check()
                reason = str(error)
                continue
            if answer.is_success:
                return time.perf_counter() - asked
            reason = answer.text[:300]
            break
        raise LiveServerError(f"the slot was not {action}d: {reason}")


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


def daemon_engine(
    model: Model, workspace: Path, report: Report, more: Sequence[str], *, api_key: str | None = None
) -> HttpEngine:
    """`api_key` is one of the daemon's, if `more` gives it any."""
    del report
    port = free_port()
    command = [sys.executable, "-P", "-m", "diskprefix", "serve", "--port", str(port), "--model", str(model.file)]
    command += ["--kv-cache-dir", str(workspace / "kv"), "--disk-prefix-cache", "full", *more]
    # A cache folder of its own: files that an earlier run converted would shorten the first start.
    cache_home = workspace / "kept"
    environment = {"XDG_CACHE_HOME": str(cache_home), "PYTHONPATH": ROOT}
    process = Process(command, workspace / "engine.log", environment)
    off, tokens = {"prefix_cache": {"scope": "off"}}, cache_home / "diskprefix" / "daemons"
    return HttpEngine(process, port, {}, without_cache=off, settle=_wait_until_saved, tokens=tokens, api_key=api_key)


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
    require_file(model)
    command = [sys.executable, str(Path(__file__).with_name("llama_cpp_worker.py")), str(llama_cpp_libraries(report))]
    command += [str(model.file), str(model.context), str(workspace), *more]
    return WorkerEngine(Process(command, workspace / "engine.log"))


def require_file(model: Model) -> None:
    """Raises `LiveServerError` if the model is not a `.gguf` file, the only ones that llama.cpp and its fork read."""
    if model.file.suffix != ".gguf":
        raise LiveServerError(f"llama.cpp reads .gguf files, and {model.name} is a folder")


def program_of(engine: str, name: str, report: Report, more: Sequence[str]) -> list[str]:
    """Returns the command of a program of llama.cpp or its fork, one of `COMPILED`, and then `more`, of which the first
    may be the folder that has the program. Without a folder, it is compiled on first use. Raises `NotInstalled`."""
    if not more or more[0].startswith("-"):
        return [str(compiled_programs(engine, report) / name), *more]
    program = Path(more[0]).absolute() / name
    if not os.access(program, os.X_OK):
        raise NotInstalled(f"{more[0]} has no {name}; give the folder with the programs of {engine}, or none")
    return [str(program), *more[1:]]


def _slot_server(engine: str, model: Model, workspace: Path, report: Report, more: Sequence[str]) -> Engine:
    require_file(model)
    program, *own = program_of(engine, "llama-server", report, more)
    port, saved = free_port(), workspace / "slots"
    saved.mkdir()
    command = [program, "--model", str(model.file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ctx-size", str(model.context), "--threads", str(num_cpus()), "--slot-save-path", str(saved)]
    # Otherwise the fork writes a log to the caller's folder, too.
    command += ["--log-disable", "--parallel", "1", *own]
    return SlotServer(Process(command, workspace / "engine.log"), port, {"cache_prompt": True, "ignore_eos": True})


class Hearth(HttpEngine):
    """hearth-llm, a proxy that saves the slot of a `llama-server` after each chat, and restores it by the chat's
    messages. A prompt is a message; one that begins with an earlier prompt is that one, its reply and another
    message."""

    def __init__(self, process: Process, port: int) -> None:
        super().__init__(process, port, {"ignore_eos": True}, settle=lambda _engine: None)
        self._replies: dict[str, str] = {}

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        return [self._chat(prompt, max_tokens) for prompt in prompts]

    def _chat(self, prompt: str, max_tokens: int) -> Answer:
        earlier = next((known for known in self._replies if prompt != known and prompt.startswith(known)), "")
        messages = [{"role": "user", "content": prompt[len(earlier) :]}]
        if earlier:
            replied = {"role": "assistant", "content": self._replies[earlier]}
            messages = [{"role": "user", "content": earlier}, replied, *messages]
        answer = self.chat(messages, max_tokens)
        self._replies.setdefault(prompt, answer.text)
        return answer


def _hearth(model: Model, workspace: Path, report: Report, more: Sequence[str]) -> Engine:
    require_file(model)
    port, python = free_port(), python_of("hearth", report)
    program, *own = program_of("llama-server", "llama-server", report, more)
    command = [str(python), "-m", "hearth", "serve", "--model", str(model.file), "--port", str(port)]
    command += ["--upstream-port", str(free_port()), "--ctx", str(model.context), "--cache-dir", str(workspace / "kv")]
    command += ["--", "--threads", str(num_cpus()), *own]
    search = {"PATH": os.pathsep.join([str(Path(program).parent), os.environ["PATH"]])}
    return Hearth(Process(command, workspace / "engine.log", search), port)


def _folder(model: Model) -> str:
    if model.folder is None:
        raise LiveServerError(f"there is no folder of {model.name} with its weights in bfloat16")
    return str(model.folder)


def vllm_engine(
    model: Model,
    workspace: Path,
    report: Report,
    more: Sequence[str],
    *,
    connector: str = "ExampleConnector",
    keys: Mapping[str, Any] | None = None,
) -> HttpEngine:
    """`keys` are more keys of the connector's configuration."""
    store = str(workspace / "kv")
    settings: dict[str, Any] = {"kv_connector": connector}
    if connector == OURS:
        settings |= {"kv_connector_module_path": "diskprefix.bridges.vllm.connector"}
        settings |= {"kv_load_failure_policy": "recompute"}
        extra: dict[str, Any] = {"kv_cache_dir": store, "kv_cache_budget": "16GiB", "disk_prefix_cache": "full"}
    else:
        extra = {"shared_storage_path": store}
    return _vllm(python_of("vllm", report), model, workspace, settings, {**extra, **(keys or {})}, more)


def _vllm(
    python: Path,
    model: Model,
    workspace: Path,
    settings: Mapping[str, Any],
    extra: Mapping[str, Any],
    more: Sequence[str],
    beside: str = "",
) -> HttpEngine:
    """`settings` and `extra` are vLLM's configuration of a connector, `beside` the command of a program that runs with
    it."""
    port, configured = free_port(), {"kv_role": "kv_both", **settings, "kv_connector_extra_config": extra}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", _folder(model), "--served-model-name", "model", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(model.context)]
    command += ["--kv-transfer-config", json.dumps(configured)]
    # The example connector saves what the first step of a prompt computes, so a step must hold a prompt.
    command += ["--max-num-batched-tokens", str(model.context), *more]
    if beside:
        command = ["sh", "-c", f"{beside} & exec {shlex.join(command)}"]
    # By default it leaves a core to its other processes, and another one to a connector.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"PYTHONPATH": ROOT, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    environment |= {"LMCACHE_TRACK_USAGE": "false"}
    fields = {"model": "model", "ignore_eos": True}
    settle = partial(_wait_until_grown, workspace / "kv")
    return HttpEngine(Process(command, workspace / "engine.log", environment), port, fields, settle=settle)


def _vllm_lmcache(
    model: Model, workspace: Path, report: Report, more: Sequence[str], *, is_ours: bool = False
) -> HttpEngine:
    """vLLM with LMCache's connector and server, above LMCache's own files or above our adapter."""
    python, store, port = python_of("vllm-lmcache", report), workspace / "kv", free_port()
    store.mkdir()
    adapter: dict[str, Any] = {"type": "fs", "base_path": str(store)}
    if is_ours:
        params = {"kv_cache_dir": str(store), "kv_cache_budget": "16GiB"}
        adapter = {"type": "plugin", "module_path": "diskprefix.bridges.lmcache.l2_adapter", "adapter_params": params}
        adapter |= {"class_name": "DiskPrefixL2Adapter"}
    server = [str(python.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)]
    server += ["--http-host", "127.0.0.1", "--http-port", str(free_port()), "--disable-observability"]
    # Without a GPU, the engine itself copies its pages, which the server does not take by default.
    server += ["--supported-transfer-mode", "auto", "--l1-size-gb", "2", "--eviction-policy", "LRU"]
    server += ["--l2-adapter", json.dumps(adapter)]
    settings = {"kv_connector": "LMCacheMPConnector"}
    settings |= {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return _vllm(python, model, workspace, settings, extra, more, beside=shlex.join(server))


ENGINES: Mapping[str, Callable[[Model, Path, Report, Sequence[str]], Engine]] = {
    "diskprefix": daemon_engine,
    "llama.cpp": _llama_cpp,
    "llama-server": partial(_slot_server, "llama-server"),
    "ik_llama.cpp": partial(_slot_server, "ik_llama.cpp"),
    "hearth": _hearth,
    "vllm": vllm_engine,
    "vllm-diskprefix": partial(vllm_engine, connector=OURS),
    "vllm-lmcache": _vllm_lmcache,
    "vllm-lmcache-diskprefix": partial(_vllm_lmcache, is_ours=True),
}


def made(wanted: str, model: Model, workspace: Path, report: Report) -> Engine:
    """Returns an engine. `wanted` is its name, and then more arguments of its own: `diskprefix --speculative off`.

    Raises `LiveServerError`, `NotInstalled`.
    """
    name, *more = shlex.split(wanted)
    return ENGINES[name](model, workspace, report, more)
