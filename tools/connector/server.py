"""vLLM's server with a connector or without, as its processes are started, asked and killed here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx

from diskprefix.progress import Report
from tools.benchmarks.engines import ANSWER_DEADLINE_S, Process, started
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import python_of
from tools.measuring.processes import disk_bytes, free_port

Connector: TypeAlias = Literal["none", "diskprefix"]
_ROOT = Path(__file__).parents[2]
_MEMORY_GIB = 1
_SETTLE_S = 60.0


@dataclass(frozen=True)
class Reply:
    """`tokens` and their `logprobs` are the reply. `restored` tokens came from our store."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    restored: int

    def head(self, num_tokens: int) -> Reply:
        """The first tokens of the reply."""
        return replace(self, tokens=self.tokens[:num_tokens], logprobs=self.logprobs[:num_tokens])


class Server:
    """One server of one model. `start` may be called again after `kill`."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        report: Report,
        connector: Connector = "diskprefix",
        *,
        context: int = 2304,
        dtype: str = "bfloat16",
        arguments: tuple[str, ...] = (),
        **config: Any,
    ) -> None:
        """`folder` gets the log and, in `kv`, the store. `config` are settings of our connector."""
        self.connector: Connector = connector
        self.store = folder / "kv"
        self._port = free_port()
        command = [str(python_of("vllm", report)), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "model", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--dtype", dtype, "--max-model-len", str(context), "--enforce-eager"]
        command += ["--max-num-batched-tokens", str(context), *arguments, *self._connector(connector, config)]
        self.process = Process(command, folder / "server.log", environment_of())
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=ANSWER_DEADLINE_S)

    def _connector(self, connector: Connector, config: dict[str, Any]) -> list[str]:
        if connector == "none":
            return []
        extra = {"path": str(self.store), "budget": "2GiB", "scope": "full", "min_free": 0} | config
        settings: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        settings |= {
            "kv_connector": "DiskPrefixConnector",
            "kv_connector_module_path": "diskprefix.extras.vllm.connector",
            "kv_connector_extra_config": extra,
        }
        return ["--kv-transfer-config", json.dumps(settings)]

    def start(self) -> None:
        """Returns once it answers. Raises `LiveServerError`."""
        started(self.process, self._client)

    def kill(self) -> None:
        self.process.kill()

    def ask(self, prompt: str, max_tokens: int = 8, *, patience_s: float = ANSWER_DEADLINE_S) -> Reply:
        """Hangs up when nothing comes for `patience_s`. Raises `LiveServerError` if there is no whole answer."""
        body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 1}
        tokens: list[str] = []
        logprobs: list[float] = []
        before = self._restored()
        first: float | None = None
        began = time.perf_counter()
        try:
            with self._client.stream("POST", "/v1/completions", json=body, timeout=patience_s) as response:
                if response.status_code != 200:
                    response.read()
                    raise LiveServerError(f"it answered {response.status_code}: {response.text[:300]}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise LiveServerError(f"it answered {chunk['error']}")
                    for choice in chunk.get("choices", []):
                        found = choice.get("logprobs") or {}
                        tokens += found.get("tokens", [])
                        logprobs += found.get("token_logprobs", [])
                        first = first or time.perf_counter()
        except httpx.HTTPError as error:
            raise LiveServerError(f"the connection broke: {error}") from error
        if len(tokens) != max_tokens or first is None:
            raise LiveServerError(f"it answered {len(tokens)} of {max_tokens} tokens")
        return Reply(tuple(tokens), tuple(logprobs), first - began, self._restored() - before)

    def metrics(self) -> dict[str, float]:
        """Returns our counters at `/metrics`, without labels but the reason."""
        found: dict[str, float] = {}
        for line in self._client.get("/metrics").text.splitlines():
            if line.startswith("vllm:diskprefix_") and "_created" not in line:
                name, _, value = line.rpartition(" ")
                reason = name.partition('reason="')[2].partition('"')[0]
                key = name.partition("{")[0].removeprefix("vllm:diskprefix_").removesuffix("_total")
                key += f":{reason}" if reason else ""
                found[key] = found.get(key, 0) + float(value)
        return found

    def preemptions(self) -> int:
        """Returns how often a request had to give its memory away, so far."""
        return self.count("num_preemptions_total")

    def count(self, name: str) -> int:
        """Returns one of vLLM's own counters at `/metrics`."""
        lines = self._client.get("/metrics").text.splitlines()
        return int(sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(f"vllm:{name}")))

    def _restored(self) -> int:
        return int(self.metrics().get("restored_tokens", 0)) if self.connector == "diskprefix" else 0

    def settle(self) -> None:
        """Waits until what was saved no longer grows on the disk. Raises `LiveServerError` if that takes too long."""
        deadline, last = time.monotonic() + _SETTLE_S, -1
        while time.monotonic() < deadline:
            if (now := disk_bytes(self.store)) == last:
                return
            last = now
            time.sleep(0.5)
        raise LiveServerError(f"not all was saved after {_SETTLE_S:.0f} s")


def environment_of() -> dict[str, str]:
    """Returns the variables of vLLM on this machine's processor."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    memory = {"VLLM_CPU_KVCACHE_SPACE": str(_MEMORY_GIB), "VLLM_CPU_OMP_THREADS_BIND": cores}
    return {"PYTHONPATH": str(_ROOT)} | memory


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server that is started, and killed at the end."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
