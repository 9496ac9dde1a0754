"""Two vLLMs and two daemons that share one bucket: what one computed the other of its kind restores, and neither a kill
nor a fault of the bucket changes a reply."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tests.object_server import FAULTS, Fault, ObjectServer, object_server
from tools.benchmarks.engines import OURS, HttpEngine, Model, daemon_engine, vllm_engine
from tools.measuring.answers import LiveServerError
from tools.measuring.options import FOLDER
from tools.measuring.prompts import prompt_text
from tools.measuring.workspace import measuring, model_folder

_WORDS, _REPLY_TOKENS = 600, 8
_API_KEY = "the-key-of-both-daemons"
_SETTLE_S, _POLL_S = 60.0, 0.5


@dataclass
class Kind:
    """Two machines of one kind. `source` says where the tokens of a reply came from. `counts` has the outcomes."""

    name: str
    computing: HttpEngine
    asking: HttpEngine
    source: Callable[[Mapping[str, Any]], str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def reply(self, engine: HttpEngine, prompt: str) -> tuple[str, str]:
        """Returns the text and the source."""
        body = engine.complete(prompt, _REPLY_TOKENS, **self.fields)
        return str(body["choices"][0]["text"]), self.source(body)


@click.command()
@FOLDER
def machines(folder: Path | None) -> None:
    """Two vLLMs and two daemons on one bucket of a real object server: one computes, the other asks, while the bucket
    fails in each way, and after a kill. Prints the outcomes; ends with 1 for a wrong reply or an error."""
    progress = Console(stderr=True)
    with ExitStack() as opened:
        workspace = opened.enter_context(measuring(folder, progress))
        server = opened.enter_context(object_server(workspace / "objects"))
        os.environ.update(server.environment)
        kinds = _started(workspace, server, progress, opened)
        for kind in kinds:
            _try_all(kind, server, progress)
    print(json.dumps({kind.name: dict(kind.counts) for kind in kinds}, indent=2))
    if any(kind.counts["wrong"] or not kind.counts["remote"] for kind in kinds):
        raise click.exceptions.Exit(1)


def _started(workspace: Path, server: ObjectServer, progress: Console, opened: ExitStack) -> list[Kind]:
    """Returns the machines. Closing `opened` kills them."""
    key = workspace / "namespace.key"
    key.touch(mode=0o600)
    key.write_text("the key of two kinds of machines", encoding="ascii")
    folder = model_folder("smollm2", progress)
    model = Model("smollm2", next(folder.glob("*.gguf"), folder), folder, 2048)
    numbers = count(1)
    shared = {"remote_tier": server.url, "namespace_key_file": str(key), "remote_write": "all"}
    flags = ["--remote-tier", server.url, "--namespace-key-file", str(key), "--remote-write", "all"]
    # Without API keys, the tenant is a user of one machine.
    keys = workspace / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"everyone {_API_KEY}", encoding="ascii")
    flags += ["--api-keys", str(keys)]

    def machine(make: Callable[[Path], HttpEngine]) -> HttpEngine:
        own = workspace / f"machine{next(numbers)}"
        own.mkdir()
        engine = make(own)
        opened.callback(engine.process.kill)
        progress.print(f"{own.name}: started in {engine.start():.1f} s", highlight=False)
        return engine

    def vllm(own: Path) -> HttpEngine:
        # In float32: vLLM rounds differently when it resumes at another token, which bfloat16 may show in a reply.
        # Compiling would take minutes, and changes nothing here.
        more = ["--dtype", "float32", "--enforce-eager"]
        return vllm_engine(model, own, progress.print, more, connector=OURS, keys=shared)

    def daemon(own: Path) -> HttpEngine:
        return daemon_engine(model, own, progress.print, flags, api_key=_API_KEY)

    def vllm_source(body: Mapping[str, Any]) -> str:
        return str((body.get("kv_transfer_params") or {}).get("prefix_cache", {}).get("source", "none"))

    def daemon_source(body: Mapping[str, Any]) -> str:
        return str(body["prefix_cache"].get("source", "none"))

    return [
        Kind("vllm", machine(vllm), machine(vllm), vllm_source, {"kv_transfer_params": {"scope": "full"}}),
        Kind("diskprefix", machine(daemon), machine(daemon), daemon_source),
    ]


def _try_all(kind: Kind, server: ObjectServer, progress: Console) -> None:
    works: Fault = "none"
    for fault in FAULTS:
        # A fetch that works ends a row of failures, after which the bucket would be left alone.
        for now in (works, fault):
            _compare(kind, server, now, f"{kind.name} {fault} {now}", progress)
    prompt = prompt_text(_WORDS, f"{kind.name} kill")
    expected = kind.reply(kind.computing, prompt)[0]
    # Its upload has begun or not.
    kind.computing.process.kill()
    _count(kind, "one machine killed", expected, kind.reply(kind.asking, prompt), progress)


def _compare(kind: Kind, server: ObjectServer, fault: Fault, name: str, progress: Console) -> None:
    """One machine computes a prompt, and the other one asks for it while the bucket has a fault."""
    prompt = prompt_text(_WORDS, name)
    if fault == "full":
        server.fault = fault
    expected = kind.reply(kind.computing, prompt)[0]
    _settle(server)
    server.fault = fault
    try:
        _count(kind, f"the bucket: {fault}", expected, kind.reply(kind.asking, prompt), progress)
    finally:
        server.reset()


def _count(kind: Kind, what: str, expected: str, reply: tuple[str, str], progress: Console) -> None:
    text, source = reply
    is_right = text == expected
    kind.counts[source if is_right else "wrong"] += 1
    progress.print(f"{kind.name}: {what}: {source}, {'the same' if is_right else 'ANOTHER'} reply", highlight=False)


def _settle(server: ObjectServer) -> None:
    """Waits until the bucket has got nothing new for a while. Raises `LiveServerError`."""
    deadline, before = time.monotonic() + _SETTLE_S, -1
    while (now := server.num_requests) != before:
        if time.monotonic() > deadline:
            raise LiveServerError("the uploads do not end")
        before = now
        time.sleep(2 * _POLL_S)
