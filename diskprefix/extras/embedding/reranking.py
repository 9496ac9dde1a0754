"""`POST /v1/rerank`: how well documents answer a query, by a decoder that was trained to say yes or no.

The form is that of Jina, Cohere and llama.cpp's server; the prompt is that of Qwen3-Reranker, unless the model's file
has its own. The score is the probability of yes against no.
"""

from __future__ import annotations

import math
import uuid
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from diskprefix.api.fields import MAX_COUNT, Body, OneOf
from diskprefix.chat.messages import JsonObject
from diskprefix.engine.request import Reading
from diskprefix.errors import InvalidRequest
from diskprefix.extras.embedding.model_purpose import Purpose, purpose_of
from diskprefix.extras.embedding.prompt_readings import MAX_INPUTS, ReadingBody, TokenUsage, Values, read_prompts
from diskprefix.nouns import Prompt
from diskprefix.server.described import described
from diskprefix.server.serving import Serving

router = APIRouter(tags=["embeddings"])

_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class TextDocument(Body):
    """A document as an object."""

    text: str = Field(description="Its text.")


class RerankRequest(ReadingBody):
    """`POST /v1/rerank`."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"query": "Where is Oslo?", "documents": ["In Norway.", "A river."]}}
    )

    query: str = Field(min_length=1, description="What is asked.")
    documents: list[Annotated[str | TextDocument, OneOf("text, or an object with the field `text`", TextDocument)]] = (
        Field(min_length=1, max_length=MAX_INPUTS, description="Texts.")
    )
    top_n: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="Only the so many best ones.")
    return_documents: bool = Field(default=False, description="Whether to send the texts back.")


class Ranked(BaseModel):
    """A document, by its index in the request."""

    index: int
    relevance_score: float = Field(description="From 0 to 1.")
    document: TextDocument | None = None


class RerankReply(BaseModel):
    """The documents, the best first."""

    id: str
    object: str = "list"
    model: str
    results: list[Ranked]
    usage: TokenUsage


@router.post("/v1/reranking", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
@router.post("/v1/rerank", summary="Rerank", **described(RerankRequest, RerankReply))
async def rerank(request: Request) -> Response:
    """Documents in the order in which they answer the query. For models such as Qwen3-Reranker."""
    body, found = await read_prompts(request, RerankRequest, _prompts)
    scores = [_score(values) for values in found.values]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[JsonObject] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": _text_of(body.documents[result["index"]])}
    reply = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": found.serving.model_name}
    return JSONResponse(reply | {"results": results, "usage": found.token_usage})


def _prompts(serving: Serving, body: RerankRequest, setting: str) -> tuple[list[Prompt], Reading]:
    purpose = purpose_of(serving.engine.origin, setting)
    if purpose.pooling != "rank":
        raise InvalidRequest.at(
            "model",
            f"{serving.model_name} is not known as a reranker; serve one that answers yes or no, such as "
            "Qwen3-Reranker, beside it, and say --pooling rank if its files do not",
        )
    labels = _labels(serving, purpose)
    write = partial(_prompt, serving, purpose.template or _TEMPLATE, body.query)
    texts = [(_text_of(document), f"documents.{index}") for index, document in enumerate(body.documents)]
    return [write(text, path) for text, path in texts], Reading(logits_of=labels)


def _labels(serving: Serving, purpose: Purpose) -> tuple[int, int]:
    if purpose.labels is not None:
        return purpose.labels
    found = [serving.renderer.tokenize(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(token_ids) != 1 for token_ids in found):
        raise InvalidRequest.at("model", f"{serving.model_name} has no single tokens for yes and no")
    return found[0][0], found[1][0]


def _prompt(serving: Serving, template: str, query: str, document: str, path: str) -> Prompt:
    # In one pass: a query may contain the text of a placeholder.
    before, _, behind = template.partition("{document}")
    text = before.replace("{query}", query) + document + behind.replace("{query}", query)
    return serving.renderer.completion(serving.renderer.tokenize(text, add_special_tokens=False), param=path)


def _score(values: Values) -> float:
    yes, no = values.tolist()
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _text_of(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text
