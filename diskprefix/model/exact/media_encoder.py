"""The pictures of prompts as a model takes them: the rows of its encoder, and positions.

The rows are computed once, by the model's own code, and kept. transformers' models take them in each forward, in the
place of pixels (`mm_encoder_outputs`). A row of a step is then computed as that of a token of text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diskprefix.errors import InvalidRequest
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.step import Run
from diskprefix.model.exact.patterns import sees_pictures_whole
from diskprefix.nouns import Medium
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FEATURES = {"image": "get_image_features", "audio": "get_audio_features"}


@dataclass(frozen=True, eq=False)
class MediaRows:
    """What rows of a step that belong to a prompt with media take beside token ids. `is_media`, bool [num_rows], says
    which of them are of media, `encoded` has the encoder's rows for these, [levels, count, hidden]. `positions` are
    int64 [axes, num_rows], None for a model that counts tokens. For `spans` see `Run`."""

    encoder: MediaEncoder
    is_media: torch.Tensor
    encoded: torch.Tensor
    positions: torch.Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()


class _Joined(list[torch.Tensor]):
    """A list of one tensor, for models that take the tensor too."""

    def to(self, *args: Any) -> torch.Tensor:
        return self[0].to(*args)


class MediaEncoder:
    """The encoder of a model, and how its output comes into prompts. `token_id` stands for a row of that. The output
    for a picture has the shape [levels, num_tokens, hidden]: behind the first level are those which the model adds
    after its first layers (Qwen3-VL). `dtype` is the model's."""

    def __init__(self, model: PreTrainedModel, token_id: int) -> None:
        self._model = model
        self.token_id = token_id
        config = model.config
        levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
        self.levels = 1 + len(levels)
        self.hidden = int(config.get_text_config(decoder=True).hidden_size)
        self.dtype = model.dtype
        self.nothing = torch.empty(self.levels, 0, self.hidden, dtype=self.dtype, device=model.device)
        self.sees_whole = bool(sees_pictures_whole(config))
        """Tokens of a picture see each other."""
        self._counts_axes = hasattr(model.base_model, "get_rope_index")

    @staticmethod
    def problem(model: PreTrainedModel, layout: Layout) -> str | None:
        """Returns why a model cannot take pictures; None if it can."""
        if layout.unsupported:
            return "its state cannot be cached"
        accepted = inspect.signature(type(model).forward).parameters
        if "mm_encoder_outputs" not in accepted or not hasattr(model, "get_image_features"):
            return f"transformers' {type(model).__name__} takes pictures only together with its whole prompt"
        whole = sees_pictures_whole(model.config)
        if whole == "otherwise" or (whole and layout.exact_at != "token"):
            return "its tokens see later ones of the same picture, or of others"
        return None

    def encode(self, medium: Medium, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the encoder's output for what `Medium.prepare` has returned. Raises `InvalidRequest` if the model's
        code fails over it, and what torch raises when memory runs out."""
        encode = self._model.get_image_features
        accepted = inspect.signature(encode).parameters
        placed = {name: self._placed(value) for name, value in inputs.items() if name in accepted}
        try:
            output = encode(**placed, return_dict=True)
            levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            rows = torch.stack([_joined(level).reshape(-1, self.hidden) for level in levels]).to(self.dtype)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"{medium.param}: the model's own code fails over it: {first_line(error)}"
            raise InvalidRequest(problem, param=medium.param, code="unsupported_content") from error
        if rows.shape != (self.levels, medium.num_tokens, self.hidden):
            problem = f"{medium.param}: the model's encoder returns {tuple(rows.shape)} for {medium.num_tokens} tokens"
            raise InvalidRequest(problem, param=medium.param, code="unsupported_content")
        return rows

    def slices(self) -> Iterator[nn.Module]:
        """Yields the modules of the encoder before each of which it may pause: its layers, and their parts."""
        decoder = {*self._model.get_decoder().modules()}
        for found in self._model.modules():
            if isinstance(found, nn.ModuleList) and found not in decoder:
                for layer in found:
                    yield from (layer, *layer.children())

    def positions(
        self, token_ids: torch.Tensor, is_media: torch.Tensor, media: Sequence[Medium]
    ) -> torch.Tensor | None:
        """Returns the positions of a prompt's tokens, int64 [axes, tokens], None for a model that counts tokens.
        `token_ids` are int64 [1, tokens], `is_media` bool [tokens]."""
        if not self._counts_axes:
            return None
        names = dict.fromkeys(name for medium in media for name in medium.shape)
        shapes = {name: torch.cat([medium.shape[name] for medium in media]) for name in names}
        found, _ = self._model.base_model.get_rope_index(token_ids, mm_token_type_ids=is_media.int()[None], **shapes)
        positions: torch.Tensor = found[:, 0]
        return positions

    def output(self, encoded: torch.Tensor) -> dict[str, Any]:
        """Returns rows of the output, [levels, count, hidden], as a forward takes them."""
        return {
            "image": SimpleNamespace(
                pooler_output=_Joined([encoded[0]]), deepstack_features=[[one] for one in encoded[1:]]
            )
        }

    def of_text(self, count: int) -> torch.Tensor:
        """Returns the rows that have the placeholder in a text, or in a reply, as any other token: its embedding."""
        rows = torch.zeros(self.levels, count, self.hidden, dtype=self.dtype, device=self._model.device)
        rows[0] = self._model.get_input_embeddings()(torch.tensor([self.token_id], device=rows.device))
        return rows

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._model.device, self.dtype if value.is_floating_point() else None)


def media_arguments(input_ids: torch.Tensor, runs: Sequence[Run], media: Sequence[MediaRows | None]) -> dict[str, Any]:
    """Returns the arguments of a forward for the rows of a step, some of which are of prompts with media. `input_ids`
    are int64 [1, rows]."""
    encoder = next(one.encoder for one in media if one is not None)
    is_media = torch.cat(
        [
            torch.zeros(run.num_rows, dtype=torch.bool) if one is None else one.is_media
            for run, one in zip(runs, media, strict=True)
        ]
    )
    found: dict[str, Any] = {}
    if is_media.any():
        is_placeholder = (input_ids[0] == encoder.token_id).cpu()
        encoded = encoder.of_text(int(is_placeholder.sum()))
        encoded[:, is_media[is_placeholder]] = torch.cat([one.encoded for one in media if one is not None], dim=1).to(
            encoded.device
        )
        found["mm_encoder_outputs"] = encoder.output(encoded)
    axes = next((len(one.positions) for one in media if one is not None and one.positions is not None), None)
    if axes is not None:
        found["position_ids"] = torch.cat(
            [
                torch.arange(run.start, run.end).expand(axes, -1)
                if one is None or one.positions is None
                else one.positions
                for run, one in zip(runs, media, strict=True)
            ],
            dim=1,
        )[:, None].to(input_ids.device)
    return found


def _joined(level: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return level if isinstance(level, torch.Tensor) else torch.cat([one.flatten(0, -2) for one in level])
