"""Prefill ahead of time: `diskprefix warm`."""
