"""A step of a model, written down: operator calls in order, over weights and buffers at fixed addresses.

A family (`model.families`) writes the plan of a model once, and `plan_runner` computes steps by it. What an operator
computes for a row depends on that row and the memory of its sequence. A call with other sizes than its operands have is
refused with `ValueError`, because operators check none.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from diskprefix.native import address_of, calls
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.config import NGramConfig
from diskprefix.runtime.plan.curves import curve
from diskprefix.runtime.plan.operands import (
    AnyMatrix,
    Buffer,
    ChosenBlocks,
    DenseExperts,
    DenseMatrix,
    ExpertRoutes,
    Gating,
    HeadMatrices,
    JoinedMatrix,
    Location,
    PackedExperts,
    Rotary,
    RotaryAngles,
    Router,
    StateLocation,
    TableRows,
    Weight,
    WeightedNorm,
)
from diskprefix.runtime.plan.plan_memory import PlanMemory, StepInputs

_ITEM_BYTES = {calls.FLOAT32: 4, calls.BFLOAT16: 2}
_MAX_ROTARY = 1024
"""`MAX_ROTARY` of `native/source/rows.h`."""
_LENGTH_EPSILON = 1e-6
"""That of transformers' `l2norm`."""


class OperatorCall(NamedTuple):
    """A call of an operator. `kept` are the weights and tables that it reads."""

    kind: int
    is_of_logits: bool
    call: ctypes.Structure
    kept: tuple[Any, ...]


