"""The encoder's outputs for pictures, in the store: one for all prompts with the same picture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import View, open_views
from diskprefix.prefixstore.kv.numbers import Array, array_dtype
from diskprefix.prefixstore.store.changes import NewNode, batches
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.pieces import LAYOUT_VERSION, LayoutGroup, LayoutText, PayloadLayout, split_payload
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import ENCODED_PICTURES, RootRecord
from diskprefix.prefixstore.store.store import Publication
from diskprefix.prefixstore.store.writer import Room
from diskprefix.tokens import TokenPath, picture_ids, root_hash
from diskprefix.values import CacheOptions, Picture, Tenant

log = logging.getLogger("diskprefix")

_BATCH_BYTES = 16 << 20
"""The bytes that are written in one transaction, at least one block."""


def are_saved(options: CacheOptions) -> bool:
    """Returns False if a request saves nothing, or only the beginning of its prompt."""
    return options.save and options.scope.most is None


class EncodedPictures:
    """Loads and saves the encoder's outputs of one model, as blocks of the pictures' token ids.

    The blocks continue each other like those of a prompt, below a root for the pictures of each tenant. So they count
    in the budget, are evicted from the end on, expire, and are purged like all blocks. Errors are logged and counted,
    never raised: without its output, a picture is encoded again.
    """

    def __init__(self, cache: PrefixCache, levels: int, hidden: int, dtype: str) -> None:
        """Outputs have the shape [levels, tokens of the picture, hidden] and this dtype."""
        self._cache, self._shape, self._dtype = cache, (levels, hidden), array_dtype(dtype)
        group = LayoutGroup(levels, hidden, dtype, ("rows",))
        self._text = LayoutText(LAYOUT_VERSION, (group,), (0, "float32")).text()
        self._layout = PayloadLayout.parse(self._text)
        self._copied: dict[tuple[Tenant, bytes], Array] = {}
        """Outputs that are being copied for the writer."""

    def load(
        self, picture: Picture, options: CacheOptions, is_wanted: Callable[[], bool] = lambda: True
    ) -> Array | None:
        """Returns the output for a picture; None if some of its blocks are not stored, or with the scope `off`. Removes
        damaged blocks. Waits for the disk. `is_wanted` is called before each block; if it returns False, no more is
        read. For any thread."""
        if options.scope.kind == "off" or self._cache.bits.state in ("unknown", "other"):
            return None
        if (copied := self._copied.get((options.tenant, picture.name))) is not None:
            return copied
        levels, hidden = self._shape
        try:
            rows = np.empty((levels, picture.num_tokens, hidden), self._dtype)
            _, nodes = self._root_of(picture, options.tenant, self.epoch(options.tenant))
            path = _path(nodes)
            with open_views(self._cache.tiers) as views:
                if not all(is_wanted() and self._read_block(views, nodes, node, rows) for node in path):
                    return None
        except CacheError as error:
            self._cache.count("errors")
            log.warning("[disk-cache] a picture is encoded again: %s", error)
            return None
        self._cache.writer.touch(path[-1].name, self._cache.store.clock(), options.ttl_s)
        return rows

    def epoch(self, tenant: Tenant) -> Epoch:
        """Returns a tenant's epoch now. `save` needs the epoch in which the request began."""
        return self._cache.store.epochs.of(str(tenant))

    def save(self, picture: Picture, rows: Array, options: CacheOptions, epoch: Epoch, encode_s: float = 0.0) -> None:
        """Has a copy of an output written, if outputs of the request `are_saved`. `encode_s` is how long computing the
        output took. For the engine's thread; the copy is made on another thread."""
        cache, num_bytes, writer = self._cache, rows.nbytes, self._cache.writer
        spending = cache.spending(options.share)
        if not are_saved(options) or cache.store.problem is not None or cache.bits.state != "settled":
            return
        if spending is not None and not spending.allows_picture(num_bytes, is_asked=options.is_asked):
            cache.count("unaffordable")
        elif (room := writer.reserve(num_bytes)) is not None:
            cache.spend(options.share, num_bytes)
            self._copied[options.tenant, picture.name] = rows
            try:
                cache.run_aside(partial(self._submit, picture, rows, options, epoch, encode_s, room))
            except BaseException:
                room.release()
                self._copied.pop((options.tenant, picture.name), None)
                raise
        else:
            writer.note_loss(Save(epoch, "a picture"), "the write buffer has no room for it")

    def _submit(
        self, picture: Picture, rows: Array, options: CacheOptions, epoch: Epoch, encode_s: float, room: Room
    ) -> None:
        """Gives copies of the rows, for which `room` is reserved, to the writer."""
        cache, writer, save, own = self._cache, self._cache.writer, Save(epoch, "a picture"), [room]
        try:
            record, nodes = self._root_of(picture, options.tenant, epoch)
            token_s, token_bytes = encode_s / picture.num_tokens, rows.nbytes // picture.num_tokens
            at_once = max(1, _BATCH_BYTES // (nodes.block_size * token_bytes))
            for batch in batches(_path(nodes), at_once):
                captured = tuple(self._capture(nodes, node, rows, token_s, options.ttl_s) for node in batch)
                is_last = captured[-1].end == picture.num_tokens
                publication = Publication(epoch=epoch, root=nodes.path.root, root_record=record, nodes=captured)
                writer.queue_publication(save, publication, own if is_last else [])
                # The writer releases the room once the last payload is written or lost.
                own = [] if is_last else own
            content = f"{picture.size} {picture.name.hex()}".encode()
            notes = cache.notes_of(nodes.path.root, record, options.ttl_s, epoch)
            notes.put(NoteKind.PICTURE, picture.name.hex(), content, nodes.token_ids)
        except BaseException:
            for hold in own:
                hold.release()
            raise
        finally:
            writer.finish(save)
            # If the output is saved twice at once, the other thread may have removed it.
            self._copied.pop((options.tenant, picture.name), None)

    def _root_of(self, picture: Picture, tenant: Tenant, epoch: Epoch) -> tuple[RootRecord, PromptNodes]:
        """Returns the record of the root for a tenant's pictures, and the nodes of a picture below this root. The root
        of the tenant's prompts has other payloads."""
        record = self._cache.root_record(tenant)
        identity = f"{ENCODED_PICTURES}{self._text} {record.identity}"
        record = replace(record, layout=self._text, identity=identity, has_prompts=False)
        ids, root = picture_ids(picture.name, picture.num_tokens), root_hash(record.identity)
        return record, PromptNodes(TokenPath(epoch.secret, root, ids, record.block_size), self._layout)

    def _read_block(self, views: Sequence[View], nodes: PromptNodes, node: Node, rows: Array) -> bool:
        """Reads the rows of a block. Returns False if it is not stored, or damaged."""
        view = next((view for view in views if view.has(node, nodes.token_bytes(node))), None)
        if view is None:
            return False
        pieces, out = nodes.pieces(node), rows[:, node.position : node.end].reshape(len(rows), -1).view(np.uint8)
        try:
            for piece, write in zip(pieces, view.piece_writes(node, pieces, range(len(pieces))), strict=True):
                write(out[piece.rows])
        except StoreCorrupt as error:
            view.drop_damaged(node, error)
            return False
        return True

    def _capture(self, nodes: PromptNodes, node: Node, rows: Array, token_s: float, ttl_s: float | None) -> NewNode:
        pieces = nodes.pieces(node)
        copy = rows[:, node.position : node.end].copy()
        payload = split_payload(copy.reshape(-1).view(np.uint8).data, pieces)
        return nodes.new_node(node, payload, prefill_s=token_s * node.num_tokens, ttl_s=ttl_s)


def _path(nodes: PromptNodes) -> list[Node]:
    """Returns the blocks of a picture. The last one may not be full."""
    num_tokens = len(nodes.token_ids)
    return [*nodes.blocks, *([nodes.partial_block(num_tokens)] if num_tokens % nodes.block_size else [])]
