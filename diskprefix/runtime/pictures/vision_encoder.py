"""The pictures of prompts in the form that a model takes: the rows of its encoder, and positions.

The model's own code computes the rows once, and they are kept. transformers' models take them in each forward, instead
of pixels (`mm_encoder_outputs`). A step then computes the row of a picture like the row of a text token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diskprefix.errors import InvalidRequest
from diskprefix.native.attention_operator import attention_to_all
from diskprefix.native.library import operators
from diskprefix.prefixstore.kv.layout import is_out_of_memory
from diskprefix.prefixstore.kv.numbers import array_dtype
from diskprefix.prefixstore.kv.step import Run
from diskprefix.printable import first_line
from diskprefix.runtime.contract import PictureRows
from diskprefix.runtime.plan.families.decoder_options import sees_pictures_whole
from diskprefix.values import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Joined(list[torch.Tensor]):
    """A list of one tensor, for models that take the tensor too."""

    def to(self, *args: Any) -> torch.Tensor:
        return self[0].to(*args)


_CHANGING = ("dropout_p", "is_causal", "enable_gqa")


class _EachSeesAll(TorchFunctionMode):
    """Computes attention without a mask in bfloat16 by the compiled operator. In torch it takes most of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, compiled = kwargs or {}, operators()
        if func is nn.functional.scaled_dot_product_attention and len(args) == 3 and compiled is not None:
            is_plain = kwargs.get("attn_mask") is None and not any(kwargs.get(name) for name in _CHANGING)
            form = (args[0].shape, torch.bfloat16, "cpu")
            if is_plain and len(form[0]) == 4 and all((x.shape, x.dtype, x.device.type) == form for x in args):
                scale = kwargs.get("scale") or form[0][-1] ** -0.5
                each = (map(_array, tensors) for tensors in zip(*args, strict=True))
                heads = [attention_to_all(compiled, query, key, value, scale) for query, key, value in each]
                return _tensor(np.stack(heads), "bfloat16")
        return func(*args, **kwargs)


class _Reached(Exception):
    """The model calls its decoder."""


class VisionEncoder:
    """The encoder of a model, and how its output comes into prompts.

    `token_id` is the placeholder for one row of the output. The output for a picture has the shape [levels, num_tokens,
    hidden], in the type of the model (`kv.numbers`). Levels after the first one are added after the model's first
    layers (Qwen3-VL). `is_exact`: the model is exact at every token, so its identity includes the compiled operators.
    """

    def __init__(self, model: PreTrainedModel, token_id: int, *, is_exact: bool) -> None:
        self._model, self._is_exact = model, is_exact
        self.token_id = token_id
        config = model.config
        levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
        self.levels = 1 + len(levels)
        self.hidden = int(config.get_text_config(decoder=True).hidden_size)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.nothing = np.empty((self.levels, 0, self.hidden), array_dtype(self.dtype))
        self.sees_whole = bool(sees_pictures_whole(config))
        """Tokens of a picture see each other."""
        self._counts_axes = hasattr(model.base_model, "get_rope_index")

    @staticmethod
    def problem(kind: type[PreTrainedModel]) -> str | None:
        """Returns why models of a class cannot take pictures; None if they can."""
        accepted = inspect.signature(kind.forward).parameters
        if "mm_encoder_outputs" not in accepted or not hasattr(kind, "get_image_features"):
            return f"transformers' {kind.__name__} takes pictures only together with its whole prompt"
        return None

    @torch.inference_mode()
    def encode(self, picture: Picture, inputs: Mapping[str, Any]) -> np.ndarray:
        """Returns the encoder's output for the `inputs` that `Picture.prepare` returned. Raises `InvalidRequest` if the
        model's code fails, and torch's error if memory runs out."""
        encode = self._model.get_image_features
        accepted = inspect.signature(encode).parameters
        placed = {name: self._placed(value) for name, value in inputs.items() if name in accepted}
        try:
            with _EachSeesAll() if self._is_exact else nullcontext():
                output = encode(**placed, return_dict=True)
            levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            rows = torch.stack([_joined(level).reshape(-1, self.hidden) for level in levels]).to(self._model.dtype)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"{picture.param}: the model's own code fails over it: {first_line(error)}"
            raise InvalidRequest(problem, param=picture.param, code="unsupported_content") from error
        if rows.shape != (self.levels, picture.num_tokens, self.hidden):
            problem = (
                f"{picture.param}: the model's encoder returns {tuple(rows.shape)} for {picture.num_tokens} tokens"
            )
            raise InvalidRequest(problem, param=picture.param, code="unsupported_content")
        return _array(rows.cpu().contiguous())

    def slices(self) -> Iterator[nn.Module]:
        """Yields the modules of the encoder that it may pause before: its layers, and their parts."""
        decoder = {*self._model.get_decoder().modules()}
        for module in self._model.modules():
            if isinstance(module, nn.ModuleList) and module not in decoder:
                for layer in module:
                    yield from (layer, *layer.children())

    def positions(
        self, token_ids: np.ndarray, is_picture: np.ndarray, pictures: Sequence[Picture]
    ) -> np.ndarray | None:
        """Returns the positions of a prompt's tokens, int64 [axes, tokens], None for a model whose positions count
        tokens. `token_ids` are int64 [tokens], `is_picture` bool [tokens]."""
        if not self._counts_axes:
            return None
        names = dict.fromkeys(name for picture in pictures for name in picture.shape)
        shapes = {name: torch.cat([picture.shape[name] for picture in pictures]) for name in names}
        ids, kinds = torch.from_numpy(token_ids)[None], torch.from_numpy(is_picture).int()[None]
        counted, _ = self._model.base_model.get_rope_index(ids, mm_token_type_ids=kinds, **shapes)
        positions: np.ndarray = counted[:, 0].numpy()
        return positions

    def output(self, encoded: torch.Tensor) -> dict[str, Any]:
        """Returns rows of the output, [levels, count, hidden], in the form that a forward takes."""
        return {
            "image": SimpleNamespace(
                pooler_output=_Joined([encoded[0]]), deepstack_features=[[level] for level in encoded[1:]]
            )
        }

    def of_text(self, count: int) -> torch.Tensor:
        """Returns the rows of `count` placeholders in a text or a reply, where they are ordinary tokens."""
        rows = torch.zeros(self.levels, count, self.hidden, dtype=self._model.dtype, device=self._model.device)
        if count:
            rows[0] = self._in_text
        return rows

    @cached_property
    def _in_text(self) -> torch.Tensor:
        """The row of a placeholder without a picture, as the model's own code embeds it, [hidden]. Some classes, like
        Gemma 4's, embed another token there."""
        embedded: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
            embedded.append(given["inputs_embeds"][0, 0])
            raise _Reached

        token = torch.tensor([[self.token_id]], device=self._model.device)
        hook = self._model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with suppress(_Reached):
                self._model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=False)
        finally:
            hook.remove()
        return embedded[0]

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._model.device, self._model.dtype if value.is_floating_point() else None)


