"""The routes below `/api/`."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from diskprefix.api.dialect import json_text
from diskprefix.api.fields import Body
from diskprefix.extras.embedding.embeddings import EmbeddingsRequest, read_vectors, vector
from diskprefix.extras.ollama.ollama_dialect import Ollama, OllamaChatRequest, OllamaGenerateRequest
from diskprefix.extras.ollama.ollama_models import INSTEAD, VERSION, require_served, running, shown_model, tag
from diskprefix.model.load.memory import resident_bytes
from diskprefix.server.answer import answer
from diskprefix.server.described import described, replies
from diskprefix.server.log_context import log_context
from diskprefix.server.model_routes import card

router = APIRouter(tags=["ollama"])
_LINES = "The reply, as lines of JSON unless `stream` is `false`."


class ShowRequest(Body):
    """`POST /api/show`."""

    model: str | None = Field(default=None, description="Name of the served model. Absent: the served model.")


@router.post("/api/chat", summary="Ollama: chat", **described(OllamaChatRequest, _LINES))
async def chat(request: Request) -> Response:
    """Reply to a conversation. Without messages the model is loaded."""
    return await answer(request, Ollama(OllamaChatRequest))


@router.post("/api/generate", summary="Ollama: generate", **described(OllamaGenerateRequest, _LINES))
async def generate(request: Request) -> Response:
    """Reply to a text, or continue it. Without a prompt the model is loaded."""
    return await answer(request, Ollama(OllamaGenerateRequest))


@router.post(
    "/api/embed", summary="Ollama: embeddings", **described(EmbeddingsRequest, "`embeddings`: a vector for each.")
)
async def embed(request: Request) -> Response:
    """The vectors of `/v1/embeddings`."""
    body, serving, vectors, usage = await read_vectors(request)
    took_ns = round(1e9 * (time.perf_counter() - log_context(request).began_at))
    said = {"model": serving.model_name, "total_duration": took_ns, "prompt_eval_count": usage["prompt_tokens"]}
    content = await request.app.state.daemon.threads.run_for(
        request, "writing", lambda: json_text(said | {"embeddings": [vector(one, body) for one in vectors]})
    )
    return Response(content, media_type="application/json")


@router.post("/api/show", summary="Ollama: show a model", **described(ShowRequest, "Its capabilities and sizes."))
async def show(request: Request) -> JSONResponse:
    """The served model."""
    daemon = request.app.state.daemon
    async with AsyncExitStack() as held:
        body = await daemon.bodies.read_json(request, ShowRequest, held)
    serving = await daemon.ready()
    serving.require_model(body.model)
    return JSONResponse(shown_model(card(serving), request.app.state.file_facts))


@router.get("/api/tags", summary="Ollama: list models", **replies("`models`: the served model."))
async def tags(request: Request) -> JSONResponse:
    """The served model."""
    serving = await request.app.state.daemon.ready()
    return JSONResponse({"models": [tag(card(serving), request.app.state.file_facts)]})


@router.get("/api/ps", summary="Ollama: models in memory", **replies("`models`: the served model, once it is loaded."))
async def loaded(request: Request) -> JSONResponse:
    """The model in memory, with that of the process."""
    serving, state = request.app.state.daemon.serving, request.app.state
    found = [] if serving is None else [running(card(serving), state.file_facts, resident_bytes() or 0)]
    return JSONResponse({"models": found})


@router.get("/api/version", summary="Ollama: version", **replies("`version`: the release of Ollama with this API."))
async def version() -> JSONResponse:
    """The release of Ollama that clients look for."""
    return JSONResponse(VERSION)


async def refused(request: Request) -> None:
    require_served(request.url.path)


for _what in INSTEAD:
    _path = f"/api/{_what}" + "/{digest}" * (_what == "blobs")
    router.add_api_route(_path, refused, methods=["GET", "POST", "DELETE"], include_in_schema=False)
