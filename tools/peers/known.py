"""The peers: how each is started, with the settings that its makers recommend for a processor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from diskprefix.progress import Report
from diskprefix.server.process.token_file import token_at
from tools.measuring.processes import free_port
from tools.peers.environments import llama_cpp_libraries, python_of
from tools.peers.peer import HttpPeer, Peer, Process, WorkerPeer

_WORKERS = Path(__file__).parent / "workers"
_USAGE = {"stream_options": {"include_usage": True}}
_SAVE_DEADLINE_S = 120.0
_VLLM_MEMORY_GIB = 2


@dataclass(frozen=True)
class Model:
    """`folder` has the weights in bf16, `gguf` the quantised file that they were made from. `context` is the longest
    prompt with its reply, in tokens."""

    name: str
    folder: Path
    gguf: Path
    context: int


def diskprefix(
    model: Model,
    workspace: Path,
    report: Report,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Peer:
    del report
    port = free_port()
    command = [sys.executable, "-P", "-m", "diskprefix", "serve", "--port", str(port), "--model", str(model.gguf)]
    command += ["--kv-cache-dir", str(workspace / "kv"), "--disk-prefix-cache", "full", *flags]
    return HttpPeer(
        Process(command, workspace / "server.log", dict(environment or {})),
        port,
        _USAGE,
        restores=True,
        settle=_all_is_saved,
    )


def _all_is_saved(client: httpx.Client) -> None:
    deadline = time.monotonic() + _SAVE_DEADLINE_S
    token = token_at("127.0.0.1", client.base_url.port or 0)
    request = client.build_request("GET", "/props", headers={"Authorization": f"Bearer {token}"})
    while client.send(request).json()["full_cache"]["state"]["pending_bytes"] and time.monotonic() < deadline:
        time.sleep(0.05)


def llama_cpp(model: Model, workspace: Path, report: Report, flash_attention: str = "auto") -> Peer:
    command = [sys.executable, str(_WORKERS / "llama_cpp_worker.py"), str(llama_cpp_libraries(report))]
    command += [str(model.gguf), str(model.context), str(workspace), flash_attention]
    return WorkerPeer(Process(command, workspace / "server.log"), restores=True)


def generate(model: Model, workspace: Path, report: Report) -> Peer:
    command = [str(python_of("transformers", report)), str(_WORKERS / "generate_worker.py"), str(model.folder)]
    return WorkerPeer(Process(command, workspace / "server.log"), restores=False)


def transformers_serve(model: Model, workspace: Path, report: Report) -> Peer:
    port = free_port()
    python = python_of("transformers", report)
    command = [str(python.with_name("transformers")), "serve", str(model.folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--dtype", "bfloat16"]
    fields = {"model": str(model.folder)}
    return HttpPeer(Process(command, workspace / "server.log"), port, fields, restores=False)


def vllm(model: Model, workspace: Path, report: Report) -> Peer:
    port = free_port()
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(workspace / "kv")}}
    command = [str(python_of("vllm", report)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.folder), "--served-model-name", "model", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(model.context)]
    command += ["--kv-transfer-config", json.dumps(connector | extra)]
    # The connector saves what the first step of a prompt computes, so a step must hold a prompt.
    command += ["--max-num-batched-tokens", str(model.context)]
    # By itself it leaves a core to its other processes, and another one to a connector.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(_VLLM_MEMORY_GIB), "VLLM_CPU_OMP_THREADS_BIND": cores}
    fields = {"model": "model", "ignore_eos": True, **_USAGE}
    return HttpPeer(Process(command, workspace / "server.log", environment), port, fields, restores=True)


PEERS: Mapping[str, Callable[[Model, Path, Report], Peer]] = {
    "diskprefix": diskprefix,
    "diskprefix int4": partial(diskprefix, flags=("--weights", "int4")),
    "diskprefix bf16": partial(diskprefix, flags=("--weights", "native")),
    "generate": generate,
    "transformers serve": transformers_serve,
    "llama.cpp": llama_cpp,
    "llama.cpp -fa off": partial(llama_cpp, flash_attention="off"),
    "vllm": vllm,
}
