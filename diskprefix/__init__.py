"""diskprefix: an OpenAI-compatible model server whose prefix (KV) cache survives restarts, bit for bit."""

__version__ = "0.1.0"
