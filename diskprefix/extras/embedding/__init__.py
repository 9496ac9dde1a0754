"""`POST /v1/embeddings`, computed by the served decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from diskprefix.server.serving import Serving


def add_routes(app: Starlette) -> None:
    """Adds `POST /v1/embeddings`."""
    from diskprefix.extras.embedding import embeddings
    from diskprefix.extras.embedding.model_purpose import read_purpose

    def read(serving: Serving) -> None:
        app.state.purpose = read_purpose(serving.engine.origin)

    app.state.daemon.at_load.append(read)
    app.routes.extend(embeddings.routes)
