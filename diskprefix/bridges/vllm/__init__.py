"""Connectors: the store under another engine. README.md tells how to use them."""
