"""The routes about the model: `GET /v1/models`, `POST /tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.daemon.api.dialect import json_text
from diskprefix.daemon.api.fields import Body
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.server.daemon import Daemon
from diskprefix.daemon.server.routes import Routes
from diskprefix.daemon.server.serving import Serving
from diskprefix.errors import InvalidRequest
from diskprefix.runtime.fetch.recommended_sampling import SamplingDefaults
from diskprefix.units import format_size

routes, token_routes = Routes("daemon"), Routes("tokens")

_PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "top_logprobs"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("response_format", "structured_outputs"),
)


def _anthropic_model(serving: Serving) -> dict[str, Any]:
    name, positions = serving.model_name, serving.engine.max_positions
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(serving.loaded_at, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": positions,
        "max_tokens": positions,
    }


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def card(serving: Serving, sampling: SamplingDefaults) -> dict[str, Any]:
    """Describes the served model. Several fields repeat one value under the names that different servers use."""
    positions, processor = serving.engine.max_positions, serving.engine.processor
    template = str(serving.engine.tokenizer.chat_template or "")
    offered = {
        "completion": True,
        "chat": bool(template),
        "tool_use": "tools" in template,
        "reasoning": serving.renderer.output_format.thought is not None,
        "vision": processor is not None and processor.problem is None,
    }
    capabilities = [name for name, is_offered in offered.items() if is_offered]
    of_tools = ["tools", "tool_choice", "parallel_tool_calls"] if offered["tool_use"] else []
    of_thoughts = ["reasoning_effort"] if offered["reasoning"] else []
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.loaded_at,
        "owned_by": "diskprefix",
        # The names of vLLM, OpenRouter, Groq, and LM Studio and Mistral.
        "max_model_len": positions,
        "context_length": positions,
        "context_window": positions,
        "max_context_length": positions,
        # Of Anthropic and LiteLLM.
        "max_input_tokens": positions,
        # As in llama.cpp's server.
        "meta": {
            "n_ctx_train": serving.engine.model_positions,
            "n_ctx": positions,
            "n_vocab": serving.renderer.vocab_size,
        },
        "architecture": {"input_modalities": ["text", *["image"] * offered["vision"]], "output_modalities": ["text"]},
        "capabilities": capabilities,
        "supported_parameters": [*_PARAMETERS, *of_tools, *of_thoughts],
        # As at OpenRouter.
        "default_parameters": sampling.parameters,
        "needs_bytes": serving.engine.fit.needed_bytes,
        "needs": dict(serving.engine.fit.rows()),
    }


@routes.add("GET /v1/models", "List models")
async def list_models(request: Request) -> JSONResponse:
    """A list of the served model, as in OpenAI's API; with the header `anthropic-version` as in Anthropic's."""
    daemon: Daemon = request.app.state.daemon
    serving = await daemon.ready()
    if _is_anthropic(request):
        ends = {"first_id": serving.model_name, "last_id": serving.model_name, "has_more": False}
        return JSONResponse({"data": [_anthropic_model(serving)], **ends})
    return JSONResponse({"object": "list", "data": [card(serving, daemon.sampling)]})


@routes.add("GET /v1/models/{model_name:path}", "Retrieve a model", errors=[404])
async def retrieve_model(request: Request) -> JSONResponse:
    """The served model by its name, as `/v1/models` lists it."""
    if not request.path_params["model_name"]:
        raise HTTPException(404)
    daemon: Daemon = request.app.state.daemon
    serving = await daemon.ready()
    serving.require_model(request.path_params["model_name"])
    return JSONResponse(_anthropic_model(serving) if _is_anthropic(request) else card(serving, daemon.sampling))


B = TypeVar("B", bound=Body)

_MAX_BYTES = 1 << 20
"""The most bytes of UTF-8 in a text, which may have as many tokens. Encoding them takes two seconds and 200 MB."""
_MAX_TOKENS = 1 << 20


class TokenizeRequest(Body, json_schema_extra={"example": {"content": "Hello!", "with_pieces": True}}):
    """`POST /tokenize`."""

    content: str = Field(description=f"The text, {format_size(_MAX_BYTES)} at most.")
    add_special: bool = Field(default=False, description="With the tokens that the tokenizer adds, such as BOS.")
    parse_special: Literal[True] = Field(default=True, description="Texts of special tokens become these tokens.")
    with_pieces: bool = Field(default=False, description="With the text of each token.")


class DetokenizeRequest(Body, json_schema_extra={"example": {"tokens": [19556, 17]}}):
    """`POST /detokenize`."""

    tokens: list[int] = Field(max_length=_MAX_TOKENS, description="Token ids.")


async def _answer(request: Request, body: type[B], work: Callable[[PromptRenderer, B], dict[str, Any]]) -> Response:
    """Reads the body, and does the work in a thread, one request of a caller at a time."""
    daemon: Daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        read = await daemon.bodies.read_json(request, body, held)
        serving = await daemon.ready()
        content = await daemon.threads.run_for(request, "counting", lambda: json_text(work(serving.renderer, read)))
    return Response(content, media_type="application/json")


@token_routes.add("POST /tokenize", "Text to tokens", TokenizeRequest)
async def tokenize(request: Request) -> Response:
    """The `tokens` of a text: ids, or with `with_pieces` objects with `id` and `piece`."""

    def work(renderer: PromptRenderer, body: TokenizeRequest) -> dict[str, Any]:
        if (num_bytes := len(body.content.encode("utf-8", "surrogatepass"))) > _MAX_BYTES:
            said = f"has {format_size(num_bytes)} of UTF-8; send {format_size(_MAX_BYTES)} at most"
            raise InvalidRequest.at("content", said)
        tokens: list[Any] = renderer.tokenize(body.content, add_special_tokens=body.add_special)
        if body.with_pieces:
            pieces = {token: renderer.detokenize([token]) for token in set(tokens)}
            tokens = [{"id": token, "piece": pieces[token]} for token in tokens]
        return {"tokens": tokens}

    return await _answer(request, TokenizeRequest, work)


@token_routes.add("POST /detokenize", "Tokens to text", DetokenizeRequest)
async def detokenize(request: Request) -> Response:
    """`content` is the text of the tokens, special tokens included."""
    return await _answer(
        request, DetokenizeRequest, lambda renderer, body: {"content": renderer.detokenize(body.tokens)}
    )


@token_routes.add("POST /apply-template", "Conversation to prompt", ChatRequest)
async def apply_template(request: Request) -> Response:
    """`prompt` is the prompt of a conversation as text, without images. The model computes nothing."""
    return await _answer(request, ChatRequest, lambda renderer, body: {"prompt": renderer.text_of(body.conversation)})
