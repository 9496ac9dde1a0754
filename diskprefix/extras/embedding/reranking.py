"""`POST /v1/rerank`: how well documents answer a query, by a decoder that was trained to say yes or no.

The form has what Jina's, Cohere's and llama.cpp's have in common; the prompt is that of Qwen3-Reranker, unless the
model's file has its own. The score is the probability of yes against no.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from diskprefix.api.fields import MAX_COUNT, Body, OneOf
from diskprefix.chat.messages import JsonObject
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.engine.request import Reading
from diskprefix.errors import InvalidRequest
from diskprefix.extras.embedding.model_purpose import Purpose
from diskprefix.extras.embedding.prompt_readings import (
    MAX_INPUTS,
    Prompts,
    ReadingBody,
    TokenUsage,
    Values,
    answer_with_readings,
)
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
    return_documents: bool | None = Field(default=None, description="Whether to send the texts back.")


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
    return await answer_with_readings(request, RerankRequest, _prompts, _reply)


def _prompts(serving: Serving, purpose: Purpose, body: RerankRequest) -> tuple[Prompts, Reading]:
    if purpose.pooling != "rank":
        raise InvalidRequest.at(
            "model",
            f"{serving.model_name} is not known as a reranker; serve one that answers yes or no, such as "
            "Qwen3-Reranker, beside it, and say --pooling rank if its files do not",
        )
    labels = purpose.labels or _labels(serving)
    write = _writer(serving.renderer, purpose.template or _TEMPLATE, body.query)
    texts = ((f"documents.{index}", _text_of(document)) for index, document in enumerate(body.documents))
    return ((path, write(text, path)) for path, text in texts), Reading(logits_of=labels)


def _labels(serving: Serving) -> tuple[int, int]:
    found = [serving.renderer.tokenize(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(token_ids) != 1 for token_ids in found):
        raise InvalidRequest.at("model", f"{serving.model_name} has no single tokens for yes and no")
    return found[0][0], found[1][0]


def _writer(renderer: PromptRenderer, template: str, query: str) -> Callable[[str, str], Prompt]:
    """Returns what makes the prompt of a document and its path. The template is cut at its special tokens, which is
    where its parts, encoded alone, give the tokens of the whole. Special tokens in query and documents are text."""
    if "{query}" not in template or "{document}" not in template:
        raise InvalidRequest.at("model", "the prompt in its file has no place for {query} or none for {document}")
    parts: list[str | list[int]] = []
    for piece in renderer.pieces(template):
        if isinstance(piece, int):
            parts.append([piece])
        elif "{document}" in piece:
            parts.append(piece)
        else:
            parts.append(renderer.plain(piece.replace("{query}", query), param="query", is_first=not parts))

    def write(document: str, path: str) -> Prompt:
        token_ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                # In one pass: a query may contain the text of a placeholder.
                filled = document.join(text.replace("{query}", query) for text in part.split("{document}"))
                token_ids += renderer.plain(filled, param=path, is_first=not token_ids)
            else:
                token_ids += part
        return renderer.completion(token_ids, param=path)

    return write


def _reply(body: RerankRequest, values: list[Values]) -> tuple[JsonObject, str, list[JsonObject]]:
    scores = [_score(one) for one in values]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[JsonObject] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": _text_of(body.documents[result["index"]])}
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "list"}, "results", results


def _score(values: Values) -> float:
    yes, no = values.tolist()
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _text_of(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text
