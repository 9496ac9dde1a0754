"""Attention by torch's kernels, for a machine without the compiled operator (`native`), called so that the bits of a
token do not depend on the rest of the batch.

Keys are read in tiles of `TILE` tokens counted from position 0 of a sequence, in ascending order, with products of one
shape. A tile that a row does not see leaves it exactly as it is. torch's own flash attention for the CPU does that: it
splits the queries of a call in blocks, of 32 rows for calls of less than 192. Here each block is full, and the calls
end with a tile. Soft caps, values of another size than keys, and forms for which that kernel is measured to be unsafe
are computed by `_tiled` from products of `model.exact.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from diskprefix.kv.sizes import TILE
from diskprefix.kv.step import Run, Step
from diskprefix.model.exact.patterns import Pattern
from diskprefix.model.exact.rows import in_whole_vectors, is_ours, linear, times

_BLOCK = 32
"""Rows of queries in a block of torch's kernel, for calls of less than `_WIDE_CALL` rows."""
_CALL = 160
_WIDE_BLOCK = 64
_WIDE_CALL = 192
_MAX_WIDE = 704
_HEADS = 3
"""Heads in a call. From four on, torch may choose a kernel by the number of rows."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class TorchAttention:
    """The attention of a layer over all sequences of a step."""

    step: Step
    pattern: Pattern
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    def attend(self, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns [rows, heads, value_dim] for [heads, rows, key_dim] and the memory of each sequence."""
        groups = keys[0].shape[1]
        queries = query.view(groups, -1, *query.shape[1:])
        token = is_ours.set(True)
        try:
            parts = torch.split(queries, [run.num_rows for run in self.step.runs], dim=2)
            found = [self._of_run(*of_run) for of_run in zip(self.step.runs, parts, keys, values, strict=True)]
        finally:
            is_ours.reset(token)
        return _joined(found).permute(2, 0, 1, 3).reshape(query.shape[1], query.shape[0], -1)

    def _of_run(self, run: Run, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns [groups, heads of a group, rows, value_dim] for queries of that form and a layer's memory, [1,
        groups, tokens, dim], which ends with the last tile of the run."""
        seen, end = _tiles_of(run, self.pattern)
        # From the first tile that is seen.
        keys, values = (memory[0, :, memory.shape[2] - (end - seen) :] for memory in (keys, values))
        is_plain = self.softcap is None and keys.shape[-1] == values.shape[-1]
        is_flash = is_plain and _is_flash_safe(queries.dtype, queries.shape[-1], torch.get_num_threads())
        attended = self._flash if is_flash else self._tiled
        size = _call_size(queries.shape[1], run.num_rows, queries.dtype, queries.shape[-1])
        if size >= run.num_rows:
            return attended(run, queries, keys, values, seen)
        parts = [
            attended(Run(run.start + first, part.shape[2]), part, keys, values, seen)
            for first, part in zip(range(0, run.num_rows, size), torch.split(queries, size, dim=2), strict=True)
        ]
        return _joined(parts)

    def _flash(
        self, run: Run, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int
    ) -> torch.Tensor:
        groups, heads, num_rows, dim = queries.shape
        begin, end = _tiles_of(run, self.pattern)
        k, v = (memory[:, None, begin - first : end - first] for memory in (keys, values))
        if heads * num_rows <= _CALL:
            # Few rows: those of all heads of a group one behind the other.
            count = heads * num_rows
            size = _smallest_safe(count, queries.dtype, dim, torch.get_num_threads())
            rows = _filled(queries.reshape(groups, 1, count, dim), size)
            mask = self._mask(run, rows.shape[2], heads, begin, end, queries.dtype)
            out, sums = _flash(rows, k, v, 0.0, False, attn_mask=mask, scale=self.scale)
            return self._with_sinks(out[:, 0, :count].view(groups, heads, num_rows, dim), sums)
        rows = _filled(queries, _WIDE_BLOCK if num_rows >= _WIDE_CALL else _BLOCK)
        mask = self._mask(run, rows.shape[2], 1, begin, end, queries.dtype)
        found = []
        for part in torch.split(rows, _HEADS, dim=1):
            k_part, v_part = (memory.expand(-1, part.shape[1], -1, -1) for memory in (k, v))
            found.append(_flash(part, k_part, v_part, 0.0, False, attn_mask=mask, scale=self.scale))
        out, sums = (torch.cat(parts, dim=1)[:, :, :num_rows] for parts in zip(*found, strict=True))
        return self._with_sinks(out, sums)

    def _with_sinks(self, out: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Gives a sink its share. `sums` are the logarithms of the sums of weights of these rows, and others behind."""
        if self.sinks is None:
            return out
        groups, heads, num_rows, _ = out.shape
        sums = sums.reshape(groups, -1)[:, : heads * num_rows].view(groups, heads, num_rows)
        sinks = self.sinks.float().view(groups, heads, 1)
        return (out.float() * in_whole_vectors(torch.sigmoid, sums - sinks).unsqueeze(-1)).to(out.dtype)

    def _tiled(
        self, run: Run, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int
    ) -> torch.Tensor:
        groups, heads, num_rows, dim = queries.shape
        begin, end = _tiles_of(run, self.pattern)
        mask = self._mask(run, heads * num_rows, heads, begin, end, torch.float32)[0, 0]
        out, sums = [], []
        for group in range(groups):
            rows = queries[group].reshape(heads * num_rows, dim)
            highest = rows.new_full((len(rows), 1), torch.finfo(torch.float32).min, dtype=torch.float32)
            total = torch.zeros_like(highest)
            taken = rows.new_zeros(len(rows), values.shape[-1], dtype=torch.float32)
            for tile in range(begin, end, TILE):
                at = slice(tile - first, tile - first + TILE)
                scores = linear(rows, keys[group, at]).float() * self.scale
                if self.softcap is not None:
                    scores = torch.tanh(scores / self.softcap) * self.softcap
                scores += mask[: len(rows), tile - begin : tile - begin + TILE]
                higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
                weights, kept = scores.sub_(higher).exp_(), torch.exp(highest - higher)
                total = total * kept + weights.sum(-1, keepdim=True)
                taken = taken * kept + times(weights.to(rows.dtype), values[group, at]).float()
                highest = higher
            out.append((taken / total).to(rows.dtype))
            sums.append((highest + total.log())[:, 0])
        form = (groups, heads, num_rows)
        return self._with_sinks(torch.stack(out).view(*form, -1), torch.stack(sums))

    def _mask(self, run: Run, num_rows: int, heads: int, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns what is added to the scores of keys `begin` … `end`, [1, 1, num_rows, end - begin]: 0 or -inf. The
        rows are those of the run for each of `heads` heads, and copies of the last one."""
        name = (run, self.pattern, num_rows, heads, begin, end, dtype)
        if name not in self.step.masks:
            self.step.masks[name] = _made_mask(run, self.pattern, num_rows, heads, begin, end, dtype)
        return self.step.masks[name]


def _made_mask(
    run: Run, pattern: Pattern, num_rows: int, heads: int, begin: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    positions = torch.arange(run.start, run.end, dtype=torch.int32).repeat(heads)
    positions = torch.nn.functional.pad(positions, (0, num_rows - len(positions)), value=run.end - 1).unsqueeze(1)
    keys = torch.arange(begin, end, dtype=torch.int32)
    hidden = keys > positions
    first = pattern.first_of(positions)
    if first is not None:
        hidden |= keys < first
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]


def _call_size(heads: int, num_rows: int, dtype: torch.dtype, dim: int) -> int:
    """Returns how many tokens a call takes."""
    if heads * num_rows <= _CALL:
        return num_rows
    if num_rows < _CALL:
        # The heads of a group in one call read its keys once, which is what a long context costs.
        return max(1, _CALL // heads)
    if num_rows >= _WIDE_CALL and _is_wide_safe(dtype, dim, torch.get_num_threads()):
        return min(num_rows, _MAX_WIDE)
    return _CALL


@lru_cache
def _is_wide_safe(dtype: torch.dtype, dim: int, threads: int) -> bool:
    """Returns whether blocks of 64 rows, which are faster, give the bits of blocks of 32."""
    return _gives_the_bits_of_blocks(_MAX_WIDE, dtype, dim, threads)


@lru_cache
def _is_flash_safe(dtype: torch.dtype, dim: int, threads: int) -> bool:
    """Returns whether several blocks in a call, which threads share, give the bits of one block in a call, and a row
    has the same bits in any place of a block: float32 rows of 10 values have not on a CPU of AMD."""
    return _gives_the_bits_of_blocks(_CALL, dtype, dim, threads) and all(
        torch.equal(replace(probe, queries=probe.queries[:, :, 1:]).in_calls(_BLOCK, _CALL), found[:, :, 1 : 1 + _CALL])
        for probe, found in _probes(dtype, dim, threads)
    )


@lru_cache
def _smallest_safe(count: int, dtype: torch.dtype, dim: int, threads: int) -> int:
    """Returns how many rows, at least `count`, a call must have to give the bits of blocks of 32 rows."""
    step = 1 if count < _BLOCK else 8
    first, whole = -(-count // step) * step, -(-count // _BLOCK) * _BLOCK
    safe = (rows for rows in range(first, whole, step) if _gives_the_bits_of_blocks(rows, dtype, dim, threads))
    return next(safe, whole)


def _gives_the_bits_of_blocks(num_rows: int, dtype: torch.dtype, dim: int, threads: int) -> bool:
    """Returns whether calls of `num_rows` rows give the bits of calls of 32."""
    count = max(num_rows, _CALL) // num_rows * num_rows
    return all(
        torch.equal(probe.in_calls(num_rows, count), expected[:, :, :count])
        for probe, expected in _probes(dtype, dim, threads)
    )


@dataclass(frozen=True)
class _Probe:
    """Inputs that nearly cancel. What remains is rounding error, which reveals the summation order."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float

    def in_calls(self, num_rows: int, count: int) -> torch.Tensor:
        """Returns the first `count` rows, a multiple of `num_rows`, in calls of `num_rows`."""
        parts = torch.split(self.queries[:, :, :count], num_rows, dim=2)
        found = [_flash(part, self.keys, self.values, 0.0, False, scale=self.scale)[0] for part in parts]
        return torch.cat(found, dim=2)


@lru_cache
def _probes(dtype: torch.dtype, dim: int, _threads: int) -> tuple[tuple[_Probe, torch.Tensor], ...]:
    """Returns probes for the order of the sums of scores and of values, each with the result of calls of one block."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(num, dim, generator=generator) for num in (_MAX_WIDE, 2 * TILE, 2 * TILE))
    half = dim // 2
    cancelling, twice, opposite = queries.clone(), keys.clone(), values.clone()
    cancelling[:, half : 2 * half], twice[:, half : 2 * half] = -queries[:, :half], keys[:, :half]
    opposite[1::2] = -values[::2]

    def of(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> _Probe:
        given, known, taken = (part.to(dtype)[None, None] for part in (queries, keys, values))
        return _Probe(given, known, taken, scale)

    probes = of(cancelling, twice, values, 1e5), of(cancelling, twice, opposite, 1e-3)
    return tuple((probe, probe.in_calls(_BLOCK, _MAX_WIDE)) for probe in probes)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _tiles_of(run: Run, pattern: Pattern) -> tuple[int, int]:
    """Returns the positions between which the run sees tokens, in whole tiles."""
    return pattern.first_visible(run.start) // TILE * TILE, -(-run.end // TILE) * TILE


def _filled(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Returns [.., n, dim] with n filled up to a multiple of `block`."""
    missing = -rows.shape[2] % block
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
