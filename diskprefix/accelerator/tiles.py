"""The sizes of tiles, by device and dtype.

Where a device has several sizes for products in bfloat16 and float16, or for queries, it was measured there that they
give the same bits, so that the number of rows may choose between them. Every other device has one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cache

import torch

PAIRED = 128
"""The columns of a quantised matrix fill blocks of this size. In one, two codes of 4 bits that are half of it apart
share a byte."""


@dataclass(frozen=True)
class Tiles:
    """The sizes of a product. A matrix that is quantised is read by half a block (`PAIRED`) and not by `inner`."""

    rows: int
    outer: int
    inner: int
    warps: int
    stages: int


_WIDE, _ONE = Tiles(32, 32, 64, 4, 3), Tiles(64, 64, 64, 4, 3)


@dataclass(frozen=True)
class Queries:
    """The sizes of attention. A row is a token and one of the heads that share keys."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """The sizes on one device. `few` are for up to 32 rows, `many` for more: the first that makes `programs` programs,
    or the last. `any_rows` are for any number of them, `wide` for float32. Of `queries` the first are for as many
    rows as they have."""

    few: Tiles
    many: tuple[Tiles, ...]
    any_rows: Tiles
    wide: Tiles
    queries: tuple[Queries, Queries]
    programs: int = 112

    def whatever_rows(self, dtype: torch.dtype) -> Tiles:
        """Returns the sizes of products with quantised matrices, of which no two sizes were compared yet, and with
        those of experts."""
        return self.wide if dtype is torch.float32 else self.any_rows

    def product(self, num_rows: int, outer: int, dtype: torch.dtype) -> Tiles:
        if dtype is torch.float32:
            return self.wide
        if num_rows <= 32:
            return self.few
        for tiles in self.many:
            if -(-num_rows // tiles.rows) * -(-outer // tiles.outer) >= self.programs:
                return tiles
        return self.many[-1]

    def attention(self, num_rows: int) -> Queries:
        few, many = self.queries
        return few if num_rows <= few.rows else many


_OTHERS = Sizes(_ONE, (_ONE,), _ONE, _WIDE, (Queries(64, 4, 2), Queries(64, 4, 2)))
_INTERPRETED = Sizes(_WIDE, (_WIDE,), _WIDE, _WIDE, (Queries(64, 4, 1), Queries(128, 4, 1)))
"""numpy adds up in an order that depends on the sizes of a product."""
_MEASURED = {
    "NVIDIA H100": Sizes(
        Tiles(16, 32, 256, 4, 4),
        (Tiles(128, 128, 64, 4, 3), Tiles(64, 128, 128, 4, 3), Tiles(64, 64, 128, 4, 4)),
        _ONE,
        _WIDE,
        (Queries(64, 4, 3), Queries(128, 8, 3)),
    ),
}
"""By the beginning of the device's name."""


@dataclass(frozen=True)
class ScanSizes:
    """The part of a state that a program computes: channels of a convolution (so many tokens at a time), columns of a
    state of the delta rule, rows of one of Mamba 2."""

    tokens: int = 16
    channels: int = 64
    columns: int = 32
    rows: int = 16
    warps: int = 4


SCANS = ScanSizes()
"""Those of every device."""


def is_interpreted(device: torch.device) -> bool:
    """Returns whether kernels run in Triton's interpreter. It compiles for GPUs of NVIDIA, AMD (`cuda`) and Intel."""
    return device.type not in ("cuda", "xpu")


@cache
def sizes_of(device: torch.device) -> Sizes:
    """Returns the sizes on a device, which has its number in `device`. Each product asks for them."""
    if is_interpreted(device):
        return _INTERPRETED
    name = torch.get_device_module(device).get_device_name(device)
    return next((sizes for start, sizes in _MEASURED.items() if name.startswith(start)), _OTHERS)


def digest(device: torch.device) -> str:
    """Returns a digest of the sizes on a device, for the identity."""
    return hashlib.sha256(f"{asdict(sizes_of(device))} {asdict(SCANS)}".encode()).hexdigest()[:8]
