"""The last step of a request: what a plan wants is copied out of the arena and handed to the writer."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from diskprefix.cache_options import CacheOptions
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture
from diskprefix.policy.scope import MAX_VALUE
from diskprefix.prefix_cache.namespaces import TenantNamespace
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.prefix_cache.planning import Plan, Planner, Progress, ttl_at
from diskprefix.prefix_cache.resources import CacheResources
from diskprefix.prompt import Prompt
from diskprefix.store.changes import NewNode
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Publication
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")


@dataclass(kw_only=True, eq=False)
class Publisher:
    """Publishes what one request stores. `goes_on`: the prompt ends at a grid point and is only a beginning."""

    cache: CacheResources
    namespace: TenantNamespace
    prompt: Prompt
    options: CacheOptions
    goes_on: bool = False
    token_s: float = 0.0
    """How long computing a token took, in seconds."""

    def __post_init__(self) -> None:
        self._names = self.cache.store.names
        """Those of the store that the request began with."""
        num_tokens, state = len(self.prompt.token_ids), self.cache.layout.state_kind
        self.planner = Planner(self.nodes_of(self.prompt.token_ids), Progress(), state, num_tokens)

    def nodes_of(self, token_ids: TokenIds) -> PromptNodes:
        block_size, layout = self.cache.settings.block_size, self.cache.payload_layout
        return PromptNodes(self._names.secret, self.namespace.root, token_ids, block_size, layout)

    def fit(self, plan: Plan) -> Plan:
        """Returns what of the plan the write buffer has room for: its longest beginning."""
        sizes = list(accumulate(map(self.planner.nodes.payload_bytes, plan.nodes)))
        fitting = plan.beginning(bisect_right(sizes, self.cache.writer.room_bytes), self.cache.layout.state_kind)
        if fitting is plan:
            return plan
        log.warning(
            "[disk-cache] the write buffer has room for %d of the %d tokens to save; raise --kv-cache-write-buffer",
            fitting.num_tokens,
            plan.num_tokens,
        )
        if not fitting.nodes:
            self.cache.count("refused")
        return fitting

    def submit(
        self,
        arena: KVArena,
        logits: torch.Tensor | None,
        plan: Plan,
        states: dict[int, memoryview],
        pins: ExitStack,
        *,
        prompt: TokenIds | None = None,
    ) -> None:
        """Reserve the write buffer, and let the capturing thread do the rest while the reply is decoded.

        `logits` are those at the prompt's end, shape [vocab], which a tail holds. `states` are taken out of the mapping
        for the checkpoints of the plan. `pins` are taken over, and released when the writer has the publication: what
        is extended must stay until then. `prompt` is added to the store's history.
        """
        captures = list(self._captures(arena, logits, plan.nodes, states))
        size = sum(map(self.planner.nodes.payload_bytes, plan.nodes))
        self.cache.writer.reserve(size)
        self.planner.submitted.update(node.name for node in plan.nodes)
        pinned = pins.pop_all()

        def copy() -> None:
            with pinned:
                try:
                    publication = self._publication(plan, tuple(capture() for capture in captures), prompt)
                    self.cache.writer.submit(publication, reserved_bytes=size)
                except BaseException:
                    self.cache.writer.release(size)
                    raise

        arena.capturer = self.cache.capturer
        self.cache.capturer.submit(Capture(arena, 0, copy, copy))

    def _publication(self, plan: Plan, nodes: tuple[NewNode, ...], prompt: TokenIds | None) -> Publication:
        entry = EntryRecord(
            root=self.namespace.root,
            num_tokens=plan.num_tokens,
            scope=str(self.options.scope),
            preview=self.prompt.text,
            created_at=time.time(),
        )
        return Publication(
            store_id=self._names.store_id,
            root=self.namespace.root,
            root_record=self.namespace.record,
            nodes=nodes,
            tip=plan.tip,
            entry=entry if plan.tip is not None else None,
            prompt=prompt,
            history_limit=MAX_VALUE,
            prompt_group=self.options.group,
            ttl_s=self._ttl_at(plan.num_tokens),
        )

    def _captures(
        self, arena: KVArena, logits: torch.Tensor | None, wanted: tuple[Node, ...], states: dict[int, memoryview]
    ) -> Iterator[Callable[[], NewNode]]:
        """For each node, what copies it out of the arena. States are copied now: decoding changes them."""
        for node, saved_tokens in zip(wanted, self.planner.saved_tokens(wanted), strict=True):
            parts: list[memoryview] = []
            if node.kind == Kind.CHECKPOINT:
                parts = [states.pop(node.position)]
            elif node.kind == Kind.TAIL:
                assert logits is not None
                parts = [arena.read_states(), arena.logits_bytes(logits)]
            nodes = self.planner.nodes
            yield partial(self._captured, arena, nodes, node, parts, self.token_s * saved_tokens)

    def _captured(
        self, arena: KVArena, nodes: PromptNodes, node: Node, parts: list[memoryview], seconds: float
    ) -> NewNode:
        """`parts` of the payload come after the tokens' own."""
        payload = arena.read_tokens(node.position, node.num_tokens)
        if node.kind == Kind.CHECKPOINT:
            (payload,) = parts
        elif parts:
            payload = memoryview(b"".join([payload, *parts]))
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=nodes.tokens(node),
            kind=node.kind,
            payload=payload,
            pieces=tuple(cut.piece for cut in nodes.cuts(node)),
            prefill_s=seconds,
            generated=node.generated,
            ttl_s=self._ttl_at(node.end),
        )

    def _ttl_at(self, position: int) -> float | None:
        return ttl_at(position, self.prompt.marks, self.options.ttl_s)
