"""Prompts, stores and tiers for tests of the shared tier, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diskprefix.prefixstore.cache.tiers.local import view_buffer, view_disk
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Prefetched, PrefetchRequest, Tier, Upload
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.remote.objects import ObjectStore
from diskprefix.prefixstore.remote.remote_tier import RemoteTier
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.tokens import TokenIds, TokenPath
from tests.prefixstore.store.building import BLOCK, ROOT, layout_of, publication

KEY = NamespaceKey.of(b"the key of the tests' fleet")
OTHER_KEY = NamespaceKey.of(b"the key of another fleet")
PAYLOAD_BYTES = 20_000
WAIT_S = 20.0


@dataclass
class Machine:
    store: Store
    writer: Writer
    remote: RemoteTier
    layout: str

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return partial(view_buffer, self.writer), partial(view_disk, self.store, self.writer.quarantine)

    def nodes(self, token_ids: TokenIds, root: bytes = ROOT) -> PromptNodes:
        return PromptNodes(TokenPath(self.store.secret, root, token_ids, BLOCK), PayloadLayout.parse(self.layout))

    def save(self, token_ids: TokenIds, **publication_options: Any) -> Publication:
        pub = publication(self.store, token_ids, layout=self.layout, **publication_options)
        self.store.publish(pub)
        return pub

    def share(
        self, token_ids: TokenIds, num_tokens: int | None = None, root: bytes = ROOT, *, tenant: str = ""
    ) -> None:
        record = RootRecord(model="tiny", block_size=BLOCK, layout=self.layout, created_at=0.0, tenant=tenant)
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        self.remote.upload(Upload(self.nodes(token_ids, root), num_tokens, record, self.tiers))
        assert self.remote.flush(WAIT_S)

    def prefetch(self, token_ids: TokenIds, root: bytes = ROOT, **wishes: Any) -> tuple[Prefetched, list[NewNode]]:
        published: list[NewNode] = []

        def publish(nodes: tuple[NewNode, ...]) -> bool:
            published.extend(nodes)
            return True

        wish: dict[str, Any] = {"publish": publish, "max_s": WAIT_S} | wishes
        nodes = self.nodes(token_ids, root)
        return self.remote.prefetch(PrefetchRequest(nodes=nodes, tiers=self.tiers, **wish)), published


@contextmanager
def machine(folder: Path, bucket: str, *, key: NamespaceKey = KEY, state_bytes: int = 0) -> Iterator[Machine]:
    store = Store(folder, budget_bytes=64 << 20, serving=True, namespace=key)
    writer = Writer(store, buffer_bytes=1 << 30)
    remote = RemoteTier(ObjectStore(bucket, timeout_s=WAIT_S), key)
    try:
        yield Machine(store, writer, remote, layout_of(PAYLOAD_BYTES, state_bytes))
    finally:
        remote.close(WAIT_S)
        writer.close(WAIT_S)
        store.close()


MakeMachine = Callable[..., Machine]


def share_of_each(machine: Machine, token_ids: TokenIds, *tenants: str) -> None:
    for number, tenant in enumerate(tenants):
        root = ROOT[:-1] + bytes([number])
        machine.save(token_ids, root=root)
        machine.share(token_ids, root=root, tenant=tenant)
