"""Saved prompts as files: `diskprefix export` and `diskprefix import`."""