def encoded_rows(
    encoder: VisionEncoder, is_placeholder: torch.Tensor, runs: Sequence[Run], pictures: Sequence[PictureRows | None]
) -> torch.Tensor:
    """Returns the rows for the placeholders of a step, [levels, count, hidden]: the rows of its pictures, and the rows
    of placeholders in a text."""
    is_picture = np.concatenate(
        [
            np.zeros(run.num_rows, bool) if rows is None else rows.is_picture
            for run, rows in zip(runs, pictures, strict=True)
        ]
    )
    encoded = encoder.of_text(int(is_placeholder.sum()))
    of_pictures = np.concatenate([rows.encoded for rows in pictures if rows is not None], axis=1)
    encoded[:, torch.from_numpy(is_picture)[is_placeholder]] = _tensor(of_pictures, encoder.dtype).to(encoded.device)
    return encoded


def picture_arguments(
    input_ids: torch.Tensor, runs: Sequence[Run], pictures: Sequence[PictureRows | None]
) -> dict[str, Any]:
    """Returns the arguments of a forward for the rows of a step in which some prompts have pictures. `input_ids` are
    int64 [1, rows]."""
    encoder = next(rows.encoder for rows in pictures if rows is not None)
    arguments: dict[str, Any] = {}
    if any(rows is not None and rows.is_picture.any() for rows in pictures):
        is_placeholder = (input_ids[0] == encoder.token_id).cpu()
        arguments["mm_encoder_outputs"] = encoder.output(encoded_rows(encoder, is_placeholder, runs, pictures))
    axes = next((len(rows.positions) for rows in pictures if rows is not None and rows.positions is not None), None)
    if axes is not None:
        positions = [
            rows.positions
            if rows is not None and rows.positions is not None
            else np.tile(np.arange(run.start, run.end), (axes, 1))
            for run, rows in zip(runs, pictures, strict=True)
        ]
        arguments["position_ids"] = torch.from_numpy(np.concatenate(positions, axis=1))[:, None].to(input_ids.device)
    return arguments


def _array(numbers: torch.Tensor) -> np.ndarray:
    """Returns the memory of a tensor as an array."""
    return (numbers.view(torch.uint16) if numbers.dtype is torch.bfloat16 else numbers).numpy()


def _tensor(numbers: np.ndarray, dtype: str) -> torch.Tensor:
    """Returns the memory of an array as a tensor."""
    return torch.from_numpy(numbers).view(getattr(torch, dtype))


def _joined(level: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return level if isinstance(level, torch.Tensor) else torch.cat([part.flatten(0, -2) for part in level])
