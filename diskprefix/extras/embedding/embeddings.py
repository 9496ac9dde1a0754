"""`POST /v1/embeddings`, in the form of OpenAI's API: vectors of length 1."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

from diskprefix.api.fields import REFUSED
from diskprefix.chat.messages import JsonObject
from diskprefix.engine.request import Reading
from diskprefix.errors import InvalidRequest
from diskprefix.extras.embedding.model_purpose import Purpose, purpose_of
from diskprefix.extras.embedding.prompt_readings import (
    MAX_INPUTS,
    ReadingBody,
    TokenUsage,
    Values,
    read_prompts,
    require_text,
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
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="Numbers, or float32 (little-endian) in base64."
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Only the first so many numbers, again as a vector of length 1."
    )


class Embedding(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsReply(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TokenUsage


@router.post("/v1/embeddings", summary="Embeddings", **described(EmbeddingsRequest, EmbeddingsReply))
async def embeddings(request: Request) -> Response:
    """A vector for each input: the model's last hidden states, pooled as its files or `--pooling` say."""
    body, found = await read_prompts(request, EmbeddingsRequest, _prompts)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(values, body)}
        for index, values in enumerate(found.values)
    ]
    reply: JsonObject = {"object": "list", "data": data, "model": found.serving.model_name}
    return JSONResponse(reply | {"usage": found.token_usage})


def _prompts(serving: Serving, body: EmbeddingsRequest, setting: str) -> tuple[list[Prompt], Reading]:
    purpose = purpose_of(serving.engine.origin, setting)
    if purpose.pooling == "rank":
        raise InvalidRequest.at("model", "this model is a reranker: send a query and documents to /v1/rerank")
    size = serving.engine.model.config.get_text_config(decoder=True).hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest.at("dimensions", f"must be at most {size}, the size of this model's vectors")
    is_one = isinstance(body.input, str) or _is_tokens(body.input)
    items = {"input": body.input} if is_one else {f"input.{index}": item for index, item in enumerate(body.input)}
    return [_prompt(serving, purpose, item, path) for path, item in items.items()], Reading(pooling=purpose.pooling)


def _prompt(serving: Serving, purpose: Purpose, item: str | list[int], path: str) -> Prompt:
    renderer = serving.renderer
    if isinstance(item, list):
        return renderer.completion(item, param=path)
    prompt = renderer.completion(require_text(item, path), param=path)
    if purpose.end_id is None or prompt.token_ids[-1] == purpose.end_id:
        return prompt
    return renderer.completion([*prompt.token_ids.tolist(), purpose.end_id], param=path)


def _written(values: Values, body: EmbeddingsRequest) -> list[float] | str:
    """Returns the beginning of a vector, with length 1."""
    wide = values[: body.dimensions].astype(np.float64)
    unit = (wide / (np.sqrt((wide * wide).sum()) or 1.0)).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if body.encoding_format == "base64" else unit.tolist()
