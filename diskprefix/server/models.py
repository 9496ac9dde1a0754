"""`GET /v1/models`: the served model, with what other servers' clients look for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request

from diskprefix.server.daemon import Daemon
from diskprefix.server.errors import ErrorBody
from diskprefix.server.serving import Serving

router = APIRouter(tags=["daemon"])

_PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "top_logprobs"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("response_format", "structured_outputs"),
)


class Architecture(BaseModel):
    """In the form of OpenRouter."""

    input_modalities: list[str] = Field(description="`text`, and `image` or `audio` for models that take them.")
    output_modalities: list[str]


class Meta(BaseModel):
    """In the form of llama.cpp's server."""

    n_ctx_train: int
    n_ctx: int
    n_vocab: int


class ModelCard(BaseModel):
    """The served model. Several fields say the same, because clients of other servers know it by other names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diskprefix"
    max_model_len: int = Field(description="Positions: prompt and reply together, in tokens. The name of vLLM.")
    context_length: int = Field(description="The same: the name of OpenRouter.")
    context_window: int = Field(description="The same: the name of Groq.")
    max_context_length: int = Field(description="The same: the name of LM Studio and Mistral.")
    meta: Meta
    architecture: Architecture
    capabilities: list[str] = Field(
        description="`completion`, `chat` (it has a chat template), `tool_use` (which knows tools), `reasoning` (and "
        "thoughts), `vision`, `audio`."
    )
    supported_parameters: list[str] = Field(description="Fields of requests that have an effect, as OpenRouter has it.")


class ModelList(BaseModel):
    """The answer of `GET /v1/models`: the one served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class AnthropicModel(BaseModel):
    """The served model, in the form of Anthropic's API."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int = Field(description="Positions: prompt and reply together, in tokens.")
    max_tokens: int = Field(description="The same.")


class AnthropicModelList(BaseModel):
    """The answer of `GET /v1/models` for Anthropic's clients, which send the header `anthropic-version`."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


def _anthropic_model(serving: Serving) -> AnthropicModel:
    name, positions = serving.model_name, serving.engine.max_positions
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(serving.loaded_at, UTC),
        max_input_tokens=positions,
        max_tokens=positions,
    )


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def card(serving: Serving) -> ModelCard:
    positions, media = serving.engine.max_positions, sorted(serving.engine.media.kinds) if serving.engine.media else []
    template = str(serving.engine.tokenizer.chat_template or "")
    offered = {
        "completion": True,
        "chat": bool(template),
        "tool_use": "tools" in template,
        "reasoning": serving.renderer.output_format.thought is not None,
        "vision": "image" in media,
        "audio": "audio" in media,
    }
    capabilities = [name for name, is_offered in offered.items() if is_offered]
    of_tools = ["tools", "tool_choice", "parallel_tool_calls"] if offered["tool_use"] else []
    of_thoughts = ["reasoning_effort"] if offered["reasoning"] else []
    return ModelCard(
        id=serving.model_name,
        created=serving.loaded_at,
        max_model_len=positions,
        context_length=positions,
        context_window=positions,
        max_context_length=positions,
        meta=Meta(n_ctx_train=positions, n_ctx=positions, n_vocab=serving.renderer.vocab_size),
        architecture=Architecture(input_modalities=["text", *reversed(media)], output_modalities=["text"]),
        capabilities=capabilities,
        supported_parameters=[*_PARAMETERS, *of_tools, *of_thoughts],
    )


async def _serving(request: Request) -> Serving:
    daemon: Daemon = request.app.state.daemon
    return await daemon.ready()


@router.get("/v1/models", summary="List models")
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """The one model that is served."""
    serving = await _serving(request)
    if _is_anthropic(request):
        name = serving.model_name
        return AnthropicModelList(data=[_anthropic_model(serving)], first_id=name, last_id=name)
    return ModelList(data=[card(serving)])


@router.get(
    "/v1/models/{model_name:path}",
    summary="Retrieve a model",
    responses={404: {"model": ErrorBody}},
)
async def retrieve_model(model_name: str, request: Request) -> ModelCard | AnthropicModel:
    """The served model by its name."""
    serving = await _serving(request)
    serving.require_model(model_name)
    return _anthropic_model(serving) if _is_anthropic(request) else card(serving)
