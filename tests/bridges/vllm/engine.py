"""A stand-in for vLLM: requests with tables of blocks, and the pages of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diskprefix.bridges.shared.connector_settings import connector_settings
from diskprefix.bridges.vllm.engine_pages import EngineGroup, Pages
from diskprefix.bridges.vllm.scheduler_side import SchedulerSide
from diskprefix.bridges.vllm.worker import WorkerSide
from diskprefix.prefixstore.shared_store import open_shared
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION, LayoutText

PAGE, BLOCK, HEADS, DIM, NUM_BLOCKS = 8, 16, 2, 6, 24
FULL = EngineGroup(("model.layers.0.attn", "model.layers.2.attn"), PAGE)
SLIDING = EngineGroup(("model.layers.1.attn",), PAGE, window=12)


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    reply: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> Sequence[int]:
        return [*(self.prompt_token_ids or []), *self.reply]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def prompt(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 40_000, num_tokens).tolist()
    return ids


def caches(groups: Sequence[EngineGroup], *, by_token: bool = False, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The pages of each layer as vLLM hands them over, all layers in one memory."""
    layers = [layer for group in groups for layer in group.layers]
    form: Any = {"dtype": torch.bfloat16, "device": device}
    if by_token:
        memory = torch.zeros(len(layers), NUM_BLOCKS, PAGE, HEADS, DIM, **form).transpose(2, 3)
    else:
        memory = torch.zeros(len(layers), NUM_BLOCKS, HEADS, PAGE, DIM, **form)
    return dict(zip(layers, memory, strict=True))


def state(rank: int, layer: str, token_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
    """What a rank computes for some tokens: a function of all tokens up to each, shape [heads, tokens, dim]."""
    layer_seed = sum(map(ord, layer)) + 1000 * rank
    sums = torch.tensor(token_ids[:end], dtype=torch.float64).cumsum(0)[start:end]
    values = torch.arange(HEADS * DIM, dtype=torch.float64) + layer_seed
    return torch.sin(sums[:, None] * values[None]).view(-1, HEADS, DIM).transpose(0, 1).to(torch.bfloat16)


class Engine:
    """The scheduler's side and the workers of `num_ranks` simulated ranks, with pages of their own."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int = 1,
        groups: Sequence[EngineGroup] = (FULL,),
        by_token: bool = False,
        device: str = "cpu",
        numbers: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        self.groups = tuple(groups)
        config = {
            "kv_cache_dir": str(folder),
            "kv_cache_budget": "64MiB",
            "kv_cache_min_tokens": 0,
            "disk_prefix_cache": "full",
        } | config
        self.settings = connector_settings({"block_size": BLOCK} | config, PAGE)
        self.shared = open_shared(self.settings)
        self.caches = [caches(groups, by_token=by_token, device=device) for _ in range(num_ranks)]
        pages = [Pages(cache, groups, NUM_BLOCKS) for cache in self.caches]
        self.identities = [
            StateIdentity(
                model="tiny",
                block_size=self.settings.block_size,
                layout=LayoutText(
                    LAYOUT_VERSION, tuple(g.layout for g in page.groups), (0, "float32"), shard=(rank, num_ranks)
                ).text(),
                layout_version=LAYOUT_VERSION,
                fingerprint={"engine": "tiny", "dtype": "bfloat16"} | (numbers or {}),
            )
            for rank, page in enumerate(pages)
        ]
        self.workers = [
            WorkerSide(self.shared, page, identity, rank)
            for rank, (page, identity) in enumerate(zip(pages, self.identities, strict=True))
        ]
        self.scheduler = SchedulerSide(self.shared, self.identities, [group.block_size for group in groups])
        self.tables: dict[str, list[list[int]]] = {}
        self._num_given = 0

    def allocate(self, request: Request, num_tokens: int) -> list[list[int]]:
        """Blocks for so many tokens. Block 0 is nobody's."""
        tables = self.tables.setdefault(request.request_id, [[] for _ in self.groups])
        for table in tables:
            while len(table) * PAGE < num_tokens:
                # Requests that have ended lose theirs to those that come.
                table.append(1 + self._num_given % (NUM_BLOCKS - 1))
                self._num_given += 1
        return tables

    def begin(self, request: Request, *, not_cached: str | None = None) -> int:
        self.scheduler.add(request, not_cached=not_cached)
        num_external = self.match(request)
        tables = self.allocate(request, request.num_computed_tokens + num_external)
        if num_external:
            self.scheduler.plan_load(request.request_id, tables, num_external)
            plan = self.scheduler.plan([])
            for worker in self.workers:
                worker.load(plan)
            request.num_computed_tokens += num_external
        return num_external

    def match(self, request: Request) -> int:
        """Asks in each step, until nothing is fetched from a bucket any more."""
        while (found := self.scheduler.match(request.request_id, request.num_computed_tokens)) is None:
            self.scheduler.wait_for_fetch(0.02)
        return found

    def results(self, request: Request) -> list[tuple[bool, bool, set[int]]]:
        """For each rank once its loads have ended: whether the request is loaded, whether that failed, which blocks
        are bad."""
        found = []
        for worker in self.workers:
            worker._loader.submit(lambda: None).result()
            loaded, failed, bad = worker.take_results()
            found.append((request.request_id in loaded, request.request_id in failed, bad))
        return found

    def step(self, request: Request, num_tokens: int) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        tables = self.allocate(request, end)
        plan = self.scheduler.plan([(request.request_id, end, tables)])
        for rank, worker in enumerate(self.workers):
            self._compute(rank, request, tables, start, end)
            worker.save(plan)
        request.num_computed_tokens = end

    def run(self, request: Request, *, step: int = 20) -> int:
        loaded = self.begin(request)
        self.results(request)
        while (left := len(request.prompt_token_ids or []) - request.num_computed_tokens) > 0:
            self.step(request, min(step, left))
        self.end(request)
        return loaded

    def end(self, request: Request) -> dict[str, Any] | None:
        told = self.scheduler.finish(request.request_id)
        plan = self.scheduler.plan([])
        for worker in self.workers:
            worker.save(plan)
        self.shared.writer.flush(10)
        return told

    def is_right(self, request: Request, end: int, groups: Sequence[int] = (0,)) -> bool:
        return all(
            torch.equal(
                self._found(rank, layer, request, number, end), state(rank, layer, request.all_token_ids, 0, end)
            )
            for rank in range(len(self.workers))
            for number in groups
            for layer in self.groups[number].layers
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        self.shared.release()

    def _found(self, rank: int, layer: str, request: Request, group: int, end: int) -> torch.Tensor:
        pages = self.caches[rank][layer][self.tables[request.request_id][group]]
        return pages.transpose(0, 1).reshape(HEADS, -1, DIM)[:, :end].cpu()

    def _compute(self, rank: int, request: Request, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            for layer in group.layers:
                # What is not known yet is guessed.
                token_ids = [*request.all_token_ids, *[0] * (end - request.num_tokens)]
                values = state(rank, layer, token_ids, start, end)
                for token in range(start, end):
                    if (block := table[token // PAGE]) != 0:
                        self.caches[rank][layer][block][:, token % PAGE] = values[:, token - start]
