"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and the lists of models."""
