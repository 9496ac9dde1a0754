"""The pages of an engine's KV cache, as rows of the store's payloads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import torch
from msgspec import Struct

from diskprefix.bridges.shared.step_orders import NO_PAGE
from diskprefix.prefixstore.cache.tiers.tier import Write
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.pieces import Axis, LayoutGroup

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class UnsupportedPages(ValueError):
    """The form of a model's pages is not supported."""


class EngineGroup(Struct, frozen=True):
    """Layers with a common block table. `block_size` is the number of tokens in an engine block. `window` is the number
    of tokens that attention reads, None for all."""

    layers: tuple[str, ...]
    block_size: int
    window: int | None = None


class PageGroup(Struct, frozen=True, dict=True):
    """Layers whose pages have the same form. `stacks` are views of the pages, shape [layers, pages, page_bytes], uint8,
    in the order of the layers. `engine_group` is the index of the engine's group. An engine block has `pages_each`
    pages."""

    layout: LayoutGroup
    stacks: tuple[torch.Tensor, ...]
    engine_group: int
    pages_each: int

    @property
    def num_rows(self) -> int:
        return len(self.layout.tensors)

    @property
    def page_bytes(self) -> int:
        return self.stacks[0].shape[2]

    @cached_property
    def _memories(self) -> tuple[Bytes, ...]:
        """The stacks as arrays: copying a page is ten times as fast as with torch's indexing."""
        return tuple(stack.numpy() for stack in self.stacks)

    def in_place(self, pages: Sequence[int], rows: slice) -> Bytes | None:
        """Returns the memory of one page of the layers `rows`, shape [rows, page_bytes], or None if the memory is not
        one array in main memory."""
        if len(pages) != 1 or len(self.stacks) != 1 or self.stacks[0].device.type != "cpu":
            return None
        return self._memories[0][rows, pages[0]]

    def read_page(self, page: int, out: Bytes) -> None:
        """Copies a page of all layers into `out`, shape [layers, page_bytes]."""
        start = 0
        for number, stack in enumerate(self.stacks):
            rows = out[start : start + len(stack)]
            if stack.device.type == "cpu":
                rows[...] = self._memories[number][:, page]
            else:
                torch.from_numpy(rows).copy_(stack[:, page])
            start += len(stack)

    def write_page(self, page: int, rows: slice, values: Bytes) -> None:
        """Copies `values`, shape [rows, page_bytes], into a page of the layers `rows`."""
        start = 0
        for number, stack in enumerate(self.stacks):
            first, last = max(rows.start - start, 0), min(rows.stop - start, len(stack))
            if first < last:
                part = values[start + first - rows.start : start + last - rows.start]
                if stack.device.type == "cpu":
                    self._memories[number][first:last, page] = part
                else:
                    stack[first:last, page].copy_(torch.from_numpy(part))
            start += len(stack)

    def page_numbers(self, blocks: Sequence[int]) -> list[int]:
        """Returns the page numbers of engine blocks."""
        return [block * self.pages_each + page for block in blocks for page in range(self.pages_each)]


