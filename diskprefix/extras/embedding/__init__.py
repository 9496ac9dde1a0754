"""`POST /v1/embeddings` and `POST /v1/rerank`, computed by the served decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from diskprefix.server.serving import Serving


def add_routes(app: FastAPI) -> None:
    """Adds `POST /v1/embeddings`, and `POST /v1/rerank` under the names that clients know."""
    from diskprefix.extras.embedding import embeddings, reranking
    from diskprefix.extras.embedding.model_purpose import read_purpose

    daemon = app.state.daemon

    def read(serving: Serving) -> None:
        setting, vocab_size = daemon.settings.pooling, serving.renderer.vocab_size
        app.state.purpose = read_purpose(serving.engine.origin, setting, vocab_size)

    daemon.at_load.append(read)
    app.include_router(embeddings.router)
    app.include_router(reranking.router)
