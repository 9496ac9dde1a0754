"""A program that serves a model, as `tools/bench peers` measures it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from diskprefix.errors import DiskPrefixError

START_DEADLINE_S = 1800.0
ANSWER_DEADLINE_S = 1800.0
_POLL_S = 0.02


class PeerError(DiskPrefixError):
    """A peer did not start or did not answer."""


@dataclass(frozen=True)
class Reply:
    """`at_s` are the client's seconds from the question to each piece of the reply, a token or a few. `text` is empty
    where a program does not say it."""

    prompt_tokens: int | None
    tokens: int
    at_s: tuple[float, ...]
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.at_s[0]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / (self.at_s[-1] - self.at_s[0])


def rate_together(replies: Sequence[Reply]) -> float:
    """Returns the tokens a second of all together, from where the last has its first token to where the first ends."""
    begin, end = max(reply.at_s[0] for reply in replies), min(reply.at_s[-1] for reply in replies)
    if end <= begin:
        # One after the other: from the first token of the first to the end of the last.
        begin, end = min(reply.at_s[0] for reply in replies), max(reply.at_s[-1] for reply in replies)
        return sum(reply.tokens - 1 for reply in replies) / (end - begin)
    inside = sum(sum(begin < at <= end for at in reply.at_s) * reply.tokens / len(reply.at_s) for reply in replies)
    return inside / (end - begin)


class Peer(Protocol):
    """One program, with one model. `restores` says whether it can answer from disk after it was killed."""

    restores: bool
    process: Process

    def start(self) -> float:
        """Returns the seconds from the process's start until it can answer. Raises `PeerError`."""

    def kill(self) -> None:
        """Sends SIGKILL after all is written."""

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Reply]:
        """Sends all prompts at once; returns their replies. Raises `PeerError`."""


@dataclass
class Process:
    """One process and its children, with a log."""

    command: Sequence[str]
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[str] | None = None

    def start(self, *, piped: bool = False) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE if piped else None
        with self.log_path.open("a", encoding="utf-8") as log:
            self.popen = subprocess.Popen(
                self.command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                text=True,
                env=_clean_environment() | self.environment,
                start_new_session=True,
            )
        return self.popen

    def end(self) -> None:
        """Sends SIGKILL and waits for nothing: for a thread beside the one that waits for an answer."""
        if (popen := self.popen) is not None:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        if self.popen is not None:
            with self.popen as popen, suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            self.popen = None

    def check(self) -> None:
        """Raises `PeerError` if it has ended."""
        if self.popen is None or self.popen.poll() is not None:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            code = self.popen.returncode if self.popen is not None else 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "ended"
            raise PeerError(f"{Path(self.command[0]).name} {how}; the last line of its log: {last[:300]}")

    def memory_bytes(self) -> int:
        """Returns the proportional memory of all processes of its session."""
        return sum(map(_proportional_bytes, self.pids()))

    def pids(self) -> list[int]:
        """Returns all processes of its session; none before the start."""
        session = None if self.popen is None else self.popen.pid
        return [pid for pid in _pids() if session is not None and _session_of(pid) == session]


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))


def _clean_environment() -> dict[str, str]:
    """Returns the variables without settings of the user that would change the figures, and without a model hub."""
    own = ("DISKPREFIX_", "PYTHON", "OMP_", "VLLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return kept | {"HF_HUB_OFFLINE": "1"}


def started(process: Process, client: httpx.Client) -> float:
    """Starts a server. Returns the seconds until it said at `/health` that it is ready. Raises `PeerError`."""
    began = time.perf_counter()
    process.start()
    while not _is_ready(client):
        process.check()
        if time.perf_counter() - began > START_DEADLINE_S:
            raise PeerError(f"not ready after {START_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)
    return time.perf_counter() - began


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


class HttpPeer:
    """A server of OpenAI's `/v1/completions` that says at `/health` when it is ready.

    In `command` and `fields`, `{port}` is the port. `fields` are sent with each request.
    """

    def __init__(
        self,
        process: Process,
        port: int,
        fields: dict[str, Any],
        *,
        restores: bool,
        settle: Callable[[httpx.Client], None] | None = None,
    ) -> None:
        self.restores = restores
        self.process = process
        self._fields = fields
        self._settle = settle
        timeout = httpx.Timeout(ANSWER_DEADLINE_S, connect=5.0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout)

    def start(self) -> float:
        return started(self.process, self._client)

    def kill(self) -> None:
        if self._settle is not None and self.process.popen is not None:
            self._settle(self._client)
        self.process.kill()

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Reply]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._ask(prompt, max_tokens), prompts))

    def _ask(self, prompt: str, max_tokens: int) -> Reply:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **self._fields}
        at_s: list[float] = []
        text = ""
        usage: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise PeerError(f"it answered {response.status_code}: {response.text[:300]}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk.get("usage") or usage
                    if piece := "".join(choice.get("text") or "" for choice in chunk.get("choices", [])):
                        at_s.append(time.perf_counter() - began)
                        text += piece
        except httpx.HTTPError as error:
            self.process.check()
            raise PeerError(f"the connection broke: {error}") from error
        if not at_s:
            raise PeerError("it answered without a reply")
        return Reply(usage.get("prompt_tokens"), usage.get("completion_tokens") or len(at_s), tuple(at_s), text)


class WorkerPeer:
    """A program of `tools.peers.workers`."""

    def __init__(self, process: Process, *, restores: bool) -> None:
        self.restores = restores
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

    def ask(self, prompts: Sequence[str], max_tokens: int) -> list[Reply]:
        popen = self.process.popen
        assert popen is not None
        assert popen.stdin is not None
        popen.stdin.write(json.dumps({"prompts": list(prompts), "max_tokens": max_tokens}) + "\n")
        popen.stdin.flush()
        return [Reply(one["prompt_tokens"], len(one["at_s"]), tuple(one["at_s"])) for one in self._line()]
