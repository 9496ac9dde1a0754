"""Finds and fetches the files of a model by its name."""
