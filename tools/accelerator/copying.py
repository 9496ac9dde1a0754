"""The part `copies` of `tools/gpu`: restores and captures beside plain copies over the bus and reads of the disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from diskprefix.cache.tiers.nodes import Node
from diskprefix.engine.device import synchronize
from diskprefix.kv.layout import Layout
from diskprefix.store.codec.codec import Codec
from diskprefix.store.folder import DATA
from diskprefix.store.schema import Kind
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds
from tests.synthetic_model import Restorer, SyntheticModel, dense_layout, open_restorer
from tools.accelerator.parts import Row, Task
from tools.measuring import page_cache

_BLOCKS, _DIFFERENT, _RUNS = 32, 4, 5


def copies(task: Task) -> Iterator[Row]:
    """Yields a row for the bus, for restores from the page cache and from the disk, and for captures."""
    shape, device = task.model, torch.device(task.device)
    heads, head_dim = shape.kv_heads, shape.hidden // shape.heads
    layout = dense_layout(
        layers=shape.layers, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, vocab_size=shape.vocab
    )
    prompt = np.array(shape.prompt(_BLOCKS * shape.block, 0), np.int32)
    raw_bytes = len(prompt) * layout.bytes_per_token
    to_s, from_s = _plain_s(device, raw_bytes)
    figures = {"to_gb_s": raw_bytes / to_s / 1e9, "from_gb_s": raw_bytes / from_s / 1e9}
    result = f"{figures['to_gb_s']:.1f} GB/s to the device, {figures['from_gb_s']:.1f} GB/s from it"
    yield Row(f"plain copies of {raw_bytes / 2**20:.1f} MiB", "measured", result, figures)
    blocks = _blocks(layout, shape.block)
    store, file = _stored(task, layout, prompt, blocks), Path(task.folder) / "kv" / DATA
    try:
        model = SyntheticModel(store, layout, identity="gpu", block_size=shape.block)
        with open_restorer(model, capacity=len(prompt), device=device) as restorer:
            warm_s = min(_restore_s(restorer, prompt, device) for _ in range(_RUNS))
            is_right = _is_right(restorer, blocks, shape.block)
            yield _row("restore, page cache", raw_bytes, warm_s, to_s, is_right=is_right)
            read_s = statistics.median(_capture_s(restorer, shape.block) for _ in range(_RUNS))
            yield _row("capture", raw_bytes, read_s, from_s, is_right=is_right)
    finally:
        store.close()
    yield _from_disk(task, layout, prompt, file, to_s)


def _from_disk(task: Task, layout: Layout, prompt: TokenIds, file: Path, to_s: float) -> Row:
    raw_bytes, stored_bytes = len(prompt) * layout.bytes_per_token, file.stat().st_size
    page_cache.drop(file)
    try:
        disk_s = page_cache.direct_read_s(file, stored_bytes)
    except OSError as error:
        return Row("restore, disk", "skipped", f"no direct reads there: {error}")
    store = Store(file.parent, budget_bytes=2 * raw_bytes + (64 << 20))
    model = SyntheticModel(store, layout, identity="gpu", block_size=task.model.block)
    try:
        device = torch.device(task.device)
        with open_restorer(model, capacity=len(prompt), device=device) as restorer:
            page_cache.drop(file)
            seconds = _restore_s(restorer, prompt, device)
            is_right = _is_right(restorer, _blocks(layout, task.model.block), task.model.block)
    finally:
        store.close()
    slower = "disk" if disk_s > to_s else "bus"
    return _row(f"restore, disk (the slower: {slower})", raw_bytes, seconds, max(disk_s, to_s), is_right=is_right)


def _row(case: str, num_bytes: int, seconds: float, least_s: float, *, is_right: bool) -> Row:
    rate, share = num_bytes / seconds / 1e9, least_s / seconds
    result = f"{rate:.1f} GB/s, {share:.0%} of what is possible{'' if is_right else '; what came back differs'}"
    return Row(case, "pass" if is_right else "fail", result, {"gb_s": rate, "share": share})


def _plain_s(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Returns the seconds of copies of pinned memory to the device and back."""
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
        return _seconds(lambda: target.copy_(source, non_blocking=True), device)

    return min(copy_s(there, here) for _ in range(_RUNS)), min(copy_s(here, there) for _ in range(_RUNS))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def _restore_s(restorer: Restorer, prompt: TokenIds, device: torch.device) -> float:
    def restore() -> None:
        restorer.seconds(prompt)
        restorer.arena.copies.arrive()

    return _seconds(restore, device)


def _capture_s(restorer: Restorer, block: int) -> float:
    started = time.perf_counter()
    for index in range(_BLOCKS):
        restorer.arena.read_tokens(index * block, block)
    return time.perf_counter() - started


def _is_right(restorer: Restorer, blocks: list[memoryview], block: int) -> bool:
    read = restorer.arena.read_tokens
    return all(read(index * block, block) == blocks[index % len(blocks)] for index in range(_BLOCKS))


def _blocks(layout: Layout, block: int) -> list[memoryview]:
    """Returns payloads of normal numbers, which compress as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    numbers = layout.bytes_per_token * block // 2
    made = (torch.randn(numbers, generator=generator).to(torch.bfloat16) for _ in range(_DIFFERENT))
    return [one.view(torch.uint8).numpy().data for one in made]


def _stored(task: Task, layout: Layout, prompt: TokenIds, blocks: list[memoryview]) -> Store:
    raw_bytes = len(prompt) * layout.bytes_per_token
    store = Store(Path(task.folder) / "kv", budget_bytes=2 * raw_bytes + (64 << 20))
    store.codec = Codec.PLANES
    model = SyntheticModel(store, layout, identity="gpu", block_size=task.model.block)
    logits = memoryview(bytes(layout.logits_bytes))

    def payload(node: Node) -> memoryview:
        return logits if node.kind == Kind.TAIL else blocks[node.position // task.model.block % len(blocks)]

    store.publish(model.publication(prompt, payload))
    return store