class Pages:
    """All pages of one rank. The payload of a block has, for each of `groups`, the rows of its layers."""

    def __init__(self, caches: Mapping[str, torch.Tensor], groups: Sequence[EngineGroup], num_blocks: int) -> None:
        """`caches` has the pages of each layer by its name, shape [pages, heads, tokens, dim], with any strides.

        Raises `UnsupportedPages`.
        """
        self.groups = tuple(
            group for number, engine in enumerate(groups) for group in _page_groups(caches, number, engine, num_blocks)
        )
        if not self.groups:
            raise UnsupportedPages("the model has no layer with a KV cache")
        self.device = self.groups[0].stacks[0].device

    def block_bytes(self, num_tokens: int) -> int:
        return sum(group.num_rows * group.page_bytes * num_tokens // group.layout.page for group in self.groups)

    def read(self, blocks: Sequence[Sequence[int]], out: Bytes) -> None:
        """Copies pages into `out`, a payload. `blocks` has the engine's blocks by group. Waits for copies from a
        device."""
        start = 0
        for group in self.groups:
            pages = group.page_numbers(blocks[group.engine_group])
            size = group.num_rows * len(pages) * group.page_bytes
            rows = out[start : start + size].reshape(group.num_rows, len(pages), group.page_bytes)
            for number, page in enumerate(pages):
                group.read_page(page, rows[:, number])
            start += size

    def fill(self, blocks: Sequence[Sequence[int]], number: int, rows: slice, write: Write) -> None:
        """Calls `write` to fill the pages of group `number` in the layers `rows`. Skips `NO_PAGE`."""
        group = self.groups[number]
        numbers = blocks[group.engine_group]
        pages = group.page_numbers(numbers)
        if numbers[0] != NO_PAGE and (place := group.in_place(pages, rows)) is not None:
            write(place)
            return
        payload = np.empty((rows.stop - rows.start, len(pages) * group.page_bytes), np.uint8)
        write(payload)
        values = payload.reshape(len(payload), len(pages), group.page_bytes)
        for index, page in enumerate(pages):
            if numbers[index // group.pages_each] != NO_PAGE:
                group.write_page(page, rows, values[:, index])


def _page_groups(
    caches: Mapping[str, torch.Tensor], number: int, engine: EngineGroup, num_blocks: int
) -> list[PageGroup]:
    """Returns the groups of one block table, one for each form of pages. Omits layers that share the pages of another
    layer."""
    by_form: dict[tuple[LayoutGroup, int], list[tuple[str, torch.Tensor]]] = {}
    seen: set[int] = set()
    for layer in engine.layers:
        cache = caches.get(layer)
        if cache is None or cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        pages_each, rest = divmod(cache.shape[0], num_blocks)
        if rest or not pages_each:
            raise UnsupportedPages(f"{layer} has {cache.shape[0]} pages for {num_blocks} blocks")
        form = _form(layer, cache, engine, pages_each)
        by_form.setdefault((form, pages_each), []).append((layer, cache))
    groups: list[PageGroup] = []
    for (form, pages_each), layers in by_form.items():
        layout = msgspec.structs.replace(form, tensors=tuple(f"{_layer_number(layer)}.pages" for layer, _ in layers))
        groups.append(PageGroup(layout, tuple(_stacks([cache for _, cache in layers])), number, pages_each))
    return groups


def _form(layer: str, cache: torch.Tensor, engine: EngineGroup, pages_each: int) -> LayoutGroup:
    """Returns the form of a layer's pages, without the layer's name."""
    if cache.dim() != 4:
        raise UnsupportedPages(f"{layer} has pages of {cache.dim() - 1} dimensions, not of heads, tokens and values")
    _, heads, tokens, dim = cache.shape
    if tokens * pages_each != engine.block_size:
        raise UnsupportedPages(f"{layer} has {tokens} states for {engine.block_size // pages_each} tokens in a page")
    axes: tuple[Axis, ...]
    _, head_stride, token_stride, dim_stride = cache.stride()
    if dim_stride == 1 and token_stride == dim and (heads == 1 or head_stride == tokens * dim):
        axes = ("page", "head", "token", "dim")
    elif dim_stride == 1 and head_stride == dim and token_stride == heads * dim:
        axes = ("page", "token", "head", "dim")
    else:
        raise UnsupportedPages(f"{layer} has pages that are not in one piece, with strides {cache.stride()}")
    dtype = str(cache.dtype).removeprefix("torch.")
    return LayoutGroup(heads, dim, dtype, (), window=engine.window, axes=axes, page=tokens)


def _layer_number(layer: str) -> str:
    match = _LAYER.search(layer)
    return match[1] if match else layer


def _stacks(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of shape [layers, pages, page_bytes], each of consecutive layers at equal distances in one
    storage."""
    runs: list[list[torch.Tensor]] = []
    for cache in caches:
        if runs and _continues(runs[-1], cache):
            runs[-1].append(cache)
        else:
            runs.append([cache])
    return [_stack(run) for run in runs]


def _continues(run: Sequence[torch.Tensor], cache: torch.Tensor) -> bool:
    """Returns whether `cache` follows the layers of `run` at their distance."""
    last = run[-1]
    if last.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr() or last.stride() != cache.stride():
        return False
    distance = cache.data_ptr() - last.data_ptr()
    return distance > 0 and (len(run) == 1 or distance == last.data_ptr() - run[-2].data_ptr())


def _stack(run: Sequence[torch.Tensor]) -> torch.Tensor:
    first = run[0]
    itemsize = first.element_size()
    storage = first.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
    page_bytes = first[0].numel() * itemsize
    distance = run[1].data_ptr() - first.data_ptr() if len(run) > 1 else page_bytes
    size = (len(run), first.shape[0], page_bytes)
    offset = first.data_ptr() - storage.data_ptr()
    return raw.as_strided(size, (distance, first.stride(0) * itemsize, 1), offset)


class PageSink:
    """The pages of some blocks, which `fill` fills. `blocks` maps the position of each block in tokens to the engine's
    blocks by group."""

    def __init__(self, pages: Pages, blocks: Mapping[int, Sequence[Sequence[int]]]) -> None:
        self._pages, self._blocks = pages, blocks

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Write) -> None:
        """See `cache.tiers.tier.Fill`. Fills whole blocks only."""
        del num_tokens
        self._pages.fill(self._blocks[position], group, rows, write)
