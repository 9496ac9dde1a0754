"""The kernels for an accelerator, called with torch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from diskprefix.accelerator import kernels
from diskprefix.accelerator.grouped import GroupedMatrix
from diskprefix.accelerator.tiles import PAIRED, Tiles, digest, is_interpreted, sizes_of

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
SPAN = 1024
"""The keys of a part of attention, counted from position 0."""
MAX_DIM = 256
REVISION = 2
"""The number changes with the bits of what a kernel computes."""
_ENOUGH = 512
"""The number of programs from which the spans of a tile are computed one after another."""
_BLOCK_KEYS = 64
_KEPT, _MERGED = 16, 4
_ALIGNMENT = 16
_LOG2_E = 1.4426950408889634


def staged(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers in main memory that a device copies from. They are page-locked: nobody waits for the copy."""
    found = torch.from_numpy(numbers)
    return found if is_interpreted(device) else found.pin_memory()


def uploaded(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Returns numbers on a device, without waiting for it."""
    return staged(numbers, device).to(device, non_blocking=True)


def identity(device: torch.device) -> str:
    """Returns what decides about the bits on a device: the compiler, the kernels, and the sizes of their tiles."""
    return f"triton {triton.__version__}, {REVISION}, tiles {digest(device)}"


def product(
    rows: torch.Tensor,
    matrix: torch.Tensor | GroupedMatrix,
    bias: torch.Tensor | None = None,
    *,
    is_plain: bool = False,
) -> torch.Tensor:
    """Returns [.., outer] for `rows`, [.., inner], and a matrix [outer, inner], or [inner, outer] with `is_plain`."""
    flat = rows.reshape(-1, rows.shape[-1])
    weights = Weights.of(matrix, is_plain=is_plain)
    out = rows.new_empty(*rows.shape[:-1], weights.numbers.shape[0])
    if num_rows := len(flat):
        sizes, dtype = sizes_of(rows.device), rows.dtype
        is_quantised = isinstance(matrix, GroupedMatrix)
        tiles = sizes.whatever_rows(dtype) if is_quantised else sizes.product(num_rows, out.shape[-1], dtype)
        _multiply(flat, weights, bias, out, tiles, triton.cdiv(num_rows, tiles.rows))
    return out


def expert_product(
    rows: torch.Tensor, matrices: torch.Tensor | GroupedMatrix, bias: torch.Tensor | None, routes: Routes
) -> torch.Tensor:
    """Returns [pairs, outer] for matrices [experts, outer, inner] and a bias [experts, outer]. `rows` are those that
    chose, [rows, inner], or what an expert has for each pair, [pairs, inner]."""
    weights = Weights.of(matrices)
    out = rows.new_zeros(len(routes.order), weights.numbers.shape[1])
    if len(out):
        tiles = sizes_of(rows.device).whatever_rows(rows.dtype)
        _multiply(rows, weights, bias, out, tiles, len(routes.tiles), routes)
    return out


def _multiply(
    rows: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    blocks_of_rows: int,
    routes: Routes | None = None,
) -> None:
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, inner = rows.shape
    outer, numbers, scales = out.shape[-1], weights.numbers, weights.scales
    kernels.product[(blocks_of_rows * triton.cdiv(outer, tiles.outer),)](
        *(rows, numbers, scales, weights.zeros, rows if bias is None else bias.contiguous(), out),
        *((rows, rows) if routes is None else (routes.order, routes.tiles)),
        *(num_rows, outer, inner, rows.stride(0), *numbers.stride()[-2:], scales.stride(-2)),
        *((0, 0) if routes is None else (numbers.stride(0), scales.stride(0))),
        **weights.constants,
        IS_WHOLE=inner % (weights.columns or tiles.inner) == 0,
        HAS_BIAS=bias is not None,
        IS_WIDENED=is_interpreted(rows.device),
        BLOCK_ROWS=tiles.rows,
        BLOCK_OUTER=tiles.outer,
        BLOCK_INNER=weights.columns // 2 or tiles.inner,
        GROUP=8,
        NUM_CHOSEN=0 if routes is None else len(routes.order) // num_rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows that each expert computes. A pair is a row and one of its choices: row × choices + choice.

    `order` has the pairs by their experts. `tiles`, int32 [.., 3], are an expert, the first of a tile's places in
    `order`, and the end of the expert's places. Their number depends on sizes alone, so some may be empty: nothing here
    waits for the device.
    """

    order: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int, dtype: torch.dtype) -> Routes:
        """`chosen` are the experts of each row, [rows, choices]; `dtype` is that of the rows."""
        found, order = chosen.reshape(-1).sort(stable=True)
        tile_rows = sizes_of(chosen.device).whatever_rows(dtype).rows
        starts = torch.searchsorted(found, torch.arange(num_experts + 1, device=found.device, dtype=found.dtype))
        counts = (starts.diff() + tile_rows - 1) // tile_rows
        ends = counts.cumsum(0)
        tiles = torch.arange(min(num_experts, len(found)) + len(found) // tile_rows, device=found.device)
        expert = torch.searchsorted(ends, tiles, right=True).clamp(max=num_experts - 1)
        first = starts[expert] + (tiles - (ends - counts)[expert]) * tile_rows
        return cls(order, torch.stack([expert, first, starts[expert + 1]], dim=1).to(torch.int32))


@dataclass(frozen=True, eq=False)
class Weights:
    """A matrix [.., outer, inner] as the kernel takes it: its numbers, what makes weights of them, and the columns of a
    block (0: any)."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    columns: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, matrix: torch.Tensor | GroupedMatrix, *, is_plain: bool = False) -> Weights:
        if isinstance(matrix, torch.Tensor):
            constants = {"BITS": 16, "IS_E4M3": False, "HAS_ZEROS": False, "QUANT_GROUP": 1}
            numbers = matrix.mT if is_plain else matrix
            return cls(numbers, numbers, numbers, 0, constants)
        codes, is_e4m3 = matrix.codes, matrix.codes.dtype is torch.float8_e4m3fn
        constants = {"BITS": matrix.bits, "IS_E4M3": is_e4m3, "HAS_ZEROS": matrix.zeros is not None}
        constants |= {"QUANT_GROUP": matrix.group}
        numbers = codes.view(torch.uint8) if is_e4m3 else codes
        return cls(numbers, matrix.scales, matrix.scales if matrix.zeros is None else matrix.zeros, PAIRED, constants)


def norm(rows: torch.Tensor, weight: torch.Tensor, kind: int, epsilon: float) -> torch.Tensor:
    """Returns the norm by the root of the mean square of rows [.., width], in their dtype."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = rows.new_empty(rows.shape)
    if len(flat):
        block = triton.next_power_of_2(width)
        kernels.norm[(len(flat),)](
            *(flat, weight, out, width, flat.stride(0), epsilon),
            KIND=kind,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
            enable_fp_fusion=False,
        )
    return out


@dataclass(frozen=True)
class PlacedRun:
    """A run of consecutive tokens of one sequence. `keys` and `values` are the memory of several layers one behind the
    other, [tensors, 1, heads, tokens, dim], which begins with position `first`, or `first_value`."""

    start: int
    num_rows: int
    keys: torch.Tensor
    values: torch.Tensor
    first: int = 0
    first_value: int = 0


@dataclass(frozen=True)
class RunTable:
    """The runs of a step and the memory of their keys and values, in main memory: `rows`, int64 [runs, 11].

    A row has the first position, the number of rows, and the first row in the step; then for keys and for values the
    address that position 0 would have, and the strides of layers, heads and tokens, in numbers. `alignment` is the
    largest power of two, at most 16, that divides all strides. `end` is the end of the last position.
    """

    rows: npt.NDArray[np.int64]
    alignment: int
    end: int

    @classmethod
    def of(cls, runs: Sequence[PlacedRun]) -> RunTable:
        found, row = list[list[int]](), 0
        for run in runs:
            places = _placed(run.keys, run.first), _placed(run.values, run.first_value)
            found.append([run.start, run.num_rows, row, *places[0], *places[1]])
            row += run.num_rows
        strides = {stride for row in found for stride in (*row[4:7], *row[8:11])}
        alignment = min(_ALIGNMENT, *(stride & -stride for stride in strides))
        return cls(np.array(found, np.int64), alignment, max(run.start + run.num_rows for run in runs))

    @property
    def sizes(self) -> list[int]:
        return [int(size) for size in self.rows[:, 1]]


def _placed(memory: torch.Tensor, first: int) -> tuple[int, int, int, int]:
    layer_stride, _, head_stride, stride, one = memory.stride()
    assert one == 1
    address = memory.untyped_storage().data_ptr() - first * stride * memory.itemsize
    return address, layer_stride, head_stride, stride


def one_tile_each(num_runs: int) -> npt.NDArray[np.int64]:
    """Returns the tiles of runs that fit in a tile each; see `Runs.tiles`."""
    return np.stack([np.arange(num_runs), np.zeros(num_runs, np.int64)], axis=1)


class Runs:
    """The runs of a step as kernels take them: a `RunTable` on the device.

    Attention computes keys before `end` in spans side by side, or more of them, which are empty. A step that is
    recorded has the end of the longest sequence that it may be replayed for.
    """

    def __init__(
        self,
        runs: RunTable,
        end: int = 0,
        table: torch.Tensor | None = None,
        tiles: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`table` and `tiles` (one for each run) are copied to `device` if they are not there."""
        sizes = runs.sizes
        self.alignment, self.end, self.most_rows = runs.alignment, end or runs.end, max(sizes)
        self._sizes = sizes
        if table is None or tiles is None:
            assert device is not None
            table, tiles = uploaded(runs.rows, device), uploaded(one_tile_each(len(sizes)), device)
        self.table = table
        self._tiles = {self.most_rows: tiles}

    def tiles(self, tokens: int) -> torch.Tensor:
        """Returns the tiles of so many tokens: a run and its first row in the tile, int64 [tiles, 2]."""
        tokens = min(tokens, self.most_rows)
        if tokens not in self._tiles:
            pairs = [(run, first) for run, size in enumerate(self._sizes) for first in range(0, size, tokens)]
            self._tiles[tokens] = uploaded(np.array(pairs, np.int64), self.table.device)
        return self._tiles[tokens]

    def spans(self, programs: int) -> int:
        """Returns the number of spans in which keys are computed side by side: 1 if there are programs enough."""
        return triton.cdiv(self.end, SPAN) if programs < _ENOUGH else 1


def number_of(memory: torch.Tensor) -> int:
    """Returns the number of a layer's tensor, [heads, tokens, dim], among those that lie one behind the other."""
    number, rest = divmod(int(memory.storage_offset()), memory.stride(0) * memory.shape[0])
    assert not rest
    return number


def keep(runs: Runs, keys: torch.Tensor, values: torch.Tensor, numbers: tuple[int, int]) -> None:
    """Copies the keys and values of a step's rows, [heads, rows, dim], to the memory of their runs."""
    for rows, number, place in ((keys, numbers[0], 3), (values, numbers[1], 7)):
        heads, _, dim = rows.shape
        given = rows if rows.stride(-1) == 1 else rows.contiguous()
        kernels.keep[(len(runs.table), heads, triton.cdiv(runs.most_rows, _KEPT))](
            *(given, runs.table, given.stride(0), given.stride(1), number),
            DIM=dim,
            PLACE=place,
            BLOCK=triton.next_power_of_2(dim),
            BLOCK_ROWS=_KEPT if runs.most_rows > 1 else 1,
            num_warps=4 if runs.most_rows > 1 else 1,
        )


def attention(
    query: torch.Tensor,
    runs: Runs,
    numbers: tuple[int, int],
    groups: int,
    value_dim: int,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_spans: int | None = None,
) -> torch.Tensor:
    """Returns [rows, heads, value_dim] for `query`, [heads, rows, key_dim], in the dtype of all tensors.

    `numbers` are those of the layer's keys and values (`number_of`), `groups` is the number of heads of keys. Visible
    tokens, sinks and scale are those of `native.attention_operator.attention`. Keys are computed in `num_spans` spans
    side by side, by default as many as make it faster: that changes no bit.
    """
    if query.stride(-1) != 1:
        query = query.contiguous()
    heads, rows, key_dim = query.shape
    group = heads // groups
    sizes = sizes_of(query.device).attention(runs.most_rows * group)
    block_rows = sizes.rows
    tiles = runs.tiles(block_rows // group)
    num_spans = num_spans or runs.spans(len(tiles) * groups)
    out = query.new_empty(rows, heads, value_dim)
    block_value = max(16, triton.next_power_of_2(value_dim))
    sums = parts = out
    max_parts = min(block_rows, runs.most_rows * group)
    if num_spans > 1:
        shape = (len(tiles), groups, num_spans, max_parts)
        sums = query.new_empty(*shape, 2, dtype=torch.float32)
        parts = query.new_empty(*shape, block_value, dtype=torch.float32)
    of_sinks = out if sinks is None else sinks
    both = {
        "GROUP": group,
        "VALUE_DIM": value_dim,
        "HAS_SINKS": sinks is not None,
        "SPAN": SPAN,
        "BLOCK_ROWS": block_rows,
        "BLOCK_VALUE": block_value,
        "enable_fp_fusion": False,
    }
    kernels.attention[(len(tiles), groups, num_spans)](
        *(query, runs.table, tiles, out, sums, parts, of_sinks, query.stride(0), query.stride(1), *numbers),
        *(scale * _LOG2_E, softcap, window, chunk, max_parts),
        **both,
        KEY_DIM=key_dim,
        ALIGNMENT=runs.alignment,
        HAS_SOFTCAP=softcap > 0,
        IS_WIDENED=is_interpreted(query.device),
        BLOCK_KEYS=_BLOCK_KEYS,
        BLOCK_KEY=max(16, triton.next_power_of_2(key_dim)),
        IS_SPLIT=num_spans > 1,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    if num_spans > 1:
        kernels.attention_of_parts[(len(tiles), groups, triton.cdiv(max_parts, _MERGED))](
            *(runs.table, tiles, out, sums, parts, of_sinks, num_spans, window, chunk, max_parts),
            **both,
            ROWS=_MERGED,
            num_warps=4,
        )
    return out
