"""The parts of `tools/gpu`, each run in a process of its own: `python -m tools.accelerator.parts TASK`.

A part writes a line of JSON, a `Row`, as soon as something is measured. Its libraries are imported when it runs: it can
do without those of another one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tools.accelerator.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from tools.measuring.live_server import Answer, LiveServer

INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
"""The environment in which kernels in Triton are interpreted. numpy multiplies there. Of OpenBLAS, only the kernels for
older CPUs add up the rows of a tile in one order."""
State: TypeAlias = Literal["pass", "fail", "measured", "skipped", "cut off", "crash"]
REPLY = 33
"""Tokens of a reply: the first, and 32 for the speed of decoding."""
TINY_MODELS = (
    *("llama", "llama int8", "llama int4", "llama fp8", "gemma3", "gpt_oss"),
    *("qwen3_moe", "qwen3_moe int4", "qwen3_moe fp8"),
    *("qwen3_next", "mamba2", "granitemoehybrid", "rwkv"),
)
"""The models of the part `models`, with `--weights` if they have one."""
GRAPH_MODELS = ("llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "lfm2", "mamba2")
_ONCE_FROM, _ONLY_SAVED_FROM = 16_384, 65_536
"""A prompt of this length is asked once, with saving, instead of three times with and without. This saves time."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `figures` have their units in their names."""

    case: str
    state: State
    result: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The input of a part. `free_bytes` is the free memory of the device, `count` the number of devices."""

    part: str
    shape: str
    device: str
    folder: str
    free_bytes: int = 0
    count: int = 1

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]


class _Skipped(Exception):
    """Something is not measured here; the message says why."""


def probe(_task: Task) -> Iterator[Row]:
    """Returns the accelerators that torch sees."""
    import torch

    gpus = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    kind = next((name for name, one in gpus.items() if one.is_available()), "cpu")
    found: dict[str, Any] = {"device": kind, "torch": torch.__version__, "count": 1, "free_bytes": 0}
    if kind in ("cuda", "xpu"):
        of_device = torch.get_device_module(kind)
        found |= {"count": of_device.device_count(), "name": of_device.get_device_name()}
        found |= {"free_bytes": of_device.mem_get_info()[0], "cuda": torch.version.cuda, "hip": torch.version.hip}
    elif kind == "mps":
        found["free_bytes"] = torch.mps.recommended_max_memory()
    elif shutil.which("nvidia-smi") and not torch.version.cuda:
        found["hint"] = "there may be an NVIDIA GPU, but this torch is a build for the CPU; see --python"
    yield Row(kind, "measured", "", found)


def exactness(task: Task) -> Iterator[Row]:
    """A job of the exactness suite: what another process restores is what a cold run computes, bit for bit."""
    from tests.exactness.jobs import Job, Lengths, write_jobs
    from tests.exactness.rows import answers_of, judged

    folder, shape = Path(task.folder), task.model
    job = Job(
        name=task.shape,
        dtype="bfloat16",
        folder=str(folder / "job"),
        reply=16,
        model=str(shape.write(folder / "model")),
        device=task.device,
        lengths=Lengths.scaled(shape.exact_tokens, block=shape.block),
        # On a CPU it checks what accelerators do today.
        at_grid=task.device == "cpu",
    )
    write_jobs([job], plan := folder / "jobs.json")
    for phase in ("save", "restore"):
        # It ends by SIGKILL, and what it left is judged.
        command = [sys.executable, "-m", "tools.accelerator.random_weights", phase, str(plan)]
        subprocess.run(command, check=False)
    saved, restored = answers_of(job, "save"), answers_of(job, "restore")
    print(saved.error, restored.error, file=sys.stderr)
    row = judged(job, saved, restored)
    counts = ", ".join(f"{case.restored} of {case.prompt_tokens}" for case in row.cases)
    result = f"the same bits, with {job.reply} tokens of reply; exact at: {row.exact_at}; restored {counts}"
    case = f"{len(row.cases)} prompts around {shape.exact_tokens} tokens"
    yield Row(case, "pass" if row.bitwise else "fail", row.reason or result, row.as_dict())


def first_token(task: Task) -> Iterator[Row]:
    """A daemon over HTTP: cold with and without saving; then killed, started again, and asked the same."""
    from tools.measuring.live_server import LiveServer, LiveServerError

    folder, shape = Path(task.folder), task.model
    flags = ["--model", str(shape.write(folder / "model")), "--device", task.device, "--dtype", "bfloat16"]
    # Both times are to be seen, so what is faster to compute is restored too.
    flags += ["--disk-prefix-cache", "full", "--kv-cache-gate", "off", "--kv-cache-budget", "64GiB"]
    with LiveServer(
        kv_cache_dir=folder / "kv",
        log_path=folder / "server.log",
        flags=tuple(flags),
        module="tools.accelerator.random_weights",
    ) as server:
        yield Row("start", "measured", f"ready after {server.start():.1f} s")
        bytes_per_token = int(server.cache_stats()["bytes_per_token"])
        # What the first request of a process takes longer is not measured.
        server.complete(shape.prompt(shape.prompts[0][0], -1), max_tokens=4, scope="off")
        for sizes in shape.prompts:
            cold: dict[int, list[Answer]] = {}
            for size in sizes:
                try:
                    _require_disk(folder, size * bytes_per_token * (1 if size >= _ONCE_FROM else 3))
                    row, cold[size] = _cold(server, shape, size)
                    yield row
                except (_Skipped, LiveServerError) as error:
                    # So the daemon refuses a prompt for which the device is too small.
                    if isinstance(error, LiveServerError) and "memory" not in str(error):
                        raise
                    yield Row(_tokens(size), "skipped", str(error))
            if cold:
                server.restart()
            for size, before in cold.items():
                yield _restored(server, shape, size, before, bytes_per_token)


def _require_disk(folder: Path, num_bytes: int) -> None:
    if (free := shutil.disk_usage(folder).free) < (needed := int(1.1 * num_bytes) + 2**30):
        raise _Skipped(f"needs {_gib(needed)} of disk, {_gib(free)} are free; see --folder")


def _cold(server: LiveServer, shape: Shape, size: int) -> tuple[Row, list[Answer]]:
    """Asks for each prompt with and without saving, in turns. Returns the saved answers too."""
    answers: dict[str, list[Answer]] = {"full": [], "off": []}
    saving_s = 0.0
    for run in range(1 if size >= _ONCE_FROM else 3):
        # Scope off neither restores nor saves, so it may go second with the prompt that was just saved.
        order = ("full",) if size >= _ONLY_SAVED_FROM else ("full", "off") if run % 2 else ("off", "full")
        for scope in order:
            answers[scope].append(server.complete(shape.prompt(size, run), max_tokens=REPLY, scope=scope))
            saving_s += server.wait_until_saved() if scope == "full" else 0.0
    figures: dict[str, float] = {"saved_after_s": saving_s / len(answers["full"])}
    result = []
    for scope, found in answers.items():
        if found:
            ttft_s = statistics.median(one.ttft_s for one in found)
            rate = statistics.median((one.completion_tokens - 1) / (one.total_s - one.ttft_s) for one in found)
            figures |= {f"ttft_s_{scope}": ttft_s, f"decode_tok_s_{scope}": rate}
            result.append(f"{'without saving' if scope == 'off' else 'first token'} {_ms(ttft_s)}, {rate:.1f} tok/s")
    if answers["off"]:
        whole_s, without_s = (statistics.median(one.total_s for one in answers[scope]) for scope in ("full", "off"))
        figures["saving_cost"] = whole_s / without_s - 1
        result.append(f"saving costs {figures['saving_cost']:.1%}")
    result.append(f"saved {_ms(figures['saved_after_s'])} after the reply")
    if is_other := bool(answers["off"]) and _texts(answers["full"]) != _texts(answers["off"]):
        result.append("another reply with saving than without")
    row = Row(f"{_tokens(size)}, cold", "fail" if is_other else "measured", "; ".join(result), figures)
    return row, answers["full"]


def _restored(server: LiveServer, shape: Shape, size: int, before: Sequence[Answer], bytes_per_token: int) -> Row:
    found = [server.complete(shape.prompt(size, run), max_tokens=REPLY) for run in range(len(before))]
    ttft_s, cold_s = (statistics.median(one.ttft_s for one in answers) for answers in (found, before))
    restore_s = statistics.median(one.timings["restore_ms"] for one in found) / 1e3
    result = [
        f"first token {_ms(ttft_s)}, {cold_s / ttft_s:.1f}× sooner",
        f"restore {_ms(restore_s)}, {size * bytes_per_token / max(restore_s, 1e-6) / 1e9:.1f} GB/s",
    ]
    if is_other := _texts(found) != _texts(before):
        result.append("another reply than cold")
    if is_lost := not all(one.restored for one in found):
        result.append("nothing was restored")
    figures = {"ttft_s": ttft_s, "cold_ttft_s": cold_s, "restore_s": restore_s}
    figures["restored"] = min(one.restored for one in found)
    state: State = "fail" if is_other or is_lost else "pass"
    return Row(f"{_tokens(size)}, after kill -9", state, "; ".join(result), figures)


def _texts(answers: Sequence[Answer]) -> list[str]:
    return [one.text for one in answers]


def _tokens(size: int) -> str:
    return f"{size:,} tokens".replace(",", " ")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def connector(task: Task) -> Iterator[Row]:
    """The connector without vLLM: a stand-in with one rank and with two, and how fast pages are copied."""
    from tests.extras.vllm.engine import BLOCK, Engine, Request, prompt

    for ranks in (1, 2):
        # Each has pages of its own on the one device.
        settings: dict[str, Any] = {"num_ranks": ranks, "device": task.device}
        folder, token_ids = Path(task.folder) / f"kv{ranks}", prompt(1, 3 * BLOCK + 5)
        first = Engine(folder, **settings)
        first.run(Request("a", token_ids))
        first.close()
        again, request = Engine(folder, **settings), Request("b", token_ids)
        loaded, results = again.begin(request), again.results(request)
        is_right = loaded == 3 * BLOCK and results == [(True, False, set())] * ranks and again.is_right(request, loaded)
        again.close()
        result = "after a restart the pages are those that were saved" if is_right else f"wrong pages: {results}"
        yield Row(f"a stand-in for vLLM, {ranks} in parallel", "pass" if is_right else "fail", result)
    yield _page_speed(task)


def _page_speed(task: Task, *, num_blocks: int = 16, block_tokens: int = 128, page_tokens: int = 16) -> Row:
    """Copies blocks from pages of the shape and back, as the connector does."""
    import numpy as np
    import torch

    from diskprefix.extras.vllm.pages import EngineGroup, Pages

    shape, pages_each = task.model, block_tokens // page_tokens
    # The first page is nobody's.
    num_pages = num_blocks * pages_each + 1
    size = (shape.layers, num_pages, shape.kv_heads, page_tokens, 2 * shape.hidden // shape.heads)
    memory = torch.randn(size, device=task.device).to(torch.bfloat16)
    wanted = memory[:, 1:].clone()
    layers = {f"model.layers.{number}.attn": cache for number, cache in enumerate(memory)}
    pages = Pages(layers, [EngineGroup(tuple(layers), page_tokens)], num_pages)
    tables = [[list(range(first, first + pages_each))] for first in range(1, num_pages, pages_each)]
    payloads = np.ones((num_blocks, pages.block_bytes(block_tokens)), np.uint8)
    times = [time.perf_counter()]
    for table, payload in zip(tables, payloads, strict=True):
        pages.read(table, payload)
    times.append(time.perf_counter())
    memory.zero_()
    for table, payload in zip(tables, payloads.reshape(num_blocks, shape.layers, -1), strict=True):
        pages.fill(table, 0, slice(0, shape.layers), lambda out, saved=payload: np.copyto(out, saved))  # type: ignore[misc]
    times.append(time.perf_counter())
    is_right = bool(torch.equal(memory[:, 1:], wanted))
    read, fill = (payloads.nbytes / (end - start) / 1e9 for start, end in pairwise(times))
    result = f"{read:.2f} GB/s from pages, {fill:.2f} GB/s to pages{'' if is_right else '; what came back differs'}"
    figures = {"from_pages_gb_s": read, "to_pages_gb_s": fill}
    return Row(f"{num_blocks} blocks of {block_tokens} tokens", "pass" if is_right else "fail", result, figures)


def vllm(task: Task) -> Iterator[Row]:
    """The tier and the connector inside vLLM, with one rank and with two, each on an accelerator of its own."""
    if find_spec("vllm") is None:
        raise _Skipped(f"vLLM is not installed: {sys.executable} -m pip install 'vllm==0.32.*'")
    yield from _tier_in_vllm(task)
    yield from _in_vllm(task, 1)
    if task.count < 2:
        yield Row("tensor parallel, 2 ranks", "skipped", "one accelerator")
    else:
        yield from _in_vllm(task, 2)


def _in_vllm(task: Task, ranks: int, size: int = 4096) -> Iterator[Row]:
    from tools.connector.bench import Plan, measured

    folder = Path(task.folder) / f"ranks{ranks}"
    plan = Plan(
        task.model.write(folder / "model"),
        (size,),
        ("diskprefix",),
        turns=0,
        kills=1,
        codec="planes",
        python=Path(sys.executable),
        arguments=("--load-format", "dummy", "--tensor-parallel-size", str(ranks)),
    )
    found = measured(plan, folder, lambda line: print(line, file=sys.stderr))
    after = next(one for one in found.cases if one.case == "exact")
    cold_ms = found.ttft_ms("diskprefix", "cold", size)
    result = f"first token {cold_ms:.0f} ms, after a kill {after.ttft_ms:.0f} ms; {after.restored} restored, "
    result += f"{'the same' if after.equal else 'another'} reply as before; {found.load_errors} loads failed"
    figures = {"cold_ttft_ms": cold_ms, "ttft_ms": after.ttft_ms, "restored": after.restored, "equal": after.equal}
    # vLLM does not promise the same bits for a prompt that is computed in other steps.
    state: State = "fail" if found.load_errors or not after.restored else "measured"
    yield Row(f"{_tokens(size)}, {'one rank' if ranks == 1 else 'tensor parallel, 2 ranks'}", state, result, figures)


def _tier_in_vllm(task: Task, num_replies: int = 100, **config: Any) -> Iterator[Row]:
    """With VLLM_BATCH_INVARIANT, replies after SIGKILL are those before it, bit for bit."""
    from tools.connector.restarts import restarted
    from tools.connector.server import Server

    folder = Path(task.folder) / "tier"
    server = Server(
        task.model.write(folder / "model"),
        folder,
        lambda line: print(line, file=sys.stderr),
        "tier",
        python=Path(sys.executable),
        arguments=("--load-format", "dummy"),
        environment={"VLLM_BATCH_INVARIANT": "1"},
        **config,
    )
    found = restarted(server, num_replies)
    result = f"{found.same_bits} of {num_replies} replies are those before SIGKILL bit for bit, {found.same_text} have "
    result += f"the same tokens; {found.restored} prompt tokens restored"
    is_right = found.same_bits == num_replies and found.restored > 0
    yield Row("the tier, batch invariant", "pass" if is_right else "fail", result, asdict(found))


def kernels(task: Task) -> Iterator[Row]:
    """The kernels in Triton, beside plain references and with other rows beside a row."""
    from tests.accelerator import checks

    for name in checks.CHECKS:
        try:
            checks.run(name, task.device)
        except AssertionError as error:
            yield Row(name, "fail", " ".join(str(error).split()) or "it is not what a plain reference computes")
        else:
            yield Row(name, "pass", "what a plain reference computes; a row has the same bits in any company")


def models(task: Task, names: Sequence[str] = TINY_MODELS) -> Iterator[Row]:
    """Whether tiny models are exact at every token, and why not."""
    import torch

    from diskprefix.model.exact.invariance import make_exact
    from tests.exactness.architectures import quantised_tiny_model, tiny_model

    for name in names:
        kind, _, weights = name.partition(" ")
        model = quantised_tiny_model(kind, weights, task.device) if weights else tiny_model(kind, torch.bfloat16)
        model = model.to(task.device)
        layout, reason = make_exact(model)
        packs = "several sequences in a step" if layout.packs else "one sequence in a step"
        yield Row(name, "measured", reason or f"exact at: {layout.exact_at}, {packs}", {"exact_at": layout.exact_at})


def copies(task: Task) -> Iterator[Row]:
    """Restores and captures beside plain copies over the bus and reads of the disk."""
    from tools.accelerator import copying

    yield from copying.copies(task)


def graphs(task: Task) -> Iterator[Row]:
    """Recorded steps of tiny models beside steps that are not recorded."""
    import torch

    from diskprefix.model.exact.invariance import make_exact
    from diskprefix.model.exact.step_graphs import graphs_of
    from tests.accelerator.graph_checks import require_the_same
    from tests.exactness.architectures import tiny_model

    for name in GRAPH_MODELS:
        model = tiny_model(name, torch.bfloat16).to(task.device)
        layout, reason = make_exact(model)
        recorded = graphs_of(model, layout)
        if recorded is None:
            yield Row(name, "skipped", reason or "its sequences do not share a step")
            continue
        try:
            replayed = sum(require_the_same(model, layout, recorded, count, 1100) for count in (1, 3, 8, 32))
        except AssertionError as error:
            yield Row(name, "fail", str(error))
        else:
            text = f"the same bits in {replayed} recorded steps of 1 to 32 sequences, while memory grows"
            yield Row(name, "pass" if replayed else "fail", text, {"replayed": replayed})


def decoding(task: Task) -> Iterator[Row]:
    """Decoding of one sequence and of 32, in recorded steps and in others; then that of vLLM, where it is installed."""
    from tools.accelerator import decode_speed

    folder = task.model.write(Path(task.folder) / "model")
    ours = dict(decode_speed.ours(folder, task.device))
    for (count, is_recorded), rate in ours.items():
        case = f"{_sequences(count)}, {'recorded' if is_recorded else 'not recorded'}"
        yield Row(case, "measured", f"{rate:.0f} tok/s", {"tok_s": rate})
    if find_spec("vllm") is None:
        raise _Skipped("vLLM is not installed")
    for mode in decode_speed.VLLM_MODES:
        for count, rate in decode_speed.of_vllm(folder, mode):
            share = max(ours.get((count, True), 0.0), ours[count, False]) / rate
            text = f"{rate:.0f} tok/s; ours {share:.2f} of it"
            yield Row(f"{_sequences(count)}, vLLM {mode}", "measured", text, {"tok_s": rate, "ours": share})


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


PARTS: dict[str, Callable[[Task], Iterator[Row]]] = {
    "probe": probe,
    "copies": copies,
    "kernels": kernels,
    "models": models,
    "graphs": graphs,
    "decoding": decoding,
    "exactness": exactness,
    "connector": connector,
    "vLLM": vllm,
    "first token": first_token,
}


def rows_of(task: Task) -> Iterator[Row]:
    """Yields the rows of a part, or one that says why there are none."""
    try:
        # The weights in two bytes each, and something to compute with.
        needed = 2.6 * task.model.num_weights
        if task.device != "cpu" and task.free_bytes < needed:
            raise _Skipped(f"needs {_gib(needed)} of the device, {_gib(task.free_bytes)} are free")
        yield from PARTS[task.part](task)
    except (_Skipped, ModuleNotFoundError) as reason:
        yield Row("all", "skipped", str(reason))


if __name__ == "__main__":
    # So that no daemon outlives a part that is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Whatever a library prints goes to the log.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        for each in rows_of(Task(**json.loads(sys.argv[1]))):
            print(json.dumps(asdict(each), default=str), file=lines, flush=True)
