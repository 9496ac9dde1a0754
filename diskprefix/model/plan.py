"""A step of a model, written down: operator calls in order, over weights and buffers at fixed addresses.

A family (`model.families`) makes the plan of a model once. `ComputePlan.run` computes a step in one call, without
Python between the operators. What an operator computes for a row depends on that row and the memory of its sequence.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np

from diskprefix.model.curves import curve
from diskprefix.model.operands import (
    AnyMatrix,
    Buffer,
    DenseExperts,
    DenseMatrix,
    EncodedRows,
    ExpertRoutes,
    Gating,
    HeadMatrices,
    JoinedMatrix,
    Location,
    PackedExperts,
    PlannedRun,
    Rotary,
    RotaryAngles,
    Router,
    StateLocation,
    Weight,
    WeightedNorm,
)
from diskprefix.native import address_of, calls
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix

_ALIGNMENT = 64
_ITEM_BYTES = {calls.FLOAT32: 4, calls.BFLOAT16: 2}
_MAX_ROTARY = 1024
"""`MAX_ROTARY` of `native/source/rows.h`."""
_MAX_AXES = 3
"""The most dimensions of a position: pictures have three."""
_LENGTH_EPSILON = 1e-6
"""That of transformers' `l2norm`."""
_Part: TypeAlias = Literal["all", "without logits", "states"]


