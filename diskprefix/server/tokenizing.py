"""`POST /tokenize`, `/detokenize` and `/apply-template`, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from diskprefix.api.dialect import json_text
from diskprefix.api.fields import Body
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.chat.template import PromptRenderer
from diskprefix.errors import InvalidRequest
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import described
from diskprefix.server.log_context import log_context
from diskprefix.units import format_size

B = TypeVar("B", bound=Body)

router = APIRouter(tags=["tokens"])

_MOST_BYTES = 1 << 20
"""Of UTF-8: a text may have as many tokens. To encode them takes two seconds and 200 MB of memory."""
_MOST_TOKENS = 1 << 20


class TokenizeRequest(Body):
    """`POST /tokenize`."""

    content: str = Field(description=f"The text, {format_size(_MOST_BYTES)} at most.")
    add_special: bool = Field(default=False, description="With the tokens that the tokenizer adds, such as BOS.")
    parse_special: Literal[True] = Field(default=True, description="Texts of special tokens become these tokens.")
    with_pieces: bool = Field(default=False, description="With the text of each token.")


class TokenizeReply(BaseModel):
    """The tokens of a text."""

    tokens: list[Any] = Field(description="Token ids, or with `with_pieces` objects with `id` and `piece`.")


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: list[int] = Field(max_length=_MOST_TOKENS, description="Token ids.")


class DetokenizeReply(BaseModel):
    """The text of tokens, special ones included."""

    content: str


class TemplateReply(BaseModel):
    """What the chat template writes for a conversation."""

    prompt: str


async def _answer(request: Request, body: type[B], work: Callable[[PromptRenderer, B], dict[str, Any]]) -> Response:
    """Reads the body, and does the work in a thread, within the bounds of the queue."""
    daemon: Daemon = request.app.state.daemon
    with daemon.arriving(log_context(request).caller.tenant) as place:
        read = await daemon.bodies.read_json(request, body, place)
        serving = await daemon.ready()
        content = await daemon.threads.run(place.rendering, lambda: json_text(work(serving.renderer, read)))
    return Response(content, media_type="application/json")


@router.post("/tokenize", summary="Text to tokens", **described(TokenizeRequest, TokenizeReply))
async def tokenize(request: Request) -> Response:
    """The tokens of a text."""

    def work(renderer: PromptRenderer, body: TokenizeRequest) -> dict[str, Any]:
        if (num_bytes := len(body.content.encode("utf-8", "surrogatepass"))) > _MOST_BYTES:
            said = f"has {format_size(num_bytes)} of UTF-8; send {format_size(_MOST_BYTES)} at most"
            raise InvalidRequest(f"content: {said}", param="content")
        tokens: list[Any] = renderer.tokenize(body.content, add_special_tokens=body.add_special)
        if body.with_pieces:
            pieces = {token: renderer.detokenize([token]) for token in set(tokens)}
            tokens = [{"id": token, "piece": pieces[token]} for token in tokens]
        return {"tokens": tokens}

    return await _answer(request, TokenizeRequest, work)


@router.post("/detokenize", summary="Tokens to text", **described(DetokenizeRequest, DetokenizeReply))
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    return await _answer(
        request, DetokenizeRequest, lambda renderer, body: {"content": renderer.detokenize(body.tokens)}
    )


@router.post("/apply-template", summary="Conversation to prompt", **described(ChatRequest, TemplateReply))
async def apply_template(request: Request) -> Response:
    """The prompt of a conversation as a text, without images and sounds. Nothing is computed."""
    return await _answer(request, ChatRequest, lambda renderer, body: {"prompt": renderer.text_of(body.conversation)})
