"""`POST /v1/embeddings`, computed by the served decoder."""
