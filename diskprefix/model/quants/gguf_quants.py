"""The quantised tensors of a GGUF file as `Quants`, number for number (llama.cpp, ggml/src/ggml-common.h and
ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diskprefix.model.quants.forms import QuantForm, Quants

_AT_ONCE = 1 << 22
"""Weights that are read at a time, so that the work does not take several times the memory of the matrix."""

Blocks = torch.Tensor
"""uint8 [rows, blocks of a row, bytes of a block]."""


def _half(blocks: Blocks, at: int) -> torch.Tensor:
    """Returns the float16 at byte `at` of each block as float32, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _split(content: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Returns it with the last dimension cut into several."""
    return content.reshape(*content.shape[:-1], *sizes)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Returns the low halves of the bytes, then the high halves."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def _fifth_bits(blocks: Blocks, at: int) -> torch.Tensor:
    """Returns what the 32 bits at byte `at` add to codes of 4 bits."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[..., at : at + 4].unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2) << 4


def _quants(
    bits: int, group: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> Quants:
    flat = [codes.to(torch.int8), scales] if zeros is None else [codes.to(torch.int8), scales, zeros]
    return Quants(bits, group, *(part.reshape(len(part), -1) for part in flat))


def _q4_0(blocks: Blocks) -> Quants:
    scales = _half(blocks, 0)
    return _quants(4, 32, _nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: Blocks) -> Quants:
    return _quants(4, 32, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Blocks) -> Quants:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _quants(5, 32, codes.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Blocks) -> Quants:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _quants(5, 32, codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Blocks) -> Quants:
    return _quants(8, 32, blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _scales_of_k(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zeros of the eight groups of a block: products of 6 bits and a float16, exact in float32."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1).float()
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1).float()
    return scales * _half(blocks, 0), -(least * _half(blocks, 2))


def _chunks_of_k(codes: torch.Tensor) -> torch.Tensor:
    """Returns 256 codes of 4 bits: of each 32 bytes the low halves, then the high halves."""
    return _nibbles(_split(codes, 4, 32)).flatten(-2)


def _q4_k(blocks: Blocks) -> Quants:
    return _quants(4, 32, _chunks_of_k(blocks[..., 16:]), *_scales_of_k(blocks))


def _q5_k(blocks: Blocks) -> Quants:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1).flatten(-2) << 4
    return _quants(5, 32, _chunks_of_k(blocks[..., 48:]) | fifth, *_scales_of_k(blocks))


def _q6_k(blocks: Blocks) -> Quants:
    low = _nibbles(_split(blocks[..., :128], 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = ((_split(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3).flatten(-2)
    codes = (low | (high << 4)).flatten(-2).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return _quants(8, 16, codes, scales)


_READERS: dict[str, tuple[int, int, Callable[[Blocks], Quants]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
"""The weights and bytes of a block, and how it is read."""

_FORMS = {
    "Q4_0": QuantForm(4, 32, True, torch.float16),
    "Q4_1": QuantForm(4, 32, True, torch.float16),
    "Q5_0": QuantForm(5, 32, False, torch.float16),
    "Q5_1": QuantForm(5, 32, True, torch.float16),
    "Q8_0": QuantForm(8, 32, False, torch.float16),
    "Q4_K": QuantForm(4, 32, True, torch.float32),
    "Q5_K": QuantForm(5, 32, True, torch.float32),
    "Q6_K": QuantForm(8, 16, False, torch.float32),
}
"""The form that `native.packing` gives a type."""


def form_of(kind: str) -> QuantForm | None:
    """Returns the form in which weights of a type are kept; None if there is none."""
    return _FORMS.get(kind)


def gguf_quants(kind: str, content: torch.Tensor, rows: int, columns: int) -> Quants | None:
    """Returns a matrix [rows, columns] that a file holds as the bytes `content`; None for types without such a form."""
    if kind not in _READERS:
        return None
    weights, num_bytes, read = _READERS[kind]
    blocks = content.reshape(rows, columns // weights, num_bytes)
    parts = [read(part) for part in torch.split(blocks, max(1, _AT_ONCE // columns))]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Quants(parts[0].bits, parts[0].group, codes, scales, torch.cat(zeros) if zeros else None)
