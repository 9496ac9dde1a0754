"""The way of one chat request through the package, followed call by call.

A daemon runs in this process and answers a conversation, whose state is saved. The request that is followed is the next
turn of it: what was saved is restored, the rest is computed, a reply of a few tokens is streamed, and both are saved.

* A **step** is a thread going from one module of the package to another: it calls a function there, the called function
  returns, or a coroutine or generator goes on.
* A **stay** begins at the place where a step arrives: a function and its line. Arrivals at one place are one stay,
  however often they happen. So neither the number of tokens nor a loop changes the count: it is what a reader of the
  code goes through.
* A **return** is a transition back into a module that the way has left before: each stay of a module but its first.
  It does not count after a mere look-up, which is a call of a function that calls nothing else in the package.
  Look-ups have a column of their own.

Properties and methods such as `__init__` and `__len__` count as part of their callers: a value is read or made.

A leg is answering, rendering or the engine. Its orchestrator is the module of its packages with the most returns, so
that giving code another name changes nothing.
"""

from __future__ import annotations

import ast
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click
import httpx
import uvicorn
from rich.console import Console

import diskprefix
from diskprefix.app import create_application
from diskprefix.server.process.process import uvicorn_config
from diskprefix.settings import Settings
from diskprefix.store.writer import Writer
from tests.server.chat_model import write_chat_model
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report, say

ROOT = Path(diskprefix.__file__).parent
LEGS = {"answering": ("server", "api"), "rendering": ("chat",), "engine": ("engine",)}
"""Names of packages. A package that does not exist has no modules."""
SHOWN = 3
"""Modules of each leg in the table."""
MAX_TOKENS = 8
SYSTEM = "You are a careful assistant that answers questions about rivers, mountains and cities. " * 20
_DEADLINE_S = 120.0
_POLL_S = 0.02


@dataclass
class Module:
    """The stays of the way in one module. A stay is known by its place: a function and a line in it."""

    lines: int
    threads: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    stays: dict[tuple[str, int], bool] = field(default_factory=dict)
    """By place: whether every arrival there came from a look-up."""

    @property
    def num_lookups(self) -> int:
        return sum(self.stays.values())

    @property
    def num_returns(self) -> int:
        return max(0, len(self.stays) - self.num_lookups - 1)


class Follower:
    """A profile hook for all threads that start while it is installed. It records only while `is_recording`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.modules: dict[str, Module] = {}
        """In the order of the first stay, by path below the package."""
        self.steps: list[tuple[str, str]] = []
        """Thread and module of each new stay, in their order."""
        self.is_recording = False
        self._root = f"{root}/"
        sources = {str(file): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
        self._num_lines = {file: source.count("\n") for file, source in sources.items()}
        self._properties = {(file, line) for file, source in sources.items() for line in properties_of(source)}
        self._last: dict[int, str] = {}
        """The module of each thread, by the thread's number."""
        self._leaf: dict[int, FrameType | None] = {}
        """By thread: the latest call, if nothing of the package was called or has returned since."""
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._on_event)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.is_recording or event not in ("call", "return") or not self._counts(frame.f_code):
            return
        ident = threading.get_ident()
        if event == "call":
            self._leaf[ident] = frame
            self._arrive(frame, is_lookup=False)
            return
        is_lookup = self._leaf.get(ident) is frame
        self._leaf[ident] = None
        caller = frame.f_back
        while caller is not None and not self._counts(caller.f_code):
            caller = caller.f_back
        if caller is not None:
            self._arrive(caller, is_lookup=is_lookup)

    def _counts(self, code: CodeType) -> bool:
        """Returns whether it is a function of the package, and no part of its caller or body of a module."""
        name, file = code.co_name, code.co_filename
        is_special = (name.startswith("__") and name.endswith("__")) or name == "<module>"
        return file in self._num_lines and not is_special and (file, code.co_firstlineno) not in self._properties

    def _arrive(self, frame: FrameType, *, is_lookup: bool) -> None:
        code, thread = frame.f_code, threading.current_thread()
        name = code.co_filename.removeprefix(self._root)
        with self._lock:
            module = self.modules.get(name)
            if module is None:
                module = self.modules[name] = Module(lines=self._num_lines[code.co_filename])
            module.functions.add(code.co_qualname)
            module.threads.add(thread_name(thread.name))
            ident = threading.get_ident()
            if self._last.get(ident) == name:
                return
            self._last[ident] = name
            place = code.co_qualname, frame.f_lineno
            if place not in module.stays:
                self.steps.append((thread_name(thread.name), name))
            module.stays[place] = is_lookup and module.stays.get(place, True)