class ComputePlan:
    """The operator calls of a step. One thread at a time makes or runs it."""

    hidden: Buffer
    """The hidden states behind the last norm."""
    logits: Buffer
    made_of: list[tuple[ctypes.Structure, tuple[Any, ...]]]
    """Each call in order, with the weights and tables that it reads."""
    layers: list[range]
    """The numbers of the calls of each layer."""

    def __init__(self, operators: Operators, dtype: int, max_rows: int, vocab_size: int, page_tokens: int) -> None:
        self.dtype, self.max_rows, self.vocab_size = dtype, max_rows, vocab_size
        self._operators, self._page_tokens = operators, page_tokens
        self.made_of, self.layers = [], []
        self._calls: list[tuple[int, bool, ctypes.Structure]] = []
        self.buffers: dict[int, np.ndarray] = {}
        self._free: dict[int, list[int]] = {}
        self._kept: list[Any] = []
        self._scratch: list[tuple[int, int]] | None = None
        self._ids_below = dict[int, np.ndarray]()
        """The step's tokens for tables of so many rows."""
        self._logit_rows = self._numbers(max_rows)
        self._positions = self._numbers(_MAX_AXES * max_rows).reshape(_MAX_AXES, max_rows)
        self._num_positions = sys.maxsize
        self._of_pictures: list[calls.ScatterCall] = []
        self._of_states: list[tuple[int, bool, ctypes.Structure]] = []
        self._made = dict[_Part, tuple[Any, calls.Operations]]()
        self.kept_bytes = 0

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    # -- making -----------------------------------------------------------------------------------------------------

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Gives a context for a layer: its buffers are used again behind it."""
        self._scratch, first = [], len(self._calls)
        try:
            yield
        finally:
            for num_bytes, address in self._scratch:
                self._free.setdefault(num_bytes, []).append(address)
            self._scratch = None
            self.layers.append(range(first, len(self._calls)))

    def rows(self, width: int, *, is_of_logits: bool = False, item_bytes: int = 0) -> Buffer:
        """Returns a buffer."""
        item_bytes = item_bytes or self.item_bytes
        return Buffer(self._memory(self.max_rows * width * item_bytes), width, width, item_bytes, is_of_logits)

    def widened(self, rows: Buffer) -> Buffer:
        """Returns the rows in float32."""
        if rows.item_bytes == 4:
            return rows
        self._require(rows.width == rows.stride, "numbers that do not lie side by side")
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits, item_bytes=4)
        self._add(calls.WIDEN, out, calls.WideningCall(width=rows.width, rows=rows.address, out=out.address))
        return out

    def narrowed(self, rows: Buffer) -> Buffer:
        """Returns the rows in the type of the plan."""
        if rows.item_bytes == self.item_bytes:
            return rows
        self._require(rows.width == rows.stride, "numbers that do not lie side by side")
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._add(calls.WIDEN, out, calls.WideningCall(narrows=1, width=rows.width, rows=rows.address, out=out.address))
        return out

    def embeddings(self, table: Matrix | DenseMatrix) -> Buffer:
        """Returns the rows of a table that the step's tokens have: the first one for tokens that it lacks."""
        num_ids = min(table.rows, self.vocab_size)
        ids = self._ids_below[num_ids] = self._ids_below.get(num_ids, self._numbers(self.max_rows))
        out = self.rows(table.columns)
        if isinstance(table, Matrix):
            call = calls.LookupCall(ids=address_of(ids), matrix=table.address, out=out.address)
            self._add(calls.LOOK_UP, out, call, table)
        else:
            self._pick(table.weight.address, ids, out, table.weight)
        return out

    def of_positions(self, table: Matrix | DenseMatrix, offset: int) -> Buffer:
        """Returns the rows of a table that the step's positions have, from row `offset` on."""
        self._require(isinstance(table, DenseMatrix), "a table of quants for positions")
        assert isinstance(table, DenseMatrix)
        self._num_positions = table.rows - offset
        out = self.rows(table.columns)
        start = table.weight.address + offset * table.columns * self.item_bytes
        self._pick(start, self._positions, out, table.weight)
        return out

    def that_get_logits(self, rows: Buffer) -> Buffer:
        """Returns those of the rows that get logits."""
        if rows.is_of_logits:
            return rows
        self._require(rows.width == rows.stride, "numbers that do not lie side by side")
        out = self.rows(rows.width, is_of_logits=True, item_bytes=rows.item_bytes)
        self._pick(rows.address, self._logit_rows, out)
        return out

    def _pick(self, source: int, numbers: np.ndarray, out: Buffer, *kept: Any) -> None:
        call = calls.PickCall(
            row_bytes=out.width * out.item_bytes, rows=source, numbers=address_of(numbers), out=out.address
        )
        self._add(calls.PICK, out, call, *kept)

    def norm(self, rows: Buffer, norm: WeightedNorm) -> Buffer:
        """Returns the norm of each row."""
        rows = self.narrowed(rows)
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._require(
            rows.width == rows.stride and norm.has(1, rows.width),
            f"a norm of {norm.weight.shape[0]} numbers, of rows of {rows.width}",
        )
        call = calls.NormCall(
            dtype=self.dtype, kind=norm.kind, width=rows.width, rows=rows.address, weight=norm.weight.address,
            out=out.address, epsilon=norm.epsilon,
        )  # fmt: skip
        self._add(calls.NORM, out, call, norm)
        return out

    def product(self, rows: Buffer, matrix: AnyMatrix) -> Buffer:
        """Returns the product of each row with a matrix."""
        return self.products(rows, matrix)[0]

    def products(self, rows: Buffer, *matrices: AnyMatrix) -> list[Buffer]:
        """Returns the products of each row with several matrices: those of packed ones are computed together. The
        results of a joined matrix's parts are put in order."""
        outs = self._products(rows, [part for matrix in matrices for part in _parts(matrix)])
        return [self._joined(matrix, [outs.pop(0) for _ in _parts(matrix)]) for matrix in matrices]

    def _joined(self, matrix: AnyMatrix, parts: Sequence[Buffer]) -> Buffer:
        if not isinstance(matrix, JoinedMatrix):
            return parts[0]
        out = self.rows(matrix.rows, is_of_logits=parts[0].is_of_logits)
        for part, runs in zip(parts, matrix.runs, strict=True):
            to = out.part(runs.first, out.width - runs.first)
            self._copy(part, runs.count, runs.width, to, runs.stride, runs.width)
        return out

    def _products(self, rows: Buffer, matrices: Sequence[Matrix | DenseMatrix]) -> list[Buffer]:
        for matrix in matrices:
            size = matrix.rows, matrix.columns
            self._require(matrix.columns == rows.width == rows.stride, f"a product of {size} and rows of {rows.width}")
        outs = [
            self.rows(matrix.rows, is_of_logits=rows.is_of_logits, item_bytes=rows.item_bytes) for matrix in matrices
        ]
        together = [(matrix, out) for matrix, out in zip(matrices, outs, strict=True) if isinstance(matrix, Matrix)]
        for first in range(0, len(together), calls.MAX_MATRICES):
            part = together[first : first + calls.MAX_MATRICES]
            call = calls.ProductCall(num_matrices=len(part), rows=rows.address)
            for number, (packed, out) in enumerate(part):
                call.matrices[number], call.outs[number] = packed.address, out.address
            self._add(calls.PRODUCT, rows, call, part)
        for matrix, out in zip(matrices, outs, strict=True):
            if isinstance(matrix, DenseMatrix):
                self._dense(rows, matrix, out)
        return outs

    def _dense(self, rows: Buffer, matrix: DenseMatrix, out: Buffer) -> None:
        call = calls.DenseProductCall(
            dtype=self._dtype_of(rows), is_turned=1, num_heads=1, inner=matrix.columns, outer=matrix.rows,
            rows=rows.address, row_stride=rows.stride, matrices=matrix.weight.address, line_stride=matrix.columns,
            bias=0 if matrix.bias is None else matrix.bias.address, out=out.address, out_row_stride=out.stride,
        )  # fmt: skip
        self._add(calls.DENSE, rows, call, matrix)

    def of_groups(self, rows: Buffer, groups: int, first: int, width: int) -> Buffer:
        """Returns `width` numbers, from number `first` on, of each of the equal groups of a row."""
        if groups == 1:
            return rows.part(first, width)
        out = self.rows(groups * width)
        self._require(rows.width % groups == 0 and first + width <= rows.width // groups, "groups of other rows")
        self._copy(rows.part(first, width), groups, rows.width // groups, out, width, width)
        return out

    def heads_times(self, rows: Buffer, matrices: HeadMatrices | Sequence[Matrix], behind: int = 0) -> Buffer:
        """Returns the first numbers of each head times its matrix, and its last `behind` numbers as they are:
        [heads × (inner + behind)] becomes [heads × (outer + behind)]."""
        if isinstance(matrices, HeadMatrices):
            heads, inner, outer = matrices.heads, matrices.inner, matrices.outer
        else:
            heads, (inner, outer) = len(matrices), (matrices[0].columns, matrices[0].rows)
        of_head, to_head = inner + behind, outer + behind
        self._require(rows.width == heads * of_head, "heads of other rows")
        out = self.rows(heads * to_head, is_of_logits=rows.is_of_logits)
        where = {
            "num_heads": heads, "rows": rows.address, "head_stride": of_head, "row_stride": rows.stride,
            "out": out.address, "out_head_stride": to_head, "out_row_stride": out.stride,
        }  # fmt: skip
        if isinstance(matrices, HeadMatrices):
            dense = calls.DenseProductCall(
                dtype=self.dtype, is_turned=matrices.is_turned, inner=inner, outer=outer, matrices=matrices.address,
                matrix_stride=matrices.stride, line_stride=inner if matrices.is_turned else outer, **where,
            )  # fmt: skip
            self._add(calls.DENSE, rows, dense, matrices)
        else:
            addresses = array("Q", [one.address for one in matrices])
            packed = calls.HeadProductCall(matrices=addresses.buffer_info()[0], **where)
            self._add(calls.HEAD_PRODUCT, rows, packed, matrices, addresses)
        if behind:
            self._copy(rows.part(inner, behind), heads, of_head, out.part(outer, behind), to_head, behind)
        return out

    def copy(self, rows: Buffer) -> Buffer:
        """Returns the same rows in a buffer of their own."""
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._copy(rows, 1, rows.width, out, rows.width, rows.width)
        return out

    def angles(self, rotary: Rotary) -> RotaryAngles:
        """Returns the angles of the step's positions."""
        half = len(rotary.frequencies)
        cosines, sines = self.rows(half), self.rows(half)
        frequencies = np.ascontiguousarray(rotary.frequencies, np.float32)
        axes = None if rotary.axes is None else np.ascontiguousarray(rotary.axes, np.int64)
        call = calls.AnglesCall(
            dtype=self.dtype, half=half, axis_stride=self.max_rows, positions=address_of(self._positions),
            frequencies=address_of(frequencies), axes=address_of(axes), factor=rotary.factor,
            cosines=cosines.address, sines=sines.address,
        )  # fmt: skip
        self._add(calls.ANGLES, cosines, call, frequencies, axes)
        return RotaryAngles(cosines, sines, rotary.is_paired, rotary.first)

    def angles_of_logits(self, angles: RotaryAngles) -> RotaryAngles:
        """Returns the angles of the rows that get logits."""
        cosines, sines = self.that_get_logits(angles.cosines), self.that_get_logits(angles.sines)
        return angles._replace(cosines=cosines, sines=sines)

    def heads(
        self,
        rows: Buffer,
        dim: int,
        *,
        norm: WeightedNorm | None = None,
        angles: RotaryAngles | None = None,
        to: Location | None = None,
    ) -> None:
        """Changes rows of heads in place: each head gets its norm and is turned. Then it goes to memory `to`."""
        num_heads = rows.width // dim
        self._require(rows.width % dim == 0, "heads of other rows")
        call = calls.HeadsCall(
            dtype=self.dtype, num_heads=num_heads, dim=dim, row_stride=rows.stride, rows=rows.address, table=-1
        )
        if norm is not None:
            self._require(norm.has(1, dim) or norm.has(num_heads, dim), "a norm of other heads")
            call.norm_stride = 0 if norm.has(1, dim) else norm.weight.shape[0] // num_heads
            call.norm, call.norm_kind, call.epsilon = norm.weight.address, norm.kind, norm.epsilon
        if angles is not None:
            half = angles.cosines.width
            self._require(angles.first + 2 * half <= dim and 2 * half <= _MAX_ROTARY, "angles of others")
            self._require(angles.cosines.is_of_logits == rows.is_of_logits, "angles of other rows")
            call.cosines, call.sines, call.half = angles.cosines.address, angles.sines.address, half
            call.is_paired, call.rotary_first = angles.is_paired, angles.first
        if to is not None:
            self._require(to.has_room(call.num_heads, dim, self.item_bytes), "memory of another form")
            call.table, call.to = to.table, to.call
        self._add(calls.HEADS, rows, call, norm)

    def attention(
        self,
        query: Buffer,
        keys: Location,
        values: Location,
        *,
        key_dim: int,
        value_dim: int,
        num_kv_heads: int,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: Weight | None = None,
        sees_pictures: bool = False,
    ) -> Buffer:
        """Returns what each row of queries attends to: its own token and those before it, the last `window` of them, or
        those of its chunk. With `sees_pictures` a token of a picture sees all of the picture. `sinks` is float32."""
        num_heads = query.width // key_dim
        sizes = (keys, key_dim), (values, value_dim)
        has_room = all(memory.has_room(num_kv_heads, dim, self.item_bytes) for memory, dim in sizes)
        self._require(num_heads % num_kv_heads == 0, "attention of other heads")
        self._require(has_room, "memory of another form")
        out = self.rows(num_heads * value_dim, is_of_logits=query.is_of_logits)
        attention = calls.AttentionCall(
            dtype=self.dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim,
            window=window, chunk=chunk, query=query.address, query_head_stride=key_dim, query_row_stride=query.stride,
            out=out.address, sinks=0 if sinks is None else sinks.address, scale=scale, softcap=softcap,
        )  # fmt: skip
        call = calls.AttendCall(attention, keys.table, values.table, sees_pictures, keys.call, values.call)
        self._add(calls.ATTEND, query, call, sinks)
        return out

    def gated(self, gate: Buffer, up: Buffer | None, function: str, factor: float = 1.0, *, kept: Any = None) -> Buffer:
        """Returns factor × function(gate / factor) × up, without `up` of the function alone. A number of a gate of
        fewer numbers counts for several of `up`."""
        width = gate.width if up is None else up.width
        self._require(width % gate.width == 0, "a gate of other rows")
        out = self.rows(width, is_of_logits=gate.is_of_logits)
        table = curve(function, factor) if self.dtype == calls.BFLOAT16 else None
        call = calls.GateCall(
            dtype=self.dtype, width=width, each=width // gate.width, gate_stride=gate.stride,
            up_stride=0 if up is None else up.stride, function=calls.FUNCTIONS[function], factor=factor,
            gate=gate.address, up=0 if up is None else up.address,
            curve=address_of(table), out=out.address,
        )  # fmt: skip
        self._add(calls.GATE, gate, call, table, kept)
        return out

    def routes(self, logits: Buffer, router: Router, bias: Weight | None, scales: Weight | None = None) -> ExpertRoutes:
        """Returns the experts that a router chooses by its logits. `bias` and `scales` are float32 [experts]."""
        count, groups = router.num_chosen, router.groups
        allowed = logits.width // groups * (router.groups_chosen if groups > 1 else 1)
        self._require(
            0 < count <= allowed and logits.width % groups == 0 and router.groups_chosen <= groups <= calls.MAX_GROUPS
            and (groups == 1 or router.of_group <= logits.width // groups) and logits.width == logits.stride
            and all(one is None or one.shape == (logits.width,) for one in (bias, scales)),
            "a router of other experts",
        )  # fmt: skip
        found = ExpertRoutes(self._memory(self.max_rows * count * 8), self._memory(self.max_rows * count * 4), count)
        call = calls.RouterCall(
            dtype=self._dtype_of(logits), num_experts=logits.width, num_chosen=count,
            scores=calls.SCORES[router.scores], groups=groups, groups_chosen=router.groups_chosen,
            of_group=router.of_group, is_normed=router.is_normed, logits=logits.address,
            bias=0 if bias is None else bias.address, scales=0 if scales is None else scales.address,
            floor=router.floor, factor=router.factor,
            softcap=router.softcap, threshold=router.threshold, chosen=found.chosen, weights=found.weights,
        )  # fmt: skip
        self._add(calls.ROUTE, logits, call, bias, scales)
        return found

    def experts(
        self, rows: Buffer, routes: ExpertRoutes, experts: PackedExperts | DenseExperts, gating: Gating
    ) -> Buffer:
        """Returns the sum of the experts of each row, down × (function(gate) × up_function(up)) times its weight."""
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._require(rows.width == rows.stride, "experts of other rows")
        is_short = self.dtype == calls.BFLOAT16
        curves = [gating.table(name) if is_short else None for name in (gating.function, gating.up_function)]
        of_gate, of_up = map(address_of, curves)
        if isinstance(experts, PackedExperts):
            sizes = {(one.rows, one.columns) for one in (*experts.gate, *experts.up)}
            sizes |= {(one.columns, one.rows) for one in experts.down}
            self._require(
                is_short and len(sizes) == 1 and {rows.width} == {width for _, width in sizes}, "other experts"
            )
            self._require(
                len(experts.gate) == len(experts.down) and len(experts.up) in (0, len(experts.gate)), "experts"
            )
            lists = [array("Q", [one.address for one in of]) for of in (experts.gate, experts.up, experts.down)]
            gate, up, down = (one.buffer_info()[0] if one else 0 for one in lists)
            packed = calls.ExpertsCall(
                num_chosen=routes.num_chosen, num_experts=len(experts.gate), weighs_rows=gating.weighs_rows,
                rows=rows.address, chosen=routes.chosen, weights=routes.weights, gate=gate, up=up, down=down,
                curve=of_gate, up_curve=of_up, out=out.address,
            )  # fmt: skip
            self._add(calls.EXPERTS, rows, packed, experts, lists, curves)
            return out
        outer, inner = (one.shape[1:][:: -1 if experts.is_turned else 1] for one in (experts.first, experts.last))
        both = 2 if experts.has_up else 1
        self._require(outer == (both * inner[1], rows.width) == (outer[0], inner[0]), "experts of other rows")
        first_bias, last_bias = (one.address for one in experts.biases) if experts.biases else (0, 0)
        dense = calls.DenseExpertsCall(
            dtype=self.dtype, num_chosen=routes.num_chosen, num_experts=experts.first.shape[0], width=rows.width,
            inner=inner[1], outer=outer[0], is_turned=experts.is_turned, step=both if experts.turns_about else 1,
            up_shift=0 if both == 1 else 1 if experts.turns_about else inner[1],
            weighs_rows=gating.weighs_rows, function=calls.FUNCTIONS[gating.function],
            up_function=calls.FUNCTIONS[gating.up_function], slope=gating.slope, limit=gating.limit,
            rows=rows.address, chosen=routes.chosen, weights=routes.weights,
            first=experts.first.address, last=experts.last.address, first_bias=first_bias, last_bias=last_bias,
            curve=of_gate, up_curve=of_up, out=out.address,
        )  # fmt: skip
        self._add(calls.DENSE_EXPERTS, rows, dense, experts, curves)
        return out

    def temper(self, rows: Buffer, offset: int, period: int, factor: float) -> None:
        """Multiplies rows in place by 1 + factor × log(1 + floor((position + offset) / period))."""
        self._require(rows.width == rows.stride and period > 0, "numbers that do not lie side by side")
        self._require(not rows.is_of_logits, "rows without positions")
        call = calls.TemperingCall(
            dtype=self.dtype, width=rows.width, offset=offset, period=period, factor=factor,
            positions=address_of(self._positions), rows=rows.address,
        )  # fmt: skip
        self._add(calls.TEMPER, rows, call)

    def add(self, rows: Buffer, other: Buffer, factor: float = 1.0) -> None:
        """Adds other × factor to rows. A factor that is not 1 rounds the product."""
        self._sum(rows, rows.address, other, factor)

    def scale(self, rows: Buffer, factor: float) -> None:
        """Multiplies rows in place."""
        if factor != 1:
            self._sum(rows, 0, rows, factor)

    def scaled(self, rows: Buffer, factor: float) -> Buffer:
        """Returns rows × factor, and leaves the rows as they are."""
        if factor == 1:
            return rows
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._sum(out, 0, rows, factor)
        return out

    def weighed(self, rows: Buffer, weight: Weight) -> Buffer:
        """Returns rows × weight, [width], number by number."""
        self._require(weight.shape == (rows.width,), "weights of other rows")
        # The same numbers for each row: it is no number behind the one before.
        return self.gated(rows, Buffer(weight.address, rows.width, 0, self.item_bytes), "identity", kept=weight)

    def _sum(self, out: Buffer, one: int, other: Buffer, factor: float) -> None:
        other = self.widened(other) if out.item_bytes == 4 else other
        self._require(out.width == out.stride == other.width == other.stride, "a sum of other rows")
        call = calls.SumCall(
            dtype=self._dtype_of(out), width=out.width, factor=factor, one=one, other=other.address, out=out.address
        )
        self._add(calls.SUM, out, call)

    def mix(
        self, base: Buffer, rows: Sequence[Buffer], factors: Buffer, *, offset: float = 0.0, out: Buffer | None = None
    ) -> Buffer:
        """Returns base + Σ (factor + offset) × rows, with a factor of each row for each of `rows`."""
        everything, width = [base, *rows], base.width
        out = out or self.rows(width, is_of_logits=base.is_of_logits)
        self._require(len(rows) == factors.width <= calls.MAX_STREAMS, "streams of others")
        self._require(all(one.width == one.stride == width for one in (*everything, out)), "streams of other rows")
        call = calls.MixCall(
            dtype=self.dtype, width=width, count=len(rows), factors=factors.address, factor_stride=factors.stride,
            offset=offset, base=base.address, out=out.address,
        )  # fmt: skip
        call.rows[: len(rows)] = [one.address for one in rows]
        self._add(calls.MIX, base, call)
        return out

    def level(self, rows: Buffer, like: Buffer) -> None:
        """Gives rows the root mean square of those of `like`, in place."""
        self._require(rows.width == rows.stride == like.width == like.stride, "levels of other rows")
        call = calls.LevelingCall(dtype=self.dtype, width=rows.width, like=like.address, rows=rows.address)
        self._add(calls.LEVEL, rows, call)

    def cut_off(self, rows: Buffer, deviations: float) -> None:
        """Takes the mean and so many standard deviations of a row from its numbers, in place, down to 0."""
        self._require(rows.width == rows.stride, "numbers that do not lie side by side")
        self._add(
            calls.CUT_OFF,
            rows,
            calls.CutOffCall(dtype=self.dtype, width=rows.width, deviations=deviations, rows=rows.address),
        )

    def beside(self, *parts: Buffer) -> Buffer:
        """Returns a buffer with these rows side by side."""
        out = self.rows(sum(part.width for part in parts), is_of_logits=parts[0].is_of_logits)
        first = 0
        for part in parts:
            self._copy(part, 1, part.width, out.part(first, part.width), part.width, part.width)
            first += part.width
        return out

    def by_parts(self, rows: Buffer, heads: int, *widths: int) -> Buffer:
        """Returns rows of heads with the first part of all heads before the second one, and so on."""
        of_head = sum(widths)
        self._require(rows.width == heads * of_head, "heads of other rows")
        out, first = self.rows(rows.width, is_of_logits=rows.is_of_logits), 0
        for width in widths:
            part = out.part(heads * first, heads * width)
            self._copy(rows.part(first, width), heads, of_head, part, width, width)
            first += width
        return out

    def _copy(self, source: Buffer, heads: int, of_head: int, out: Buffer, to_head: int, count: int) -> None:
        size = self.item_bytes
        call = calls.CopyCall(
            num_heads=heads, num_bytes=count * size, source=source.address, row_bytes=source.stride * size,
            head_bytes=of_head * size, out=out.address, out_row_bytes=out.stride * size, out_head_bytes=to_head * size,
        )  # fmt: skip
        self._add(calls.COPY, source, call)

    def step_sizes(
        self,
        rows: Buffer,
        bias: Weight | None,
        factors: Weight | None = None,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Buffer:
        """Returns factors × softplus(rows + bias) in float32, within limits before the factors. `bias` and `factors`
        are float32, one for each number of a row."""
        is_right = all(one is None or one.shape == (rows.width,) for one in (bias, factors))
        self._require(is_right and rows.item_bytes == self.item_bytes, "steps of other rows")
        out = self.rows(rows.width, item_bytes=4)
        call = calls.StepSizesCall(
            dtype=self.dtype, width=rows.width, row_stride=rows.stride, least=limits[0], most=limits[1],
            rows=rows.address, bias=0 if bias is None else bias.address,
            factors=0 if factors is None else factors.address, out=out.address,
        )  # fmt: skip
        self._add(calls.STEP_SIZES, rows, call, bias, factors)
        return out

    def gated_norm(
        self,
        rows: Buffer,
        gate: Buffer,
        norm: WeightedNorm | None,
        function: str,
        *,
        groups: int = 1,
        gates_first: bool = False,
    ) -> Buffer:
        """Returns function(gate) × norm(rows), or with `gates_first` norm(function(gate) × rows). Each group of numbers
        has its norm, without one none. Weights are float32, those of a row or of each group. The function is silu or
        sigmoid."""
        rows, width = self.widened(rows), rows.width
        weights = width if norm is None else norm.weight.shape[0]
        self._require(
            width % groups == 0 and weights in (width, width // groups) and rows.stride == width == gate.width
            and gate.item_bytes == self.item_bytes and function in ("silu", "sigmoid"),
            "a gate of other rows",
        )  # fmt: skip
        out = self.rows(width)
        call = calls.GatedNormCall(
            dtype=self.dtype, width=width, group=width // groups, gates_first=gates_first, num_weights=weights,
            function=calls.FUNCTIONS[function], gate_stride=gate.stride, rows=rows.address, gate=gate.address,
            out=out.address,
        )  # fmt: skip
        if norm is not None:
            call.weight, call.epsilon = norm.weight.address, norm.epsilon
        self._add(calls.GATED_NORM, rows, call, norm)
        return out

    def convolution(
        self, rows: Buffer, weight: Weight, bias: Weight | None, state: StateLocation, *, has_silu: bool = False
    ) -> Buffer:
        """Returns the causal convolution of each channel alone. `weight` is [channels, kernel], `bias` [channels]."""
        channels, kernel = weight.shape
        self._require(
            channels == rows.width and kernel <= calls.MAX_KERNEL and (bias is None or bias.shape == (channels,))
            and state.is_of((channels, kernel), self.item_bytes) and rows.item_bytes == self.item_bytes,
            "a convolution of other rows",
        )  # fmt: skip
        out = self.rows(channels)
        call = calls.ConvolutionCall(
            dtype=self.dtype, channels=channels, kernel=kernel, has_silu=has_silu, row_stride=rows.stride,
            rows=rows.address, weight=weight.address, bias=0 if bias is None else bias.address, out=out.address,
        )  # fmt: skip
        kept = self._kept_behind(channels * self.item_bytes)
        self._over_states(calls.CONVOLVE, rows, calls.PlannedConvolutionCall(call, state.call, kept), weight, bias)
        return out

    def delta_rule(
        self, query: Buffer, key: Buffer, value: Buffer, decay: Buffer, beta: Buffer, state: StateLocation
    ) -> Buffer:
        """Returns the gated delta rule of heads, [heads × value_dim]. Queries and keys get length 1; those of a head
        may be of several. They and the values are of the convolution before it. `decay` has float32 logarithms, one of
        each head or one of each number of a key, `beta` float32 numbers, one of each head."""
        heads, key_dim, value_dim = state.shape
        key_heads = key.width // key_dim
        self._require(
            query.width == key.width == key_heads * key_dim and heads % key_heads == 0
            and value.width == heads * value_dim and decay.width in (heads, heads * key_dim) and beta.width == heads
            and all(one.item_bytes == 4 and one.stride == one.width for one in (decay, beta))
            and all(one.item_bytes == self.item_bytes for one in (query, key, value))
            and state.is_of((heads, key_dim, value_dim), 4),
            "a delta rule of other rows",
        )  # fmt: skip
        out = self.rows(value.width)
        call = calls.DeltaRuleCall(
            dtype=self.dtype, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim,
            decay_dim=decay.width // heads, query=query.address, key=key.address, value=value.address,
            query_stride=query.stride, key_stride=key.stride, value_stride=value.stride, decay=decay.address,
            beta=beta.address, out=out.address, epsilon=_LENGTH_EPSILON,
        )  # fmt: skip
        kept = (self._kept_behind(one.width * 4) for one in (decay, beta))
        self._over_states(calls.DELTA_RULE, query, calls.PlannedDeltaRuleCall(call, state.call, *kept))
        return out

    def state_space(
        self,
        rows: Buffer,
        into: Buffer,
        out_of: Buffer,
        steps: Buffer,
        decay: Weight,
        skip: Weight | None,
        state: StateLocation,
    ) -> Buffer:
        """Returns the state space of Mamba 2 in float32, [heads × dim], for `rows` of that form. They, `into` and
        `out_of` (B and C, [groups × state_dim]) are of the convolution before it. `steps` are float32, one of each
        head, as are `decay` and `skip` (A and D)."""
        heads, dim, state_dim = state.shape
        groups = into.width // state_dim
        self._require(
            rows.width == heads * dim and into.width == out_of.width == groups * state_dim and heads % groups == 0
            and steps.width == steps.stride == heads and steps.item_bytes == 4
            and all(one is None or one.shape == (heads,) for one in (decay, skip))
            and all(one.item_bytes == self.item_bytes for one in (rows, into, out_of))
            and state.is_of((heads, dim, state_dim), 4),
            "a state space of other rows",
        )  # fmt: skip
        out = self.rows(rows.width, item_bytes=4)
        call = calls.StateSpaceCall(
            dtype=self.dtype, heads=heads, groups=groups, dim=dim, state_dim=state_dim, rows=rows.address,
            into=into.address, from_=out_of.address, row_stride=rows.stride, into_stride=into.stride,
            from_stride=out_of.stride, steps=steps.address, decay=decay.address,
            skip=0 if skip is None else skip.address, out=out.address,
        )  # fmt: skip
        planned = calls.PlannedStateSpaceCall(call, state.call, self._kept_behind(heads * 4))
        self._over_states(calls.STATE_SPACE, rows, planned, decay, skip)
        return out

    def _kept_behind(self, row_bytes: int) -> int:
        """Returns how many bytes are kept of each row before others, `row_bytes` of it."""
        before = self.kept_bytes
        self.kept_bytes += -(-row_bytes // 4) * 4
        return before

    def _over_states(self, kind: int, rows: Buffer, call: ctypes.Structure, *kept: Any) -> None:
        self._add(kind, rows, call, *kept)
        self._of_states.append(self._calls[-1])

    def pictures(self, rows: Buffer, level: int = 0) -> None:
        """Puts the encoder's rows in the place of those of pictures, or adds those of a further level to them."""
        call = calls.ScatterCall(dtype=self.dtype, width=rows.width, adds=level > 0, rows=rows.address)
        self._require(rows.width == rows.stride and level == len(self._of_pictures), "levels of pictures in order")
        self._of_pictures.append(call)
        self._add(calls.SCATTER, rows, call)

    @staticmethod
    def _dtype_of(rows: Buffer) -> int:
        return calls.FLOAT32 if rows.item_bytes == 4 else calls.BFLOAT16

    def _add(self, kind: int, rows: Buffer, call: ctypes.Structure, *kept: Any) -> None:
        self._calls.append((kind, rows.is_of_logits, call))
        self.made_of.append((call, kept))

    def _memory(self, num_bytes: int) -> int:
        """Returns the address of memory, which the context of `scratch` gives back."""
        free = self._free.get(num_bytes)
        if self._scratch is not None and free:
            address = free.pop()
        else:
            memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
            address = -(-address_of(memory) // _ALIGNMENT) * _ALIGNMENT
            self.buffers[address] = memory[address - address_of(memory) :][:num_bytes]
        if self._scratch is not None:
            self._scratch.append((num_bytes, address))
        return address

    def _numbers(self, count: int) -> np.ndarray:
        numbers = np.zeros(count, np.int64)
        self._kept.append(numbers)
        return numbers

    @staticmethod
    def _require(is_right: bool, what: str) -> None:
        if not is_right:
            raise ValueError(what)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(
        self,
        runs: Sequence[PlannedRun],
        ids: np.ndarray,
        positions: np.ndarray,
        threads: int,
        pictures: EncodedRows | None = None,
    ) -> None:
        """Computes a step: `logits` and `hidden` have its results until the next one.

        `ids` are int64 [rows], `positions` [1, rows] or [3, rows]. Memory must have room for the rows. Raises
        `IndexError` for a token or a position that is none, `MemoryError`.
        """
        num_rows, num_logits = len(ids), sum(run.num_logits for run in runs)
        self._require(0 < num_rows <= self.max_rows and num_logits <= num_rows, "a step of more rows than the plan has")
        ends = accumulate(run.num_rows for run in runs)
        logit_rows = [np.arange(end - run.num_logits, end) for end, run in zip(ends, runs, strict=True)]
        if not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise IndexError(f"a token is none of the {self.vocab_size}: {ids.min()} or {ids.max()}")
        if positions.max() >= self._num_positions:
            raise IndexError(f"a position is none of the {self._num_positions}: {positions.max()}")
        self._logit_rows[:num_logits] = np.concatenate(logit_rows)
        for count, found in self._ids_below.items():
            found[:num_rows] = np.where(ids < count, ids, 0)
        self._positions[:, :num_rows] = positions
        for level, call in enumerate(self._of_pictures):
            call.count = 0 if pictures is None else len(pictures.numbers)
            if pictures is not None:
                call.numbers, call.from_ = address_of(pictures.numbers), pictures.level(level)
        self._compute(
            "all" if num_logits else "without logits", runs, [run.num_rows for run in runs], num_logits, threads
        )

    def replay(self, run: PlannedRun, num_rows: int, threads: int) -> None:
        """Computes the states behind the first rows of a run again, from those before it and what it kept."""
        self._compute("states", [run], [num_rows], 0, threads)

    def _compute(
        self, part: _Part, runs: Sequence[PlannedRun], num_rows: Sequence[int], num_logits: int, threads: int
    ) -> None:
        """Computes all operations, those without logits, or those over states again."""
        is_replay = part == "states"
        if part not in self._made:
            of_part = self._of_states if is_replay else self._calls
            self._made[part] = _operations([one for one in of_part if part == "all" or not one[1]])
        lists = [[array("Q", one) for one in (run.tables, run.befores, run.states)] for run in runs]
        described = (calls.PlanRun * len(runs))()
        for number, (run, of_run) in enumerate(zip(runs, lists, strict=True)):
            spans = run.spans.buffer_info()[0], len(run.spans) // 2
            addresses = (one.buffer_info()[0] for one in of_run)
            described[number] = calls.PlanRun(
                run.start, num_rows[number], run.num_logits, *spans, *addresses, address_of(run.kept), run.num_rows
            )
        step = calls.PlanStep(
            sum(num_rows), num_logits, len(runs), self._page_tokens, is_replay, ctypes.addressof(described), threads
        )
        if self._operators.run(bytes(self._made[part][1]), bytes(step)):
            raise MemoryError("there is no memory left for a step")

    def put(self, to: Buffer, rows: np.ndarray) -> None:
        """Fills the first rows of a buffer, which a step reads, with uint8 [rows, bytes of a row]."""
        self.buffers[to.address][: rows.size] = rows.reshape(-1)

    def copied(self, rows: Buffer, num_rows: int) -> np.ndarray:
        """Returns a copy of the first rows of a buffer, uint8 [rows, bytes of a row]."""
        size = num_rows * rows.width * rows.item_bytes
        return np.frombuffer(bytearray(ctypes.string_at(rows.address, size)), np.uint8).reshape(num_rows, -1)


def _parts(matrix: AnyMatrix) -> Sequence[Matrix | DenseMatrix]:
    return matrix.parts if isinstance(matrix, JoinedMatrix) else [matrix]


def _operations(made: Sequence[tuple[int, bool, ctypes.Structure]]) -> tuple[Any, calls.Operations]:
    found = (calls.Operation * len(made))()
    for place, (kind, is_of_logits, call) in zip(found, made, strict=True):
        place.kind, place.is_of_logits, place.call = kind, is_of_logits, ctypes.addressof(call)
    return found, calls.Operations(len(found), ctypes.addressof(found))
