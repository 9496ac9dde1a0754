"""`POST /v1/embeddings` and `POST /v1/rerank`, computed by the served decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_routes(app: FastAPI) -> None:
    """Adds `POST /v1/embeddings`, and `POST /v1/rerank` under the names that clients know."""
    from diskprefix.extras.embedding import embeddings, reranking

    app.include_router(embeddings.router)
    app.include_router(reranking.router)