def thread_name(name: str) -> str:
    """Returns the name of a pool for its threads: `kv-reader` for `kv-reader_3`."""
    return name.rstrip("0123456789").rstrip("_-") if name[-1:].isdigit() else name


def properties_of(source: str) -> set[int]:
    """Returns the first lines of the properties of a source, as code objects give them: those of their decorators."""
    names = ("property", "cached_property")
    return {
        min(decorator.lineno for decorator in node.decorator_list)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(one, ast.Name) and one.id in names for one in node.decorator_list)
    }


@contextmanager
def running(settings: Settings) -> Iterator[Client]:
    """Runs the daemon in a thread, on a free port, and gives a client. Raises what kept the model from being loaded."""
    application = create_application(settings)
    daemon = application.state.daemon
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn_config(application, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            wait_until(lambda: server.started and daemon.status != "loading")
            if daemon.failure is not None:
                raise daemon.failure
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=_DEADLINE_S, trust_env=False) as http:
                yield Client(http, daemon.serving.engine.cache.writer)
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException(f"the daemon did not get ready within {_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Client:
    http: httpx.Client
    writer: Writer

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Sends a conversation and returns the text of the streamed reply. By then all state is on disk."""
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        response = self.http.post("/v1/chat/completions", json=body).raise_for_status()
        self.wait_until_written()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def wait_until_written(self) -> None:
        wait_until(lambda: self.writer.pending_bytes + self.writer.notes.waiting_bytes == 0)


def follow(model: Path | None = None) -> Follower:
    """Returns what the next turn of a conversation went through. `model` is a folder; None is a tiny random model."""
    follower = Follower()
    with tempfile.TemporaryDirectory(prefix="diskprefix-way-") as name, follower.installed():
        folder = Path(name)
        model = model or write_chat_model(folder / "tiny-chat")
        with running(Settings(model=str(model), kv_cache_dir=folder / "kv")) as client:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name three rivers."}]
            reply = client.chat(messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And three cities?"}]
            with follower.recording():
                client.chat(messages)
    return follower


def package_of(module: str) -> str:
    """Returns the package of a path below `diskprefix`. A file of the uppermost folder is its own package."""
    return module.partition("/")[0]


def report_of(follower: Follower) -> dict[str, Any]:
    modules = follower.modules
    path: list[str] = []
    for _, module in follower.steps:
        if path[-1:] != [package_of(module)]:
            path.append(package_of(module))
    legs = {}
    for leg, packages in LEGS.items():
        of_leg = {name: module.num_returns for name, module in modules.items() if package_of(name) in packages}
        legs[leg] = dict(sorted(of_leg.items(), key=lambda item: -item[1]))
    return {
        "num_files": len(modules),
        "num_lines": sum(module.lines for module in modules.values()),
        "num_stays": sum(len(module.stays) for module in modules.values()),
        "returns": {leg: max(counts.values(), default=0) for leg, counts in legs.items()},
        "legs": legs,
        "packages": path,
        "modules": {
            name: {
                "lines": module.lines,
                "functions": len(module.functions),
                "stays": len(module.stays),
                "lookups": module.num_lookups,
                "returns": module.num_returns,
                "threads": sorted(module.threads),
                "places": [f"{function}:{line}" for function, line in sorted(module.stays)],
            }
            for name, module in modules.items()
        },
    }


def show(report: dict[str, Any], console: Console) -> None:
    columns = ("lines", "functions", "stays", "lookups", "returns")
    table = new_table("The way of a chat request", left=("module", "threads"), right=columns)
    for name, module in report["modules"].items():
        table.add_row(name, ", ".join(module["threads"]), *(str(module[column]) for column in columns))
    console.print(table)
    say(console, " → ".join(report["packages"]))
    say(console, f"{report['num_files']} files, {report['num_lines']} lines, {report['num_stays']} stays")
    legs = new_table("Returns by leg", left=("leg", "modules"), right=("returns",))
    for leg, counts in report["legs"].items():
        most = [f"{name} {count}" for name, count in list(counts.items())[:SHOWN]]
        legs.add_row(leg, ", ".join(most), str(report["returns"][leg]))
    console.print(legs)


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A model's folder.")
@JSON
def main(model: Path | None, as_json: bool) -> None:
    """Follow one chat request through the package.

    Prints each module that the request comes through, in that order, how often it stays there and comes back, and the
    returns of each leg: answering, rendering, engine. Takes ten seconds with the tiny model that is the default.
    """
    if sys.gettrace() is not None:
        raise click.ClickException("a debugger or a coverage run is active, which takes the same hook")
    print_report(report_of(follow(model)), as_json, show)
