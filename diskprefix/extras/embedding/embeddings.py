"""`POST /v1/embeddings`, in the form of OpenAI's API: vectors of length 1."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from diskprefix.api.fields import REFUSED
from diskprefix.chat.messages import JsonObject
from diskprefix.engine.request import Reading
from diskprefix.errors import InvalidRequest
from diskprefix.extras.embedding.model_purpose import Purpose
from diskprefix.extras.embedding.prompt_readings import (
    MAX_INPUTS,
    Prompts,
    ReadingBody,
    Values,
    answer_with_readings,
)
from diskprefix.nouns import Prompt
from diskprefix.server.described import described
from diskprefix.server.serving import Serving

router = APIRouter(tags=["embeddings"])

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_INPUT = {"anyOf": [{"type": "string"}, _TOKENS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}}]}


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _checked_input(value: Any) -> Any:
    if isinstance(value, str) or _is_tokens(value):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise PydanticCustomError(
            REFUSED, f"must be a text, a list of token ids, or a list of 1 to {MAX_INPUTS} of these"
        )
    for index, item in enumerate(value):
        if not isinstance(item, str) and not _is_tokens(item):
            raise InvalidRequest.at(f"input.{index}", "must be a text, or a list of token ids that is not empty")
    return value


class EmbeddingsRequest(ReadingBody):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["The Nile is a river.", "Oslo is a city."]}})

    input: Annotated[Any, AfterValidator(_checked_input), WithJsonSchema(_INPUT)] = Field(
        description="A text, a list of token ids, or a list of these. A text ends as the model's tokenizer ends it."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers, or float32 (little-endian) in base64."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Only the first so many numbers, again as a vector of length 1."
    )


@router.post(
    "/v1/embeddings", summary="Embeddings", **described(EmbeddingsRequest, "A list of the vectors, as in OpenAI's API.")
)
async def embeddings(request: Request) -> Response:
    """A vector for each input: the model's last hidden states, pooled as its files or `--pooling` say."""
    return await answer_with_readings(request, EmbeddingsRequest, _prompts, _reply)


def _prompts(serving: Serving, purpose: Purpose, body: EmbeddingsRequest) -> tuple[Prompts, Reading]:
    model = serving.engine.model
    if model.base_model is model:
        raise InvalidRequest.at("model", "this model does not show its last hidden states, so it makes no embeddings")
    size = model.config.get_text_config(decoder=True).hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest.at("dimensions", f"must be at most {size}, the size of this model's vectors")
    is_one = isinstance(body.input, str) or _is_tokens(body.input)
    items = {"input": body.input} if is_one else {f"input.{index}": item for index, item in enumerate(body.input)}
    prompts = ((path, _prompt(serving, purpose, item, path)) for path, item in items.items())
    return prompts, Reading(pooling=purpose.pooling)


def _prompt(serving: Serving, purpose: Purpose, item: str | list[int], path: str) -> Prompt:
    renderer = serving.renderer
    if not item:
        raise InvalidRequest.at(path, "must not be empty")
    prompt = renderer.completion(item, param=path)
    if isinstance(item, list) or purpose.end_id is None or prompt.token_ids[-1] == purpose.end_id:
        return prompt
    return renderer.completion([*prompt.token_ids.tolist(), purpose.end_id], param=path)


def _reply(body: EmbeddingsRequest, values: list[Values]) -> tuple[JsonObject, str, Iterator[JsonObject]]:
    vectors = (_written(one, body) for one in values)
    items = ({"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors))
    return {"object": "list"}, "data", items


def _written(values: Values, body: EmbeddingsRequest) -> list[float] | str:
    """Returns the beginning of a vector, with length 1."""
    wide = values[: body.dimensions].astype(np.float64)
    unit = (wide / (np.sqrt((wide * wide).sum()) or 1.0)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if body.encoding_format == "base64" else unit.tolist()
