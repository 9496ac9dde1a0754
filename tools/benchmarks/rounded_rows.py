"""Rows of products, rounded as the operators round them, in a model of transformers in float32.

This says what a form of rows costs without the operators: weights, attention and norms have no other rounding. It also
measures how far the largest number of a row is from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from diskprefix.daemon.settings import Settings
from diskprefix.runtime.load.loader import load_model
from tools.models import real

BLOCK, UNIT = 32, 256
_LEAST_ROWS = 16
"""Smaller matrices, such as routers of few experts, keep their rows."""
Rounding = Callable[[torch.Tensor], torch.Tensor]


def in_8_bits(rows: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Returns the rows with each block rounded to a scale, its largest number / 127, times integers of 8 bits."""
    blocks = _blocks(rows, block)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return _rows((blocks / scales.clamp(min=1e-30)).round() * scales, rows)


def in_15_bits(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows rounded to bfloat16, and each block to a power of 2 times integers of 15 bits."""
    blocks = _blocks(rows.bfloat16().float(), BLOCK)
    _, exponents = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    scales = torch.ldexp(torch.ones_like(blocks[..., :1]), exponents - 14)
    return _rows((blocks / scales).round() * scales, rows)


def _blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    padded: torch.Tensor = pad(rows, (0, -rows.shape[-1] % block))
    return padded.reshape(*rows.shape[:-1], -1, block)


def _rows(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]]


ROUNDINGS: dict[str, Rounding] = {
    "torch": lambda rows: rows,
    "torch bf16": lambda rows: rows.bfloat16().float(),
    "torch 15": in_15_bits,
    "torch 8": in_8_bits,
    "torch 8 of 256": lambda rows: in_8_bits(rows, UNIT),
}
"""By form: what is done to the rows. The last one is llama.cpp's for K-quants."""


class Products(TorchFunctionMode):
    """Passes the rows of every product through `change`, which gets the matrix too."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is linear and args[1].shape[0] >= _LEAST_ROWS:
            args = (self.change(args[0], args[1]), *args[1:])
        return func(*args, **(kwargs or {}))


def modules_of(file: str) -> Any:
    """Returns a file's model as transformers' modules in float32, which has its quants as they are."""
    settings = Settings(model=file, weights="native", dtype="float32")
    model = load_model(settings, real.print_report).read_modules().eval()
    # Other implementations multiply all experts in one call, whose rows are not seen.
    model.set_experts_implementation("eager")
    return model


def logits_of(model: Any, rounding: Rounding) -> Callable[[list[int]], Iterator[np.ndarray]]:
    @torch.inference_mode()
    def computed(ids: list[int]) -> np.ndarray:
        with Products(lambda rows, _: rounding(rows)):
            logits: np.ndarray = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return logits

    return lambda ids: iter([computed(ids)])


@torch.inference_mode()
def outliers_of(model: Any, ids: list[int]) -> dict[str, dict[str, float]]:
    """Returns figures of the rows of each matrix, as means over the rows of `ids`; experts have one matrix.

    `ratio` is the largest number of a row, and `kurtosis` the mean fourth power, both relative to the root mean square.
    `lost` is the error of 8 bits with a scale for 32 numbers, relative to the row.
    """
    names = {values.untyped_storage().data_ptr(): name for name, values in model.named_parameters()}
    by_matrix = dict[str, list[torch.Tensor]]()

    def measured(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        size = flat.square().mean(-1).sqrt().clamp(min=1e-30)
        ratio, kurtosis = flat.abs().amax(-1) / size, (flat / size[:, None]).pow(4).mean(-1)
        lost = (in_8_bits(flat) - flat).square().mean(-1).sqrt() / size
        name = names[matrix.untyped_storage().data_ptr()]
        by_matrix.setdefault(name, []).append(torch.stack([ratio, kurtosis, lost]))
        return rows

    with Products(measured):
        model(input_ids=torch.tensor([ids]), use_cache=False)
    means = {name: torch.cat(parts, 1).mean(1).tolist() for name, parts in by_matrix.items()}
    return {name: dict(zip(("ratio", "kurtosis", "lost"), of, strict=True)) for name, of in means.items()}