class ComputePlan:
    """The operations of a step of at most `max_rows` tokens."""

    hidden: Buffer
    """The hidden states after the last norm."""
    logits: Buffer
    operations: list[OperatorCall]
    """All, in order."""
    state_operations: list[OperatorCall]
    """Those over states."""
    picture_calls: list[Any]
    """The calls that put in the rows of pictures, by level."""
    layers: list[range]
    """The numbers of the operations of each layer."""
    kept_bytes: int
    """The bytes that operations over states keep of a row, to compute the states again."""

    def __init__(self, dtype: int, max_rows: int, vocab_size: int) -> None:
        self.dtype, self.max_rows, self.vocab_size = dtype, max_rows, vocab_size
        self.operations, self.state_operations, self.picture_calls, self.layers = [], [], [], []
        self.inputs, self._memory = StepInputs(max_rows, vocab_size), PlanMemory()
        self.kept_bytes = 0

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def buffers(self) -> dict[int, np.ndarray]:
        """The buffers by address, uint8 [bytes]."""
        return self._memory.buffers

    # -- buffers and calls --------------------------------------------------------------------------------------------

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Gives a context for a layer, whose buffers later layers use again."""
        first = len(self.operations)
        with self._memory.scratch():
            yield
        self.layers.append(range(first, len(self.operations)))

    def rows(self, width: int, *, is_of_logits: bool = False, item_bytes: int = 0) -> Buffer:
        """Returns a new buffer."""
        item_bytes = item_bytes or self.item_bytes
        return Buffer(self._memory.take(self.max_rows * width * item_bytes), width, width, item_bytes, is_of_logits)

    def _call(
        self, kind: int, *, result: Buffer | int | None = None, keeps: Sequence[Any] = (), **operands: Any
    ) -> Buffer:
        """Adds a call, and returns its result: the buffer `result`, a new one of this width, or without a result the
        first buffer of the operands, which is changed in place.

        An operand is set as the field of its name. A buffer is its address; its stride is set where the call has a
        field for it, and without one its numbers must lie side by side. Weights, norms and arrays are set as their
        addresses, and are kept, as are the objects in `keeps`. By default, `dtype` is the plan's and `width` the first
        buffer's. Raises `ValueError` if only some of the buffers are limited to rows that get logits.
        """
        call, kept = calls.CALLS[kind](), list[Any]()
        buffers = [operand for operand in operands.values() if isinstance(operand, Buffer)]
        if isinstance(result, int):
            result = self.rows(result, is_of_logits=buffers[0].is_of_logits)
        if result is not None:
            buffers.append(result)
            operands["out"] = result
        if hasattr(call, "dtype"):
            operands.setdefault("dtype", self.dtype)
        if hasattr(call, "width"):
            operands.setdefault("width", buffers[0].width)
        for name, operand in operands.items():
            assert hasattr(call, name), f"{type(call).__name__} has no {name}"
            if isinstance(operand, Buffer):
                _set_buffer(call, name, operand)
            elif isinstance(operand, list):
                getattr(call, name)[: len(operand)] = operand
            elif isinstance(operand, int | float | ctypes.Structure):
                setattr(call, name, operand)
            else:
                kept.append(operand)
                _set_weights(call, name, operand)
        of_logits = {buffer.is_of_logits for buffer in buffers}
        _require(len(of_logits) == 1, "rows of other tokens")
        self.operations.append(OperatorCall(kind, of_logits.pop(), call, (*kept, *keeps)))
        return buffers[0] if result is None else result

    # -- rows and their numbers ---------------------------------------------------------------------------------------

    def widened(self, rows: Buffer) -> Buffer:
        """Returns the rows in float32."""
        if rows.item_bytes == 4:
            return rows
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits, item_bytes=4)
        return self._call(calls.WIDEN, rows=rows, result=out)

    def narrowed(self, rows: Buffer) -> Buffer:
        """Returns the rows in the type of the plan."""
        if rows.item_bytes == self.item_bytes:
            return rows
        return self._call(calls.WIDEN, rows=rows, narrows=True, result=rows.width)

    def embeddings(self, table: Matrix | DenseMatrix) -> Buffer:
        """Looks up the step's tokens in a table. Tokens beyond its end get row 0."""
        ids = self.inputs.ids_below(min(table.rows, self.vocab_size))
        if isinstance(table, Matrix):
            return self._call(calls.LOOK_UP, ids=address_of(ids), matrix=table, result=self.rows(table.columns))
        return self._pick(table.weight.address, ids, self.rows(table.columns), table.weight)

    def of_positions(self, table: Matrix | DenseMatrix, offset: int) -> Buffer:
        """Looks up the step's positions in a table. Row `offset` belongs to position 0."""
        _require(isinstance(table, DenseMatrix), "a table of quants for positions")
        assert isinstance(table, DenseMatrix)
        self.inputs.num_positions = table.rows - offset
        start = table.weight.address + offset * table.columns * self.item_bytes
        return self._pick(start, self.inputs.positions, self.rows(table.columns), table.weight)

    def select_logit_rows(self, rows: Buffer) -> Buffer:
        """Returns the rows that get logits."""
        if rows.is_of_logits:
            return rows
        _require(rows.width == rows.stride, "numbers that do not lie side by side")
        out = self.rows(rows.width, is_of_logits=True, item_bytes=rows.item_bytes)
        return self._pick(rows.address, self.inputs.logit_rows, out)

    def _pick(self, table: int, numbers: np.ndarray, out: Buffer, *keeps: Any) -> Buffer:
        """Picks the rows of these numbers from the rows at the address `table`."""
        row_bytes = out.width * out.item_bytes
        return self._call(
            calls.PICK, rows=table, numbers=address_of(numbers), row_bytes=row_bytes, result=out, keeps=keeps
        )

    def pictures(self, rows: Buffer, level: int = 0) -> None:
        """Replaces the rows of pictures by the encoder's rows, or adds the encoder's rows of a further level."""
        _require(level == len(self.picture_calls), "levels of pictures in order")
        self._call(calls.SCATTER, rows=rows, adds=level > 0)
        self.picture_calls.append(self.operations[-1].call)

    def norm(self, rows: Buffer, norm: WeightedNorm) -> Buffer:
        """Returns the norm of each row."""
        rows = self.narrowed(rows)
        _require(norm.fits(1, rows.width), f"a norm of {norm.weight.shape[0]} numbers, of rows of {rows.width}")
        return self._call(calls.NORM, rows=rows, weight=norm, result=rows.width)

    def gated(self, gate: Buffer, up: Buffer | None, function: str, factor: float = 1.0, *, kept: Any = None) -> Buffer:
        """Returns factor × function(gate / factor) × up; without `up`, factor × function(gate / factor). In a gate with
        fewer numbers than `up`, each number is used for several of `up`."""
        width = gate.width if up is None else up.width
        _require(width % gate.width == 0, "a gate of other rows")
        table = curve(function, factor) if self.dtype == calls.BFLOAT16 else None
        return self._call(
            calls.GATE, gate=gate, up=up or 0, width=width, each=width // gate.width,
            function=calls.FUNCTIONS[function], factor=factor, curve=table, result=width, keeps=[kept],
        )  # fmt: skip

    def scale_by_position(self, rows: Buffer, offset: int, period: int, factor: float) -> None:
        """Multiplies rows in place by 1 + factor × log(1 + floor((position + offset) / period))."""
        _require(period > 0 and not rows.is_of_logits, "rows without positions")
        positions = address_of(self.inputs.positions)
        self._call(calls.SCALE_BY_POSITION, rows=rows, positions=positions, offset=offset, period=period, factor=factor)

    def add(self, rows: Buffer, other: Buffer, factor: float = 1.0) -> None:
        """Adds other × factor to rows. A factor that is not 1 rounds the product."""
        self._sum(rows, rows, other, factor)

    def scale(self, rows: Buffer, factor: float) -> None:
        """Multiplies rows in place."""
        if factor != 1:
            self._sum(rows, None, rows, factor)

    def scaled(self, rows: Buffer, factor: float) -> Buffer:
        """Returns rows × factor, and leaves the rows as they are."""
        if factor == 1:
            return rows
        out = self.rows(rows.width, is_of_logits=rows.is_of_logits)
        self._sum(out, None, rows, factor)
        return out

    def weighed(self, rows: Buffer, weight: Weight) -> Buffer:
        """Returns rows × weight, [width], number by number."""
        _require(weight.shape == (rows.width,), "weights of other rows")
        # A stride of 0: each row is multiplied by the same numbers.
        return self.gated(rows, self._repeated(weight, rows), "identity", kept=weight)

    def _repeated(self, weight: Weight, rows: Buffer) -> Buffer:
        return Buffer(weight.address, rows.width, 0, self.item_bytes, rows.is_of_logits)

    def _sum(self, out: Buffer, first: Buffer | None, second: Buffer, factor: float) -> None:
        """Sets `out` to first + second × factor."""
        second = self.widened(second) if out.item_bytes == 4 else second
        _require(out.width == second.width, "a sum of other rows")
        self._call(calls.SUM, dtype=_dtype_of(out), first=first or 0, second=second, factor=factor, result=out)

    def mix(
        self, base: Buffer, rows: Sequence[Buffer], factors: Buffer, *, offset: float = 0.0, out: Buffer | None = None
    ) -> Buffer:
        """Returns base + Σ (factor + offset) × rows, with a factor of each row for each of `rows`."""
        _require(len(rows) == factors.width <= calls.MAX_STREAMS, "streams of others")
        streams = [*rows, base if out is None else out]
        _require(all(stream.width == stream.stride == base.width for stream in streams), "streams of other rows")
        return self._call(
            calls.MIX, base=base, rows=[stream.address for stream in rows], count=len(rows), factors=factors,
            offset=offset, result=out or base.width,
        )  # fmt: skip

    def match_rms(self, rows: Buffer, like: Buffer) -> None:
        """Scales each row, in place, to the root mean square of the same row of `like`."""
        _require(rows.width == like.width, "levels of other rows")
        self._call(calls.MATCH_RMS, rows=rows, like=like)

    def sparsify_gate(self, rows: Buffer, deviations: float) -> None:
        """Subtracts mean + deviations × standard deviation of each row from its numbers, in place. Negative numbers
        become 0."""
        self._call(calls.SPARSIFY_GATE, rows=rows, deviations=deviations)

    # -- copies: parts of rows side by side ---------------------------------------------------------------------------

    def copy(self, rows: Buffer) -> Buffer:
        """Returns the rows in a new buffer."""
        return self._copy(rows, 1, rows.width, self._like(rows), rows.width, rows.width)

    def concat_columns(self, *parts: Buffer) -> Buffer:
        """Returns a buffer with these rows side by side."""
        out, first = self.rows(sum(part.width for part in parts), is_of_logits=parts[0].is_of_logits), 0
        for part in parts:
            self._copy(part, 1, part.width, out.part(first, part.width), part.width, part.width)
            first += part.width
        return out

    def split_heads(self, rows: Buffer, heads: int, *widths: int) -> Buffer:
        """Splits each head into parts of these widths. Returns rows with the first parts of all heads, then the
        second parts, and so on."""
        of_head = sum(widths)
        _require(rows.width == heads * of_head, "heads of other rows")
        out, first = self._like(rows), 0
        for width in widths:
            part = out.part(heads * first, heads * width)
            self._copy(rows.part(first, width), heads, of_head, part, width, width)
            first += width
        return out

    def per_group(self, rows: Buffer, groups: int, first: int, width: int) -> Buffer:
        """Returns numbers `first` to `first + width - 1` of each of the equal groups of a row."""
        if groups == 1:
            return rows.part(first, width)
        out = self.rows(groups * width)
        _require(rows.width % groups == 0 and first + width <= rows.width // groups, "groups of other rows")
        return self._copy(rows.part(first, width), groups, rows.width // groups, out, width, width)

    def _like(self, rows: Buffer) -> Buffer:
        return self.rows(rows.width, is_of_logits=rows.is_of_logits)

    def _copy(self, source: Buffer, heads: int, of_head: int, out: Buffer, to_head: int, count: int) -> Buffer:
        """Copies the first `count` numbers of each head. Heads are `of_head` and `to_head` numbers apart."""
        size = self.item_bytes
        return self._call(
            calls.COPY, source=source, num_heads=heads, head_bytes=of_head * size, num_bytes=count * size,
            out_head_bytes=to_head * size, result=out,
        )  # fmt: skip

    # -- products -----------------------------------------------------------------------------------------------------

    def product(self, rows: Buffer, matrix: AnyMatrix) -> Buffer:
        """Returns the product of each row with a matrix."""
        return self.products(rows, matrix)[0]

    def products(self, rows: Buffer, *matrices: AnyMatrix) -> list[Buffer]:
        """Returns the products of each row with several matrices. Those of packed matrices are computed together. The
        results of the parts of a joined matrix are put in order."""
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
            _require(matrix.columns == rows.width, f"a product of {size} and rows of {rows.width}")
        outs = [
            self.rows(matrix.rows, is_of_logits=rows.is_of_logits, item_bytes=rows.item_bytes) for matrix in matrices
        ]
        together = [(matrix, out) for matrix, out in zip(matrices, outs, strict=True) if isinstance(matrix, Matrix)]
        for first in range(0, len(together), calls.MAX_MATRICES):
            part = together[first : first + calls.MAX_MATRICES]
            self._call(
                calls.PRODUCT, rows=rows, num_matrices=len(part), matrices=[matrix.address for matrix, _ in part],
                outs=[out.address for _, out in part], keeps=[part],
            )  # fmt: skip
        for matrix, out in zip(matrices, outs, strict=True):
            if isinstance(matrix, DenseMatrix):
                self._dense(rows, matrix, out)
        return outs

    def _dense(self, rows: Buffer, matrix: DenseMatrix, out: Buffer) -> None:
        _require(rows.width == rows.stride, "numbers that do not lie side by side")
        self._call(
            calls.DENSE, dtype=_dtype_of(rows), rows=rows, num_heads=1, inner=matrix.columns, outer=matrix.rows,
            matrices=matrix.weight.address, is_transposed=True, line_stride=matrix.columns,
            bias=matrix.bias.address if matrix.bias else 0, result=out, keeps=[matrix],
        )  # fmt: skip

    def heads_times(self, rows: Buffer, matrices: HeadMatrices | Sequence[Matrix], rest: int = 0) -> Buffer:
        """Multiplies the first numbers of each head by its matrix, and copies its last `rest` numbers:
        [heads × (inner + rest)] becomes [heads × (outer + rest)]."""
        if isinstance(matrices, HeadMatrices):
            heads, inner, outer = matrices.heads, matrices.inner, matrices.outer
        else:
            heads, (inner, outer) = len(matrices), (matrices[0].columns, matrices[0].rows)
        of_head, to_head = inner + rest, outer + rest
        _require(rows.width == heads * of_head, "heads of other rows")
        where: dict[str, Any] = {"rows": rows, "num_heads": heads, "head_stride": of_head, "out_head_stride": to_head}
        if isinstance(matrices, HeadMatrices):
            out = self._call(
                calls.DENSE, **where, inner=inner, outer=outer, matrices=matrices, matrix_stride=matrices.stride,
                is_transposed=matrices.is_transposed, line_stride=inner if matrices.is_transposed else outer,
                result=heads * to_head,
            )  # fmt: skip
        else:
            addresses = array("Q", [matrix.address for matrix in matrices])
            out = self._call(
                calls.HEAD_PRODUCT, **where, matrices=addresses.buffer_info()[0], result=heads * to_head,
                keeps=[matrices, addresses],
            )  # fmt: skip
        if rest:
            self._copy(rows.part(inner, rest), heads, of_head, out.part(outer, rest), to_head, rest)
        return out

    # -- attention ----------------------------------------------------------------------------------------------------

    def angles(self, rotary: Rotary) -> RotaryAngles:
        """Returns the angles of the step's positions."""
        half = len(rotary.frequencies)
        cosines, sines = self.rows(half), self.rows(half)
        axes = None if rotary.axes is None else np.ascontiguousarray(rotary.axes, np.int64)
        self._call(
            calls.ANGLES, cosines=cosines, sines=sines, half=half, factor=rotary.factor,
            positions=address_of(self.inputs.positions), axis_stride=self.max_rows,
            frequencies=np.ascontiguousarray(rotary.frequencies, np.float32), axes=axes,
        )  # fmt: skip
        return RotaryAngles(cosines, sines, rotary.pairing, rotary.first)

    def angles_of_logits(self, angles: RotaryAngles) -> RotaryAngles:
        """Returns the angles of the rows that get logits."""
        cosines, sines = self.select_logit_rows(angles.cosines), self.select_logit_rows(angles.sines)
        return angles._replace(cosines=cosines, sines=sines)

    def norm_rotate_store(
        self,
        rows: Buffer,
        dim: int,
        *,
        norm: WeightedNorm | None = None,
        angles: RotaryAngles | None = None,
        to: Location | None = None,
    ) -> None:
        """Normalises each head of the rows, rotates it by the angles, in place, and stores it at `to`."""
        num_heads, given = rows.width // dim, dict[str, Any]()
        _require(rows.width % dim == 0, "heads of other rows")
        if norm is not None:
            _require(norm.fits(1, dim) or norm.fits(num_heads, dim), "a norm of other heads")
            given["norm_stride"] = 0 if norm.fits(1, dim) else norm.weight.shape[0] // num_heads
        if angles is not None:
            half = angles.cosines.width
            _require(angles.first + 2 * half <= dim and 2 * half <= _MAX_ROTARY, "angles of others")
            given |= {"cosines": angles.cosines, "sines": angles.sines, "half": half}
            given |= {"pairing": angles.pairing, "rotary_first": angles.first}
        if to is not None:
            _require(to.has_room(num_heads, dim, self.item_bytes), "memory of another form")
        place = {"table": -1} if to is None else {"table": to.table, "to": to.call}
        self._call(calls.NORM_ROTATE_STORE, rows=rows, num_heads=num_heads, dim=dim, norm=norm, **given, **place)

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
        chosen: ChosenBlocks | None = None,
    ) -> Buffer:
        """Returns the attention of each row of queries to its own token and the tokens before it: at most `window`
        tokens, only the tokens of its chunk, or those of the `chosen` blocks. With `sees_pictures` a token of a picture
        sees all of the picture. `sinks` is float32."""
        num_heads = query.width // key_dim
        sizes = (keys, key_dim), (values, value_dim)
        has_room = all(memory.has_room(num_kv_heads, dim, self.item_bytes) for memory, dim in sizes)
        _require(num_heads % num_kv_heads == 0, "attention of other heads")
        _require(has_room, "memory of another form")
        _require(chosen is None or chosen.is_of_logits == query.is_of_logits, "blocks of other rows")
        operands_of_blocks: dict[str, Any] = {} if chosen is None else chosen.operands
        return self._call(
            calls.ATTEND, query=query, query_head_stride=key_dim, num_heads=num_heads, num_kv_heads=num_kv_heads,
            key_dim=key_dim, value_dim=value_dim, window=window, chunk=chunk, scale=scale, softcap=softcap, sinks=sinks,
            table=keys.table, keys=keys.call, value_table=values.table, values=values.call,
            sees_pictures=sees_pictures, result=num_heads * value_dim,
            **operands_of_blocks,
        )  # fmt: skip

    def pool_keys(self, keys: Location, block: int, norm: WeightedNorm, rotary: Rotary) -> None:
        """Replaces the key of the last token of each block of tokens by one key for the block: the mean of its keys,
        normed and rotated by the position of its first token."""
        half = len(rotary.frequencies)
        _require(keys.has_room(1, keys.dim, self.item_bytes) and norm.fits(1, keys.dim), "memory of another form")
        _require(2 * half <= keys.dim and not rotary.first and rotary.pairing == calls.Pairing.HALVES, "other angles")
        frequencies = np.ascontiguousarray(rotary.frequencies, np.float32)
        call = calls.PoolKeysCall(
            dtype=self.dtype, dim=keys.dim, block=block, half=half, factor=rotary.factor,
            frequencies=address_of(frequencies), table=keys.table, keys=keys.call,
        )  # fmt: skip
        _set_weights(call, "norm", norm)
        self.operations.append(OperatorCall(calls.POOL_KEYS, False, call, (norm, frequencies)))

    def choose_blocks(self, query: Buffer, keys: Location, num_heads: int, block: int, num_chosen: int) -> ChosenBlocks:
        """Returns the blocks of tokens that the heads of a row of queries choose."""
        _require(query.width == num_heads * keys.dim, "queries of other heads")
        _require(keys.has_room(1, keys.dim, self.item_bytes), "memory of another form")
        chosen = self._memory.take(self.max_rows * num_chosen * 4)
        self._call(
            calls.CHOOSE_BLOCKS, query=query, num_heads=num_heads, dim=keys.dim, block=block, num_chosen=num_chosen,
            table=keys.table, keys=keys.call, chosen=chosen,
        )  # fmt: skip
        return ChosenBlocks(chosen, block, num_chosen, query.is_of_logits)

    # -- experts ------------------------------------------------------------------------------------------------------

    def routes(self, logits: Buffer, router: Router, bias: Weight | None, scales: Weight | None = None) -> ExpertRoutes:
        """Returns the experts that a router chooses by its logits. `bias` and `scales` are float32 [experts]."""
        count, groups = router.num_chosen, router.groups
        allowed = logits.width // groups * (router.groups_chosen if groups > 1 else 1)
        _require(
            0 < count <= allowed and logits.width % groups == 0 and router.groups_chosen <= groups <= calls.MAX_GROUPS
            and (groups == 1 or router.of_group <= logits.width // groups)
            and all(weight is None or weight.shape == (logits.width,) for weight in (bias, scales)),
            "a router of other experts",
        )  # fmt: skip
        chosen, weights = (self._memory.take(self.max_rows * count * item_bytes) for item_bytes in (8, 4))
        self._call(
            calls.ROUTE, dtype=_dtype_of(logits), logits=logits, num_experts=logits.width, num_chosen=count,
            scores=calls.SCORES[router.scores], groups=groups, groups_chosen=router.groups_chosen,
            of_group=router.of_group, is_normed=router.is_normed, bias=bias, scales=scales, floor=router.floor,
            factor=router.factor, softcap=router.softcap, threshold=router.threshold, chosen=chosen, weights=weights,
        )  # fmt: skip
        return ExpertRoutes(chosen, weights, count)

    def experts(
        self, rows: Buffer, routes: ExpertRoutes, experts: PackedExperts | DenseExperts, gating: Gating
    ) -> Buffer:
        """Returns the sum over the experts of each row of weight × down × (function(gate) × up_function(up))."""
        is_short = self.dtype == calls.BFLOAT16
        curves = [gating.table(name) if is_short else None for name in (gating.function, gating.up_function)]
        of_gate, of_up = map(address_of, curves)
        common = {
            "rows": rows, **routes._asdict(), "weighs_rows": gating.weighs_rows, "curve": of_gate, "up_curve": of_up,
            "result": rows.width,
        }  # fmt: skip
        if isinstance(experts, PackedExperts):
            _require(is_short, "packed experts of float32")
            return self._packed_experts(experts, curves, common)
        return self._dense_experts(experts, gating, curves, common)

    def _packed_experts(self, experts: PackedExperts, curves: list[Any], common: dict[str, Any]) -> Buffer:
        sizes = {(matrix.rows, matrix.columns) for matrix in (*experts.gate, *experts.up)}
        sizes |= {(matrix.columns, matrix.rows) for matrix in experts.down}
        _require(len(sizes) == 1 and {common["rows"].width} == {width for _, width in sizes}, "other experts")
        _require(len(experts.gate) == len(experts.down) and len(experts.up) in (0, len(experts.gate)), "experts")
        parts = experts.gate, experts.up, experts.down
        lists = [array("Q", [matrix.address for matrix in part]) for part in parts]
        gate, up, down = (addresses.buffer_info()[0] if addresses else 0 for addresses in lists)
        return self._call(
            calls.EXPERTS, **common, num_experts=len(experts.gate), gate=gate, up=up, down=down,
            keeps=[experts, lists, curves],
        )  # fmt: skip

    def _dense_experts(
        self, experts: DenseExperts, gating: Gating, curves: list[Any], common: dict[str, Any]
    ) -> Buffer:
        first, last = experts.first, experts.last
        outer, inner = (weight.shape[1:][:: -1 if experts.is_transposed else 1] for weight in (first, last))
        both, width = 2 if experts.has_up else 1, common["rows"].width
        _require(outer == (both * inner[1], width) == (outer[0], inner[0]), "experts of other rows")
        first_bias, last_bias = (bias.address for bias in experts.biases) if experts.biases else (0, 0)
        return self._call(
            calls.DENSE_EXPERTS, **common, num_experts=first.shape[0], inner=inner[1], outer=outer[0],
            is_transposed=experts.is_transposed, step=both if experts.is_interleaved else 1,
            up_shift=0 if both == 1 else 1 if experts.is_interleaved else inner[1],
            function=calls.FUNCTIONS[gating.function], up_function=calls.FUNCTIONS[gating.up_function],
            slope=gating.slope, limit=gating.limit, first=first.address, last=last.address, first_bias=first_bias,
            last_bias=last_bias, keeps=[experts, curves],
        )  # fmt: skip

    # -- streams of hidden states -------------------------------------------------------------------------------------

    def repeated(self, rows: Buffer, count: int) -> Buffer:
        """Returns rows with the same numbers in each of `count` streams, side by side."""
        return self.concat_columns(*[rows] * count)

    def mean_of_streams(self, gates: Buffer, streams: Buffer, count: int) -> Buffer:
        """Returns the mean over the streams of sigmoid(gates) × streams."""
        _require(gates.width == streams.width and gates.width % count == 0, "gates of other streams")
        table = curve("sigmoid", 1.0) if self.dtype == calls.BFLOAT16 else None
        width = streams.width // count
        return self._call(
            calls.MEAN_STREAMS, gates=gates, streams=streams, width=width, count=count, curve=table, result=width
        )

    def add_to_streams(self, streams: Buffer, gates: Buffer, rows: Buffer) -> None:
        """Adds 2 × sigmoid(gates / streams) × rows to each stream, in place. There is a gate for each stream."""
        _require(streams.width == gates.width * rows.width, "gates of other streams")
        self._call(calls.ADD_TO_STREAMS, streams=streams, gates=gates, rows=rows, width=rows.width, count=gates.width)

    def gate_streams(self, keys: Buffer, queries: Buffer, rows: Buffer) -> Buffer:
        """Returns sigmoid(root(keys · queries / √width)) × rows for each stream: root(x) is sign(x) √max(|x|, 1e-6)."""
        _require(keys.width == queries.width and keys.width % rows.width == 0, "keys of other streams")
        return self._call(
            calls.GATE_STREAMS, keys=keys, queries=queries, rows=rows, width=rows.width, count=keys.width // rows.width,
            result=keys.width,
        )  # fmt: skip

    # -- layers with states -------------------------------------------------------------------------------------------

    def step_sizes(
        self,
        rows: Buffer,
        bias: Weight | None,
        factors: Weight | None = None,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Buffer:
        """Returns factors × softplus(rows + bias) in float32. `limits` bound the softplus. `bias` and `factors` are
        float32 [width of a row]."""
        is_right = all(weight is None or weight.shape == (rows.width,) for weight in (bias, factors))
        _require(is_right and rows.item_bytes == self.item_bytes, "steps of other rows")
        least, most = limits
        out = self.rows(rows.width, item_bytes=4)
        return self._call(
            calls.STEP_SIZES, rows=rows, least=least, most=most, bias=bias, factors=factors, result=out
        )  # fmt: skip

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
        """Returns function(gate) × norm(rows), or with `gates_first` norm(function(gate) × rows). The function is silu
        or sigmoid. Each of the equal groups of a row is normalised alone, unless `norm` is None. Its weights are
        float32, for a row or for each group."""
        rows, width = self.widened(rows), rows.width
        num_weights = width if norm is None else norm.weight.shape[0]
        _require(
            width % groups == 0 and num_weights in (width, width // groups) and width == gate.width
            and gate.item_bytes == self.item_bytes and function in ("silu", "sigmoid"),
            "a gate of other rows",
        )  # fmt: skip
        return self._call(
            calls.GATED_NORM, rows=rows, gate=gate, weight=norm, num_weights=num_weights, group=width // groups,
            gates_first=gates_first, function=calls.FUNCTIONS[function], result=width,
        )  # fmt: skip

    def convolution(
        self, rows: Buffer, weight: Weight, bias: Weight | None, state: StateLocation, *, has_silu: bool = False
    ) -> Buffer:
        """Returns the causal convolution of each channel alone. `weight` is [channels, kernel], `bias` [channels]."""
        channels, kernel = weight.shape
        _require(
            channels == rows.width and kernel <= calls.MAX_KERNEL and (bias is None or bias.shape == (channels,))
            and state.is_of((channels, kernel), self.item_bytes) and rows.item_bytes == self.item_bytes,
            "a convolution of other rows",
        )  # fmt: skip
        return self._over_state(
            calls.CONVOLVE, state, rows=rows, channels=channels, kernel=kernel, weight=weight, bias=bias,
            has_silu=has_silu, kept=self._kept_offset(channels * self.item_bytes), result=channels,
        )  # fmt: skip

    def delta_rule(
        self, query: Buffer, key: Buffer, value: Buffer, decay: Buffer, beta: Buffer, state: StateLocation
    ) -> Buffer:
        """Returns the gated delta rule of heads, [heads × value_dim]. Queries and keys are scaled to length 1. Several
        heads may share a query and a key. Queries, keys and values come from the convolution before the rule. `decay`
        has logarithms, float32 [heads] or [heads × key_dim]. `beta` is float32 [heads]."""
        heads, key_dim, value_dim = state.shape
        key_heads = key.width // key_dim
        _require(
            query.width == key.width == key_heads * key_dim and heads % key_heads == 0
            and value.width == heads * value_dim and decay.width in (heads, heads * key_dim) and beta.width == heads
            and all(factor.item_bytes == 4 for factor in (decay, beta))
            and all(mixed.item_bytes == self.item_bytes for mixed in (query, key, value))
            and state.is_of((heads, key_dim, value_dim), 4),
            "a delta rule of other rows",
        )  # fmt: skip
        return self._over_state(
            calls.DELTA_RULE, state, query=query, key=key, value=value, decay=decay, beta=beta, heads=heads,
            key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, decay_dim=decay.width // heads,
            epsilon=_LENGTH_EPSILON, kept_decay=self._kept_offset(decay.width * 4),
            kept_beta=self._kept_offset(beta.width * 4), result=value.width,
        )  # fmt: skip

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
        """Returns the state space of Mamba 2, float32 [heads × dim]. `rows` [heads × dim], `into` and `out_of` (B
        and C, [groups × state_dim]) come from the convolution before it. `steps`, `decay` and `skip` (A and D) are
        float32 [heads]."""
        heads, dim, state_dim = state.shape
        groups = into.width // state_dim
        _require(
            rows.width == heads * dim and into.width == out_of.width == groups * state_dim and heads % groups == 0
            and steps.width == heads and steps.item_bytes == 4
            and all(weight is None or weight.shape == (heads,) for weight in (decay, skip))
            and all(mixed.item_bytes == self.item_bytes for mixed in (rows, into, out_of))
            and state.is_of((heads, dim, state_dim), 4),
            "a state space of other rows",
        )  # fmt: skip
        return self._over_state(
            calls.STATE_SPACE, state, rows=rows, into=into, from_=out_of, steps=steps, decay=decay, skip=skip,
            heads=heads, groups=groups, dim=dim, state_dim=state_dim, kept=self._kept_offset(heads * 4),
            result=self.rows(rows.width, item_bytes=4),
        )  # fmt: skip

    def ngrams(self, ngrams: NGramConfig, table: TableRows, state: StateLocation) -> Buffer:
        """Returns the rows of a table that the last tokens of a sequence name, side by side."""
        size, heads = len(ngrams.multipliers), len(ngrams.sizes)
        _require(
            2 <= size <= calls.MAX_NGRAM and heads % (size - 1) == 0 and len(ngrams.offsets) == heads
            and all(first + count <= table.rows for first, count in zip(ngrams.offsets, ngrams.sizes, strict=True))
            and state.is_of((size - 1,), 4) and self.vocab_size < 1 << 24,
            f"n-grams of {sum(ngrams.sizes)} rows, of a table of {table.rows}",
        )  # fmt: skip
        names = ("multipliers", "sizes", "offsets")
        arrays: dict[str, Any] = {name: np.array(getattr(ngrams, name), np.int64) for name in names}
        return self._over_state(
            calls.NGRAMS, state, ids=address_of(self.inputs.ids_below(self.vocab_size)), stored=table.stored, size=size,
            heads=heads // (size - 1), width=table.width, end=ngrams.end_token,
            num_parts=len(table.parts), parts=ctypes.addressof(table.parts), kept=self._kept_offset(8),
            result=self.rows(heads * table.width), keeps=[table], **arrays,
        )  # fmt: skip

    def _over_state(self, kind: int, state: StateLocation, **operands: Any) -> Buffer:
        """Adds a call over the state of a layer."""
        out = self._call(kind, place=state.call, **operands)
        self.state_operations.append(self.operations[-1])
        return out

    def _kept_offset(self, row_bytes: int) -> int:
        """Returns the offset of `row_bytes` bytes in the bytes kept for each row."""
        offset = self.kept_bytes
        self.kept_bytes += -(-row_bytes // 4) * 4
        return offset


def _set_buffer(call: Any, name: str, buffer: Buffer) -> None:
    """Sets the address of a buffer, and its stride in numbers or bytes. Raises `ValueError` if the call has no field
    for the stride and the numbers of the buffer do not lie side by side."""
    setattr(call, name, buffer.address)
    names = [f"{name.rstrip('_')}_{of_row}" for of_row in ("stride", "row_stride", "row_bytes")]
    names += ["row_stride", "row_bytes"] if name in ("rows", "source") else []
    field = next((field for field in names if hasattr(call, field)), None)
    if field is None:
        _require(buffer.width == buffer.stride, "numbers that do not lie side by side")
    else:
        setattr(call, field, buffer.stride * (buffer.item_bytes if field.endswith("bytes") else 1))


def _set_weights(
    call: Any, name: str, weights: Weight | WeightedNorm | HeadMatrices | Matrix | np.ndarray | None
) -> None:
    """Sets the address of weights, 0 for None, and with a norm its kind and epsilon."""
    if isinstance(weights, WeightedNorm):
        for kind in ("kind", f"{name}_kind"):
            if hasattr(call, kind):
                setattr(call, kind, weights.kind)
        call.epsilon, weights = weights.epsilon, weights.weight
    setattr(call, name, address_of(weights) if weights is None or isinstance(weights, np.ndarray) else weights.address)


def _dtype_of(rows: Buffer) -> int:
    return calls.FLOAT32 if rows.item_bytes == 4 else calls.BFLOAT16


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


def _parts(matrix: AnyMatrix) -> Sequence[Matrix | DenseMatrix]:
    return matrix.parts if isinstance(matrix, JoinedMatrix) else [matrix]
