"""The tensors of gpt-oss in a `.gguf` file, which transformers does not find: experts with biases, and sinks."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import modeling_gguf_pytorch_utils as legacy

_EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)")
_SINKS = re.compile(r"(blk\.\d+\.attn_sinks)\.weight")


class GptOssTensors(legacy.TensorProcessor):  # type: ignore[misc]
    """Makes the parameters of transformers' experts: gate and up turn about, and matrices are turned."""

    def process(self, weights: Any, name: str, **context: Any) -> Any:
        """Puts what it makes of a tensor of experts into `parsed_parameters`, as others of transformers do."""
        if sinks := _SINKS.fullmatch(name):
            return legacy.GGUFTensor(weights, sinks[1], {})
        found = _EXPERTS.fullmatch(name)
        if found is None:
            return legacy.GGUFTensor(weights, name, {})
        parameter = "down_proj" if found["part"] == "down" else "gate_up_proj"
        parameter = f"model.layers.{found['layer']}.mlp.experts.{parameter}{'_bias' * (found['kind'] == 'bias')}"
        made, rows = context["parsed_parameters"]["tensors"], torch.from_numpy(weights).to(torch.bfloat16)
        if found["part"] != "down":
            both = made.get(parameter)
            both = rows.new_zeros(len(rows), 2 * rows.shape[1], *rows.shape[2:]) if both is None else _turned(both)
            both[:, found["part"] == "up" :: 2] = rows
            rows = both
        made[parameter] = _turned(rows)
        return legacy.GGUFTensor(weights, None, {})


def _turned(rows: torch.Tensor) -> torch.Tensor:
    """Returns matrices of experts with rows and columns exchanged; biases as they are."""
    return rows.transpose(1, 2) if rows.ndim > 2 else rows


PROCESSORS = {**legacy.TENSOR_PROCESSORS, "gpt-oss": GptOssTensors}
"""What changes the tensors of a file, by its architecture."""
